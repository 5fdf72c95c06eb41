// What one step came to, for the history.

#pragma once

#include <fp16core/gradient_report.h>

#include <cstdint>
#include <vector>

namespace fp16core {

/// What one step came to. A step with a closure has one for each evaluation.
struct StepRecord {
  /// Its number among the steps, applied or skipped; the first is 1.
  std::int64_t step = 1;
  /// The scale that the gradients were made with.
  double scale = 1.0;
  /// Whether a gradient was infinite or NaN.
  bool overflow = false;
  /// Whether the step was skipped for it; an evaluation that is repeated at a
  /// lower scale skips nothing.
  bool skipped = false;
  /// How many skipped steps in a row it ended, itself counted; 0 if it was
  /// applied.
  std::int64_t skipped_in_a_row = 0;
  /// 2-norm of all unscaled gradients, before clipping; of this process where
  /// there are several. Not finite after an overflow here.
  double norm = 0.0;
  /// The gradients with an infinite or NaN element. Of a step that a device
  /// decided on the first of them; none where the overflow was another
  /// process's, or set by hand.
  std::vector<TensorReport> culprits;
};

} // namespace fp16core
