#include <fp16core/fp16_optimizer.h>

#include "dict_reader.h"
#include "parameter_text.h"
#include "torch_optim/optimizer_state.h"
#include "torch_optim/rule_view.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <iostream>
#include <mutex>
#include <type_traits>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace fp16core {

namespace {

using torch::optim::Optimizer;

constexpr std::int64_t kFormatVersion = 1;

// Unwinds an inner step whose first evaluation overflows for good.
struct SkippedStep {};

// The optimizers that are wrapped, since the masters of one would be taken for
// native parameters by the next.
class Wrapped {
 public:
  static bool add(const Optimizer* optimizer) {
    const std::lock_guard lock(mutex());
    return all().insert(optimizer).second;
  }
  static void remove(const Optimizer* optimizer) {
    const std::lock_guard lock(mutex());
    all().erase(optimizer);
  }

 private:
  static std::mutex& mutex() {
    static std::mutex mutex;
    return mutex;
  }
  static std::unordered_set<const Optimizer*>& all() {
    static std::unordered_set<const Optimizer*> all;
    return all;
  }
};

// Masters whose wrapper is gone. They look like any parameter and are tied to
// no model.
class Orphans {
 public:
  static void add(const ParamGroups& masters) {
    const std::lock_guard lock(mutex());
    std::erase_if(all(), [](const auto& orphan) { return orphan.expired(); });
    for (const auto& group : masters) {
      for (const auto& master : group) {
        all().emplace_back(master.getIntrusivePtr());
      }
    }
  }
  static bool has(const at::Tensor& parameter) {
    const std::lock_guard lock(mutex());
    return std::any_of(all().begin(), all().end(), [&](const auto& orphan) {
      return orphan.lock() == parameter.getIntrusivePtr();
    });
  }

 private:
  using Weak =
      c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  static std::mutex& mutex() {
    static std::mutex mutex;
    return mutex;
  }
  static std::vector<Weak>& all() {
    static std::vector<Weak> all;
    return all;
  }
};

ParamGroups params_of(const Optimizer& optimizer) {
  ParamGroups groups;
  for (const auto& group : optimizer.param_groups()) {
    groups.push_back(group.params());
  }
  return groups;
}

std::shared_ptr<LossScaler> make_scaler(const FP16OptimizerOptions& options) {
  if (options.loss_scaler() != nullptr) {
    return options.loss_scaler();
  }
  if (!options.dynamic_loss_scale()) {
    return std::make_shared<LossScaler>(options.static_loss_scale());
  }
  return std::make_shared<DynamicLossScaler>(DynamicLossScalerOptions{
      .init_scale = options.init_scale(),
      .scale_factor = options.scale_factor(),
      .scale_window = options.scale_window(),
      .min_scale = options.min_scale(),
      .delayed_shift = options.delayed_shift(),
      .consecutive_hysteresis = options.consecutive_hysteresis(),
      .backoff_factor = options.backoff_factor()});
}

// Returns what insists on an update rule, as the rule of an error; "" if
// nothing.
std::string insistence(const FP16OptimizerOptions& options) {
  if (!options.materialize_master_grads()) {
    const std::string rule =
        "materialize_master_grads(false) needs a step by an update rule";
    TORCH_CHECK_VALUE(
        options.fused().value_or(true),
        "FP16Optimizer: ",
        rule,
        ", but got fused(false)");
    return rule;
  }
  return options.fused().value_or(false)
      ? "fused(true) needs a step by an update rule"
      : "";
}

std::string no_rule(const Optimizer& optimizer) {
  return detail::class_name(typeid(optimizer)) +
      ", for which the core has no update rule";
}

// Reads a number of a loss scaler. Those that came later than the others may be
// missing: what they say was the only way then.
template <typename Number>
void read_number(
    const detail::DictReader& state,
    const std::string& name,
    Number& number) {
  static const std::unordered_set<std::string> always = {
      "cur_iter",
      "last_overflow_iter",
      "cur_hysteresis",
      "scale_factor",
      "scale_window",
      "min_scale",
      "delayed_shift",
      "consecutive_hysteresis"};
  if (!state.has(name) && !always.contains(name)) {
    return;
  }
  if constexpr (std::is_same_v<Number, bool>) {
    number = state.boolean(name);
  } else if constexpr (std::is_same_v<Number, double>) {
    number = state.number(name);
  } else {
    number = state.integer(name);
  }
}

// Returns the items of a list of tensors, or of integers, in a list `key`.
std::vector<at::Tensor> tensors_of(
    const detail::DictReader& state,
    const char* key,
    const c10::IValue& group) {
  std::vector<at::Tensor> tensors;
  if (!group.isList()) {
    state.refuse(key, "must hold lists", detail::describe(group));
  }
  for (const c10::IValue& item : group.toListRef()) {
    if (!item.isTensor()) {
      state.refuse(key, "must hold tensors", detail::describe(item));
    }
    tensors.push_back(item.toTensor());
  }
  return tensors;
}

std::vector<std::int64_t> integers_of(
    const detail::DictReader& state,
    const char* key,
    const c10::IValue& group) {
  std::vector<std::int64_t> integers;
  if (!group.isList()) {
    state.refuse(key, "must hold lists", detail::describe(group));
  }
  for (const c10::IValue& item : group.toListRef()) {
    if (!item.isInt()) {
      state.refuse(key, "must hold integers", detail::describe(item));
    }
    integers.push_back(item.toInt());
  }
  return integers;
}

// Returns the kind that has a rule for the optimizer, or null.
const detail::OptimizerKind* kind_with_rule(const Optimizer& optimizer) {
  const auto* kind = detail::find_kind(optimizer);
  return kind != nullptr && kind->rule != nullptr ? kind : nullptr;
}

} // namespace

