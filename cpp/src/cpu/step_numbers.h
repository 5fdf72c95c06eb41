// The numbers of the steps that the items of an update need.

#pragma once

#include "../kernel_items.h"

#include <c10/util/ArrayRef.h>

#include <cstddef>
#include <span>
#include <vector>

namespace fp16core::detail::cpu {

/// Advances counters and prepares steps, in memory that is kept.
class StepNumbers {
 public:
  /// Advances the counters of all items, and lets each of them point to the
  /// numbers of its step, which stay until the next call.
  void prepare(
      const UpdateRule& rule,
      std::span<UpdateItem> items,
      c10::ArrayRef<RuleOptions> options);

 private:
  struct Numbers {
    alignas(8) std::byte bytes[UpdateRule::kStepBytes];
  };

  std::vector<Numbers> numbers_;
};

} // namespace fp16core::detail::cpu
