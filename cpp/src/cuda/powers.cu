// The kernel behind powers.cuh and its launch.

#include "powers.cuh"

#include "elements.cuh"
#include "reduce.cuh"

#include <cmath>

namespace fp16core::detail::cuda {

namespace {

struct Add {
  __device__ double operator()(double a, double b) const { return a + b; }
};

__device__ double power_of(double value, double power) {
  const double magnitude = std::fabs(value);
  if (power == 1.0) {
    return magnitude;
  }
  if (power == 0.0) {
    return magnitude != 0.0 ? 1.0 : 0.0;
  }
  return std::pow(magnitude, power);
}

// The task: sum up powers in double. Such norms are rare: one element at a
// time, neighbouring threads on neighbouring elements. One read.
__global__ void __launch_bounds__(kThreads, kBlocks) sum_of_powers_kernel(
    const __grid_constant__ Work<GradientTask> work,
    const double power,
    double* sums) {
  const auto span = span_of_block(work);
  double sum = 0.0;
  with_type(span.task.source_type, [&](auto type) {
    const auto* source =
        static_cast<const decltype(type)*>(span.task.source) + span.begin;
    for (std::int64_t i = threadIdx.x; i < span.size; i += kThreads) {
      sum += power_of(static_cast<double>(source[i]), power);
    }
  });
  sum = reduce_block(sum, Add());
  if (threadIdx.x == 0) {
    sums[blockIdx.x] = sum;
  }
}

} // namespace

cudaError_t launch_sum_of_powers(
    const Work<GradientTask>& work,
    double power,
    double* sums,
    cudaStream_t stream) {
  return launch(
      &sum_of_powers_kernel,
      work.chunk_count,
      stream,
      work,
      power,
      sums);
}

} // namespace fp16core::detail::cuda
