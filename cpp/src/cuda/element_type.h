// The types of elements, as kernels know them.

#pragma once

#include <cstdint>

namespace fp16core::detail::cuda {

enum class ElementType : std::uint8_t { kHalf, kBFloat16, kFloat, kDouble };

} // namespace fp16core::detail::cuda