struct FP16Optimizer::Impl {
  Impl(Optimizer& optimizer, const FP16OptimizerOptions& given)
      : inner(optimizer),
        options(given),
        insists(insistence(given)),
        core(
            OptimizerCoreOptions{
                "FP16Optimizer",
                given.check_overflow(),
                given.on_min_scale(),
                given.track_model_writes(),
                given.materialize_master_grads(),
                given.combine(),
                given.history_size()},
            make_scaler(given)) {
    if (!insists.empty()) {
      TORCH_CHECK_VALUE(
          kind_with_rule(inner) != nullptr,
          "FP16Optimizer: ",
          insists,
          ", but got ",
          no_rule(inner));
    }
    TORCH_CHECK_VALUE(
        given.history_size() >= 0,
        "FP16Optimizer: history_size must be at least 0, but got ",
        given.history_size());
    tell_traits(params_of(inner));
    core.master_weights().check(params_of(inner));
    for (const auto& group : inner.param_groups()) {
      for (const auto& parameter : group.params()) {
        TORCH_CHECK_VALUE(
            !Orphans::has(parameter),
            "FP16Optimizer: the optimizer must hold parameters of the model, "
            "but got the master weights of a wrapper that is gone");
      }
    }
    detail::check_state_is_known(inner, "FP16Optimizer");
    TORCH_CHECK_VALUE(
        Wrapped::add(&inner),
        "FP16Optimizer: the optimizer must not be wrapped already, but got ",
        detail::class_name(typeid(inner)),
        " that is");
    try {
      ingest();
      tell_groups(0);
    } catch (...) {
      Wrapped::remove(&inner);
      throw;
    }
  }

  ~Impl() {
    Orphans::add(weights().master_params());
    Wrapped::remove(&inner);
  }

  MasterWeights& weights() { return core.master_weights(); }

  void ingest() {
    const auto& groups = inner.param_groups();
    addresses.resize(groups.size());
    for (std::size_t g = 0; g < groups.size(); ++g) {
      addresses[g].clear();
      for (const auto& parameter : groups[g].params()) {
        addresses[g].push_back(parameter.unsafeGetTensorImpl());
      }
    }
    if (!weights().is_current(addresses)) {
      detail::check_state_is_known(inner, "FP16Optimizer");
      detail::adopt(inner, weights().ingest(params_of(inner)));
      tell_traits(weights().parameters());
    }
  }

