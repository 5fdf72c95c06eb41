// Reading and writing elements, 16 bytes at a time where the memory allows it.

#pragma once

#include "element_type.h"
#include "launch.cuh"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstddef>
#include <cstdint>

namespace fp16core::detail::cuda {

/// Elements that a thread takes at a time: 16 bytes of the narrowest type.
constexpr int kVector = 8;

constexpr std::size_t kAccessBytes = 16;

template <typename T, int kCount = kVector>
struct alignas(
    sizeof(T) * kCount < kAccessBytes ? sizeof(T) * kCount : kAccessBytes)
    Vector {
  T values[kCount];

  __device__ T& operator[](int i) { return values[i]; }
  __device__ const T& operator[](int i) const { return values[i]; }
};

/// Whether all vectors of a span can be read and written as such. Spans begin
/// at a multiple of kVector elements of their tensor.
__device__ __forceinline__ bool is_aligned(const void* tensor) {
  return reinterpret_cast<std::uintptr_t>(tensor) % kAccessBytes == 0;
}

template <int kCount = kVector, typename T>
__device__ __forceinline__ Vector<T, kCount> load(const T* from, bool aligned) {
  if (aligned) {
    return *reinterpret_cast<const Vector<T, kCount>*>(from);
  }
  Vector<T, kCount> vector;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    vector[i] = from[i];
  }
  return vector;
}

template <typename T, int kCount>
__device__ __forceinline__ void store(
    T* to,
    bool aligned,
    const Vector<T, kCount>& vector) {
  if (aligned) {
    *reinterpret_cast<Vector<T, kCount>*>(to) = vector;
    return;
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    to[i] = vector[i];
  }
}

/// Calls `whole(offset)` for every vector of a span and `single(offset)` for
/// every element behind the last multiple of kVector, which only the end of a
/// tensor has; each offset, from the start of the span, is one thread's.
template <int kCount = kVector, typename Whole, typename Single>
__device__ __forceinline__ void walk(
    std::int64_t size,
    const Whole& whole,
    const Single& single,
    int remainder_of = kVector) {
  const std::int64_t body = size - size % remainder_of;
  for (std::int64_t i = std::int64_t{threadIdx.x} * kCount; i < body;
       i += std::int64_t{kThreads} * kCount) {
    whole(i);
  }
  for (std::int64_t i = body + threadIdx.x; i < size; i += kThreads) {
    single(i);
  }
}

/// Calls `use(T())` with the C++ type of `type`.
template <typename Use>
__device__ __forceinline__ void with_type(ElementType type, const Use& use) {
  switch (type) {
    case ElementType::kHalf:
      use(c10::Half{});
      break;
    case ElementType::kBFloat16:
      use(c10::BFloat16{});
      break;
    case ElementType::kFloat:
      use(float{});
      break;
    case ElementType::kDouble:
      use(double{});
      break;
  }
}

} // namespace fp16core::detail::cuda
