// The part of MasterWeights that runs update rules.
//
// Thousands of small parameters cost more in cache misses on their tensors than
// in arithmetic, so each parameter's tensors are looked at once, when its
// update is prepared; what follows works on compact lists.

#include "weight_pairs.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

namespace fp16core {

namespace {

using detail::bump_version;
using detail::describe_parameter;
using detail::describe_tensor;
using detail::gradient_of;

bool is_counter(const at::Tensor& tensor) {
  return tensor.defined() && tensor.numel() == 1 && tensor.is_cpu() &&
      tensor.layout() == at::kStrided &&
      (tensor.scalar_type() == at::kFloat ||
       tensor.scalar_type() == at::kDouble);
}

// Whether a state tensor can be walked together with the weight.
bool fits(const at::Tensor& tensor, const at::Tensor& weight) {
  return tensor.defined() && tensor.layout() == at::kStrided &&
      tensor.scalar_type() == weight.scalar_type() &&
      tensor.device() == weight.device() &&
      detail::same_dense_layout(tensor, weight);
}

// What the numbers of a step depend on.
struct StepKey {
  std::int64_t group;
  bool fresh;
  bool single;
  c10::ScalarType type;
  std::array<double, UpdateRule::kMostCounters> counters;

  bool operator==(const StepKey&) const = default;
};

} // namespace

// Returns what keeps the rule from running on one parameter.
std::optional<std::string> MasterWeights::Impl::obstacle(
    const DueParameter& due,
    const RuleState& state) const {
  const auto& pair = groups[due.group][due.index];
  const auto& weight = *due.parameter;
  const auto& gradient = inner_gradient(pair);
  const auto where = [&](const std::string& what) {
    return what + describe_parameter(due.group, due.index, pair.model);
  };
  const auto unfit = [&](std::string_view name, const at::Tensor* tensor) {
    const std::string what(name);
    return where(
        tensor == nullptr ? "no " + what + " for "
                          : what + " of " + describe_tensor(*tensor) + " for ");
  };
  if (pair.master.defined()) {
    check_master(pair, due.group, due.index);
  } else if (!weight.is_non_overlapping_and_dense()) {
    return where("gaps in the memory of ");
  }
  if (gradient.layout() != at::kStrided) {
    return where("a sparse gradient for ");
  }
  if (gradient.sizes() != weight.sizes() ||
      gradient.device() != weight.device() ||
      !(lean(pair) ? detail::is_supported(gradient.scalar_type())
                   : gradient.scalar_type() == weight.scalar_type())) {
    return where("a gradient of another kind for ");
  }
  if (state.fresh) {
    return std::nullopt;
  }
  const auto& uses = rule_options[due.group].uses;
  for (std::size_t i = 0; i < rule->tensors.size(); ++i) {
    const auto* tensor = state.tensors[i];
    if (uses[i] && (tensor == nullptr || !fits(*tensor, weight))) {
      return unfit(rule->tensors[i], tensor);
    }
  }
  for (std::size_t i = 0; i < rule->counters.size(); ++i) {
    const auto* counter = state.counters[i];
    if (counter == nullptr || !is_counter(*counter)) {
      return unfit(rule->counters[i].name, counter);
    }
  }
  return std::nullopt;
}

void MasterWeights::Impl::add_update(
    const DueParameter& due,
    const RuleState& state) {
  const auto& pair = groups[due.group][due.index];
  const auto& weight = *due.parameter;
  const auto& gradient = update_staging->readable(inner_gradient(pair), weight);
  detail::UpdateItem item{};
  item.gradient = gradient.const_data_ptr();
  item.weight = weight.data_ptr();
  if (pair.master.defined()) {
    item.model = update_staging->writable(pair.model, weight, false).data_ptr();
    item.model_type = pair.model.scalar_type();
    item.unscale = lean(pair);
  }
  item.numel = weight.numel();
  item.gradient_type = gradient.scalar_type();
  item.weight_type = weight.scalar_type();
  PreparedUpdate prepared{due.group, due.index, state.fresh, {}};
  if (!state.fresh) {
    const auto& uses = rule_options[due.group].uses;
    for (std::size_t i = 0; i < rule->tensors.size(); ++i) {
      if (uses[i]) {
        item.tensors[i] = state.tensors[i]->data_ptr();
      }
    }
    for (std::size_t i = 0; i < rule->counters.size(); ++i) {
      const auto& counter = *state.counters[i];
      prepared.counters[i] = {
          counter.data_ptr(),
          counter.scalar_type() == at::kFloat};
    }
  }
  auto& lists = Impl::lists(weight.device());
  lists.updates.push_back(item);
  lists.prepared.push_back(prepared);
}

// Lists what has a gradient, up to the first obstacle.
std::optional<std::string> MasterWeights::Impl::list_updates(
    FindRuleState find_state) {
  for (std::size_t g = 0; g < groups.size(); ++g) {
    for (std::size_t i = 0; i < groups[g].size(); ++i) {
      const auto& pair = groups[g][i];
      const auto group = static_cast<std::int64_t>(g);
      const auto index = static_cast<std::int64_t>(i);
      if (lean(pair) && gradient_of(pair.master).defined()) {
        return "a gradient set on the master of " +
            describe_parameter(group, index, pair.model);
      }
      if ((pair.master.defined() || pair.native()) &&
          inner_gradient(pair).defined()) {
        const DueParameter due{group, index, &pair.visible()};
        const auto state = find_state(due);
        if (auto found = obstacle(due, state)) {
          return found;
        }
        add_update(due, state);
      }
    }
  }
  return std::nullopt;
}

std::optional<std::string> MasterWeights::prepare_update(
    const UpdateRule& rule,
    c10::ArrayRef<RuleOptions> options,
    FindRuleState find_state) {
  auto& impl = *impl_;
  impl.rule = &rule;
  impl.rule_options = options;
  impl.update_staging.emplace();
  for (auto& lists : impl.devices) {
    lists.updates.clear();
    lists.prepared.clear();
  }
  auto found = impl.list_updates(find_state);
  if (found) {
    impl.update_staging.reset();
  }
  return found;
}

// Makes the state of a parameter that has none.
NewRuleState MasterWeights::Impl::make_state(
    detail::UpdateItem& item,
    PreparedUpdate& prepared) const {
  const auto& weight = groups[prepared.group][prepared.index].visible();
  const auto& options = rule_options[prepared.group];
  NewRuleState state{prepared.group, prepared.index, {}, {}};
  for (std::size_t i = 0; i < rule->tensors.size(); ++i) {
    if (options.uses[i]) {
      auto& tensor = state.tensors[i];
      tensor = detail::empty_dense_like(weight, weight.scalar_type());
      tensor.fill_(rule->start(options.values.data()));
      item.tensors[i] = tensor.data_ptr();
    }
  }
  for (std::size_t i = 0; i < rule->counters.size(); ++i) {
    auto& counter = state.counters[i];
    counter = at::scalar_tensor(rule->counters[i].start, options.counter_type);
    prepared.counters[i] = {
        counter.data_ptr(),
        options.counter_type == at::kFloat};
  }
  return state;
}

// Advances all counters. Most parameters share the numbers of their neighbour.
void MasterWeights::Impl::prepare_steps(DeviceLists& lists) const {
  const std::size_t counters = rule->counters.size();
  std::optional<StepKey> last;
  std::array<double, UpdateRule::kMostCounters> advanced{};
  lists.steps.clear();
  // No step may move: the items point at them.
  lists.steps.reserve(lists.updates.size());
  for (std::size_t k = 0; k < lists.updates.size(); ++k) {
    auto& prepared = lists.prepared[k];
    StepKey key{
        prepared.group,
        prepared.fresh,
        true,
        lists.updates[k].weight_type,
        {}};
    for (std::size_t i = 0; i < counters; ++i) {
      key.counters[i] = prepared.counters[i].read();
      key.single = prepared.counters[i].single;
    }
    if (last != key) {
      advanced = key.counters;
      rule->prepare(
          rule_options[prepared.group].values.data(),
          advanced.data(),
          prepared.fresh,
          key.single,
          key.type,
          lists.steps.emplace_back().bytes);
      last = key;
    }
    lists.updates[k].step = lists.steps.back().bytes;
    for (std::size_t i = 0; i < counters; ++i) {
      prepared.counters[i].write(advanced[i]);
    }
  }
}

std::vector<NewRuleState> MasterWeights::run_update() {
  const at::NoGradGuard no_grad;
  auto& impl = *impl_;
  TORCH_CHECK(
      impl.update_staging.has_value(),
      impl.owner,
      ".run_update: prepare_update must come first, but got none that found no "
      "obstacle");
  std::vector<NewRuleState> made;
  for (auto& lists : impl.devices) {
    for (std::size_t k = 0; k < lists.updates.size(); ++k) {
      const auto& prepared = lists.prepared[k];
      if (prepared.fresh && impl.rule_options[prepared.group].has_state) {
        made.push_back(impl.make_state(lists.updates[k], lists.prepared[k]));
      }
    }
  }
  for (auto& lists : impl.devices) {
    impl.prepare_steps(lists);
    lists.kernels->update(*impl.rule, lists.updates, impl.factors);
  }
  impl.update_staging->write_back();
  impl.update_staging.reset();
  impl.rule_ran = true;
  for (auto& lists : impl.devices) {
    const auto& saturated = lists.kernels->saturated();
    for (std::size_t k = 0; k < lists.updates.size(); ++k) {
      const auto& prepared = lists.prepared[k];
      auto& pair = impl.groups[prepared.group][prepared.index];
      bump_version(pair.visible());
      if (pair.master.defined()) {
        impl.see_written(
            pair,
            prepared.group,
            prepared.index,
            saturated[k] != 0);
      }
    }
  }
  return made;
}

} // namespace fp16core