  // Tells the core what the application knows of the model's parameters.
  void tell_traits(const ParamGroups& parameters) {
    const auto collect = [&](const auto& trait, auto values) {
      if (trait) {
        for (const auto& group : parameters) {
          auto& of_group = values.emplace_back();
          for (const auto& parameter : group) {
            of_group.push_back(trait(parameter));
          }
        }
      }
      return values;
    };
    weights().set_names(collect(
        options.parameter_names(),
        std::vector<std::vector<std::string>>()));
    weights().set_counted(
        collect(options.counts_in_norm(), std::vector<std::vector<bool>>()));
  }

  void tell(const std::string& line) const {
    if (options.log()) {
      options.log()(line);
    } else {
      std::cout << line << '\n';
    }
  }

  void tell_groups(std::int64_t first) {
    if (options.verbose()) {
      for (const auto& line : weights().describe(first)) {
        tell(line);
      }
    }
  }

  void warn(const std::string& message) const {
    if (options.log()) {
      options.log()(message);
    } else {
      TORCH_WARN(message);
    }
  }

  void tell_messages() {
    for (const auto& message : core.take_messages()) {
      warn(message);
    }
    for (const auto& record : core.take_skips()) {
      if (options.on_skip()) {
        options.on_skip()(record);
      }
    }
  }

  void insist_on_rule() const {
    if (!insists.empty() && kind_with_rule(inner) == nullptr) {
      refuse(no_rule(inner));
    }
  }

  void refuse(const std::string& obstacle) const {
    TORCH_CHECK(
        insists.empty(),
        "FP16Optimizer.step: ",
        insists,
        ", but got ",
        obstacle);
  }

  // Runs the wrapped optimizer's step, or the core's rule in its place.
  at::Tensor inner_step(const LossClosure& closure) {
    const auto* kind =
        options.fused().value_or(true) ? kind_with_rule(inner) : nullptr;
    if (kind == nullptr) {
      return inner.step(closure);
    }
    at::Tensor loss;
    if (closure) {
      const at::AutoGradMode enable_grad(true);
      loss = closure();
      ingest();
    }
    const auto found = rule_view.update(core, *kind, inner);
    obstacle = found.value_or("");
    if (found) {
      refuse(*found);
      inner.step();
    }
    return loss;
  }

  at::Tensor step() {
    ingest();
    insist_on_rule();
    bool applies = false;
    with_messages([&] { applies = core.begin_step(); });
    if (!applies) {
      return {};
    }
    auto result = inner_step(nullptr);
    core.finish_step();
    tell_messages();
    return result;
  }

  at::Tensor step(const LossClosure& closure) {
    ingest();
    insist_on_rule();
    core.begin_closure_step();
    const auto evaluate = [&] {
      core.begin_evaluation();
      while (true) {
        auto loss = closure();
        auto outcome = Evaluation::kAccept;
        with_messages([&] { outcome = core.end_evaluation(); });
        if (outcome == Evaluation::kAccept) {
          return loss;
        }
        if (outcome == Evaluation::kSkip) {
          throw SkippedStep();
        }
      }
    };
    at::Tensor result;
    try {
      result = inner_step(evaluate);
    } catch (const SkippedStep&) {
      with_messages([&] { core.abandon_step(/*skipped=*/true); });
      return {};
    } catch (...) {
      core.abandon_step(/*skipped=*/false);
      throw;
    }
    core.finish_step();
    tell_messages();
    return result;
  }

  // What there is to tell is told even where the function throws.
  template <typename Function>
  void with_messages(const Function& function) {
    try {
      function();
    } catch (...) {
      tell_messages();
      throw;
    }
    tell_messages();
  }

  struct Saved;
  StateDict scaler_state() const;
  std::shared_ptr<LossScaler> read_scaler(
      const detail::DictReader& state,
      double& scale_of_other) const;
  void read_progress(
      const detail::DictReader& state,
      const detail::DictReader& loss_scaler,
      Saved& saved) const;
  void check_masters(const Saved& saved, const std::string& owner) const;
  void make_room(const Saved& saved);
  void restore(const Saved& saved);
  void load_inner(torch::serialize::InputArchive& archive);

