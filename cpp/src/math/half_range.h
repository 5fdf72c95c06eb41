// Where the range of the 16-bit types ends.

#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>

namespace fp16core::detail {

/// The bits of the smallest float32 magnitude that rounds to infinity: halfway
/// between the largest finite value and what would follow it (a tie, which goes
/// to the even side, infinity).
template <typename Narrow>
inline constexpr std::int32_t kRoundsToInfinity = 0;
template <>
inline constexpr std::int32_t kRoundsToInfinity<c10::Half> =
    0x477ff000; // 65520
template <>
inline constexpr std::int32_t kRoundsToInfinity<c10::BFloat16> =
    0x7f7f8000; // (2 - 2^-8) * 2^127

} // namespace fp16core::detail
