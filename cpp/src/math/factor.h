// A number that values are multiplied by: the reciprocal of the loss scale, or
// a clip coefficient.

#pragma once

#include <c10/macros/Macros.h>

namespace fp16core::detail {

/// A factor in both precisions; `f32` is the rounding of `f64`.
struct Factor {
  double f64 = 1.0;
  float f32 = 1.0F;

  static C10_HOST_DEVICE Factor of(double value) {
    return {value, static_cast<float>(value)};
  }
};

/// Where a factor comes from: a number, or the memory of the device that uses
/// it, to be read when it is used.
struct FactorSource {
  double number = 1.0;
  const double* memory = nullptr;

  C10_HOST_DEVICE Factor read() const {
    return Factor::of(memory == nullptr ? number : *memory);
  }
};

} // namespace fp16core::detail
