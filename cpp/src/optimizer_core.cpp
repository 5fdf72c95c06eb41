#include <fp16core/optimizer_core.h>

#include "number.h"
#include "parameter_text.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace fp16core {

OptimizerCore::OptimizerCore(
    OptimizerCoreOptions options,
    std::shared_ptr<LossScaler> loss_scaler)
    : options_(std::move(options)),
      loss_scaler_(std::move(loss_scaler)),
      master_weights_(
          options_.owner,
          options_.model_writes,
          options_.materialize_gradients) {
  check_scaler(loss_scaler_.get());
}

OptimizerCore::~OptimizerCore() = default;

void OptimizerCore::check_scaler(const LossScaler* loss_scaler) const {
  if (loss_scaler == nullptr) {
    throw std::invalid_argument(
        options_.owner + ": loss_scaler must be a loss scaler, but got none");
  }
  if (loss_scaler->dynamic() && !options_.check_overflow) {
    throw std::invalid_argument(
        options_.owner +
        ": check_overflow must be on with a dynamic loss scale, but got off");
  }
}

void OptimizerCore::set_loss_scaler(std::shared_ptr<LossScaler> loss_scaler) {
  check_scaler(loss_scaler.get());
  loss_scaler_ = std::move(loss_scaler);
}

// ---- scaling and gradients ----

at::Tensor OptimizerCore::scale_loss(const at::Tensor& loss) {
  TORCH_CHECK_TYPE(
      at::isFloatingType(loss.scalar_type()),
      options_.owner,
      ".backward: loss must be a floating point tensor, but got ",
      detail::dtype_name(loss.scalar_type()));
  TORCH_CHECK(
      loss.numel() == 1,
      options_.owner,
      ".backward: loss must be a scalar, but got shape ",
      loss.sizes());
  TORCH_CHECK(
      loss.requires_grad(),
      options_.owner,
      ".backward: loss must require grad, but got one without a graph");
  const double scale =
      latched_scale_ != 0.0 ? latched_scale_ : loss_scaler_->loss_scale();
  const at::Tensor wide =
      loss.scalar_type() == at::kDouble ? loss : loss.to(at::kFloat);
  const at::Tensor scaled = wide * scale;
  // The hook runs when the backward pass starts, which may be much later, more
  // than once, or when this object is gone.
  scaled.register_hook(
      [self = std::weak_ptr<OptimizerCore*>(self_), scale](at::Tensor seed) {
        const auto core = self.lock();
        const double ratio = core ? (*core)->begin_backward(scale) : 1.0;
        return ratio == 1.0 ? seed : seed * ratio;
      });
  return scaled;
}

// Returns what the pass has to be multiplied by, so that its gradients fit
// those of the passes since the last update.
double OptimizerCore::begin_backward(double scale) {
  backward_since_update_ = true;
  if (latched_scale_ != 0.0) {
    return latched_scale_ / scale;
  }
  const bool scale_changed =
      accumulated_scale_ != 0.0 && accumulated_scale_ != scale;
  master_weights_.restore_scaled_gradients(
      scale_changed ? scale / accumulated_scale_ : 1.0);
  latched_scale_ = accumulated_scale_ = scale;
  return 1.0;
}

// The scale that the gradients now present were made with.
double OptimizerCore::gradient_scale() const {
  if (latched_scale_ != 0.0) {
    return latched_scale_;
  }
  return accumulated_scale_ != 0.0 ? accumulated_scale_
                                   : loss_scaler_->loss_scale();
}

void OptimizerCore::copy_gradients() {
  master_weights_.take_gradients(1.0);
  update_pending_ = true;
  backward_since_update_ = false;
}

void OptimizerCore::downscale_gradients() {
  const double scale = gradient_scale();
  if (scale != 1.0) {
    master_weights_.scale_gradients(1.0 / scale);
  }
  latched_scale_ = 0.0;
}

