#include "python_tensor.h"

#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

namespace fp16core::bindings {

const at::Tensor* tensor_in(PyObject* object) noexcept {
  try {
    return THPVariable_Check(object) ? &THPVariable_Unpack(object) : nullptr;
  } catch (...) {
    // A class whose __instancecheck__ raises.
    PyErr_Clear();
    return nullptr;
  }
}

PyObject* object_of(const at::Tensor& tensor) noexcept {
  try {
    return THPVariable_Wrap(tensor);
  } catch (...) {
    PyErr_SetString(PyExc_RuntimeError, "fp16core: cannot wrap a tensor");
    return nullptr;
  }
}

std::optional<c10::ScalarType> dtype_in(PyObject* object) noexcept {
  if (!THPDtype_Check(object)) {
    return std::nullopt;
  }
  return reinterpret_cast<THPDtype*>(object)->scalar_type;
}

void set_python_error(const std::exception_ptr& error) {
  torch::translate_exception_to_python(error);
}

} // namespace fp16core::bindings
