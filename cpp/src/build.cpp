#include <fp16core/build.h>

#include "cpu/capability.h"
#include "kernels.h"

namespace fp16core {

const char* cpu_capability() {
  return detail::cpu::capability();
}

bool built_with_cuda() {
  return detail::built_with_cuda();
}

} // namespace fp16core
