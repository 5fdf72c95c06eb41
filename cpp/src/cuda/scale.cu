// The kernel behind scale.cuh and its launch.

#include "scale.cuh"

#include "../math/unscale.h"

namespace fp16core::detail::cuda {

namespace {

constexpr int kThreads = 256;

template <typename T>
__device__ float widen(T value);
template <>
__device__ float widen(__half value) {
  return __half2float(value);
}
template <>
__device__ float widen(__nv_bfloat16 value) {
  return __bfloat162float(value);
}
template <>
__device__ float widen(float value) {
  return value;
}

template <typename T>
__device__ T narrow(float value);
template <>
__device__ __half narrow(float value) {
  return __float2half_rn(value);
}
template <>
__device__ __nv_bfloat16 narrow(float value) {
  return __float2bfloat16_rn(value);
}
template <>
__device__ float narrow(float value) {
  return value;
}

template <typename T>
__device__ void scale_span(T* values, std::int64_t n, float factor) {
  const Unscale unscale;
  for (std::int64_t i = threadIdx.x; i < n; i += kThreads) {
    values[i] = narrow<T>(unscale(widen<T>(values[i]), factor));
  }
}

__device__ void scale_span(double* values, std::int64_t n, double factor) {
  const Unscale unscale;
  for (std::int64_t i = threadIdx.x; i < n; i += kThreads) {
    values[i] = unscale(values[i], factor);
  }
}

// The task: multiply many spans of several types in place, in one launch. A
// block takes kBlockElements elements of one item, which it finds by bisection
// over the first blocks; so a huge tensor and many small ones keep the device
// equally busy, and no index is 32 bits wide. The awkward cases are an item's
// last block, which is shorter, and empty items, which would share their first
// block with the next one and are left out by the host. One read and one write
// of every element; neighbouring threads touch neighbouring elements.
__global__ void __launch_bounds__(kThreads) scale_kernel(
    const __grid_constant__ ScaleList list,
    const float* factor_f32,
    const double* factor_f64) {
  const auto block = static_cast<std::int64_t>(blockIdx.x);
  int item = 0;
  int end = list.count;
  while (end - item > 1) {
    const int middle = (item + end) / 2;
    if (list.first_block[middle] <= block) {
      item = middle;
    } else {
      end = middle;
    }
  }
  const std::int64_t begin = (block - list.first_block[item]) * kBlockElements;
  const std::int64_t left = list.numel[item] - begin;
  const std::int64_t n = left < kBlockElements ? left : kBlockElements;
  switch (list.type[item]) {
    case ElementType::kHalf:
      scale_span(
          static_cast<__half*>(list.values[item]) + begin,
          n,
          *factor_f32);
      break;
    case ElementType::kBFloat16:
      scale_span(
          static_cast<__nv_bfloat16*>(list.values[item]) + begin,
          n,
          *factor_f32);
      break;
    case ElementType::kFloat:
      scale_span(
          static_cast<float*>(list.values[item]) + begin,
          n,
          *factor_f32);
      break;
    case ElementType::kDouble:
      scale_span(
          static_cast<double*>(list.values[item]) + begin,
          n,
          *factor_f64);
      break;
  }
}

} // namespace

cudaError_t launch_scale(
    const ScaleList& list,
    std::int64_t blocks,
    const float* factor_f32,
    const double* factor_f64,
    cudaStream_t stream) {
  scale_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(
      list,
      factor_f32,
      factor_f64);
  return cudaGetLastError();
}

} // namespace fp16core::detail::cuda
