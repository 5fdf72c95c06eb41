// GradScaler: loss scaling for float32 parameters under autocast, around any
// torch::optim::Optimizer.

#pragma once

#include <fp16core/api.h>
#include <fp16core/loss_scaler.h>
#include <fp16core/state_dict.h>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace torch::optim {
class Optimizer;
} // namespace torch::optim

namespace fp16core {

/// The arguments of `torch.amp.GradScaler`, with its names and defaults.
struct FP16CORE_API GradScalerOptions {
  /// The scale at the start.
  TORCH_ARG(double, init_scale) = 65536.0;
  /// Growth multiplies by it. Greater than 1.
  TORCH_ARG(double, growth_factor) = 2.0;
  /// An overflow multiplies by it. Between 0 and 1.
  TORCH_ARG(double, backoff_factor) = 0.5;
  /// Clean iterations in a row until the scale grows. At least 1.
  TORCH_ARG(std::int64_t, growth_interval) = 2000;
  /// Backoff never goes below it, where torch's can reach 0 for good. At least
  /// 2^-126.
  TORCH_ARG(double, min_scale) = 0x1p-126;
  /// Off, losses stay as they are, `step` is the optimizer's, and the rest does
  /// nothing.
  TORCH_ARG(bool, enabled) = true;
};

/// Loss scaling for models with float32 parameters that run under autocast: the
/// contract of `torch.amp.GradScaler`.
///
///     fp16core::GradScaler scaler;
///     for (...) {
///       optimizer.zero_grad();
///       torch::Tensor loss;
///       {
///         const fp16core::AutocastGuard autocast(torch::kCUDA);
///         loss = criterion(model->forward(x), y);
///       }
///       scaler.scale(loss).backward();
///       scaler.unscale_(optimizer); // optional, to clip
///       fp16core::clip_grad_norm_(
///           fp16core::gradients_of(model->parameters()), 1.0);
///       scaler.step(optimizer); // skipped if gradients hold inf or NaN
///       scaler.update();
///     }
///
/// The scale is a float32 number, as losses are; it moves as torch's does, and
/// never grows beyond float32.
///
/// Several optimizers may share one scaler; an overflow in the gradients of any
/// lowers the scale. Between two calls of `update` each of them is unscaled at
/// most once and stepped at most once. Half parameters need master weights: see
/// FP16Optimizer.
///
/// Not safe for concurrent calls.
class FP16CORE_API GradScaler {
 public:
  /// Throws std::invalid_argument, naming the argument, if one makes no sense.
  explicit GradScaler(const GradScalerOptions& options = {});
  ~GradScaler();
  GradScaler(GradScaler&&) noexcept;
  GradScaler& operator=(GradScaler&&) noexcept;

  /// Returns `output` times the scale. Half outputs become float32, since the
  /// scale is beyond float16; float64 stays. Throws TypeError for a tensor that
  /// is not floating point.
  at::Tensor scale(const at::Tensor& output);
  std::vector<at::Tensor> scale(const std::vector<at::Tensor>& outputs);

  /// Divides the gradients of the optimizer's parameters by the scale, in
  /// place, and notes whether they hold inf or NaN. A gradient that several
  /// parameters share is divided once, a sparse COO one by its values, and one
  /// whose elements share memory is copied first. Does nothing for an optimizer
  /// without gradients.
  ///
  /// Throws RuntimeError if it was called since the last `update`, or after
  /// `step`, and if nothing was scaled since then; ValueError for a float16
  /// gradient, and TypeError for another dtype or layout; before anything is
  /// changed.
  void unscale_(torch::optim::Optimizer& optimizer);

  /// Runs the optimizer's step unless its gradients hold inf or NaN, after
  /// `unscale_` where that has not been called. Returns whether it ran.
  ///
  /// Throws RuntimeError if it was called since the last `update`, if nothing
  /// was scaled since then (the gradients are those of another scale), and if
  /// the optimizer has no gradients; and like `unscale_`. Closures are not
  /// supported: they would see scaled losses.
  bool step(torch::optim::Optimizer& optimizer);

  /// Updates the scale after all optimizers have stepped: lowers it if any of
  /// them met an overflow, else raises it when it is time.
  ///
  /// Throws RuntimeError if no optimizer with gradients was unscaled or stepped
  /// since the last `update`.
  void update();
  /// Sets the scale instead, and leaves the clean iterations counted. Throws
  /// std::invalid_argument unless `new_scale` is one.
  void update(double new_scale);

  /// Returns whether the last `unscale_` or `step` of the optimizer met inf or
  /// NaN; false for one that was not unscaled since the last `update`.
  bool found_inf(const torch::optim::Optimizer& optimizer) const;

  /// The current scale, 1 where it is not enabled.
  double get_scale() const;
  double get_growth_factor() const;
  double get_backoff_factor() const;
  std::int64_t get_growth_interval() const;
  /// The setters throw std::invalid_argument like the constructor.
  void set_growth_factor(double new_factor);
  void set_backoff_factor(double new_factor);
  /// Keeps the clean iterations counted: where there are as many already, the
  /// scale grows after the next one.
  void set_growth_interval(std::int64_t new_interval);
  bool is_enabled() const;

  /// Returns the state as `state_dict()` of torch.amp.GradScaler does, which
  /// loads it; for checkpoints, which are made after `update`. Empty where it
  /// is not enabled.
  StateDict state_dict() const;
  /// Restores what `state_dict` returned, in C++ or in Python. Throws
  /// ValueError, with nothing changed, for a dict that makes no sense. Does
  /// nothing where it is not enabled.
  void load_state_dict(const c10::IValue& state);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

} // namespace fp16core