  Optimizer& inner;
  FP16OptimizerOptions options;
  std::string insists;
  OptimizerCore core;
  detail::TorchRuleView rule_view;
  // What kept the rule from the last step that it should have run.
  std::string obstacle;
  detail::PythonEntries python_entries;
  // Kept for its memory.
  std::vector<std::vector<const c10::TensorImpl*>> addresses;
};

std::function<std::string(const at::Tensor&)> names_of(
    const torch::nn::Module& module) {
  std::unordered_map<const c10::TensorImpl*, std::string> names;
  for (const auto& item : module.named_parameters()) {
    names.emplace(item.value().unsafeGetTensorImpl(), item.key());
  }
  return [names = std::move(names)](const at::Tensor& parameter) {
    const auto found = names.find(parameter.unsafeGetTensorImpl());
    return found == names.end() ? std::string() : found->second;
  };
}

FP16Optimizer::FP16Optimizer(
    Optimizer& optimizer,
    const FP16OptimizerOptions& options)
    : impl_(std::make_unique<Impl>(optimizer, options)) {}

FP16Optimizer::~FP16Optimizer() = default;
FP16Optimizer::FP16Optimizer(FP16Optimizer&&) noexcept = default;
FP16Optimizer& FP16Optimizer::operator=(FP16Optimizer&&) noexcept = default;

// ---- the iteration ----

void FP16Optimizer::backward(
    const at::Tensor& loss,
    bool update_master_grads,
    bool retain_graph,
    bool create_graph,
    const std::optional<std::vector<at::Tensor>>& inputs) {
  std::optional<at::TensorList> wanted;
  if (inputs) {
    wanted = *inputs;
  }
  try {
    scale_loss(loss).backward(
        /*gradient=*/{},
        retain_graph || create_graph,
        create_graph,
        wanted);
  } catch (...) {
    if (update_master_grads) {
      impl_->core.fail_update();
    }
    throw;
  }
  if (update_master_grads) {
    this->update_master_grads();
  }
}

at::Tensor FP16Optimizer::scale_loss(const at::Tensor& loss) {
  TORCH_CHECK_TYPE(
      loss.defined(),
      "FP16Optimizer.backward: loss must be a tensor, but got an undefined "
      "one");
  return impl_->core.scale_loss(loss);
}

void FP16Optimizer::update_master_grads() {
  try {
    impl_->ingest();
  } catch (...) {
    impl_->core.fail_update();
    throw;
  }
  impl_->core.update_master_grads();
}

at::Tensor FP16Optimizer::clip_master_grads(double max_norm, double norm_type) {
  return impl_->core.clip_master_grads(max_norm, norm_type);
}

at::Tensor FP16Optimizer::step(const LossClosure& closure) {
  return closure ? impl_->step(closure) : impl_->step();
}

void FP16Optimizer::zero_grad(bool set_to_none) {
  impl_->ingest();
  impl_->core.zero_grad(set_to_none);
}

// ---- what happened ----

bool FP16Optimizer::overflow() const {
  return impl_->core.overflow();
}

std::int64_t FP16Optimizer::steps_applied() const {
  return impl_->core.steps_applied();
}

std::int64_t FP16Optimizer::steps_skipped() const {
  return impl_->core.steps_skipped();
}

GradientReport FP16Optimizer::gradient_report() const {
  return impl_->weights().report();
}

const std::deque<StepRecord>& FP16Optimizer::history() const {
  return impl_->core.history();
}

std::string FP16Optimizer::step_mode() const {
  if (!impl_->options.fused().value_or(true)) {
    return "generic (fused(false))";
  }
  const auto* kind = kind_with_rule(impl_->inner);
  if (kind == nullptr) {
    return "generic (" + no_rule(impl_->inner) + ")";
  }
  return impl_->obstacle.empty() ? "fused " + std::string(kind->rule->name)
                                 : "generic (" + impl_->obstacle + ")";
}

