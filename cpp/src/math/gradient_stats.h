// What a pass over gradients finds, for host and device.

#pragma once

#include <cstdint>

namespace fp16core::detail {

/// What a pass found in one gradient.
struct GradientStats {
  // Over the values after unscaling; combined in double.
  double sum_of_squares = 0.0;
  double largest = 0.0;
  // Over the values of the source.
  std::int64_t inf_count = 0;
  std::int64_t nan_count = 0;
};

/// What a pass found in all gradients.
struct GradientTotals {
  double sum_of_squares = 0.0;
  // NaN if an element is NaN.
  double largest = 0.0;
  // The first item with an element that is inf or NaN, or -1.
  std::int64_t first_offender = -1;
  // Of the first offender.
  std::int64_t inf_count = 0;
  std::int64_t nan_count = 0;
  // 1 if an element is inf or NaN, else 0: what torch's fused optimizers take.
  float found_inf = 0.0F;
};

} // namespace fp16core::detail
