// The kernels behind gradients.cuh and their launches.

#include "gradients.cuh"

#include "elements.cuh"
#include "reduce.cuh"

#include "../math/unscale.h"

#include <cfloat>
#include <cmath>

namespace fp16core::detail::cuda {

namespace {

constexpr unsigned kMagnitudeBits = 0x7fffffff;
constexpr unsigned kInfinityBits = 0x7f800000;
constexpr unsigned long long kDoubleMagnitudeBits = 0x7fffffffffffffff;

// A float32 sum of kVector squares is exact to 2^-38 above this, although the
// squares below 2^-126 among them have lost bits; see kTinySum of the CPU.
constexpr float kTinySum = 0x1p-100F;

__device__ unsigned long long magnitude_bits(double value) {
  return static_cast<unsigned long long>(__double_as_longlong(value)) &
      kDoubleMagnitudeBits;
}

struct Combine {
  __device__ GradientFinding
  operator()(const GradientFinding& a, const GradientFinding& b) const {
    return {
        a.sum_of_squares + b.sum_of_squares,
        a.largest_bits > b.largest_bits ? a.largest_bits : b.largest_bits,
        a.inf_count + b.inf_count,
        a.nan_count + b.nan_count};
  }
};

__device__ void count_nonfinite(double value, GradientFinding& found) {
  found.inf_count += std::isinf(value) ? 1 : 0;
  found.nan_count += std::isnan(value) ? 1 : 0;
}

// Takes `kCount` elements of a source of at most 32 bits, and remembers the
// bits of the largest of them.
template <int kCount, typename Source>
__device__ __forceinline__ void take_values(
    const Source* scaled,
    float factor,
    float* values,
    unsigned& largest,
    GradientFinding& found) {
  float sum = 0.0F;
  unsigned largest_here = 0;
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    const auto wide = static_cast<float>(scaled[k]);
    const unsigned bits = __float_as_uint(wide) & kMagnitudeBits;
    largest_here = bits > largest_here ? bits : largest_here;
    values[k] = Unscale()(wide, factor);
    sum += values[k] * values[k];
  }
  largest = largest_here > largest ? largest_here : largest;
  if (largest_here >= kInfinityBits) {
    for (int k = 0; k < kCount; ++k) {
      count_nonfinite(static_cast<float>(scaled[k]), found);
    }
  } else if (!(sum <= FLT_MAX) || (sum < kTinySum && largest_here != 0)) {
    double exact = 0.0;
    for (int k = 0; k < kCount; ++k) {
      const double value = values[k];
      exact += value * value;
    }
    found.sum_of_squares += exact;
    return;
  }
  found.sum_of_squares += sum;
}

template <typename Source>
__device__ void take_narrow(
    const Span<GradientTask>& span,
    float factor,
    GradientFinding& found) {
  const auto* source =
      static_cast<const Source*>(span.task.source) + span.begin;
  const bool write = span.task.destination != nullptr;
  auto* destination =
      write ? static_cast<float*>(span.task.destination) + span.begin : nullptr;
  const bool source_aligned = is_aligned(span.task.source);
  const bool destination_aligned = is_aligned(span.task.destination);
  unsigned largest = 0;
  walk(
      span.size,
      [&](std::int64_t i) {
        const auto scaled = load(source + i, source_aligned);
        Vector<float> values;
        take_values<kVector>(
            scaled.values,
            factor,
            values.values,
            largest,
            found);
        if (write) {
          store(destination + i, destination_aligned, values);
        }
      },
      [&](std::int64_t i) {
        const Source scaled = source[i];
        float value;
        take_values<1>(&scaled, factor, &value, largest, found);
        if (write) {
          destination[i] = value;
        }
      });
  found.largest_bits =
      magnitude_bits(Unscale()(__uint_as_float(largest), factor));
}

template <typename Destination>
__device__ void take_double(
    const Span<GradientTask>& span,
    double factor,
    GradientFinding& found) {
  const auto* source =
      static_cast<const double*>(span.task.source) + span.begin;
  auto* destination = static_cast<Destination*>(span.task.destination);
  for (std::int64_t i = threadIdx.x; i < span.size; i += kThreads) {
    const double scaled = source[i];
    const auto rounded = static_cast<Destination>(Unscale()(scaled, factor));
    const double value = rounded;
    // What the source was, if it says more than the product.
    const auto bits = magnitude_bits(std::isfinite(scaled) ? value : scaled);
    found.largest_bits = bits > found.largest_bits ? bits : found.largest_bits;
    found.sum_of_squares += value * value;
    count_nonfinite(scaled, found);
    if (destination != nullptr) {
      destination[span.begin + i] = rounded;
    }
  }
}

// The task: read every gradient once; count inf and NaN, sum up squares, find
// the largest magnitude, and write the unscaled values in fp32 (or fp64). All
// tensors of all types share a launch, a block taking one chunk of one tensor.
// The awkward cases: a sum of squares may leave the range of fp32 although no
// element does, so each thread sums eight of them, and again in double where
// the sum is infinite or tiny, while they are still in registers; source and
// destination may be the same memory; nothing is written where a gradient is
// only measured. One pass: reads 2, writes 4 bytes an element for half
// gradients, and 32 bytes a chunk. Sums are combined in an order that only
// depends on the list.
__global__ void __launch_bounds__(kThreads, kBlocks) take_gradients_kernel(
    const __grid_constant__ Work<GradientTask> work,
    const FactorSource factor_source,
    GradientFinding* findings) {
  const auto span = span_of_block(work);
  const Factor factor = span.task.unscale ? factor_source.read() : Factor{};
  GradientFinding found{};
  switch (span.task.source_type) {
    case ElementType::kHalf:
      take_narrow<c10::Half>(span, factor.f32, found);
      break;
    case ElementType::kBFloat16:
      take_narrow<c10::BFloat16>(span, factor.f32, found);
      break;
    case ElementType::kFloat:
      take_narrow<float>(span, factor.f32, found);
      break;
    case ElementType::kDouble:
      if (span.task.destination_type == ElementType::kDouble) {
        take_double<double>(span, factor.f64, found);
      } else {
        take_double<float>(span, factor.f64, found);
      }
      break;
  }
  found = reduce_block(found, Combine());
  if (threadIdx.x == 0) {
    findings[blockIdx.x] = found;
  }
}

// The task: combine the findings of the chunks of a tensor, a block for each.
__global__ void __launch_bounds__(kThreads, kBlocks) gather_stats_kernel(
    const __grid_constant__ Work<GradientTask> work,
    const GradientFinding* findings,
    GradientStats* stats) {
  const std::int64_t end = work.first_chunks[blockIdx.x + 1];
  GradientFinding found{};
  for (std::int64_t i = work.first_chunks[blockIdx.x] + threadIdx.x; i < end;
       i += kThreads) {
    found = Combine()(found, findings[i]);
  }
  found = reduce_block(found, Combine());
  if (threadIdx.x == 0) {
    auto& result = stats[blockIdx.x];
    result.sum_of_squares = found.sum_of_squares;
    result.largest =
        __longlong_as_double(static_cast<long long>(found.largest_bits));
    result.inf_count = found.inf_count;
    result.nan_count = found.nan_count;
  }
}

struct Total {
  GradientFinding found;
  // Of the first tensor with inf or NaN, or the number of tensors.
  long long first_offender;
};

struct CombineTotals {
  __device__ Total operator()(const Total& a, const Total& b) const {
    return {
        Combine()(a.found, b.found),
        a.first_offender < b.first_offender ? a.first_offender
                                            : b.first_offender};
  }
};

// The task: combine the findings of all tensors, in one block. There may be
// none.
__global__ void __launch_bounds__(kThreads, kBlocks) gather_totals_kernel(
    const __grid_constant__ Work<GradientTask> work,
    const GradientStats* stats,
    GradientTotals* totals) {
  const std::int64_t count = work.task_count;
  Total total{{}, count};
  for (std::int64_t i = threadIdx.x; i < count; i += kThreads) {
    const auto& found = stats[i];
    total = CombineTotals()(
        total,
        {{found.sum_of_squares,
          magnitude_bits(found.largest),
          found.inf_count,
          found.nan_count},
         found.inf_count + found.nan_count > 0 ? i : count});
  }
  total = reduce_block(total, CombineTotals());
  if (threadIdx.x == 0) {
    GradientTotals result{};
    result.sum_of_squares = total.found.sum_of_squares;
    result.largest =
        __longlong_as_double(static_cast<long long>(total.found.largest_bits));
    if (total.first_offender < count) {
      const auto& offender = stats[total.first_offender];
      result.first_offender = work.tasks[total.first_offender].item;
      result.inf_count = offender.inf_count;
      result.nan_count = offender.nan_count;
      result.found_inf = 1.0F;
    }
    *totals = result;
  }
}

} // namespace

cudaError_t launch_take_gradients(
    const Work<GradientTask>& work,
    const FactorSource& factor,
    GradientFinding* findings,
    GradientStats* stats,
    GradientTotals* totals,
    cudaStream_t stream) {
  cudaError_t error = cudaSuccess;
  if (work.task_count > 0) {
    error = launch(
        &take_gradients_kernel,
        work.chunk_count,
        stream,
        work,
        factor,
        findings);
    if (error == cudaSuccess) {
      error = launch(
          &gather_stats_kernel,
          work.task_count,
          stream,
          work,
          findings,
          stats);
    }
  }
  return error != cudaSuccess
      ? error
      : launch(&gather_totals_kernel, 1, stream, work, stats, totals);
}

} // namespace fp16core::detail::cuda
