#include "parameter_text.h"

#include <c10/core/ScalarType.h>

#include <sstream>

namespace fp16core::detail {

std::string dtype_name(c10::ScalarType type) {
  return std::string(c10::getDtypeNames(type).first);
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
