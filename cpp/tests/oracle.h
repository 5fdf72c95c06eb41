// What the C++ tests compare with: 16-bit floats by their definition, random
// bits, the loops of every instruction set here, and the text of errors.

#pragma once

#include "cpu/simd/blocks.h"

#include <c10/util/Exception.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

namespace fp16core::test {

/// A binary floating point format of 16 bits.
struct Format {
  int mantissa_bits;
  int lowest_exponent; // of the normal numbers
  std::uint16_t infinity;
};

constexpr Format kHalf{10, -14, 0x7c00};
constexpr Format kBFloat16{7, -126, 0x7f80};

/// Returns the number that `bits` stand for, exactly.
inline double value_of(const Format& format, std::uint16_t bits) {
  const int magnitude = bits & 0x7fff;
  double value = std::numeric_limits<double>::quiet_NaN();
  if (magnitude == format.infinity) {
    value = std::numeric_limits<double>::infinity();
  } else if (magnitude < format.infinity) {
    const int one = 1 << format.mantissa_bits;
    const int exponent = magnitude >> format.mantissa_bits;
    const int fraction = magnitude & (one - 1);
    value = exponent == 0
        ? std::ldexp(fraction, format.lowest_exponent - format.mantissa_bits)
        : std::ldexp(
              one + fraction,
              format.lowest_exponent + exponent - 1 - format.mantissa_bits);
  }
  return (bits & 0x8000) != 0 ? -value : value;
}

/// Returns the bits of `value`, rounded once, to nearest and ties to even.
inline std::uint16_t bits_of(const Format& format, double value) {
  const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  if (std::isnan(value)) {
    return sign | format.infinity | 1;
  }
  if (std::isinf(value)) {
    return sign | format.infinity;
  }
  const double magnitude = std::fabs(value);
  const int exponent = magnitude == 0.0
      ? format.lowest_exponent
      : std::max(std::ilogb(magnitude), format.lowest_exponent);
  // Counted in units of the last place, the value is rounded to a whole number;
  // a carry runs on into the exponent by itself.
  const double units =
      std::nearbyint(std::ldexp(magnitude, format.mantissa_bits - exponent));
  const double bits = units +
      std::ldexp(exponent - format.lowest_exponent, format.mantissa_bits);
  return sign |
      (bits >= format.infinity ? format.infinity
                               : static_cast<std::uint16_t>(bits));
}

/// Returns whether both hold the same number, all NaN being one.
inline bool same_bits(const Format& format, std::uint16_t a, std::uint16_t b) {
  return a == b ||
      ((a & 0x7fff) > format.infinity && (b & 0x7fff) > format.infinity);
}
inline bool same_bits(float a, float b) {
  return std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b) ||
      (std::isnan(a) && std::isnan(b));
}
inline bool same_bits(double a, double b) {
  return std::bit_cast<std::uint64_t>(a) == std::bit_cast<std::uint64_t>(b) ||
      (std::isnan(a) && std::isnan(b));
}

/// The loops of one instruction set.
struct Variant {
  std::string name;
  const detail::cpu::BlockKernels* blocks;
};

/// Returns the loops that this processor can run, the baseline first.
inline std::vector<Variant> variants() {
  using namespace detail::cpu;
  std::vector<Variant> all{{"DEFAULT", &DEFAULT::kBlocks}};
#if defined(FP16CORE_HAVE_X86_CAPABILITIES)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    all.push_back({"AVX2", &AVX2::kBlocks});
  }
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq")) {
    all.push_back({"AVX512", &AVX512::kBlocks});
  }
#endif
  return all;
}

/// An array on the heap of exactly `size` elements that starts `offset`
/// elements after a 64-byte boundary, so that a sanitizer sees the first access
/// past its end.
template <typename T>
class Array {
 public:
  explicit Array(std::size_t size, std::size_t offset = 0)
      : size_(size),
        memory_(
            static_cast<T*>(::operator new(
                (offset + size) * sizeof(T),
                std::align_val_t{64}))),
        data_(memory_ + offset) {
    std::fill_n(memory_, offset + size, T{});
  }
  ~Array() { ::operator delete(memory_, std::align_val_t{64}); }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;

  T* data() { return data_; }
  const T* data() const { return data_; }
  std::int64_t size() const { return static_cast<std::int64_t>(size_); }
  T& operator[](std::int64_t i) { return data_[i]; }
  const T& operator[](std::int64_t i) const { return data_[i]; }

 private:
  std::size_t size_;
  T* memory_;
  T* data_;
};

/// Runs `body` and returns the text of the `Error` that it throws, without
/// torch's backtrace; an empty text if it throws none.
template <typename Error, typename Body>
std::string error_of(const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    if constexpr (std::is_base_of_v<c10::Error, Error>) {
      return error.what_without_backtrace();
    } else {
      return error.what();
    }
  }
  return {};
}

} // namespace fp16core::test
