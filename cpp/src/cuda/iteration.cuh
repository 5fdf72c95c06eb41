// The CUDA kernels that decide on clipping and on the loss scale, so that the
// host need not know.

#pragma once

#include "work.h"

#include "../math/clip.h"
#include "../math/end_iteration.h"

namespace fp16core::detail::cuda {

/// See clip() in math/clip.h.
cudaError_t launch_clip(
    const GradientTotals* totals,
    bool check_overflow,
    bool by_largest,
    double max_norm,
    Clip* result,
    cudaStream_t stream);

/// See end_iteration() in math/end_iteration.h.
cudaError_t launch_end_iteration(
    const ScaleRule& rule,
    const GradientTotals* totals,
    bool check_overflow,
    DynamicLossScaleState* scale,
    StepCounts* counts,
    cudaStream_t stream);

/// See count_applied() in math/end_iteration.h.
cudaError_t launch_count_applied(
    const GradientTotals* totals,
    bool check_overflow,
    StepCounts* counts,
    cudaStream_t stream);

} // namespace fp16core::detail::cuda