void OptimizerCore::update_master_grads() {
  master_weights_.take_gradients(gradient_scale());
  overflow_ = options_.check_overflow && master_weights_.overflow();
  update_pending_ = true;
  latched_scale_ = 0.0;
  backward_since_update_ = false;
}

at::Tensor OptimizerCore::clip_master_grads(double max_norm, double norm_type) {
  TORCH_CHECK_VALUE(
      max_norm >= 0.0,
      options_.owner,
      ".clip_master_grads: max_norm must be at least 0, but got ",
      detail::number(max_norm));
  TORCH_CHECK_VALUE(
      !std::isnan(norm_type),
      options_.owner,
      ".clip_master_grads: norm_type must be a number, but got nan");
  if (overflow_) {
    return at::scalar_tensor(-1.0, at::kFloat);
  }
  const double norm = master_weights_.gradient_norm(norm_type);
  const double coefficient = max_norm / (norm + 1e-6);
  // Not `coefficient < 1`: a NaN has to reach the gradients, as in torch.
  if (!(coefficient >= 1.0)) {
    master_weights_.scale_gradients(coefficient);
  }
  // Rounded here: a norm beyond float32 is inf, and no error.
  return at::scalar_tensor(static_cast<float>(norm), at::kFloat);
}

void OptimizerCore::zero_grad(bool set_to_none) {
  master_weights_.zero_grad(set_to_none);
  latched_scale_ = accumulated_scale_ = 0.0;
  backward_since_update_ = false;
}

// ---- the step ----

void OptimizerCore::check_nothing_waits() const {
  if (const auto waiting =
          master_weights_.waiting_gradient(backward_since_update_)) {
    TORCH_CHECK(
        false,
        options_.owner,
        ".step: gradients must be taken before the step by update_master_grads"
        "() or by backward(loss), which calls it unless told not to (neither "
        "backward(loss, update_master_grads=False) nor loss.backward() does), "
        "but got a gradient that waits at ",
        detail::describe_parameter(
            waiting->group,
            waiting->index,
            waiting->parameter));
  }
}

void OptimizerCore::check_nothing_lost() const {
  if (const auto lost = master_weights_.lost_gradient()) {
    TORCH_CHECK(
        false,
        options_.owner,
        ".step: gradients must stay as update_master_grads() left them with "
        "materialize_master_grads=False, but got a cleared or changed one at ",
        detail::describe_parameter(lost->group, lost->index, lost->parameter));
  }
}

std::string OptimizerCore::first_offender() const {
  const auto report = master_weights_.report();
  const auto* offender = report.first_offender();
  return offender == nullptr ? "no parameter"
                             : GradientReport::describe(*offender);
}

void OptimizerCore::update_scale(bool overflow, const char* consequence) {
  // Held, since a scaler written by a user might replace itself meanwhile.
  const auto scaler = loss_scaler_;
  const double before = scaler->loss_scale();
  scaler->update_scale(overflow);
  const double after = scaler->loss_scale();
  const std::string change =
      detail::number(before) + " -> " + detail::number(after);
  if (!overflow) {
    if (after != before) {
      messages_.push_back(
          options_.owner + ".step: loss scale grows, " + change);
    }
    return;
  }
  std::string text =
      options_.owner + ".step: gradient overflow, " + consequence + ", ";
  if (after != before) {
    text += "loss scale " + change;
  } else if (loss_scaler_->dynamic() && !loss_scaler_->at_floor()) {
    text += "tolerated: loss scale stays at " + detail::number(after) +
        ", and so it will for " +
        std::to_string(loss_scaler_->overflows_tolerated()) + " more";
  } else {
    return; // told once a streak, where skips are counted
  }
  messages_.push_back(std::move(text));
}

