// FP16Optimizer: master weights and loss scaling around a torch::optim
// optimizer.

#pragma once

#include <fp16core/api.h>
#include <fp16core/combine.h>
#include <fp16core/gradient_report.h>
#include <fp16core/loss_scaler.h>
#include <fp16core/optimizer_core.h>
#include <fp16core/state_dict.h>
#include <fp16core/step_record.h>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace torch::nn {
class Module;
} // namespace torch::nn

namespace fp16core {

/// The arguments of FP16Optimizer: those of `FP16_Optimizer` in Python, with
/// their names and defaults.
struct FP16CORE_API FP16OptimizerOptions {
  /// The scale, unless `dynamic_loss_scale` is set.
  TORCH_ARG(double, static_loss_scale) = 1.0;
  /// Whether the scale follows the overflows, by the rule that the next
  /// arguments describe (see DynamicLossScalerOptions). In Python they are
  /// `dynamic_loss_args`.
  TORCH_ARG(bool, dynamic_loss_scale) = false;
  TORCH_ARG(double, init_scale) = DynamicLossScalerOptions{}.init_scale;
  TORCH_ARG(double, scale_factor) = DynamicLossScalerOptions{}.scale_factor;
  TORCH_ARG(double, scale_window) = DynamicLossScalerOptions{}.scale_window;
  TORCH_ARG(double, min_scale) = DynamicLossScalerOptions{}.min_scale;
  TORCH_ARG(std::int64_t, delayed_shift) =
      DynamicLossScalerOptions{}.delayed_shift;
  TORCH_ARG(bool, consecutive_hysteresis) =
      DynamicLossScalerOptions{}.consecutive_hysteresis;
  TORCH_ARG(double, backoff_factor) = DynamicLossScalerOptions{}.backoff_factor;
  /// A scaler to use in the place of all of the above, for one by
  /// `scale_policy`, or that several optimizers share.
  TORCH_ARG(std::shared_ptr<LossScaler>, loss_scaler) = nullptr;

  /// Whether to tell what is ingested: a line a group, and a line a parameter.
  /// Unlike in Python it is off by default.
  TORCH_ARG(bool, verbose) = false;
  /// Whether inf and NaN skip the step. Off (with a static scale only), they
  /// reach the wrapped optimizer.
  TORCH_ARG(bool, check_overflow) = true;
  /// What a step skipped with the scale at its floor leads to. A static scale
  /// is always at its floor.
  TORCH_ARG(OnMinScale, on_min_scale) = OnMinScale::kWarn;
  /// How writes to the model's weights by others are noticed.
  TORCH_ARG(ModelWrites, track_model_writes) = ModelWrites::kVersion;
  /// Nothing to run the core's update rule where it applies; true to insist on
  /// it; false to leave every step to the wrapped optimizer.
  TORCH_ARG(std::optional<bool>, fused) = std::nullopt;
  /// False saves the fp32 gradients, 4 bytes a parameter: the update rule reads
  /// the half gradients. It insists on the rule as `fused(true)` does. The bits
  /// are the same.
  TORCH_ARG(bool, materialize_master_grads) = true;

  /// Returns the name of a parameter of the model, for reports and messages;
  /// see `names_of`.
  TORCH_ARG(std::function<std::string(const at::Tensor&)>, parameter_names) =
      nullptr;
  /// The door to other processes that decide alike: an overflow in one skips
  /// the step in all, and the norm that is clipped is that over all. All of
  /// them have to take part in every update and every clipping, gradients or
  /// not. For models that are split over processes.
  TORCH_ARG(Combine, combine) = nullptr;
  /// With `combine`, whether this process counts a parameter of the model in
  /// norms, so that what several have is counted once. By default it counts
  /// all.
  TORCH_ARG(std::function<bool(const at::Tensor&)>, counts_in_norm) = nullptr;
  /// Called with the record of every skipped step.
  TORCH_ARG(std::function<void(const StepRecord&)>, on_skip) = nullptr;
  /// How many records `history` keeps.
  TORCH_ARG(std::int64_t, history_size) = 1000;

