// Numbers as text for messages.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>

namespace fp16core::detail {

/// Returns `value` with up to 12 digits and no trailing zeros.
inline std::string number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.12g", value);
  return text;
}

/// Returns "1,234,567".
inline std::string grouped(std::int64_t value) {
  std::string text = std::to_string(value);
  for (auto place = static_cast<std::ptrdiff_t>(text.size()) - 3; place > 0;
       place -= 3) {
    text.insert(static_cast<std::size_t>(place), 1, ',');
  }
  return text;
}

} // namespace fp16core::detail
