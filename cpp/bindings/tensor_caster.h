// The nanobind caster for at::Tensor, included by every binding file.

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

} // namespace nanobind::detail