  /// Where messages go, a line each: changes of the scale, weights beyond the
  /// half range, and what `verbose` tells. By default what is told goes to
  /// std::cout and the rest to torch's warnings.
  TORCH_ARG(std::function<void(const std::string&)>, log) = nullptr;
};

/// Returns a function that knows the names of a module's parameters as they are
/// now, for `FP16OptimizerOptions::parameter_names`.
FP16CORE_API std::function<std::string(const at::Tensor&)> names_of(
    const torch::nn::Module& module);

/// Wraps an optimizer of `torch::optim` so that it trains float16 and bfloat16
/// parameters well.
///
/// Trainable half parameters get fp32 master weights, which the wrapped
/// optimizer updates in their place; float32 and float64 parameters stay as
/// they are, and all kinds may be mixed. The loss is scaled before the backward
/// pass, gradients are unscaled into fp32, and a step whose gradients hold inf
/// or NaN is skipped:
///
///     model->to(torch::kHalf);
///     torch::optim::AdamW adam(model->parameters(), 1e-3);
///     fp16core::FP16Optimizer optimizer(
///         adam,
///         fp16core::FP16OptimizerOptions().dynamic_loss_scale(true));
///     ...
///     optimizer.zero_grad();
///     auto loss = criterion(model->forward(x).to(torch::kFloat), y);
///     optimizer.backward(loss); // instead of loss.backward()
///     optimizer.clip_master_grads(1.0); // optional
///     optimizer.step();
///
/// It refers to the wrapped optimizer, which must outlive it and stay where it
/// is, and puts masters into `param_groups()[i].params()` of it: schedulers and
/// changes of options belong on the wrapped optimizer. State that it has
/// already is cast to fp32. An optimizer of any class will do, a class of your
/// own among them.
///
/// Around SGD, Adam, AdamW, Adagrad and RMSprop the core runs the update rule
/// itself, in one pass that also writes the model, with the bits of the Python
/// class; `step_mode` tells. Options and state are the wrapped optimizer's all
/// the same.
///
/// Model weights that something else writes are noticed before the next step,
/// and only the elements that differ from the rounded master replace it. Writes
/// through a data pointer do not show: see `model_params_to_master_params` and
/// `track_model_writes`.
///
/// On CUDA a step waits for the device once. Not safe for concurrent calls;
/// several optimizers may be used in several threads.
class FP16CORE_API FP16Optimizer {
 public:
  using LossClosure = std::function<at::Tensor()>;

  /// Throws TypeError for a trainable parameter of another dtype, layout or
  /// kind, naming its group and index, and for a half parameter with optimizer
  /// state of an unknown class; NotImplementedError for one on a device without
  /// kernels; ValueError for an optimizer that is wrapped already or without an
  /// update rule where one is insisted on; and std::invalid_argument for scaler
  /// arguments that make no sense. All of it before anything is changed.
  explicit FP16Optimizer(
      torch::optim::Optimizer& optimizer,
      const FP16OptimizerOptions& options = {});
  /// Leaves the masters with the wrapped optimizer, which cannot be wrapped
  /// again then.
  ~FP16Optimizer();
  FP16Optimizer(FP16Optimizer&&) noexcept;
  FP16Optimizer& operator=(FP16Optimizer&&) noexcept;

  // The iteration.

  /// Runs backward on the scaled loss and takes the gradients.
  ///
  /// The loss is cast to float32 (float64 stays), multiplied by the loss scale
  /// and differentiated; then `update_master_grads` is called, unless the
  /// caller wants to accumulate several losses first and to call it himself.
  /// The other arguments are those of at::Tensor::backward. Throws TypeError if
  /// the loss is not floating point, and RuntimeError if it is not a scalar or
  /// has no graph.
  void backward(
      const at::Tensor& loss,
      bool update_master_grads = true,
      bool retain_graph = false,
      bool create_graph = false,
      const std::optional<std::vector<at::Tensor>>& inputs = std::nullopt);

  /// Returns the loss times the loss scale, to call backward on yourself;
  /// `update_master_grads` has to follow. Until then all backward passes count
  /// with the scale of the first. Throws like `backward`.
  at::Tensor scale_loss(const at::Tensor& loss);

  /// Takes the gradients: checks them, and unscales them into fp32. Sets
  /// `overflow`. Master gradients are rebuilt from the model's each time, so a
  /// second call is harmless; it also undoes clipping, which comes last. Throws
  /// TypeError for a gradient that is not floating point.
  void update_master_grads();

  /// Clips the norm of the master gradients, native parameters included, and
  /// returns the norm before, a 0-dim float32 tensor; -1 after an overflow,
  /// with nothing touched. Throws ValueError for a negative or NaN `max_norm`
  /// and a NaN `norm_type`, which may be infinite.
  at::Tensor clip_master_grads(double max_norm, double norm_type = 2.0);

