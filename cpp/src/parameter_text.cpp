#include "parameter_text.h"

#include <c10/core/ScalarType.h>

#include <sstream>

namespace fp16core::detail {

std::string dtype_name(c10::ScalarType type) {
  return std::string(c10::getDtypeNames(type).first);
}

std::string describe_tensor(const at::Tensor& tensor) {
  std::ostringstream text;
  text << "shape " << tensor.sizes() << ", " << dtype_name(tensor.scalar_type())
       << ", " << tensor.device();
  return text.str();
}

std::string describe_parameter(
    std::int64_t group,
    std::int64_t index,
    const at::Tensor& parameter,
    const std::string& name) {
  std::ostringstream text;
  text << "group " << group << ", index " << index << (name.empty() ? "" : ", ")
       << name << ": " << describe_tensor(parameter);
  return text.str();
}

} // namespace fp16core::detail
