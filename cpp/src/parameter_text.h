// Parameters as text for messages.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

namespace fp16core::detail {

/// Returns the name that Python users know: "float16" for Half.
std::string dtype_name(c10::ScalarType type);

/// Returns "shape [3, 4], float16, cpu".
std::string describe_tensor(const at::Tensor& tensor);

/// Returns "group 0, index 2, encoder.weight: shape [3, 4], float16, cpu".
std::string describe_parameter(
    std::int64_t group,
    std::int64_t index,
    const at::Tensor& parameter,
    const std::string& name = "");

} // namespace fp16core::detail
