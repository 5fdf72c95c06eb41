// State as plain data under Python's names, which checkpoints are made of.

#pragma once

#include <fp16core/api.h>

// Declared here rather than included, since they take long to compile: whoever
// looks into a dict includes <ATen/core/Dict.h> and <ATen/core/ivalue.h>, which
// <torch/torch.h> and <fp16core/checkpoint.h> bring along.
namespace c10 {
struct IValue;
template <class Key, class Value>
class Dict;
} // namespace c10

namespace torch::nn {
class Module;
} // namespace torch::nn

namespace fp16core {

/// A dict as Python has it: values of any kind under strings or integers, in
/// the order of insertion. A copy is the same dict.
using StateDict = c10::Dict<c10::IValue, c10::IValue>;

/// Returns a new, empty dict.
FP16CORE_API StateDict make_state_dict();

/// Returns the parameters and buffers of `module` under their names, as
/// `module.state_dict()` does in Python. The tensors are the live ones,
/// detached.
FP16CORE_API StateDict state_dict(const torch::nn::Module& module);

/// Copies the tensors of `state` into the parameters and buffers of `module`,
/// in the dtype and on the device of the latter.
///
/// Throws ValueError, with nothing changed, unless `state` is a dict that has
/// exactly the names of the module, with tensors of the same shapes: the error
/// lists what is missing and what is not expected.
FP16CORE_API void load_state_dict(
    torch::nn::Module& module,
    const c10::IValue& state);

} // namespace fp16core
