// The state machine of the dynamic loss scale, for host and device.

#pragma once

#include <fp16core/loss_scaler.h>

#include <c10/macros/Macros.h>

#include <cmath>
#include <cstdint>

namespace fp16core::detail {

/// Returns the scale in the precision of the rule.
C10_HOST_DEVICE inline double rounded_scale(
    const DynamicLossScalerOptions& rule,
    double scale) {
  return rule.float32_scale ? static_cast<double>(static_cast<float>(scale))
                            : scale;
}

/// Returns a factor as the rule uses it. A product or a quotient of two float32
/// values that is made in double and rounded once is that of float32.
C10_HOST_DEVICE inline double rounded_factor(
    const DynamicLossScalerOptions& rule,
    double factor) {
  return rule.float32_factors ? static_cast<double>(static_cast<float>(factor))
                              : factor;
}

/// Returns what backoff makes of a scale.
C10_HOST_DEVICE inline double lowered_scale(
    const DynamicLossScalerOptions& rule,
    double scale) {
  const double lowered = rounded_scale(
      rule,
      rule.backoff_factor == 0.0
          ? scale / rounded_factor(rule, rule.scale_factor)
          : scale * rounded_factor(rule, rule.backoff_factor));
  return lowered > rule.min_scale ? lowered : rule.min_scale;
}

/// Returns whether backoff would leave the scale where it is, or be an error.
C10_HOST_DEVICE inline bool at_floor(
    const DynamicLossScalerOptions& rule,
    double scale) {
  return scale <= rule.min_scale ||
      (rule.error_scale > 0.0 &&
       lowered_scale(rule, scale) <= rule.error_scale);
}

/// Returns whether the rule has an error for some overflow.
C10_HOST_DEVICE inline bool may_raise(const DynamicLossScalerOptions& rule) {
  return rule.raise_at_floor || rule.error_scale > 0.0;
}

/// Returns how many overflows in a row would still be tolerated; -1 where that
/// depends on their share.
C10_HOST_DEVICE inline std::int64_t overflows_tolerated(
    const DynamicLossScalerOptions& rule,
    const DynamicLossScaleState& state) {
  if (rule.tolerance > 0.0) {
    return -1;
  }
  return rule.delayed_shift == 1 ? 0 : state.cur_hysteresis - 1;
}

/// Advances `state` by one iteration. Returns false, with `state` as it was,
/// where the rule asks for an error.
///
/// The product of a growth is stored only if it is finite, so that the scale
/// can always come back; some of the originals have no such guard.
C10_HOST_DEVICE inline bool update_loss_scale(
    const DynamicLossScalerOptions& rule,
    DynamicLossScaleState& state,
    bool overflow) {
  DynamicLossScaleState next = state;
  next.cur_iter += 1;
  if (overflow) {
    next.last_overflow_iter = state.cur_iter;
    next.overflows_since_rescale += 1;
    const auto share = static_cast<double>(next.overflows_since_rescale) /
        static_cast<double>(state.cur_iter - state.last_rescale_iter);
    if (rule.delayed_shift != 1 && state.cur_hysteresis != 1) {
      next.cur_hysteresis -= 1;
    } else if (rule.tolerance == 0.0 || share >= rule.tolerance) {
      next.cur_scale = lowered_scale(rule, state.cur_scale);
      if ((rule.raise_at_floor && state.cur_scale == rule.min_scale) ||
          (rule.error_scale > 0.0 && next.cur_scale <= rule.error_scale)) {
        return false;
      }
      next.last_rescale_iter = state.cur_iter;
      next.overflows_since_rescale = 0;
    }
  } else {
    if (rule.consecutive_hysteresis) {
      next.cur_hysteresis = rule.delayed_shift;
    }
    const auto clean = static_cast<double>(
        state.cur_iter - state.last_overflow_iter - rule.window_lag);
    if (clean > 0.0 && std::fmod(clean, rule.scale_window) == 0.0) {
      next.cur_hysteresis = rule.delayed_shift;
      next.last_rescale_iter = state.cur_iter;
      const double grown = rounded_scale(
          rule,
          state.cur_scale * rounded_factor(rule, rule.scale_factor));
      if (std::isfinite(grown)) {
        next.cur_scale = grown < rule.max_scale ? grown : rule.max_scale;
      }
    }
  }
  state = next;
  return true;
}

} // namespace fp16core::detail
