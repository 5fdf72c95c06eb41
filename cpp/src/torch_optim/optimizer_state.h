// The state of a torch::optim optimizer: under masters, and in Python's format.

#pragma once

#include "../dict_reader.h"
#include "optimizer_kind.h"

#include <fp16core/master_weights.h>
#include <fp16core/state_dict.h>

#include <ATen/core/Dict.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace fp16core::detail {

/// Throws TypeError if a half parameter of `optimizer` has state of a class
/// whose tensors nobody knows, and which a master could therefore not take
/// over.
void check_state_is_known(
    torch::optim::Optimizer& optimizer,
    const std::string& owner);

/// Throws ValueError if state that belongs to the elements of a parameter has
/// another shape.
void check_shapes(torch::optim::Optimizer& optimizer, const std::string& owner);

/// Puts masters in the place of half parameters. Their state moves with them,
/// half tensors in it becoming float32.
void adopt(
    torch::optim::Optimizer& optimizer,
    const std::vector<Adoption>& adoptions);

/// What a Python param group has and a C++ one has no place for, by group: kept
/// from one checkpoint to the next.
using PythonEntries = std::vector<StateDict>;

/// Returns `state_dict()` of the Python optimizer that `optimizer` is. Throws
/// TypeError, which begins with `owner`, if it is none of torch::optim's.
StateDict optimizer_state_dict(
    torch::optim::Optimizer& optimizer,
    const PythonEntries& python_entries,
    const std::string& owner);

/// A state dict of a Python optimizer that has been checked and fits an
/// optimizer.
class SavedOptimizer {
 public:
  /// Throws ValueError if it does not fit, and TypeError like
  /// `optimizer_state_dict`. Changes nothing.
  SavedOptimizer(const DictReader& saved, torch::optim::Optimizer& optimizer);

  /// Replaces options and state of the optimizer. Tensors get dtype, device and
  /// strides of their parameters, and share no memory with the saved ones.
  void load(torch::optim::Optimizer& optimizer) const;

  const PythonEntries& python_entries() const { return python_entries_; }

 private:
  std::vector<DictReader> groups_;
  // The position of a parameter, and its state.
  std::vector<std::pair<std::pair<std::size_t, std::size_t>, DictReader>>
      states_;
  PythonEntries python_entries_;
};

} // namespace fp16core::detail
