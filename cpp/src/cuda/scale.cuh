// The CUDA kernel that multiplies a list of spans in place.
//
// Includes nothing but the CUDA runtime and arithmetic of our own.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace fp16core::detail::cuda {

enum class ElementType : std::uint8_t { kHalf, kBFloat16, kFloat, kDouble };

/// The items of one launch, passed by value: no copy to wait for.
struct ScaleList {
  // With three words an item this stays below the 4 KiB that every
  // architecture takes as kernel arguments.
  static constexpr int kCapacity = 128;

  void* values[kCapacity];
  std::int64_t numel[kCapacity];
  // The block that starts with the first element of each item.
  std::int64_t first_block[kCapacity];
  ElementType type[kCapacity];
  int count;
};

/// Elements that one block works on.
constexpr std::int64_t kBlockElements = 16384;

/// Multiplies every span by the factor, read from device memory: `factor_f32`
/// for all types but float64, which takes `factor_f64`. Items must not be
/// empty. Launches `blocks` blocks on `stream`; returns the launch's error.
cudaError_t launch_scale(
    const ScaleList& list,
    std::int64_t blocks,
    const float* factor_f32,
    const double* factor_f64,
    cudaStream_t stream);

} // namespace fp16core::detail::cuda
