// Combining what the threads of a block found, in an order that is always the
// same.

#pragma once

#include "launch.cuh"

#include <cstring>
#include <type_traits>

namespace fp16core::detail::cuda {

constexpr int kWarp = 32;
constexpr unsigned kWholeWarp = 0xffffffff;

/// Returns the value of the thread that is `distance` further in the warp.
template <typename T>
__device__ __forceinline__ T shuffle_down(const T& value, int distance) {
  static_assert(std::is_trivially_copyable_v<T>);
  static_assert(sizeof(T) % sizeof(unsigned) == 0);
  unsigned words[sizeof(T) / sizeof(unsigned)];
  std::memcpy(words, &value, sizeof(T));
  for (unsigned& word : words) {
    word = __shfl_down_sync(kWholeWarp, word, distance);
  }
  T result = value;
  std::memcpy(&result, words, sizeof(T));
  return result;
}

/// Combines a value of every thread of the block, in pairs that only depend on
/// the number of threads. The result is thread 0's; the others get what they
/// have no use for. All threads must call it.
template <typename T, typename Combine>
__device__ T reduce_block(T value, const Combine& combine) {
  // Bytes, since shared memory cannot be initialized.
  alignas(T) __shared__ unsigned char memory[sizeof(T) * (kThreads / kWarp)];
  T* warps = reinterpret_cast<T*>(memory);
  const int thread = static_cast<int>(threadIdx.x);
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    value = combine(value, shuffle_down(value, distance));
  }
  __syncthreads(); // an earlier call may still be read
  if (thread % kWarp == 0) {
    warps[thread / kWarp] = value;
  }
  __syncthreads();
  if (thread == 0) {
    for (int warp = 1; warp < kThreads / kWarp; ++warp) {
      value = combine(value, warps[warp]);
    }
  }
  return value;
}

} // namespace fp16core::detail::cuda
