// The CUDA kernels that check, measure, unscale and cast gradients.

#pragma once

#include "element_type.h"
#include "work.h"

#include "../math/factor.h"
#include "../math/gradient_stats.h"

namespace fp16core::detail::cuda {

/// See GradientItem.
struct GradientTask {
  const void* source;
  void* destination;
  std::int64_t numel;
  // What the totals call it.
  std::int64_t item;
  ElementType source_type;
  ElementType destination_type;
  bool unscale;
};

/// What was found in a part of a gradient. Magnitudes compare as the bits of a
/// double, with NaN above all.
struct GradientFinding {
  double sum_of_squares;
  unsigned long long largest_bits;
  long long inf_count;
  long long nan_count;
};

/// Takes the gradients, and gathers what was found: a finding for each chunk
/// in `findings`, for each task in `stats`, and in `totals`. Without work only
/// the totals are written.
cudaError_t launch_take_gradients(
    const Work<GradientTask>& work,
    const FactorSource& factor,
    GradientFinding* findings,
    GradientStats* stats,
    GradientTotals* totals,
    cudaStream_t stream);

} // namespace fp16core::detail::cuda
