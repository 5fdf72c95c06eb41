// Chooses the backend of a device in place of the library's own choice: tensors
// of the host are served by the CUDA backend, as if they were on a GPU.

#include "kernels.h"

#include <c10/util/Exception.h>

namespace fp16core::detail {

bool has_kernels(c10::DeviceType type) {
  return type == c10::DeviceType::CPU;
}

std::unique_ptr<ListKernels> make_kernels(c10::Device device) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      device.is_cpu(),
      "fp16core: parameters must be on a device that this build has kernels "
      "for, but got ",
      device);
  return make_cuda_kernels(device);
}

} // namespace fp16core::detail