// ---- the scale ----

double FP16Optimizer::loss_scale() const {
  return impl_->core.loss_scaler()->loss_scale();
}

void FP16Optimizer::set_loss_scale(double scale) {
  impl_->core.loss_scaler()->set_loss_scale(scale);
}

const std::shared_ptr<LossScaler>& FP16Optimizer::loss_scaler() const {
  return impl_->core.loss_scaler();
}

void FP16Optimizer::set_loss_scaler(std::shared_ptr<LossScaler> loss_scaler) {
  impl_->core.set_loss_scaler(std::move(loss_scaler));
}

bool FP16Optimizer::dynamic_loss_scale() const {
  return impl_->core.loss_scaler()->dynamic();
}

// ---- parameters ----

Optimizer& FP16Optimizer::optimizer() const {
  return impl_->inner;
}

ParamGroups FP16Optimizer::fp16_groups() {
  impl_->ingest();
  return impl_->weights().model_params();
}

ParamGroups FP16Optimizer::fp32_from_fp16_groups() {
  impl_->ingest();
  impl_->weights().adopt_model_writes();
  return impl_->weights().master_params();
}

ParamGroups FP16Optimizer::fp32_from_fp32_groups() {
  impl_->ingest();
  return impl_->weights().native_params();
}

ParamGroups FP16Optimizer::master_gradients() {
  return impl_->weights().master_gradients();
}

void FP16Optimizer::add_param_group(
    const torch::optim::OptimizerParamGroup& param_group) {
  impl_->ingest();
  const auto first =
      static_cast<std::int64_t>(impl_->inner.param_groups().size());
  impl_->weights().check({param_group.params()}, first);
  impl_->inner.add_param_group(param_group);
  impl_->ingest();
  impl_->tell_groups(first);
}

void FP16Optimizer::master_params_to_model_params() {
  impl_->ingest();
  impl_->weights().write_model();
  impl_->tell_messages();
}

void FP16Optimizer::model_params_to_master_params() {
  impl_->ingest();
  impl_->weights().overwrite_masters();
}

// ---- checkpoints ----

StateDict FP16Optimizer::Impl::scaler_state() const {
  const auto& scaler = *core.loss_scaler();
  auto state = make_state_dict();
  if (typeid(scaler) == typeid(LossScaler)) {
    state.insert("kind", "static");
    state.insert("cur_scale", scaler.loss_scale());
  } else if (typeid(scaler) == typeid(DynamicLossScaler)) {
    const auto& dynamic = static_cast<const DynamicLossScaler&>(scaler);
    const auto now = dynamic.state();
    const auto insert = [&](const char* name, const auto& value) {
      state.insert(name, value);
    };
    insert("kind", "dynamic");
    insert("cur_scale", now.cur_scale);
    for_each_counter(now, insert);
    for_each_option(dynamic.options(), insert);
  } else {
    state.insert("kind", "other");
    state.insert("cur_scale", scaler.loss_scale());
  }
  return state;
}

// Returns the scaler that `state` describes; null for one of a class of its
// own, which gets its scale set.
std::shared_ptr<LossScaler> FP16Optimizer::Impl::read_scaler(
    const detail::DictReader& state,
    double& scale_of_other) const {
  const auto kind = state.string("kind");
  try {
    if (kind == "static") {
      return std::make_shared<LossScaler>(state.number("cur_scale"));
    }
    if (kind == "dynamic") {
      DynamicLossScalerOptions rule;
      rule.init_scale = state.number("cur_scale");
      DynamicLossScaleState now{rule.init_scale, 0, -1, 1};
      const auto read = [&](const char* name, auto& value) {
        read_number(state, name, value);
      };
      for_each_option(rule, read);
      for_each_counter(now, read);
      auto scaler = std::make_shared<DynamicLossScaler>(rule);
      scaler->set_state(now);
      if (!core.options().check_overflow) {
        state.refuse(
            "kind",
            "must be 'static' with check_overflow off",
            "'dynamic'");
      }
      return scaler;
    }
    if (state.has("cur_scale")) {
      scale_of_other = LossScaler(state.number("cur_scale")).loss_scale();
    }
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(
        false,
        state.owner(),
        ": loss_scaler must be valid, but got ",
        error.what());
  }
  const auto& own = *core.loss_scaler();
  if (kind != "other" || !state.has("cur_scale") ||
      typeid(own) == typeid(LossScaler) ||
      typeid(own) == typeid(DynamicLossScaler)) {
    state.refuse("kind", "must be one that C++ has", "'" + kind + "'");
  }
  return nullptr;
}

