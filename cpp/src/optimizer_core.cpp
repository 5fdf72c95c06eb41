#include <fp16core/optimizer_core.h>

#include "device_step.h"
#include "number.h"
#include "parameter_text.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <mutex>
#include <typeinfo>
#include <utility>

namespace fp16core {

namespace {

// Overflows of one evaluation that a scaler may tolerate without moving.
constexpr std::int64_t kMostRepeats = 1000;

// What a process tells the others of its update: nothing, an overflow, or that
// it failed.
constexpr double kClean = 0.0;
constexpr double kOverflow = 1.0;
constexpr double kFailed = 2.0;

// The scaler as a device can run it, or nothing: it must be just one of the two
// classes, since the device knows no overridden function.
std::optional<detail::ScaleRule> rule_of(const LossScaler& scaler) {
  if (typeid(scaler) == typeid(LossScaler)) {
    return detail::ScaleRule{};
  }
  if (typeid(scaler) == typeid(DynamicLossScaler)) {
    const auto& options =
        static_cast<const DynamicLossScaler&>(scaler).options();
    // A device cannot raise an error.
    if (!detail::may_raise(options)) {
      return detail::ScaleRule{options, true};
    }
  }
  return std::nullopt;
}

// Where the state of the scaler is, if it is on a device.
detail::DeviceScale* device_scale_of(const LossScaler& scaler) {
  const auto* dynamic = dynamic_cast<const DynamicLossScaler*>(&scaler);
  return dynamic == nullptr
      ? nullptr
      : dynamic_cast<detail::DeviceScale*>(dynamic->storage().get());
}

// All cores there are, to find those that share a scaler.
struct Cores {
  std::mutex mutex;
  std::vector<OptimizerCore*> all;
};

Cores& cores() {
  static Cores cores;
  return cores;
}

} // namespace

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
  const std::lock_guard lock(cores().mutex);
  cores().all.push_back(this);
}

OptimizerCore::~OptimizerCore() {
  const std::lock_guard lock(cores().mutex);
  std::erase(cores().all, this);
}

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
  const Scale scale = latched_scale_ ? *latched_scale_ : current_scale();
  const at::Tensor wide =
      loss.scalar_type() == at::kDouble ? loss : loss.to(at::kFloat);
  const at::Tensor scaled = scale.number.times(wide);
  // The hook runs when the backward pass starts, which may be much later, more
  // than once, or when this object is gone.
  scaled.register_hook([self = std::weak_ptr<OptimizerCore*>(self_),
                        scale](at::Tensor seed) {
    const auto core = self.lock();
    const DeviceNumber ratio = core ? (*core)->begin_backward(scale) : 1.0;
    return ratio.on_host() && ratio.value() == 1.0 ? seed : ratio.times(seed);
  });
  return scaled;
}

bool OptimizerCore::Scale::same(const Scale& other) const {
  return number.on_host() && other.number.on_host()
      ? number.value() == other.number.value()
      : origin == other.origin && generation == other.generation;
}

OptimizerCore::Scale OptimizerCore::current_scale() const {
  const auto* on_device = device_scale_of(*loss_scaler_);
  // A scaler that overrides something has to be asked.
  return on_device != nullptr && rule_of(*loss_scaler_)
      ? Scale{on_device->snapshot(), on_device, on_device->generation()}
      : Scale{loss_scaler_->loss_scale(), nullptr, -1};
}

// Returns what the pass has to be multiplied by, so that its gradients fit
// those of the passes since the last update.
DeviceNumber OptimizerCore::begin_backward(const Scale& scale) {
  backward_since_update_ = true;
  tell_sharers(latched_scale_ ? *latched_scale_ : scale);
  const auto* kernels = master_weights_.only_kernels();
  backward_in_graph_ |= kernels != nullptr && kernels->recording();
  if (latched_scale_) {
    return latched_scale_->same(scale) ? DeviceNumber(1.0)
                                       : latched_scale_->number / scale.number;
  }
  // A graph may have moved the scale since.
  const bool scale_changed =
      accumulated_scale_ && (in_graph_ || !accumulated_scale_->same(scale));
  master_weights_.restore_scaled_gradients(
      scale_changed ? scale.number / accumulated_scale_->number
                    : DeviceNumber(1.0));
  latched_scale_ = accumulated_scale_ = scale;
  return 1.0;
}

