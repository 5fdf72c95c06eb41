// The step logic that the Python and the C++ facade share, as phases.

#pragma once

#include <fp16core/api.h>
#include <fp16core/combine.h>
#include <fp16core/device_number.h>
#include <fp16core/loss_scaler.h>
#include <fp16core/master_weights.h>
#include <fp16core/step_record.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace fp16core {

namespace detail {
class DeviceCounts;
class ListKernels;
struct PastIteration;
} // namespace detail

/// What happens when a step is skipped with the scale at its floor.
enum class OnMinScale { kContinue, kWarn, kRaise };

struct OptimizerCoreOptions {
  /// The facade's class name, for messages.
  std::string owner = "FP16_Optimizer";
  /// Whether inf and NaN in the gradients skip the step. Off, they are not
  /// acted on, and reach the inner optimizer.
  bool check_overflow = true;
  OnMinScale on_min_scale = OnMinScale::kWarn;
  ModelWrites model_writes = ModelWrites::kVersion;
  /// Whether masters get gradients. Off, the step must be made by an update
  /// rule of the core (see MasterWeights::prepare_update).
  bool materialize_gradients = true;
  /// The door to other processes, null for one alone. Overflow is combined with
  /// every update and the norm with every clipping, in one call each, so that
  /// all processes decide alike.
  Combine combine = nullptr;
  /// How many records `history` keeps; 0 for none.
  std::int64_t history_size = 1000;
};

/// What to do after an evaluation of a closure.
enum class Evaluation {
  /// The gradients are good.
  kAccept,
  /// They overflowed and the scale was lowered: evaluate again.
  kRepeat,
  /// They overflowed for good in the first evaluation: leave the inner step;
  /// the step is skipped.
  kSkip,
};

/// Loss scaling, overflow handling and master weights around an inner
/// optimizer, without the inner optimizer.
///
/// A facade drives the phases in this order:
///
///     ingest                 before update and step: the groups as they are
///     scale_loss             then its own backward pass
///     update_master_grads
///     clip_master_grads      optional
///     begin_step             true: run the inner step, or the update rule in
///                            its place (see
///                            MasterWeights::prepare_update), then
///                            finish_step
///                            false: the step is skipped
///
/// and for a closure `begin_closure_step`, then for every evaluation
/// `begin_evaluation`, the closure, `end_evaluation`; at last `finish_step`
/// or `abandon_step`. Closures, hooks and locks stay outside.
///
/// On a CUDA device the host need not wait to learn how an iteration went: the
/// step can be decided there. That is what `deferred` tells after `begin_step`;
/// then the scale, the overflow, the counts of steps and the counters of update
/// rules live on the device, whatever is read of them here waits for it, and
/// messages come late, with one of the next steps. A step like this can be
/// captured in a CUDA graph, once one has run outside of it; a replay changes
/// all that lives on the device and tells nothing.
///
/// Not safe for concurrent calls.
class FP16CORE_API OptimizerCore {
 public:
  /// Throws std::invalid_argument if a dynamic scaler is given with
  /// `check_overflow` off, since its scale could then only grow.
  OptimizerCore(
      OptimizerCoreOptions options,
      std::shared_ptr<LossScaler> loss_scaler);
  ~OptimizerCore();
  OptimizerCore(const OptimizerCore&) = delete;
  OptimizerCore& operator=(const OptimizerCore&) = delete;

  MasterWeights& master_weights() { return master_weights_; }
  const MasterWeights& master_weights() const { return master_weights_; }

  const std::shared_ptr<LossScaler>& loss_scaler() const {
    return loss_scaler_;
  }
  /// Takes effect with the next backward pass. Throws like the constructor.
  void set_loss_scaler(std::shared_ptr<LossScaler> loss_scaler);

  /// Returns `loss` times the loss scale, in float32 (float64 stays float64),
  /// for the caller to run backward on. The first backward pass after an
  /// update, a step or a zero_grad latches its scale: gradients accumulated
  /// until the next update are of this scale and are unscaled by it, whatever
  /// happens to the scaler meanwhile. Gradients kept from an earlier scale are
  /// brought to this one. Throws TypeError for an integer or complex loss and
  /// RuntimeError for one that has no graph or is not a scalar, before
  /// anything is changed.
  at::Tensor scale_loss(const at::Tensor& loss);

