// The state of an optimizer, as whoever drives update rules has to keep it.

#pragma once

#include <fp16core/update_rule.h>

#include <cstdint>
#include <map>
#include <utility>

namespace fp16core::test {

using Position = std::pair<std::int64_t, std::int64_t>;
using RuleStates = std::map<Position, NewRuleState>;

/// Returns the state of a parameter, fresh if there is none.
inline RuleState find_state(const RuleStates& states, const DueParameter& due) {
  RuleState found;
  const auto at = states.find({due.group, due.index});
  if (at != states.end()) {
    found.fresh = false;
    for (std::size_t i = 0; i < found.tensors.size(); ++i) {
      found.tensors[i] = &at->second.tensors[i];
    }
    for (std::size_t i = 0; i < found.counters.size(); ++i) {
      found.counters[i] = &at->second.counters[i];
    }
  }
  return found;
}

} // namespace fp16core::test