// One pass may give gradients to the parameters of several optimizers.
void OptimizerCore::tell_sharers(const Scale& scale) const {
  const std::lock_guard lock(cores().mutex);
  for (auto* other : cores().all) {
    if (other != this &&
        other->loss_scaler_->identity() == loss_scaler_->identity()) {
      other->sharers_scale_ = scale;
    }
  }
}

// The scale that the gradients now present were made with.
OptimizerCore::Scale OptimizerCore::gradient_scale() const {
  if (latched_scale_) {
    return *latched_scale_;
  }
  if (sharers_scale_) {
    return *sharers_scale_;
  }
  return accumulated_scale_ ? *accumulated_scale_ : current_scale();
}

void OptimizerCore::copy_gradients() {
  if (!overflow_) {
    overflow_ = overflow(); // of what was taken before, which goes now
  }
  // The device would act on what it finds now.
  overflow_by_hand_ = true;
  master_weights_.take_gradients(1.0);
  update_pending_ = true;
  backward_since_update_ = false;
}

void OptimizerCore::downscale_gradients() {
  const auto scale = gradient_scale().number;
  if (!scale.on_host() || scale.value() != 1.0) {
    master_weights_.scale_gradients(DeviceNumber(1.0) / scale);
  }
  taken_scale_ = taken_factor_ = scale;
  latched_scale_.reset();
}

void OptimizerCore::update_master_grads() {
  if (!options_.combine) {
    take_and_check();
    return;
  }
  double found = kClean;
  try {
    take_and_check();
    found = overflow() ? kOverflow : kClean;
  } catch (...) {
    fail_update();
    throw;
  }
  TORCH_CHECK(
      agree(found),
      options_.owner,
      ".update_master_grads: all processes must take their gradients, but got "
      "an error in another one");
}

void OptimizerCore::fail_update() {
  if (options_.combine) {
    agree(kFailed);
  }
}

// Settles with the other processes how the update went. Returns whether it did
// not fail anywhere.
bool OptimizerCore::agree(double found_here) {
  const double found = options_.combine(found_here, Reduction::kMax);
  overflow_ = found > kClean;
  // No device may decide on what it found alone.
  overflow_by_hand_ = true;
  const bool good = found < kFailed;
  update_pending_ = update_pending_ && good;
  return good;
}

void OptimizerCore::take_and_check() {
  if (backward_in_graph_ && !latched_scale_) {
    master_weights_.forget_native_factors();
  }
  const Scale scale = gradient_scale();
  if (!latched_scale_ && sharers_scale_) {
    accumulated_scale_ = scale;
  }
  taken_scale_ = scale.number;
  taken_factor_ = 1.0;
  master_weights_.take_gradients(taken_scale_);
  overflow_.reset();
  overflow_by_hand_ = false;
  const auto* kernels = master_weights_.only_kernels();
  if (!options_.check_overflow) {
    overflow_ = false;
  } else if (kernels == nullptr) {
    overflow_ = master_weights_.overflow();
  }
  in_graph_ |= kernels != nullptr && kernels->recording();
  update_pending_ = true;
  latched_scale_.reset();
  sharers_scale_.reset();
  backward_since_update_ = false;
}

bool OptimizerCore::overflow() const {
  if (overflow_) {
    return *overflow_;
  }
  const bool overflow = options_.check_overflow && master_weights_.overflow();
  if (!in_graph_) {
    overflow_ = overflow;
  }
  return overflow;
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
  if (!options_.combine && !overflow_.value_or(false)) {
    if (const auto clip = master_weights_.clip_on_device(
            max_norm,
            norm_type,
            options_.check_overflow && !overflow_by_hand_)) {
      master_weights_.scale_gradients(clip->coefficient);
      return clip->norm;
    }
  }
  if (overflow()) {
    return at::scalar_tensor(-1.0, at::kFloat);
  }
  const double norm =
      master_weights_.gradient_norm(norm_type, options_.combine);
  const double coefficient = detail::clip_coefficient(norm, max_norm);
  // A NaN has to reach the gradients, as in torch.
  if (coefficient != 1.0) {
    master_weights_.scale_gradients(coefficient);
  }
  // Rounded here: a norm beyond float32 is inf, and no error.
  return at::scalar_tensor(static_cast<float>(norm), at::kFloat);
}

void OptimizerCore::zero_grad(bool set_to_none) {
  master_weights_.zero_grad(set_to_none);
  latched_scale_.reset();
  accumulated_scale_.reset();
  sharers_scale_.reset();
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
            waiting->parameter,
            waiting->name));
  }
}

