// The loss scale and the rule by which it moves. Knows no tensor.

#pragma once

#include <fp16core/api.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>

namespace fp16core {

/// Thrown when an overflow cannot be cured by lowering the loss scale: in a
/// later evaluation of a closure, or at the scale's floor where the caller
/// asked for an error. `FP16_Optimizer` in Python raises a class of the same
/// name.
class FP16CORE_API LossScaleError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
  ~LossScaleError() override;
};

/// A loss scale that stays where it is put.
///
/// The loss is multiplied by the scale before the backward pass, which lifts
/// small gradients into the range of float16; the gradients are divided by it
/// afterwards. Scales are doubles, finite and at least 2^-126, so that their
/// reciprocals are finite in float32.
///
/// The class is also the interface that the step logic drives. Subclasses
/// override the virtual functions. Not safe for concurrent calls.
class FP16CORE_API LossScaler {
 public:
  /// Throws std::invalid_argument unless `scale` is one.
  explicit LossScaler(double scale = 1.0);
  virtual ~LossScaler();

  /// Returns the factor that the next backward pass will use.
  virtual double loss_scale() const { return cur_scale_; }

  /// Sets the scale by hand and leaves every counter alone.
  /// Throws std::invalid_argument unless `scale` is one.
  virtual void set_loss_scale(double scale);

  /// Tells the scaler how one iteration went. Does nothing here.
  virtual void update_scale(bool overflow);

  /// Returns whether `update_scale` may move the scale.
  virtual bool dynamic() const { return false; }

  /// Returns whether a further overflow would leave the scale where it is for
  /// good: always so for a static scale, and for a dynamic one at its floor.
  virtual bool at_floor() const { return true; }

  /// Returns what tells scalers apart: two that return the same are one, though
  /// they be reached in different ways.
  virtual const void* identity() const { return this; }

  /// Returns how many overflows in a row the scaler would still tolerate
  /// before it lowers the scale; -1 where that is not a matter of counting.
  virtual std::int64_t overflows_tolerated() const { return 0; }

 protected:
  // For subclasses that keep the scale elsewhere.
  double cur_scale_;
};

/// The rule of a dynamic loss scale: constants, under the names that NVIDIA's
/// original gave them where it had them.
///
/// The defaults are those of NVIDIA's and Megatron-LM's `DynamicLossScaler`.
/// scale_policies.h has the rules of other projects.
struct DynamicLossScalerOptions {
  /// The scale at the start.
  double init_scale = 4294967296.0;
  /// Growth multiplies by it, and backoff divides by it unless it has a factor
  /// of its own. Greater than 1.
  double scale_factor = 2.0;
  /// Clean iterations from the last overflow (or the last growth) to the next
  /// growth. At least 1; a fractional window is compared as it is.
  double scale_window = 1000.0;
  /// Backoff never goes below it.
  double min_scale = 1.0;
  /// Overflows until the scale is lowered: `delayed_shift - 1` of them are
  /// tolerated, the next and all that follow lower it. At least 1.
  std::int64_t delayed_shift = 1;
  /// Whether every clean iteration restores the tolerance; otherwise only a
  /// growth does.
  bool consecutive_hysteresis = false;
  /// What backoff multiplies by, between 0 and 1, as torch.amp.GradScaler has
  /// it; 0 to divide by `scale_factor`.
  double backoff_factor = 0.0;
  /// Growth never goes beyond it. May be infinite.
  double max_scale = std::numeric_limits<double>::infinity();
  /// Clean iterations by which every growth after an overflow comes later, as
  /// DeepSpeed's does by 1. At least 0.
  std::int64_t window_lag = 0;
  /// An overflow lowers the scale only where the overflows since it was lowered
  /// last are at least this share of the iterations since it was moved last, as
  /// in fairseq. Between 0 and 1.
  double tolerance = 0.0;
  /// Whether an overflow that would lower a scale which is at `min_scale` is a
  /// LossScaleError.
  bool raise_at_floor = false;
  /// Whether an overflow that would lower the scale to this value or below is a
  /// LossScaleError; 0 for no such value.
  double error_scale = 0.0;
  /// Whether the scale is rounded to float32, in which many projects keep it.
  bool float32_scale = false;
  /// Whether the factors are rounded to float32 before they are used.
  bool float32_factors = false;
};

/// What a dynamic loss scale remembers between two iterations.
struct DynamicLossScaleState {
  double cur_scale;
  /// Iterations so far, clean or not.
  std::int64_t cur_iter;
  /// The iteration of the last overflow; -1 before the first.
  std::int64_t last_overflow_iter;
  /// Overflows until the next backoff, 1 being the next one.
  std::int64_t cur_hysteresis;
  /// The iteration in which the scale was moved last; -1 before the first.
  std::int64_t last_rescale_iter = -1;
  /// Overflows since the scale was lowered last.
  std::int64_t overflows_since_rescale = 0;
};

