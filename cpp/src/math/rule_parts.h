// What the files of the update rules share: the names of options, counters,
// and the gradient as an optimizer sees it.

#pragma once

#include "arithmetic.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace fp16core::detail {

/// A hyper-parameter: its name in a param group, and its place in the struct of
/// a rule's options.
template <typename Options>
struct Option {
  // An alias: what nvcc makes of the bare type draws a warning from gcc.
  using Member = double Options::*;

  std::string_view name;
  Member member;
};

/// Returns the options of a rule as its own struct, from their values in the
/// order of its names.
template <typename Rule>
typename Rule::Options named_options(const double* values) {
  typename Rule::Options result{};
  for (std::size_t i = 0; i < Rule::kOptions.size(); ++i) {
    result.*Rule::kOptions[i].member = values[i];
  }
  return result;
}

/// A number that an optimizer keeps for each parameter, and what it starts
/// from: as UpdateRule::Counter, whose header includes torch's, which a kernel
/// must not.
struct Counter {
  std::string_view name;
  double start;
};

/// The counters of one parameter while a step is prepared.
struct Counters {
  double* values;
  // Whether the optimizer keeps them in float32.
  bool single;

  C10_HOST_DEVICE double& operator[](std::size_t i) const { return values[i]; }

  /// Multiplies a counter as torch multiplies its tensor by a number.
  C10_HOST_DEVICE void multiply(std::size_t i, double factor) const {
    values[i] = single
        ? static_cast<float>(values[i]) * static_cast<float>(factor)
        : values[i] * factor;
  }
};

/// How torch computes with a learning rate: in double, or rounding every result
/// to float32 where the rate is a float32 tensor.
struct RateArithmetic {
  bool single;

  C10_HOST_DEVICE double operator()(double value) const {
    return single ? static_cast<float>(value) : value;
  }
};

/// The gradient, negated to maximize, plus `weight_decay` times the weight.
template <typename Math>
FP16CORE_PER_ELEMENT typename Math::Value decayed_gradient(
    const typename Math::Value& gradient,
    const typename Math::Value& weight,
    bool maximize,
    typename Math::Real weight_decay) {
  const auto ascent =
      maximize ? gradient * Math::of(typename Math::Real(-1)) : gradient;
  return weight_decay == 0 ? ascent
                           : Math::fma(weight, Math::of(weight_decay), ascent);
}

/// torch's vectorized kernels treat the last elements of a tensor one by one,
/// in another order of roundings: those that do not fill a register of AVX2,
/// with which its fused kernels are compiled for AVX-512 processors too.
template <typename Real>
constexpr std::int64_t kRemainderOf = 32 / sizeof(Real);

/// decay * average + rate * x * x, in the order of roundings of torch's fused
/// kernels. In the loop over the last elements of a tensor (`kRemainder`) the
/// compiler fused another of the additions.
template <typename Math, bool kRemainder>
FP16CORE_PER_ELEMENT typename Math::Value square_average(
    const typename Math::Value& average,
    const typename Math::Value& x,
    typename Math::Real decay,
    typename Math::Real rate) {
  const auto product = Math::of(rate) * x;
  return kRemainder ? Math::fma(average, Math::of(decay), product * x)
                    : Math::fma(product, x, average * Math::of(decay));
}

} // namespace fp16core::detail
