// Numbers as text for messages.

#pragma once

#include <cstdio>
#include <string>

namespace fp16core::detail {

/// Returns `value` with up to 12 digits and no trailing zeros.
inline std::string number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.12g", value);
  return text;
}

} // namespace fp16core::detail
