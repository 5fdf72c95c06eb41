// Sums of powers, for norms other than the 2-norm and the inf-norm.

#pragma once

#include "../kernel_items.h"

#include <cmath>
#include <cstdint>

namespace fp16core::detail::cpu {

/// Returns the sum of |x|^power over `n` elements, in order, in double.
///
/// One scalar at a time: such norms are rare, and the vectorized powers of
/// different instruction sets differ in the last bit.
template <typename T>
double sum_of_powers(const T* values, std::int64_t n, double power) {
  double sum = 0.0;
  for (std::int64_t i = 0; i < n; ++i) {
    const double magnitude = std::fabs(static_cast<double>(values[i]));
    if (power == 1.0) {
      sum += magnitude;
    } else if (power == 0.0) {
      sum += magnitude != 0.0 ? 1.0 : 0.0;
    } else {
      sum += std::pow(magnitude, power);
    }
  }
  return sum;
}

inline double sum_of_powers(
    const GradientItem& item,
    std::int64_t begin,
    std::int64_t n,
    double power) {
  switch (item.source_type) {
    case c10::ScalarType::Half:
      return sum_of_powers(
          static_cast<const c10::Half*>(item.source) + begin,
          n,
          power);
    case c10::ScalarType::BFloat16:
      return sum_of_powers(
          static_cast<const c10::BFloat16*>(item.source) + begin,
          n,
          power);
    case c10::ScalarType::Float:
      return sum_of_powers(
          static_cast<const float*>(item.source) + begin,
          n,
          power);
    default:
      return sum_of_powers(
          static_cast<const double*>(item.source) + begin,
          n,
          power);
  }
}

} // namespace fp16core::detail::cpu
