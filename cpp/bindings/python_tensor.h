// The tensor in a Python object, and the Python object of a tensor.
//
// Declared apart from torch's own header for it, which takes longer to compile
// than all bindings together.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <exception>
#include <optional>

// Python's own way to declare its objects without its headers.
struct _object;

namespace fp16core::bindings {

/// Returns the tensor in `object`, which stays the owner; null if there is
/// none. Never throws: an object whose class fails to tell is no tensor.
const at::Tensor* tensor_in(_object* object) noexcept;

/// Returns a new reference to the Python object of `tensor`, the same one for
/// as long as it lives; null, with a Python error set, where that fails.
_object* object_of(const at::Tensor& tensor) noexcept;

/// Returns the dtype that `object` is, if it is one.
std::optional<c10::ScalarType> dtype_in(_object* object) noexcept;

/// Sets the Python error of torch's class for a c10::Error.
void set_python_error(const std::exception_ptr& error);

} // namespace fp16core::bindings