// What a checkpoint holds beside the inner optimizer's state.
struct FP16Optimizer::Impl::Saved {
  ParamGroups masters;
  std::vector<std::vector<std::int64_t>> positions;
  std::shared_ptr<LossScaler> scaler;
  double scale_of_other = 0.0;
  bool overflow = false;
  bool update_pending = false;
  std::int64_t steps_applied = 0;
  std::int64_t steps_skipped = 0;
};

// Reads what both formats have under the same names.
void FP16Optimizer::Impl::read_progress(
    const detail::DictReader& state,
    const detail::DictReader& loss_scaler,
    Saved& saved) const {
  if (state.integer("format_version") != kFormatVersion) {
    state.refuse(
        "format_version",
        "must be " + std::to_string(kFormatVersion),
        std::to_string(state.integer("format_version")));
  }
  saved.scaler = read_scaler(loss_scaler, saved.scale_of_other);
  saved.overflow = state.boolean("overflow");
  saved.update_pending = state.boolean("update_pending");
  saved.steps_applied = state.integer("steps_applied");
  saved.steps_skipped = state.integer("steps_skipped");
  if (std::min(saved.steps_applied, saved.steps_skipped) < 0) {
    state.refuse("steps_applied", "must be at least 0", "a negative count");
  }
}

// Throws ValueError unless every saved master has a place.
void FP16Optimizer::Impl::check_masters(
    const Saved& saved,
    const std::string& owner) const {
  const auto& groups = inner.param_groups();
  TORCH_CHECK_VALUE(
      saved.masters.size() == groups.size() &&
          saved.positions.size() == groups.size(),
      owner,
      ": there must be ",
      groups.size(),
      " groups of masters, but got ",
      saved.masters.size());
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const auto& params = groups[g].params();
    TORCH_CHECK_VALUE(
        saved.masters[g].size() == saved.positions[g].size(),
        owner,
        ": there must be a position for each master of group ",
        g,
        ", but got ",
        saved.positions[g].size(),
        " for ",
        saved.masters[g].size());
    for (std::size_t k = 0; k < saved.masters[g].size(); ++k) {
      const auto index = saved.positions[g][k];
      TORCH_CHECK_VALUE(
          index >= 0 && index < static_cast<std::int64_t>(params.size()),
          owner,
          ": positions of masters must be within group ",
          g,
          ", but got ",
          index);
      const auto& master = saved.masters[g][k];
      TORCH_CHECK_VALUE(
          master.is_floating_point() && master.sizes() == params[index].sizes(),
          owner,
          ": the master of group ",
          g,
          ", index ",
          index,
          " must be floating point with shape ",
          params[index].sizes(),
          ", but got ",
          detail::describe_tensor(master));
    }
  }
}

// Makes masters where saved ones belong to parameters that have none yet.
void FP16Optimizer::Impl::make_room(const Saved& saved) {
  detail::adopt(inner, weights().adopt_at(saved.positions));
  weights().adopt_model_writes();
}

void FP16Optimizer::Impl::restore(const Saved& saved) {
  if (saved.scaler != nullptr) {
    core.set_loss_scaler(saved.scaler);
  } else {
    core.loss_scaler()->set_loss_scale(saved.scale_of_other);
  }
  // Masters that are not in the checkpoint stay as they are.
  auto masters = weights().master_params();
  const auto positions = weights().master_positions();
  for (std::size_t g = 0; g < masters.size(); ++g) {
    std::unordered_map<std::int64_t, at::Tensor> given;
    for (std::size_t k = 0; k < saved.positions[g].size(); ++k) {
      given.emplace(saved.positions[g][k], saved.masters[g][k]);
    }
    for (std::size_t i = 0; i < masters[g].size(); ++i) {
      const auto found = given.find(positions[g][i]);
      if (found != given.end()) {
        masters[g][i] = found->second;
      }
    }
  }
  weights().load_masters(masters);
  core.set_overflow(saved.overflow);
  core.set_update_pending(saved.update_pending);
  core.set_first_evaluation(true);
  core.set_step_counts(saved.steps_applied, saved.steps_skipped);
  tell_messages();
}

