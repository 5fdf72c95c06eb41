// Multiplying a gradient by a factor: the reciprocal of the loss scale, or a
// clip coefficient.

#pragma once

#include <c10/macros/Macros.h>

namespace fp16core::detail {

/// One rounded product, of scalars or of vectors of them.
struct Unscale {
  template <typename Value>
  C10_HOST_DEVICE Value
  operator()(const Value& value, const Value& factor) const {
    return value * factor;
  }
};

} // namespace fp16core::detail