/// Calls `visit(name, value)` for every constant of a rule but the scale at the
/// start, under the names that checkpoints and Python have for them.
template <typename Options, typename Visit>
void for_each_option(Options& options, const Visit& visit) {
  visit("scale_factor", options.scale_factor);
  visit("scale_window", options.scale_window);
  visit("min_scale", options.min_scale);
  visit("delayed_shift", options.delayed_shift);
  visit("consecutive_hysteresis", options.consecutive_hysteresis);
  visit("backoff_factor", options.backoff_factor);
  visit("max_scale", options.max_scale);
  visit("window_lag", options.window_lag);
  visit("tolerance", options.tolerance);
  visit("raise_at_floor", options.raise_at_floor);
  visit("error_scale", options.error_scale);
  visit("float32_scale", options.float32_scale);
  visit("float32_factors", options.float32_factors);
}

/// The same for what a dynamic loss scale remembers beside the scale.
template <typename State, typename Visit>
void for_each_counter(State& state, const Visit& visit) {
  visit("cur_iter", state.cur_iter);
  visit("last_overflow_iter", state.last_overflow_iter);
  visit("cur_hysteresis", state.cur_hysteresis);
  visit("last_rescale_iter", state.last_rescale_iter);
  visit("overflows_since_rescale", state.overflows_since_rescale);
}

/// Where the state of a dynamic loss scale is kept while a device advances it,
/// so that the host need not wait for every iteration.
class FP16CORE_API LossScaleStorage {
 public:
  virtual ~LossScaleStorage();
  /// Returns the state. Waits for the device.
  virtual DynamicLossScaleState read() const = 0;
  virtual void write(const DynamicLossScaleState& state) = 0;
};

/// A loss scale that backs off after an overflow and grows after a run of
/// clean iterations.
///
/// An overflow spends tolerance or divides the scale by `scale_factor` (or
/// multiplies it by `backoff_factor`), not below `min_scale`; it restarts the
/// window. When the number of iterations since the last overflow is a multiple
/// of `scale_window`, the scale is multiplied by `scale_factor`, not beyond
/// `max_scale`, and not where the product is not finite. (The state machine of
/// Megatron-LM's loss scaler, 2019; its relatives' differences are options.)
///
/// Several optimizers may share a scaler. Each step of each of them is an
/// iteration then: who steps updates, an overflow of one lowers the scale of
/// all, and the window counts the steps of all. Where one backward pass gives
/// gradients to several, each unscales them by the scale of that pass, whatever
/// the others' steps have made of it meanwhile.
class FP16CORE_API DynamicLossScaler : public LossScaler {
 public:
  /// Throws std::invalid_argument, naming the argument, if one makes no sense.
  explicit DynamicLossScaler(const DynamicLossScalerOptions& options = {});
  ~DynamicLossScaler() override;
  /// A copy keeps its state itself, whatever the original's storage.
  DynamicLossScaler(const DynamicLossScaler& other);
  DynamicLossScaler& operator=(const DynamicLossScaler& other);

  /// Like everything else that looks at the state, this waits for the device
  /// where the state has a storage.
  double loss_scale() const override { return state().cur_scale; }
  void set_loss_scale(double scale) override;
  /// Throws LossScaleError where the rule says so, with nothing changed.
  void update_scale(bool overflow) override;
  bool dynamic() const override { return true; }
  bool at_floor() const override;
  std::int64_t overflows_tolerated() const override;

  const DynamicLossScalerOptions& options() const { return options_; }
  /// Replaces the rule and keeps the state. Throws like the constructor.
  void set_options(const DynamicLossScalerOptions& options);

  const DynamicLossScaleState& state() const;
  /// Replaces the state. Throws std::invalid_argument unless `cur_scale` is a
  /// scale and `cur_hysteresis` at least 1.
  void set_state(const DynamicLossScaleState& state);

  /// Moves the state to `storage`, which then is the only place that has it;
  /// null brings it back. For the step logic.
  void set_storage(std::shared_ptr<LossScaleStorage> storage);
  const std::shared_ptr<LossScaleStorage>& storage() const { return storage_; }

 private:
  void put(const DynamicLossScaleState& state);

  DynamicLossScalerOptions options_;
  // With a storage, what it held when it was read last.
  mutable DynamicLossScaleState state_;
  std::shared_ptr<LossScaleStorage> storage_;
};

} // namespace fp16core
