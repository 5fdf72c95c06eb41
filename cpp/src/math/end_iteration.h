// The end of an iteration where its outcome is known to the device alone, for
// host and device.

#pragma once

#include "gradient_stats.h"
#include "update_loss_scale.h"

#include <cmath>
#include <cstdint>

namespace fp16core::detail {

/// What an iteration came to, for whoever reads it later.
struct IterationRecord {
  double scale_before = 0.0;
  double scale_after = 0.0;
  // 2-norm of the unscaled gradients.
  double norm = 0.0;
  // Overflows in a row that would still be tolerated.
  std::int64_t overflows_tolerated = 0;
  // Of the first gradient with inf or NaN: its item, or -1, and its counts.
  std::int64_t first_offender = -1;
  std::int64_t inf_count = 0;
  std::int64_t nan_count = 0;
  bool overflow = false;
  // Whether the scale was at its floor before, and is after.
  bool at_floor_before = true;
  bool at_floor_after = true;
};

/// How the steps of one optimizer went.
struct StepCounts {
  std::int64_t applied = 0;
  std::int64_t skipped = 0;
  IterationRecord last;
};

/// A scaler as the device needs it: its rule, where it is one that moves. The
/// rule must have no error, since a device cannot raise one.
struct ScaleRule {
  DynamicLossScalerOptions options;
  bool dynamic = false;
};

/// Tells the scale how an iteration went, counts a skip, and keeps a record.
C10_HOST_DEVICE inline void end_iteration(
    const ScaleRule& rule,
    const GradientTotals& totals,
    bool check_overflow,
    DynamicLossScaleState& scale,
    StepCounts& counts) {
  const bool overflow = check_overflow && totals.found_inf != 0.0F;
  const auto on_floor = [&] {
    return !rule.dynamic || at_floor(rule.options, scale.cur_scale);
  };
  IterationRecord record;
  record.overflow = overflow;
  record.scale_before = scale.cur_scale;
  record.at_floor_before = on_floor();
  if (rule.dynamic) {
    update_loss_scale(rule.options, scale, overflow);
    record.overflows_tolerated = overflows_tolerated(rule.options, scale);
  }
  record.scale_after = scale.cur_scale;
  record.at_floor_after = on_floor();
  record.norm = std::sqrt(totals.sum_of_squares);
  record.first_offender = totals.first_offender;
  record.inf_count = totals.inf_count;
  record.nan_count = totals.nan_count;
  counts.skipped += overflow ? 1 : 0;
  counts.last = record;
}

/// Counts a step that has run to its end, unless there was an overflow.
C10_HOST_DEVICE inline void count_applied(
    const GradientTotals& totals,
    bool check_overflow,
    StepCounts& counts) {
  counts.applied += check_overflow && totals.found_inf != 0.0F ? 0 : 1;
}

} // namespace fp16core::detail