void OptimizerCore::check_nothing_lost() const {
  if (const auto lost = master_weights_.lost_gradient()) {
    // After an overflow nobody needs them.
    TORCH_CHECK(
        overflow(),
        options_.owner,
        ".step: gradients must stay as update_master_grads() left them with "
        "materialize_master_grads=False, but got a cleared or changed one at ",
        detail::describe_parameter(
            lost->group,
            lost->index,
            lost->parameter,
            lost->name));
  }
}

std::string OptimizerCore::first_offender() const {
  const auto report = master_weights_.report();
  const auto* offender = report.first_offender();
  if (offender != nullptr) {
    return GradientReport::describe(*offender);
  }
  return options_.combine ? "a parameter of another process" : "no parameter";
}

void OptimizerCore::update_scale(bool overflow, const char* consequence) {
  // Held, since a scaler written by a user might replace itself meanwhile.
  const auto scaler = loss_scaler_;
  const double before = scaler->loss_scale();
  scaler->update_scale(overflow);
  tell_scale(
      before,
      scaler->loss_scale(),
      overflow,
      loss_scaler_->dynamic(),
      loss_scaler_->at_floor(),
      loss_scaler_->overflows_tolerated(),
      consequence);
}

void OptimizerCore::tell_scale(
    double before,
    double after,
    bool overflow,
    bool dynamic,
    bool at_floor,
    std::int64_t tolerated,
    const char* consequence) {
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
  } else if (dynamic && !at_floor) {
    text += "tolerated: loss scale stays at " + detail::number(after);
    if (tolerated >= 0) {
      text += ", and so it will for " + std::to_string(tolerated) + " more";
    }
  } else {
    return; // told once a streak, where skips are counted
  }
  messages_.push_back(std::move(text));
}

void OptimizerCore::act_on_floor(bool at_floor) {
  if (at_floor && options_.on_min_scale != OnMinScale::kContinue) {
    tell_floor(loss_scaler_->loss_scale(), first_offender());
  }
}

void OptimizerCore::tell_floor(double scale, const std::string& offender) {
  const std::string text = options_.owner +
      ".step: gradient overflow with the loss scale at its floor " +
      detail::number(scale) + ", the step is skipped; first at " + offender;
  if (options_.on_min_scale == OnMinScale::kRaise) {
    throw LossScaleError(text);
  }
  if (!floor_warned_) {
    floor_warned_ = true;
    messages_.push_back(text);
  }
}

// Says what would have been said at once, had the host known.
void OptimizerCore::tell_past_iteration(const detail::PastIteration& past) {
  const auto& record = past.record;
  std::vector<TensorReport> culprits;
  if (record.overflow && record.first_offender >= 0 &&
      record.first_offender <
          static_cast<std::int64_t>(past.positions.size())) {
    const auto& [group, index] = past.positions[record.first_offender];
    if (auto culprit = master_weights_.entry(group, index)) {
      culprit->inf_count = record.inf_count;
      culprit->nan_count = record.nan_count;
      culprits.push_back(*std::move(culprit));
    }
  }
  this->record(
      {past.step,
       record.scale_before,
       record.overflow,
       record.overflow,
       0,
       record.norm,
       culprits});
  tell_scale(
      record.scale_before,
      record.scale_after,
      record.overflow,
      loss_scaler_->dynamic(),
      record.at_floor_after,
      record.overflows_tolerated,
      "the step is skipped");
  if (!record.overflow) {
    floor_warned_ = false;
    return;
  }
  if (!record.at_floor_before ||
      options_.on_min_scale == OnMinScale::kContinue) {
    return;
  }
  tell_floor(
      record.scale_after,
      culprits.empty() ? "no parameter"
                       : GradientReport::describe(culprits.front()));
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
            tensor.parameter,
            tensor.name));
  }
}

// The kernels of the device that keeps the scale and the counts, or null where
// the host has to.
detail::ListKernels* OptimizerCore::deciding_kernels() const {
  if (overflow_by_hand_ || !update_pending_ ||
      options_.on_min_scale == OnMinScale::kRaise || !rule_of(*loss_scaler_)) {
    return nullptr;
  }
  const auto device = master_weights_.only_device();
  const auto* scale = device_scale_of(*loss_scaler_);
  return !device || (scale != nullptr && scale->device() != *device)
      ? nullptr
      : master_weights_.only_kernels();
}

