#include "capability.h"

#include <ATen/Version.h>

#include <string>

namespace fp16core::detail::cpu {

namespace {

struct Choice {
  const char* name;
  const BlockKernels* kernels;
};

Choice choose() {
#if defined(FP16CORE_HAVE_X86_CAPABILITIES)
  const std::string capability = at::get_cpu_capability();
  if (capability == "AVX512") {
    return {"AVX512", &AVX512::kBlocks};
  }
  if (capability == "AVX2") {
    return {"AVX2", &AVX2::kBlocks};
  }
#endif
  return {"DEFAULT", &DEFAULT::kBlocks};
}

const Choice& choice() {
  static const Choice chosen = choose();
  return chosen;
}

} // namespace

const BlockKernels& block_kernels() {
  return *choice().kernels;
}

const char* capability() {
  return choice().name;
}

} // namespace fp16core::detail::cpu
