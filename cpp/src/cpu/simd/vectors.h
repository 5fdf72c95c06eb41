// The registers that the loops work with, and their conversions.
//
// For the SIMD sources only: every name is compiled once for each instruction
// set.

#pragma once

#include "../../math/half_range.h"

#include <ATen/cpu/vec/vec.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <type_traits>

namespace fp16core::detail::cpu {
namespace CPU_CAPABILITY {

using at::vec::Vectorized;
using Floats = Vectorized<float>;
using Bits = Vectorized<std::int32_t>;

constexpr int kWidth = Floats::size();

constexpr std::int32_t kMagnitude = 0x7fffffff;
constexpr std::int32_t kInfinity = 0x7f800000;

inline Floats load(const float* source) {
  return Floats::loadu(source);
}
inline Vectorized<double> load(const double* source) {
  return Vectorized<double>::loadu(source);
}
inline Floats load(const c10::Half* source) {
  Floats values;
  at::vec::load_fp32_from_fp16(source, values);
  return values;
}
inline Floats load(const c10::BFloat16* source) {
  Floats values;
  at::vec::load_fp32_from_bf16(source, values);
  return values;
}

// Two registers of fp32 as one of the narrow type.
template <typename Narrow>
inline Vectorized<Narrow> narrow(const Floats& low, const Floats& high) {
  if constexpr (std::is_same_v<Narrow, c10::Half>) {
    return at::vec::convert_float_half(low, high);
  } else {
    return at::vec::convert_float_bfloat16(low, high);
  }
}

inline Bits magnitude_bits(const Floats& values) {
  return at::vec::cast<std::int32_t>(values) & Bits(kMagnitude);
}
inline std::int32_t magnitude_bits(float value) {
  return std::bit_cast<std::int32_t>(value) & kMagnitude;
}

template <typename T>
inline std::int32_t largest_of(const Vectorized<T>& values) {
  T lanes[Vectorized<T>::size()];
  values.store(lanes);
  return *std::max_element(lanes, lanes + Vectorized<T>::size());
}

// Whether a finite one of `n` masters rounds to infinity. The largest magnitude
// among them decides, unless it is inf or NaN, which hides the finite ones.
template <typename Narrow>
inline bool rounds_to_infinity(
    const float* masters,
    std::int64_t n,
    std::int32_t largest_bits) {
  if (largest_bits < kInfinity) {
    return largest_bits >= kRoundsToInfinity<Narrow>;
  }
  return std::any_of(masters, masters + n, [](float master) {
    const std::int32_t bits = magnitude_bits(master);
    return bits >= kRoundsToInfinity<Narrow> && bits < kInfinity;
  });
}

} // namespace CPU_CAPABILITY
} // namespace fp16core::detail::cpu
