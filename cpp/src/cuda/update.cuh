// The CUDA kernel that runs an update rule on one parameter.
//
// Includes nothing but the CUDA runtime and arithmetic of our own.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace fp16core::detail::cuda {

/// A float32 weight with its gradient, its state (null where the rule has no
/// use for it), and a model of one of the two half types, or of none.
struct UpdateSpan {
  const float* gradient;
  float* weight;
  float* tensors[3];
  __half* half_model;
  __nv_bfloat16* bfloat16_model;
  std::int64_t numel;
};

/// Runs the rule at position `rule` of the list of rules with the numbers in
/// `step`, in host memory. The span must not be empty. Launches on `stream`;
/// returns the launch's error. Compiled, but not called yet: it shows that the
/// rules are good for a device.
cudaError_t launch_update(
    std::size_t rule,
    const UpdateSpan& span,
    const void* step,
    cudaStream_t stream);

} // namespace fp16core::detail::cuda
