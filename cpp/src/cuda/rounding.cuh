// Rounding weights to the type of the model.

#pragma once

#include "elements.cuh"

#include "../math/half_range.h"

#include <type_traits>

namespace fp16core::detail::cuda {

/// Whether a finite weight becomes inf in type T. The wide types hold every
/// fp32 weight.
template <typename T>
__device__ __forceinline__ bool saturates(float weight) {
  if constexpr (
      std::is_same_v<T, c10::Half> || std::is_same_v<T, c10::BFloat16>) {
    constexpr int kInfinityBits = 0x7f800000;
    const int bits = __float_as_int(weight) & 0x7fffffff;
    return bits >= kRoundsToInfinity<T> && bits < kInfinityBits;
  } else {
    return false;
  }
}

/// Writes a vector of weights, rounded; returns whether one of them saturates.
template <typename T, int kCount>
__device__ __forceinline__ bool store_rounded(
    T* to,
    bool aligned,
    const Vector<float, kCount>& weights) {
  Vector<T, kCount> rounded;
  bool beyond = false;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    rounded[i] = static_cast<T>(weights[i]);
    beyond |= saturates<T>(weights[i]);
  }
  store(to, aligned, rounded);
  return beyond;
}

/// Tells whether `beyond` holds for any thread of the block, in the byte of its
/// chunk. All threads must call it.
__device__ __forceinline__ void note_saturation(
    bool beyond,
    std::uint8_t* saturated) {
  const int any = __syncthreads_or(beyond ? 1 : 0);
  if (threadIdx.x == 0) {
    saturated[blockIdx.x] = any != 0 ? 1 : 0;
  }
}

} // namespace fp16core::detail::cuda
