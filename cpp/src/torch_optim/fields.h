// The fields of torch::optim's options and state classes, by their names.
//
// The names are those of torch.optim in Python, so one list of fields serves
// update rules, casts of state and checkpoints.

#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

namespace fp16core::detail {

/// Is shown every field of an object in turn, by reference. Does nothing with
/// those that it does not override.
class FieldVisitor {
 public:
  virtual ~FieldVisitor() = default;
  virtual void visit(std::string_view, double&) {}
  virtual void visit(std::string_view, std::int64_t&) {}
  virtual void visit(std::string_view, bool&) {}
  virtual void visit(std::string_view, std::tuple<double, double>&) {}
  virtual void visit(std::string_view, std::optional<std::int64_t>&) {}
  virtual void visit(std::string_view, std::optional<std::string>&) {}
  virtual void visit(std::string_view, at::Tensor&) {}
  virtual void visit(std::string_view, std::deque<at::Tensor>&) {}
  virtual void visit(
      std::string_view,
      std::optional<std::vector<at::Tensor>>&) {}
};

/// Shows the fields of `options` or `state`. Returns false, having shown
/// nothing, if its class is none of torch::optim's own: a derived class may
/// have fields that nobody knows.
bool visit_fields(
    torch::optim::OptimizerOptions& options,
    FieldVisitor& visitor);
bool visit_fields(
    torch::optim::OptimizerParamState& state,
    FieldVisitor& visitor);

} // namespace fp16core::detail
