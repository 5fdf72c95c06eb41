// The kernels behind spans.cuh and their launches.

#include "spans.cuh"

#include "elements.cuh"

#include "../math/unscale.h"

#include <type_traits>

namespace fp16core::detail::cuda {

namespace {

template <typename T>
__device__ T scaled(T value, const Factor& factor) {
  if constexpr (std::is_same_v<T, double>) {
    return Unscale()(value, factor.f64);
  } else {
    return static_cast<T>(Unscale()(static_cast<float>(value), factor.f32));
  }
}

// The task: multiply many spans of several types in place. The awkward cases: a
// factor of 1, known to the device alone, has nothing to do; and a span may
// begin anywhere, as views into one flat buffer do. One read and one write of
// every element.
__global__ void __launch_bounds__(kThreads, kBlocks) scale_kernel(
    const __grid_constant__ Work<ScaleTask> work,
    const FactorSource factor_source) {
  const Factor factor = factor_source.read();
  if (factor.f64 == 1.0) {
    return;
  }
  const auto span = span_of_block(work);
  const bool aligned = is_aligned(span.task.values);
  with_type(span.task.type, [&](auto type) {
    using T = decltype(type);
    T* values = static_cast<T*>(span.task.values) + span.begin;
    walk(
        span.size,
        [&](std::int64_t i) {
          auto vector = load(values + i, aligned);
          for (T& value : vector.values) {
            value = scaled(value, factor);
          }
          store(values + i, aligned, vector);
        },
        [&](std::int64_t i) { values[i] = scaled(values[i], factor); });
  });
}

// The task: clear many spans of bytes, 16 at a time but for what lies before
// the first and behind the last multiple of 16. One write.
__global__ void __launch_bounds__(kThreads, kBlocks)
    zero_kernel(const __grid_constant__ Work<ZeroTask> work) {
  const auto span = span_of_block(work);
  auto* bytes = static_cast<unsigned char*>(span.task.values) + span.begin;
  const auto misalignment =
      static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(bytes) % 16);
  std::int64_t head = misalignment == 0 ? 0 : 16 - misalignment;
  head = head < span.size ? head : span.size;
  const std::int64_t body = head + (span.size - head) / 16 * 16;
  for (std::int64_t i = threadIdx.x; i < head; i += kThreads) {
    bytes[i] = 0;
  }
  for (std::int64_t i = head + std::int64_t{threadIdx.x} * 16; i < body;
       i += std::int64_t{kThreads} * 16) {
    *reinterpret_cast<uint4*>(bytes + i) = uint4{0, 0, 0, 0};
  }
  for (std::int64_t i = body + threadIdx.x; i < span.size; i += kThreads) {
    bytes[i] = 0;
  }
}

} // namespace

cudaError_t launch_scale(
    const Work<ScaleTask>& work,
    const FactorSource& factor,
    cudaStream_t stream) {
  return launch(&scale_kernel, work.chunk_count, stream, work, factor);
}

cudaError_t launch_zero(const Work<ZeroTask>& work, cudaStream_t stream) {
  return launch(&zero_kernel, work.chunk_count, stream, work);
}

} // namespace fp16core::detail::cuda