  /// Takes the model gradients (see MasterWeights::take_gradients) with the
  /// latched scale, or the scaler's if nothing was latched, and sets
  /// `overflow`. With several processes all of them must call it, gradients or
  /// not; where one throws, the others throw a RuntimeError, and a step would
  /// be skipped.
  void update_master_grads();

  /// Takes the part of a process that failed before `update_master_grads` in
  /// it, so that the others need not wait. Does nothing without `combine`.
  void fail_update();

  /// The two halves of an update for subclasses that compose it themselves:
  /// exact fp32 copies of the scaled gradients, and their multiplication by
  /// the reciprocal of the scale. They set no overflow.
  void copy_gradients();
  void downscale_gradients();

  /// Clips the master gradients to `max_norm` and returns their norm before,
  /// as a 0-dim float32 tensor; -1 after an overflow, with nothing touched.
  /// With all gradients on one CUDA device the tensor is there, and the host
  /// does not wait, for the 2-norm and the inf-norm that the update measured.
  /// The coefficient is max_norm / (norm + 1e-6), at most 1, in double (that
  /// of torch.nn.utils.clip_grad_norm_). Throws ValueError for a negative or
  /// NaN `max_norm` and a NaN `norm_type`.
  at::Tensor clip_master_grads(double max_norm, double norm_type = 2.0);

  /// Updates the scale and returns whether the inner step may run. Masters
  /// take over what others wrote to the model. Throws RuntimeError while
  /// gradients wait that no `update_master_grads` has taken, or, where master
  /// gradients are not materialized, taken ones were cleared or changed since;
  /// and LossScaleError under OnMinScale::kRaise.
  ///
  /// With `may_defer` a device may be left to decide: true is returned, and
  /// `deferred` tells. Whatever then runs in the place of the inner step must
  /// leave everything as it is where `MasterWeights::found_inf` is not 0, or
  /// ask `settle` first. It is so where all gradients are on one CUDA device,
  /// the scaler is one of the two classes in loss_scaler.h itself, not under
  /// OnMinScale::kRaise, and where nobody has asked for `overflow` since the
  /// update.
  bool begin_step(bool may_defer = false);

  /// Whether the device decides on the step that has begun.
  bool deferred() const { return deferred_; }

  /// Whether the device decided on the last step, and the host has not waited.
  bool decided_on_device() const { return decided_on_device_; }

  /// Returns whether the step that has begun may run. Waits for the device
  /// where the decision was deferred, which it then no longer is. Where the
  /// answer is no, the step is over, and `finish_step` does nothing.
  bool settle();

  /// Writes the masters to the model and counts the step as applied. After an
  /// update rule, which has written the model, only what changed since is
  /// written again; `rewrite` asks for everything, where masters may have been
  /// written without a trace.
  void finish_step(bool rewrite = false);

  /// Starts a step with a closure: updates the scale for what came before.
  void begin_closure_step();
  /// Before an evaluation: refreshes the model from the masters, except before
  /// the first one.
  void begin_evaluation();
  /// After an evaluation. In a later evaluation than the first, an overflow
  /// that cannot be cured puts masters and model back to their values on entry
  /// and throws LossScaleError, naming the first offending parameter. Throws
  /// RuntimeError like `begin_step`.
  Evaluation end_evaluation();
  /// Ends a closure step that was left before its end: by a skip, with the
  /// count of skipped steps raised, or by a foreign exception.
  void abandon_step(bool skipped);

  /// Clears all gradients and the latched scale.
  void zero_grad(bool set_to_none);

  /// Whether the last update met an overflow. Lasts until the next update.
  bool overflow() const;
  void set_overflow(bool overflow);

  /// Whether the overflow (or the clean update) still has to reach the scaler
  /// with the next step. Part of a checkpoint.
  bool update_pending() const { return update_pending_; }
  void set_update_pending(bool pending);

  bool first_evaluation() const { return first_evaluation_; }
  void set_first_evaluation(bool first) { first_evaluation_ = first; }