StateDict FP16Optimizer::state_dict() {
  auto& impl = *impl_;
  impl.ingest();
  impl.weights().adopt_model_writes();
  const auto inner = detail::optimizer_state_dict(
      impl.inner,
      impl.python_entries,
      "FP16Optimizer.state_dict");
  c10::impl::GenericList masters(c10::AnyType::get());
  c10::impl::GenericList positions(c10::AnyType::get());
  const auto all_positions = impl.weights().master_positions();
  for (const auto& group : impl.weights().master_params()) {
    c10::impl::GenericList masters_of_group(c10::AnyType::get());
    c10::impl::GenericList positions_of_group(c10::AnyType::get());
    for (std::size_t i = 0; i < group.size(); ++i) {
      masters_of_group.push_back(group[i].detach());
      positions_of_group.push_back(all_positions[masters.size()][i]);
    }
    masters.push_back(masters_of_group);
    positions.push_back(positions_of_group);
  }
  auto state = make_state_dict();
  state.insert("loss_scaler", impl.scaler_state());
  state.insert("dynamic_loss_scale", dynamic_loss_scale());
  state.insert("overflow", overflow());
  state.insert("first_closure_call_this_step", impl.core.first_evaluation());
  state.insert("optimizer_state_dict", inner);
  state.insert("fp32_from_fp16", masters);
  state.insert("format_version", kFormatVersion);
  state.insert("fp32_from_fp16_positions", positions);
  state.insert("update_pending", impl.core.update_pending());
  state.insert("steps_applied", steps_applied());
  state.insert("steps_skipped", steps_skipped());
  state.insert("optimizer_class", detail::class_name(typeid(impl.inner)));
  return state;
}

void FP16Optimizer::load_state_dict(const c10::IValue& state_dict) {
  auto& impl = *impl_;
  const std::string owner = "FP16Optimizer.load_state_dict";
  const detail::DictReader state(state_dict, owner, "the state dict");
  impl.ingest();
  if (state.has("state") && state.has("param_groups") &&
      !state.has("format_version")) {
    const detail::SavedOptimizer saved(state, impl.inner);
    saved.load(impl.inner);
    impl.python_entries = saved.python_entries();
    return;
  }
  Impl::Saved saved;
  impl.read_progress(state, state.dict("loss_scaler"), saved);
  const detail::SavedOptimizer optimizer(
      state.dict("optimizer_state_dict"),
      impl.inner);
  for (const auto& group : state.list("fp32_from_fp16")) {
    saved.masters.push_back(tensors_of(state, "fp32_from_fp16", group));
  }
  for (const auto& group : state.list("fp32_from_fp16_positions")) {
    saved.positions.push_back(
        integers_of(state, "fp32_from_fp16_positions", group));
  }
  impl.check_masters(saved, owner);
  const auto name = state.string("optimizer_class");
  const auto own_name = detail::class_name(typeid(impl.inner));

  impl.make_room(saved);
  optimizer.load(impl.inner);
  impl.python_entries = optimizer.python_entries();
  impl.restore(saved);
  if (name != own_name) {
    impl.warn(owner + ": state of " + name + " is loaded into " + own_name);
  }
}

