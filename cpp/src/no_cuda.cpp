// Stands in for the CUDA backend in builds without CUDA.

#include "kernels.h"

#include <c10/util/Exception.h>

namespace fp16core::detail {

bool built_with_cuda() {
  return false;
}

std::unique_ptr<ListKernels> make_cuda_kernels(c10::Device device) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false,
      "fp16core: this build has no CUDA kernels, but got ",
      device);
}

} // namespace fp16core::detail