  std::int64_t steps_applied() const;
  std::int64_t steps_skipped() const;
  void set_step_counts(std::int64_t applied, std::int64_t skipped);

  /// Returns what the last steps came to, oldest first. A step that a device
  /// decided is told late, and a step in a CUDA graph never.
  const std::deque<StepRecord>& history() const { return history_; }
  /// Returns and forgets the records of skipped steps that are new.
  std::vector<StepRecord> take_skips();

  /// Returns and forgets what should be told to the user: changes of the
  /// scale, weights beyond the half range. In order, one line each.
  std::vector<std::string> take_messages();

  const OptimizerCoreOptions& options() const { return options_; }

 private:
  // A scale that a backward pass uses. Those of equal origin and generation are
  // equal; one that the host knows has neither.
  struct Scale {
    DeviceNumber number;
    const void* origin;
    std::int64_t generation;

    bool same(const Scale& other) const;
  };

  Scale current_scale() const;
  Scale gradient_scale() const;
  DeviceNumber begin_backward(const Scale& scale);
  void tell_sharers(const Scale& scale) const;
  void check_scaler(const LossScaler* loss_scaler) const;
  void check_nothing_waits() const;
  void check_nothing_lost() const;
  detail::ListKernels* deciding_kernels() const;
  void end_iteration_on_device(detail::ListKernels& kernels);
  void bring_scale_to_host();
  void update_scale(bool overflow, const char* consequence);
  void tell_scale(
      double before,
      double after,
      bool overflow,
      bool dynamic,
      bool at_floor,
      std::int64_t tolerated,
      const char* consequence);
  void act_on_floor(bool at_floor);
  void put_step_counts(std::int64_t applied, std::int64_t skipped);
  void tell_floor(double scale, const std::string& offender);
  void tell_past_iteration(const detail::PastIteration& past);
  void note_saturations();
  std::string first_offender() const;
  void take_and_check();
  bool agree(double found_here);
  void record(StepRecord record);
  void record_on_host(bool overflow, bool skipped);

  // For hooks, which must not outlive it.
  std::shared_ptr<OptimizerCore*> self_ =
      std::make_shared<OptimizerCore*>(this);

  OptimizerCoreOptions options_;
  std::shared_ptr<LossScaler> loss_scaler_;
  MasterWeights master_weights_;

  // The scale of the backward passes since the last update, none if there were
  // none, and the one that the gradients now present were made with.
  std::optional<Scale> latched_scale_;
  std::optional<Scale> accumulated_scale_;
  // The scale of the last backward pass of an optimizer that shares the scaler,
  // since the last update: its gradients may be here too.
  std::optional<Scale> sharers_scale_;
  bool backward_since_update_ = false;

  // Unknown while only the device knows it, always so if a graph may have
  // changed it since.
  mutable std::optional<bool> overflow_ = false;
  // Set by somebody, whatever the device found.
  bool overflow_by_hand_ = false;
  bool in_graph_ = false;
  bool backward_in_graph_ = false;
  bool deferred_ = false;
  bool decided_on_device_ = false;
  bool counts_on_device_ = false;
  bool update_pending_ = false;
  bool floor_warned_ = false;
  bool first_evaluation_ = true;
  std::int64_t steps_applied_ = 0;
  std::int64_t steps_skipped_ = 0;
  // Of the steps that the device has counted, beside the two above.
  std::shared_ptr<detail::DeviceCounts> device_counts_;
  // What graphs write to when they run, whatever becomes of it here.
  std::vector<std::shared_ptr<void>> kept_for_graphs_;
  std::vector<std::string> messages_;
  std::deque<StepRecord> history_;
  std::vector<StepRecord> skips_;
  std::int64_t steps_begun_ = 0;
  // Overflows of an evaluation in a row that left the scale where it was.
  std::int64_t repeats_ = 0;
  std::int64_t skipped_in_a_row_ = 0;
  // The scale of the gradients that were taken last, and what they were divided
  // by after they were measured.
  DeviceNumber taken_scale_ = 1.0;
  DeviceNumber taken_factor_ = 1.0;
  // The record of a step with a closure that is about to be left.
  std::optional<StepRecord> given_up_;
};

} // namespace fp16core