void OptimizerCore::count_skip(bool at_floor) {
  ++steps_skipped_;
  if (!at_floor || options_.on_min_scale == OnMinScale::kContinue) {
    return;
  }
  const std::string text = options_.owner +
      ".step: gradient overflow with the loss scale at its floor " +
      detail::number(loss_scaler_->loss_scale()) +
      ", the step is skipped; first at " + first_offender();
  if (options_.on_min_scale == OnMinScale::kRaise) {
    throw LossScaleError(text);
  }
  if (!floor_warned_) {
    floor_warned_ = true;
    messages_.push_back(text);
  }
}

void OptimizerCore::note_saturations() {
  for (const auto& tensor : master_weights_.take_new_saturations()) {
    messages_.push_back(
        options_.owner +
        ".step: a master weight is beyond the range of the model's dtype and "
        "was stored as inf, in " +
        detail::describe_parameter(
            tensor.group,
            tensor.index,
            tensor.parameter));
  }
}

bool OptimizerCore::begin_step() {
  check_nothing_waits();
  if (!overflow_) {
    check_nothing_lost();
  }
  latched_scale_ = 0.0;
  if (std::exchange(update_pending_, false)) {
    // The floor counts if the step was made on it, not if it was just reached.
    const bool at_floor = loss_scaler_->at_floor();
    update_scale(overflow_, "the step is skipped");
    if (overflow_) {
      count_skip(at_floor);
    }
  }
  if (overflow_) {
    return false;
  }
  master_weights_.adopt_model_writes();
  return true;
}

void OptimizerCore::finish_step(bool rewrite) {
  master_weights_.write_model(!rewrite);
  note_saturations();
  ++steps_applied_;
  floor_warned_ = false;
  first_evaluation_ = true;
  update_pending_ = false;
  master_weights_.drop_snapshot();
}

// ---- closures ----

void OptimizerCore::begin_closure_step() {
  latched_scale_ = 0.0;
  update_scale(
      std::exchange(update_pending_, false) && overflow_,
      "its gradients are dropped");
  overflow_ = false;
  first_evaluation_ = true;
  master_weights_.adopt_model_writes();
}

void OptimizerCore::begin_evaluation() {
  if (!first_evaluation_) {
    master_weights_.write_model();
    note_saturations();
  }
}

Evaluation OptimizerCore::end_evaluation() {
  check_nothing_waits();
  if (!overflow_) {
    check_nothing_lost();
    // What the closure wrote to the model, as Embedding(max_norm=...) does.
    master_weights_.adopt_model_writes();
    if (first_evaluation_) {
      // The inner optimizer has not moved anything yet.
      master_weights_.take_snapshot();
    }
    first_evaluation_ = false;
    return Evaluation::kAccept;
  }
  update_pending_ = false;
  const bool curable = !loss_scaler_->at_floor();
  update_scale(true, "the closure is evaluated again");
  if (curable) {
    return Evaluation::kRepeat;
  }
  if (first_evaluation_) {
    return Evaluation::kSkip;
  }
  master_weights_.rollback();
  first_evaluation_ = true;
  throw LossScaleError(
      options_.owner +
      ".step: an evaluation of the closure overflows with the loss scale at "
      "its floor " +
      detail::number(loss_scaler_->loss_scale()) + "; first at " +
      first_offender());
}

void OptimizerCore::abandon_step(bool skipped) {
  first_evaluation_ = true;
  master_weights_.drop_snapshot();
  if (skipped) {
    count_skip(true);
  }
}

// ---- state ----

void OptimizerCore::set_overflow(bool overflow) {
  overflow_ = overflow;
}

void OptimizerCore::set_step_counts(
    std::int64_t applied,
    std::int64_t skipped) {
  TORCH_CHECK_VALUE(
      applied >= 0 && skipped >= 0,
      options_.owner,
      ".load_state_dict: step counts must be at least 0, but got ",
      std::min(applied, skipped));
  steps_applied_ = applied;
  steps_skipped_ = skipped;
}

std::vector<std::string> OptimizerCore::take_messages() {
  return std::exchange(messages_, {});
}

} // namespace fp16core
