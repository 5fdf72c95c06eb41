// The state machine of the dynamic loss scale, for host and device.

#pragma once

#include <fp16core/loss_scaler.h>

#include <c10/macros/Macros.h>

#include <cmath>

namespace fp16core::detail {

/// Advances `state` by one iteration.
///
/// The product of a growth is stored only if it is finite, so that the scale
/// can always come back; the original has no such guard.
C10_HOST_DEVICE inline void update_loss_scale(
    const DynamicLossScalerOptions& rule,
    DynamicLossScaleState& state,
    bool overflow) {
  if (overflow) {
    if (rule.delayed_shift == 1 || state.cur_hysteresis == 1) {
      const double lowered = rule.backoff_factor == 0.0
          ? state.cur_scale / rule.scale_factor
          : state.cur_scale * rule.backoff_factor;
      state.cur_scale = lowered > rule.min_scale ? lowered : rule.min_scale;
    } else {
      state.cur_hysteresis -= 1;
    }
    state.last_overflow_iter = state.cur_iter;
  } else {
    if (rule.consecutive_hysteresis) {
      state.cur_hysteresis = rule.delayed_shift;
    }
    const auto since_overflow =
        static_cast<double>(state.cur_iter - state.last_overflow_iter);
    if (std::fmod(since_overflow, rule.scale_window) == 0.0) {
      if (!rule.consecutive_hysteresis) {
        state.cur_hysteresis = rule.delayed_shift;
      }
      const double grown = state.cur_scale * rule.scale_factor;
      if (std::isfinite(grown)) {
        state.cur_scale = grown;
      }
    }
  }
  state.cur_iter += 1;
}

} // namespace fp16core::detail
