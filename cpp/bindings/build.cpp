// How this build came about and what it uses.

#include "bindings.h"

#include <fp16core/build.h>

namespace fp16core::bindings {

void bind_build(nb::module_& m) {
  m.def(
      "cpu_capability",
      &cpu_capability,
      "Returns the instruction set that the CPU kernels use: DEFAULT, AVX2 or "
      "AVX512.");
  m.def(
      "built_with_cuda",
      &built_with_cuda,
      "Returns whether the CUDA backend was compiled in.");
}

} // namespace fp16core::bindings
