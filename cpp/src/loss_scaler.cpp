#include <fp16core/loss_scaler.h>

#include "math/update_loss_scale.h"
#include "number.h"

#include <cmath>
#include <utility>

namespace fp16core {

namespace {

void check(bool condition, const std::string& rule, double value) {
  if (!condition) {
    throw std::invalid_argument(rule + ", but got " + detail::number(value));
  }
}

void check_scale(const std::string& name, double value) {
  check(
      std::isfinite(value) && value > 0.0,
      name + " must be finite and greater than 0",
      value);
  // Gradients are multiplied by the reciprocal, which float32 must hold.
  check(value >= 0x1p-126, name + " must be at least 2^-126", value);
}

void check(const DynamicLossScalerOptions& options) {
  check_scale("DynamicLossScaler: init_scale", options.init_scale);
  check(
      std::isfinite(options.scale_factor) && options.scale_factor > 1.0,
      "DynamicLossScaler: scale_factor must be finite and greater than 1",
      options.scale_factor);
  check(
      std::isfinite(options.scale_window) && options.scale_window >= 1.0,
      "DynamicLossScaler: scale_window must be finite and at least 1",
      options.scale_window);
  check_scale("DynamicLossScaler: min_scale", options.min_scale);
  check(
      options.delayed_shift >= 1,
      "DynamicLossScaler: delayed_shift must be at least 1",
      static_cast<double>(options.delayed_shift));
  check(
      options.backoff_factor >= 0.0 && options.backoff_factor < 1.0,
      "DynamicLossScaler: backoff_factor must be between 0 and 1",
      options.backoff_factor);
  check(
      options.max_scale >= options.min_scale,
      "DynamicLossScaler: max_scale must be at least min_scale",
      options.max_scale);
  check(
      options.window_lag >= 0,
      "DynamicLossScaler: window_lag must be at least 0",
      static_cast<double>(options.window_lag));
  check(
      options.tolerance >= 0.0 && options.tolerance <= 1.0,
      "DynamicLossScaler: tolerance must be between 0 and 1",
      options.tolerance);
  check(
      std::isfinite(options.error_scale) && options.error_scale >= 0.0,
      "DynamicLossScaler: error_scale must be finite and at least 0",
      options.error_scale);
}

} // namespace

LossScaleError::~LossScaleError() = default;

LossScaler::LossScaler(double scale) : cur_scale_(scale) {
  check_scale("LossScaler: scale", scale);
}

LossScaler::~LossScaler() = default;

void LossScaler::set_loss_scale(double scale) {
  check_scale("LossScaler.loss_scale:", scale);
  cur_scale_ = scale;
}

void LossScaler::update_scale(bool /*overflow*/) {}

DynamicLossScaler::DynamicLossScaler(const DynamicLossScalerOptions& options)
    : options_(options),
      state_{
          detail::rounded_scale(options, options.init_scale),
          0,
          -1,
          options.delayed_shift} {
  check(options);
  check_scale("DynamicLossScaler: init_scale", state_.cur_scale);
}

DynamicLossScaler::~DynamicLossScaler() = default;

DynamicLossScaler::DynamicLossScaler(const DynamicLossScaler& other)
    : LossScaler(other), options_(other.options_), state_(other.state()) {}

DynamicLossScaler& DynamicLossScaler::operator=(
    const DynamicLossScaler& other) {
  options_ = other.options_;
  put(other.state());
  return *this;
}

LossScaleStorage::~LossScaleStorage() = default;

const DynamicLossScaleState& DynamicLossScaler::state() const {
  if (storage_ != nullptr) {
    state_ = storage_->read();
  }
  return state_;
}

void DynamicLossScaler::set_storage(std::shared_ptr<LossScaleStorage> storage) {
  const auto state = this->state();
  if (storage != nullptr) {
    storage->write(state);
  }
  storage_ = std::move(storage);
}

void DynamicLossScaler::set_loss_scale(double scale) {
  auto state = this->state();
  state.cur_scale = detail::rounded_scale(options_, scale);
  check_scale("DynamicLossScaler.loss_scale:", scale);
  check_scale("DynamicLossScaler.loss_scale:", state.cur_scale);
  put(state);
}

void DynamicLossScaler::update_scale(bool overflow) {
  auto state = this->state();
  if (!detail::update_loss_scale(options_, state, overflow)) {
    throw LossScaleError(
        "DynamicLossScaler.update_scale: an overflow must not lower the loss "
        "scale " +
        (options_.raise_at_floor && state.cur_scale == options_.min_scale
             ? "at its floor"
             : "to " + detail::number(options_.error_scale) + " or below") +
        ", but got one at " + detail::number(state.cur_scale));
  }
  put(state);
}

bool DynamicLossScaler::at_floor() const {
  return detail::at_floor(options_, state().cur_scale);
}

std::int64_t DynamicLossScaler::overflows_tolerated() const {
  return detail::overflows_tolerated(options_, state());
}

void DynamicLossScaler::set_options(const DynamicLossScalerOptions& options) {
  check(options);
  options_ = options;
}

void DynamicLossScaler::set_state(const DynamicLossScaleState& state) {
  check_scale("DynamicLossScaler.cur_scale:", state.cur_scale);
  check(
      state.cur_hysteresis >= 1,
      "DynamicLossScaler.cur_hysteresis: must be at least 1",
      static_cast<double>(state.cur_hysteresis));
  put(state);
}

void DynamicLossScaler::put(const DynamicLossScaleState& state) {
  if (storage_ != nullptr) {
    storage_->write(state);
  }
  state_ = state;
}

} // namespace fp16core
