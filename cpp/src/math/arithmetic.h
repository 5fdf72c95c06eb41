// The arithmetic that update rules are written in, for one element.
//
// A rule is a template over a Math: `Math::Value` is what it computes with,
// one number here, a register of them in cpu/simd/vector_math.h, with the same
// bits for every element. Sums and products written with operators are rounded
// one by one; `fma` rounds once.

#pragma once

#include <c10/macros/Macros.h>

#include <cmath>

/// What is done to one element. Left to itself, a compiler may call the larger
/// rules, with every register through memory.
#define FP16CORE_PER_ELEMENT C10_HOST_DEVICE C10_ALWAYS_INLINE

namespace fp16core::detail {

template <typename Number>
struct ScalarMath {
  using Real = Number;
  using Value = Number;

  static FP16CORE_PER_ELEMENT Value of(Real number) { return number; }

  /// Returns a * b + c, rounded once.
  static FP16CORE_PER_ELEMENT Value fma(Value a, Value b, Value c) {
    return std::fma(a, b, c);
  }
  static FP16CORE_PER_ELEMENT Value sqrt(Value x) { return std::sqrt(x); }
  static FP16CORE_PER_ELEMENT Value abs(Value x) { return std::fabs(x); }

  /// NaN wins.
  static FP16CORE_PER_ELEMENT Value maximum(Value a, Value b) {
    return a != a || a > b ? a : b;
  }

  /// Returns 1, -1 or 0; 0 for NaN.
  static FP16CORE_PER_ELEMENT Value sign(Value x) {
    return static_cast<Value>((x > 0) - (x < 0));
  }
};

/// Returns `start` moved to `end` by `weight`, as torch.lerp does: from the end
/// that is nearer. `kRemainder` tells the last elements of a tensor, for which
/// torch writes the same in another way, which shows in the sign of a zero.
template <typename Math, bool kRemainder>
FP16CORE_PER_ELEMENT typename Math::Value lerp(
    const typename Math::Value& start,
    const typename Math::Value& end,
    typename Math::Real weight) {
  using Real = typename Math::Real;
  const bool near_start = (weight < 0 ? -weight : weight) < Real(0.5);
  const Real from_end = kRemainder ? -(Real(1) - weight) : weight - Real(1);
  return near_start ? Math::fma(Math::of(weight), end - start, start)
                    : Math::fma(Math::of(from_end), end - start, end);
}

} // namespace fp16core::detail
