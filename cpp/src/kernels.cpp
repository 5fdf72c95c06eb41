// Chooses the backend of a device.

#include "kernels.h"

#include <c10/util/Exception.h>

namespace fp16core::detail {

bool has_kernels(c10::DeviceType type) {
  return type == c10::DeviceType::CPU ||
      (type == c10::DeviceType::CUDA && built_with_cuda());
}

std::unique_ptr<ListKernels> make_kernels(c10::Device device) {
  if (device.is_cpu()) {
    return make_cpu_kernels();
  }
  TORCH_CHECK_NOT_IMPLEMENTED(
      has_kernels(device.type()),
      "fp16core: parameters must be on a device that this build has kernels "
      "for, but got ",
      device);
  return make_cuda_kernels(device);
}

} // namespace fp16core::detail
