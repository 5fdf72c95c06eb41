// Clipping by a norm, for host and device.

#pragma once

#include "gradient_stats.h"

#include <c10/macros/Macros.h>

#include <cmath>

namespace fp16core::detail {

/// What clipping comes to.
struct Clip {
  // What the gradients have to be multiplied by, at most 1.
  double coefficient = 1.0;
  // Before clipping; -1 after an overflow, which clips nothing.
  float norm = 0.0F;
};

/// The coefficient of torch.nn.utils.clip_grad_norm_, in double. A NaN norm
/// gives NaN, as there.
C10_HOST_DEVICE inline double clip_coefficient(double norm, double max_norm) {
  const double coefficient = max_norm / (norm + 1e-6);
  return coefficient >= 1.0 ? 1.0 : coefficient;
}

/// Clips to `max_norm` by the 2-norm, or the largest magnitude.
C10_HOST_DEVICE inline Clip clip(
    const GradientTotals& totals,
    bool check_overflow,
    bool by_largest,
    double max_norm) {
  if (check_overflow && totals.found_inf != 0.0F) {
    return {1.0, -1.0F};
  }
  const double norm =
      by_largest ? totals.largest : std::sqrt(totals.sum_of_squares);
  return {clip_coefficient(norm, max_norm), static_cast<float>(norm)};
}

} // namespace fp16core::detail