void FP16Optimizer::save(torch::serialize::OutputArchive& archive) const {
  auto& impl = *impl_;
  impl.ingest();
  impl.weights().adopt_model_writes();
  archive.write("format_version", c10::IValue(kFormatVersion));
  for (const auto& entry : impl.scaler_state()) {
    archive.write("loss_scaler/" + entry.key().toStringRef(), entry.value());
  }
  archive.write("overflow", c10::IValue(overflow()));
  archive.write("update_pending", c10::IValue(impl.core.update_pending()));
  archive.write("steps_applied", c10::IValue(steps_applied()));
  archive.write("steps_skipped", c10::IValue(steps_skipped()));
  const auto masters = impl.weights().master_params();
  const auto positions = impl.weights().master_positions();
  archive.write(
      "masters/size",
      c10::IValue(static_cast<std::int64_t>(masters.size())));
  for (std::size_t g = 0; g < masters.size(); ++g) {
    const auto group = "masters/" + std::to_string(g) + "/";
    archive.write(group + "positions", c10::IValue(positions[g]));
    for (std::size_t i = 0; i < masters[g].size(); ++i) {
      archive.write(group + std::to_string(i), masters[g][i].detach());
    }
  }
  torch::serialize::OutputArchive inner(archive.compilation_unit());
  impl.inner.save(inner);
  archive.write("optimizer", inner);
}

void FP16Optimizer::load(torch::serialize::InputArchive& archive) {
  auto& impl = *impl_;
  const std::string owner = "FP16Optimizer.load";
  impl.ingest();
  const auto read = [&](const std::string& key) {
    c10::IValue value;
    TORCH_CHECK(
        archive.try_read(key, value),
        owner,
        ": the archive must be one that FP16Optimizer saved, but got one "
        "without ",
        key);
    return value;
  };
  auto state = make_state_dict();
  for (const auto* key :
       {"format_version",
        "overflow",
        "update_pending",
        "steps_applied",
        "steps_skipped"}) {
    state.insert(key, read(key));
  }
  auto scaler = make_state_dict();
  for (const auto& key : archive.keys()) {
    const std::string prefix = "loss_scaler/";
    if (key.starts_with(prefix)) {
      scaler.insert(key.substr(prefix.size()), read(key));
    }
  }
  Impl::Saved saved;
  const auto group_count = read("masters/size").toInt();
  for (std::int64_t g = 0; g < group_count; ++g) {
    const auto group = "masters/" + std::to_string(g) + "/";
    auto& positions = saved.positions.emplace_back();
    positions = read(group + "positions").toIntVector();
    auto& masters = saved.masters.emplace_back();
    for (std::size_t i = 0; i < positions.size(); ++i) {
      archive.read(group + std::to_string(i), masters.emplace_back());
    }
  }
  impl.check_masters(saved, owner);
  impl.read_progress(
      detail::DictReader(state, owner, "the archive"),
      detail::DictReader(scaler, owner, "loss_scaler"),
      saved);
  torch::serialize::InputArchive inner;
  archive.read("optimizer", inner);

  impl.make_room(saved);
  impl.load_inner(inner);
  impl.python_entries.clear();
  impl.restore(saved);
}

// The wrapped optimizer's own loader may stop halfway: then the old state is
// put back.
void FP16Optimizer::Impl::load_inner(torch::serialize::InputArchive& archive) {
  std::vector<std::unique_ptr<torch::optim::OptimizerOptions>> old_options;
  for (const auto& group : inner.param_groups()) {
    old_options.push_back(group.options().clone());
  }
  // It leaves state in place for parameters that the archive has none for.
  auto old_state = std::exchange(inner.state(), {});
  try {
    inner.load(archive);
    detail::check_shapes(inner, "FP16Optimizer.load");
  } catch (...) {
    inner.state() = std::move(old_state);
    for (std::size_t g = 0; g < old_options.size(); ++g) {
      inner.param_groups()[g].set_options(std::move(old_options[g]));
    }
    throw;
  }
}

torch::serialize::OutputArchive& operator<<(
    torch::serialize::OutputArchive& archive,
    const FP16Optimizer& optimizer) {
  optimizer.save(archive);
  return archive;
}

torch::serialize::InputArchive& operator>>(
    torch::serialize::InputArchive& archive,
    FP16Optimizer& optimizer) {
  optimizer.load(archive);
  return archive;
}

} // namespace fp16core
