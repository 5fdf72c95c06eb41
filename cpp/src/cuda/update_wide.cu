// The update rules on float64 weights.

#include "update_kernels.cuh"

namespace fp16core::detail::cuda {

cudaError_t launch_wide_update(
    std::size_t rule,
    const Work<UpdateTask>& work,
    const UpdateNumbers& numbers,
    std::byte* steps,
    std::uint8_t* saturated,
    cudaStream_t stream) {
  return launch_update_of<double>(
      rule,
      work,
      numbers,
      steps,
      saturated,
      stream);
}

} // namespace fp16core::detail::cuda