void OptimizerCore::end_iteration_on_device(detail::ListKernels& kernels) {
  const auto device = *master_weights_.only_device();
  auto* dynamic = dynamic_cast<DynamicLossScaler*>(loss_scaler_.get());
  const bool first = device_counts_ == nullptr ||
      device_counts_->device() != device ||
      (dynamic != nullptr && dynamic->storage() == nullptr);
  TORCH_CHECK(
      !first || !kernels.recording(),
      options_.owner,
      ".step: a step must have run before one is captured in a CUDA graph, but "
      "got none");
  if (device_counts_ == nullptr || device_counts_->device() != device) {
    put_step_counts(steps_applied(), steps_skipped());
    device_counts_ = std::make_shared<detail::DeviceCounts>(device);
  }
  if (dynamic != nullptr && dynamic->storage() == nullptr) {
    dynamic->set_storage(std::make_shared<detail::DeviceScale>(device));
  }
  if (kernels.recording()) {
    kept_for_graphs_.push_back(device_counts_);
    if (dynamic != nullptr) {
      kept_for_graphs_.push_back(dynamic->storage());
    }
  }
  DynamicLossScaleState* state = nullptr;
  if (auto* scale = device_scale_of(*loss_scaler_)) {
    state = scale->state();
    scale->advanced();
  } else {
    state = device_counts_->static_scale(loss_scaler_->loss_scale());
  }
  kernels.end_iteration(
      *rule_of(*loss_scaler_),
      options_.check_overflow,
      state,
      device_counts_->counts());
  ++steps_begun_;
  device_counts_->expect_record(
      steps_begun_,
      master_weights_.taken_positions());
}

// A scale on a device that is not the gradients' (any more) would be read again
// and again.
void OptimizerCore::bring_scale_to_host() {
  const auto* scale = device_scale_of(*loss_scaler_);
  if (scale != nullptr && !in_graph_ &&
      master_weights_.only_device() != scale->device()) {
    dynamic_cast<DynamicLossScaler&>(*loss_scaler_).set_storage(nullptr);
  }
}

bool OptimizerCore::begin_step(bool may_defer) {
  check_nothing_waits();
  if (!overflow_.value_or(false)) {
    check_nothing_lost();
  }
  latched_scale_.reset();
  deferred_ = decided_on_device_ = counts_on_device_ = false;
  if (auto* kernels = deciding_kernels()) {
    end_iteration_on_device(*kernels);
    update_pending_ = false;
    deferred_ = may_defer && !overflow_;
    decided_on_device_ = counts_on_device_ =
        deferred_ || !options_.check_overflow;
  } else if (std::exchange(update_pending_, false)) {
    steps_begun_ = steps_applied() + steps_skipped() + 1;
    bring_scale_to_host();
    // The floor counts if the step was made on it, not if it was just reached.
    const bool at_floor = loss_scaler_->at_floor();
    record_on_host(overflow(), overflow());
    steps_skipped_ += overflow() ? 1 : 0;
    update_scale(overflow(), "the step is skipped");
    if (overflow()) {
      act_on_floor(at_floor);
    }
  }
  if (!deferred_ && overflow()) {
    return false;
  }
  master_weights_.adopt_model_writes();
  return true;
}

bool OptimizerCore::settle() {
  if (deferred_) {
    TORCH_CHECK(
        !master_weights_.only_kernels()->recording(),
        options_.owner,
        ".step: a step that the host has to decide on, as one that makes "
        "optimizer state, must not be captured in a CUDA graph: apply a step "
        "before the capture");
    deferred_ = decided_on_device_ = counts_on_device_ = false;
    overflow_ = overflow();
  }
  return !overflow();
}

void OptimizerCore::finish_step(bool rewrite) {
  const bool skipped = overflow_.value_or(false); // settled meanwhile
  if (in_graph_ && !overflow_by_hand_) {
    overflow_.reset(); // a graph may find something else
  }
  if (skipped) {
    return;
  }
  master_weights_.write_model(!rewrite);
  note_saturations();
  deferred_ = false;
  auto* kernels = std::exchange(counts_on_device_, false)
      ? master_weights_.only_kernels()
      : nullptr;
  if (kernels != nullptr) {
    kernels->count_applied(options_.check_overflow, device_counts_->counts());
  } else {
    ++steps_applied_;
    floor_warned_ = false;
  }
  first_evaluation_ = true;
  update_pending_ = false;
  master_weights_.drop_snapshot();
}

