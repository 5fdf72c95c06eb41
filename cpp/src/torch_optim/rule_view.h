// A torch::optim optimizer as an update rule sees it.

#pragma once

#include "optimizer_kind.h"

#include <fp16core/optimizer_core.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace fp16core::detail {

/// Returns the options of a group as the rule of `kind` reads them. They are of
/// the kind's class.
RuleOptions read_rule_options(
    const OptimizerKind& kind,
    torch::optim::OptimizerOptions& options);

/// Reads an optimizer's options and state, anew for every step, and keeps the
/// memory for it.
///
/// torch::optim counts steps in integers, rules in tensors: there is a tensor
/// beside every count, which is trusted only while it agrees.
class TorchRuleView {
 public:
  /// Runs the rule of `kind` on all parameters with a gradient. The groups of
  /// `optimizer` are in line with the masters of `core` (see
  /// MasterWeights::ingest). State is made where there is none. Returns
  /// nothing, or with nothing changed what stands in the way.
  std::optional<std::string> update(
      OptimizerCore& core,
      const OptimizerKind& kind,
      torch::optim::Optimizer& optimizer);

 private:
  struct Counter {
    at::Tensor tensor;
    std::int64_t value = -1;
  };
  // A count that the update advances, where torch::optim has it and here.
  struct Due {
    std::int64_t* steps;
    Counter* counter;
  };

  Counter& counter_of(
      const torch::optim::Optimizer& optimizer,
      const DueParameter& due);

  std::vector<RuleOptions> options_;
  std::vector<std::vector<Counter>> counters_;
  std::vector<Due> due_;
};

} // namespace fp16core::detail
