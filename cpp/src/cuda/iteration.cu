// The kernels behind iteration.cuh and their launches.

#include "iteration.cuh"

#include "launch.cuh"

namespace fp16core::detail::cuda {

namespace {

// The task: a few numbers, by one thread, with the arithmetic of the host.
__global__ void __launch_bounds__(kThreads, kBlocks) clip_kernel(
    const GradientTotals* totals,
    const bool check_overflow,
    const bool by_largest,
    const double max_norm,
    Clip* result) {
  if (threadIdx.x == 0) {
    *result = clip(*totals, check_overflow, by_largest, max_norm);
  }
}

// The task: the same for the scale and the counts, in place, so that a recorded
// launch finds them where they were.
__global__ void __launch_bounds__(kThreads, kBlocks) end_iteration_kernel(
    const __grid_constant__ ScaleRule rule,
    const GradientTotals* totals,
    const bool check_overflow,
    DynamicLossScaleState* scale,
    StepCounts* counts) {
  if (threadIdx.x == 0) {
    end_iteration(rule, *totals, check_overflow, *scale, *counts);
  }
}

// The task: count a step.
__global__ void __launch_bounds__(kThreads, kBlocks) count_applied_kernel(
    const GradientTotals* totals,
    const bool check_overflow,
    StepCounts* counts) {
  if (threadIdx.x == 0) {
    count_applied(*totals, check_overflow, *counts);
  }
}

} // namespace

cudaError_t launch_clip(
    const GradientTotals* totals,
    bool check_overflow,
    bool by_largest,
    double max_norm,
    Clip* result,
    cudaStream_t stream) {
  return launch(
      &clip_kernel,
      1,
      stream,
      totals,
      check_overflow,
      by_largest,
      max_norm,
      result);
}

cudaError_t launch_end_iteration(
    const ScaleRule& rule,
    const GradientTotals* totals,
    bool check_overflow,
    DynamicLossScaleState* scale,
    StepCounts* counts,
    cudaStream_t stream) {
  return launch(
      &end_iteration_kernel,
      1,
      stream,
      rule,
      totals,
      check_overflow,
      scale,
      counts);
}

cudaError_t launch_count_applied(
    const GradientTotals* totals,
    bool check_overflow,
    StepCounts* counts,
    cudaStream_t stream) {
  return launch(
      &count_applied_kernel,
      1,
      stream,
      totals,
      check_overflow,
      counts);
}

} // namespace fp16core::detail::cuda
