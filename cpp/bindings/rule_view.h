// A Python optimizer as an update rule sees it.

#pragma once

#include "bindings.h"

#include <optional>
#include <string>
#include <vector>

namespace fp16core::bindings {

/// Reads an optimizer's options and state, anew for every step, and keeps the
/// memory for it.
class RuleView {
 public:
  /// Runs `rule` on all parameters with a gradient, with the options in
  /// `param_groups` and the state in `state`, both as in torch.optim and in
  /// line with the masters of `core` (see MasterWeights::ingest). New state
  /// goes into `state`; to make some, a deferred step is settled first, and is
  /// over after an overflow. Returns nothing, or with nothing changed what
  /// stands in the way.
  std::optional<std::string> update(
      OptimizerCore& core,
      const UpdateRule& rule,
      nb::handle param_groups,
      nb::handle state);

 private:
  std::vector<RuleOptions> options_;
};

} // namespace fp16core::bindings
