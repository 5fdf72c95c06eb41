#include "parameter_text.h"

#include <sstream>

namespace fp16core::detail {

std::string dtype_name(c10::ScalarType type) {
  switch (type) {
    case c10::ScalarType::Half:
      return "float16";
    case c10::ScalarType::BFloat16:
      return "bfloat16";
    case c10::ScalarType::Float:
      return "float32";
    case c10::ScalarType::Double:
      return "float64";
    default:
      return c10::toString(type);
  }
}

std::string describe_parameter(
    std::int64_t group,
    std::int64_t index,
    const at::Tensor& parameter) {
  std::ostringstream text;
  text << "group " << group << ", index " << index << ": shape "
       << parameter.sizes() << ", " << dtype_name(parameter.scalar_type())
       << ", " << parameter.device();
  return text.str();
}

} // namespace fp16core::detail
