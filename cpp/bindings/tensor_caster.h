// The nanobind casters for at::Tensor and its dtype, included by every binding
// file.

#pragma once

#include "python_tensor.h"

#include <nanobind/nanobind.h>

#include <ATen/core/Tensor.h>

namespace nanobind::detail {

/// Passes the very tensor in both directions: identity, autograd and version
/// counter are kept. None is refused where a tensor is wanted, and stands for
/// an undefined tensor in results.
template <>
struct type_caster<at::Tensor> {
  NB_TYPE_CASTER(at::Tensor, const_name("torch.Tensor"))

  bool from_python(handle source, uint8_t, cleanup_list*) noexcept {
    const auto* tensor = fp16core::bindings::tensor_in(source.ptr());
    if (tensor != nullptr) {
      value = *tensor;
    }
    return tensor != nullptr;
  }

  static handle from_cpp(
      const at::Tensor& tensor,
      rv_policy,
      cleanup_list*) noexcept {
    return tensor.defined() ? handle(fp16core::bindings::object_of(tensor))
                            : none().release();
  }
};

/// Takes a torch.dtype.
template <>
struct type_caster<c10::ScalarType> {
  NB_TYPE_CASTER(c10::ScalarType, const_name("torch.dtype"))

  bool from_python(handle source, uint8_t, cleanup_list*) noexcept {
    const auto dtype = fp16core::bindings::dtype_in(source.ptr());
    value = dtype.value_or(c10::ScalarType::Undefined);
    return dtype.has_value();
  }
};

} // namespace nanobind::detail
