// The optimizer classes of torch::optim, and what they are in Python.

#pragma once

#include <fp16core/update_rule.h>

#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>
#include <torch/optim/optimizer.h>

#include <memory>
#include <string>
#include <string_view>
#include <typeinfo>

namespace fp16core::detail {

/// An entry of a param group that only the Python class has.
struct PythonOption {
  enum class Meaning {
    /// A choice between ways to compute the same; any value will do.
    kImplementation,
    /// It changes what is computed: C++ is as if it had `value`.
    kFixed,
  };

  std::string_view name;
  /// What Python's constructor sets, where C++ has no say.
  enum class Value { kNone, kFalse, kTrue } value;
  Meaning meaning;

  c10::IValue to_python() const;
};

/// A class of torch::optim with its options and state.
struct OptimizerKind {
  /// The name of the class, in Python too.
  std::string_view name;
  /// The rule that the core can run in its place; null where there is none.
  const UpdateRule* rule;
  c10::ArrayRef<PythonOption> python_options;
  const std::type_info* optimizer;
  const std::type_info* options;
  const std::type_info* state;
  std::unique_ptr<torch::optim::OptimizerParamState> (*make_state)();
};

/// Returns the kind whose class, exactly, the optimizer has, or null.
const OptimizerKind* find_kind(const torch::optim::Optimizer& optimizer);

/// Returns the kind that the class of `options` belongs to, or null.
const OptimizerKind* find_kind(const torch::optim::OptimizerOptions& options);

/// Returns the state of a parameter, null if there is none. Someone who looks
/// for it with operator[] leaves an empty entry, which counts as none.
torch::optim::OptimizerParamState* state_of(
    torch::optim::Optimizer& optimizer,
    const at::Tensor& parameter);

/// Returns the name of a class without its namespaces.
std::string class_name(const std::type_info& type);

} // namespace fp16core::detail
