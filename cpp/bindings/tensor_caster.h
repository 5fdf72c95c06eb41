// The nanobind caster for at::Tensor, included by every binding file.

#pragma once

#include <nanobind/nanobind.h>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/python_variable.h>

namespace nanobind::detail {

/// Passes the very tensor in both directions: identity, autograd and version
/// counter are kept. None is refused where a tensor is wanted, and stands for
/// an undefined tensor in results.
template <>
struct type_caster<at::Tensor> {
  NB_TYPE_CASTER(at::Tensor, const_name("torch.Tensor"))

  bool from_python(handle source, uint8_t, cleanup_list*) noexcept {
    try {
      if (!THPVariable_Check(source.ptr())) {
        return false;
      }
      value = THPVariable_Unpack(source.ptr());
      return true;
    } catch (...) {
      // A class whose __instancecheck__ raises is no tensor.
      PyErr_Clear();
      return false;
    }
  }

  static handle from_cpp(
      const at::Tensor& tensor,
      rv_policy,
      cleanup_list*) noexcept {
    if (!tensor.defined()) {
      return none().release();
    }
    try {
      return THPVariable_Wrap(tensor);
    } catch (...) {
      PyErr_SetString(PyExc_RuntimeError, "fp16core: cannot wrap a tensor");
      return {};
    }
  }
};

} // namespace nanobind::detail