// ---- closures ----

void OptimizerCore::begin_closure_step() {
  steps_begun_ = steps_applied() + steps_skipped() + 1;
  repeats_ = 0;
  latched_scale_.reset();
  deferred_ = decided_on_device_ = counts_on_device_ = false;
  update_scale(
      std::exchange(update_pending_, false) && overflow(),
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
  if (!overflow()) {
    check_nothing_lost();
    // What the closure wrote to the model, as Embedding(max_norm=...) does.
    master_weights_.adopt_model_writes();
    if (first_evaluation_) {
      // The inner optimizer has not moved anything yet.
      master_weights_.take_snapshot();
    }
    record_on_host(false, false);
    first_evaluation_ = false;
    repeats_ = 0;
    return Evaluation::kAccept;
  }
  update_pending_ = false;
  bool curable = !loss_scaler_->at_floor();
  const double before = loss_scaler_->loss_scale();
  try {
    update_scale(true, "the closure is evaluated again");
  } catch (...) {
    record_on_host(true, false);
    if (!first_evaluation_) {
      master_weights_.rollback();
      first_evaluation_ = true;
    }
    throw;
  }
  // A scaler that tolerates overflows without end would be asked for ever.
  repeats_ = loss_scaler_->loss_scale() == before ? repeats_ + 1 : 0;
  curable = curable && repeats_ < kMostRepeats;
  const bool given_up = !curable && first_evaluation_;
  record_on_host(true, given_up);
  if (given_up) {
    // Told when the step is over.
    given_up_ = std::move(skips_.back());
    skips_.pop_back();
  }
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
    ++steps_skipped_;
    if (auto record = std::exchange(given_up_, std::nullopt)) {
      skips_.push_back(*std::move(record));
    }
    act_on_floor(true);
  }
}

// ---- state ----

void OptimizerCore::set_update_pending(bool pending) {
  update_pending_ = pending;
  taken_scale_ = loss_scaler_->loss_scale();
  taken_factor_ = 1.0;
}

void OptimizerCore::set_overflow(bool overflow) {
  overflow_ = overflow;
  overflow_by_hand_ = true;
}

void OptimizerCore::set_step_counts(
    std::int64_t applied,
    std::int64_t skipped) {
  TORCH_CHECK_VALUE(
      applied >= 0 && skipped >= 0,
      options_.owner,
      ".load_state_dict: step counts must be at least 0, but got ",
      std::min(applied, skipped));
  put_step_counts(applied, skipped);
  steps_begun_ = applied + skipped;
  skipped_in_a_row_ = 0;
}

void OptimizerCore::put_step_counts(
    std::int64_t applied,
    std::int64_t skipped) {
  steps_applied_ = applied;
  steps_skipped_ = skipped;
  if (device_counts_ != nullptr) {
    device_counts_->clear();
  }
}

std::int64_t OptimizerCore::steps_applied() const {
  return steps_applied_ +
      (device_counts_ == nullptr ? 0 : device_counts_->read().applied);
}

std::int64_t OptimizerCore::steps_skipped() const {
  return steps_skipped_ +
      (device_counts_ == nullptr ? 0 : device_counts_->read().skipped);
}

// ---- history ----

void OptimizerCore::record(StepRecord record) {
  if (record.skipped) {
    ++skipped_in_a_row_;
  } else if (!record.overflow) {
    skipped_in_a_row_ = 0;
  }
  record.skipped_in_a_row = skipped_in_a_row_;
  if (record.skipped) {
    skips_.push_back(record);
  }
  history_.push_back(std::move(record));
  if (static_cast<std::int64_t>(history_.size()) > options_.history_size) {
    history_.pop_front();
  }
}

void OptimizerCore::record_on_host(bool overflow, bool skipped) {
  record(
      {steps_begun_,
       taken_scale_.read(),
       overflow,
       skipped,
       0,
       master_weights_.taken_norm() / taken_factor_.read(),
       overflow ? master_weights_.report().culprits()
                : std::vector<TensorReport>()});
}

std::vector<StepRecord> OptimizerCore::take_skips() {
  return std::exchange(skips_, {});
}

std::vector<std::string> OptimizerCore::take_messages() {
  if (device_counts_ != nullptr) {
    for (const auto& past : device_counts_->take_records()) {
      tell_past_iteration(past);
    }
  }
  return std::exchange(messages_, {});
}

} // namespace fp16core