  /// Updates the loss scale, runs the wrapped optimizer, writes the model, and
  /// returns what the wrapped step returns: the loss of a closure, else an
  /// undefined tensor. After an overflow masters, model, optimizer state and
  /// options stay as they are, and the tensor is undefined: `overflow` tells.
  ///
  /// The closure clears the gradients, computes the loss, calls `backward` and
  /// returns the loss. An evaluation that overflows lowers the scale and is
  /// repeated. An overflow that no lower scale can cure skips the step if it is
  /// the first evaluation's, and throws LossScaleError in a later one, with
  /// masters and model back at their values on entry; the trained weights are
  /// copied meanwhile.
  ///
  /// Throws RuntimeError while gradients wait that have not been taken, where a
  /// rule is insisted on, if something stands in its way, and without master
  /// gradients if gradients were cleared or changed since the update; and
  /// LossScaleError under OnMinScale::kRaise.
  at::Tensor step(const LossClosure& closure = nullptr);

  /// Clears the gradients of masters and model alike.
  void zero_grad(bool set_to_none = true);

  // What happened.

  /// Whether the last update met inf or NaN. Lasts until the next one.
  bool overflow() const;
  std::int64_t steps_applied() const;
  std::int64_t steps_skipped() const;
  /// What the last update found, for each gradient and in total.
  GradientReport gradient_report() const;
  /// What the last steps came to, oldest first.
  const std::deque<StepRecord>& history() const;
  /// How a step is made: "fused Adam" by the core's rule of that name, or
  /// "generic (...)" by the wrapped optimizer, and why.
  std::string step_mode() const;

  // The scale.

  double loss_scale() const;
  /// Takes effect with the next backward pass after an update. Throws
  /// std::invalid_argument unless it is finite and at least 2^-126.
  void set_loss_scale(double scale);
  const std::shared_ptr<LossScaler>& loss_scaler() const;
  /// Throws std::invalid_argument for none, and for a dynamic one with
  /// `check_overflow` off.
  void set_loss_scaler(std::shared_ptr<LossScaler> loss_scaler);
  bool dynamic_loss_scale() const;

  // Parameters and state.

  torch::optim::Optimizer& optimizer() const;

  /// By group: the half parameters of the model that have masters, the masters
  /// in the same order, and the trainable parameters that need none.
  ParamGroups fp16_groups();
  ParamGroups fp32_from_fp16_groups();
  ParamGroups fp32_from_fp32_groups();

  /// Returns the gradients that the wrapped optimizer sees, by group, undefined
  /// where there is none. They mean nothing after an overflow.
  ParamGroups master_gradients();

  /// Adds a group to the wrapped optimizer, and gives masters to its half
  /// parameters. Throws like the constructor.
  void add_param_group(const torch::optim::OptimizerParamGroup& param_group);

  /// Writes the masters to the model, rounded.
  void master_params_to_model_params();
  /// Overwrites the masters with the model's weights.
  void model_params_to_master_params();

  /// Returns all state as plain data, in the format of `state_dict()` of the
  /// Python class, which loads it; for `save_checkpoint`. The masters in it are
  /// the live ones. Throws TypeError for an optimizer whose options or state
  /// are of classes that torch::optim does not have: use `save` for it.
  StateDict state_dict();

  /// Restores what `state_dict` returned, in C++ or in Python; or the state
  /// dict of an optimizer of torch.optim alone, and masters and scale stay as
  /// they are. The model's weights are written from the masters. What only
  /// Python has in a param group (such as `initial_lr`) is kept for the next
  /// `state_dict`. Throws ValueError, with nothing changed, if it does not fit,
  /// or asks for what torch::optim does not have, such as `maximize`; and
  /// TypeError like `state_dict`.
  void load_state_dict(const c10::IValue& state_dict);

  /// Saves and restores in torch's C++ format, which Python does not read,
  /// with `save` and `load` of the wrapped optimizer; torch::save and
  /// torch::load call them. `load` throws, with nothing changed, if the archive
  /// does not fit.
  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);

 private:
  struct FP16CORE_LOCAL Impl;
  std::unique_ptr<Impl> impl_;
};

FP16CORE_API torch::serialize::OutputArchive& operator<<(
    torch::serialize::OutputArchive& archive,
    const FP16Optimizer& optimizer);
FP16CORE_API torch::serialize::InputArchive& operator>>(
    torch::serialize::InputArchive& archive,
    FP16Optimizer& optimizer);

} // namespace fp16core
