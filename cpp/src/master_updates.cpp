// The part of MasterWeights that runs update rules.
//
// Thousands of small parameters cost more in cache misses on their tensors than
// in arithmetic, so each parameter's tensors are looked at once, when its
// update is prepared; what follows works on compact lists.

#include "weight_pairs.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

namespace fp16core {

namespace {

using detail::bump_version;
using detail::describe_tensor;
using detail::gradient_of;

// A counter may wait on the host for its first step on a device.
bool is_counter(const at::Tensor& tensor, c10::Device device) {
  return tensor.defined() && tensor.numel() == 1 &&
      (tensor.is_cpu() || tensor.device() == device) &&
      tensor.layout() == at::kStrided &&
      (tensor.scalar_type() == at::kFloat ||
       tensor.scalar_type() == at::kDouble);
}

detail::CounterMemory memory_of(const at::Tensor& counter) {
  return {counter.data_ptr(), counter.scalar_type() == at::kFloat};
}

// Whether a state tensor can be walked together with the weight.
bool fits(const at::Tensor& tensor, const at::Tensor& weight) {
  return tensor.defined() && tensor.layout() == at::kStrided &&
      tensor.scalar_type() == weight.scalar_type() &&
      tensor.device() == weight.device() &&
      detail::same_dense_layout(tensor, weight);
}

} // namespace

// Returns what keeps the rule from running on one parameter.
std::optional<std::string> MasterWeights::Impl::obstacle(
    const DueParameter& due,
    const RuleState& state) const {
  const auto& pair = groups[due.group][due.index];
  const auto& weight = *due.parameter;
  const auto& gradient = inner_gradient(pair);
  const auto where = [&](const std::string& what) {
    return what + describe(pair, due.group, due.index);
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
    if (counter == nullptr || !is_counter(*counter, weight.device())) {
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
    // Read too: a skipped update writes back what was there.
    item.model = update_staging->writable(pair.model, weight, true).data_ptr();
    item.model_type = pair.model.scalar_type();
    item.unscale = lean(pair);
  }
  item.numel = weight.numel();
  item.gradient_type = gradient.scalar_type();
  item.weight_type = weight.scalar_type();
  item.group = due.group;
  item.fresh = state.fresh;
  PreparedUpdate prepared{due.group, due.index, {}};
  if (!state.fresh) {
    const auto& uses = rule_options[due.group].uses;
    for (std::size_t i = 0; i < rule->tensors.size(); ++i) {
      if (uses[i]) {
        item.tensors[i] = state.tensors[i]->data_ptr();
      }
    }
    for (std::size_t i = 0; i < rule->counters.size(); ++i) {
      const auto& counter = *state.counters[i];
      item.counters[i] = memory_of(counter);
      prepared.moves[i] = counter.device() != weight.device();
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
            describe(pair, group, index);
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
    const PreparedUpdate& prepared) const {
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
    counter = at::full(
        {},
        rule->counters[i].start,
        at::TensorOptions(options.counter_type).device(weight.device()));
    item.counters[i] = memory_of(counter);
  }
  return state;
}

// Brings counters that are on the host to the device of the weight, where a
// step that is not known to be applied can advance them.
NewRuleState MasterWeights::Impl::move_counters(
    detail::UpdateItem& item,
    const PreparedUpdate& prepared) const {
  const auto& weight = groups[prepared.group][prepared.index].visible();
  NewRuleState state{prepared.group, prepared.index, {}, {}};
  for (std::size_t i = 0; i < rule->counters.size(); ++i) {
    auto& memory = item.counters[i];
    if (!prepared.moves[i]) {
      continue;
    }
    const auto type = memory.single ? at::kFloat : at::kDouble;
    state.counters[i] =
        at::from_blob(memory.data, {}, type).to(weight.device());
    memory = memory_of(state.counters[i]);
  }
  return state;
}

bool MasterWeights::makes_state() const {
  return std::any_of(
      impl_->devices.begin(),
      impl_->devices.end(),
      [this](const auto& lists) {
        return std::any_of(
            lists.updates.begin(),
            lists.updates.end(),
            [this](const auto& item) {
              return item.fresh && impl_->rule_options[item.group].has_state;
            });
      });
}

std::vector<NewRuleState> MasterWeights::run_update(bool unless_overflow) {
  const at::NoGradGuard no_grad;
  auto& impl = *impl_;
  TORCH_CHECK(
      impl.update_staging.has_value(),
      impl.owner,
      ".run_update: prepare_update must come first, but got none that found no "
      "obstacle");
  std::vector<NewRuleState> made;
  std::vector<detail::FactorSource> factors;
  for (const auto& factor : impl.factors) {
    factors.push_back(detail::source_of(factor));
  }
  for (auto& lists : impl.devices) {
    for (std::size_t k = 0; k < lists.updates.size(); ++k) {
      auto& item = lists.updates[k];
      const auto& prepared = lists.prepared[k];
      if (item.fresh && impl.rule_options[prepared.group].has_state) {
        made.push_back(impl.make_state(item, prepared));
      } else if (prepared.moves != decltype(prepared.moves){}) {
        made.push_back(impl.move_counters(item, prepared));
      }
    }
  }
  for (auto& lists : impl.devices) {
    if (lists.updates.empty()) {
      continue;
    }
    const float* skip =
        unless_overflow ? &lists.kernels->totals()->found_inf : nullptr;
    std::vector<std::pair<std::int64_t, std::int64_t>> positions;
    for (const auto& prepared : lists.prepared) {
      positions.emplace_back(prepared.group, prepared.index);
    }
    impl.expect_saturations(
        lists,
        lists.kernels->update(
            *impl.rule,
            lists.updates,
            impl.rule_options,
            factors,
            skip),
        std::move(positions));
  }
  impl.update_staging->write_back();
  impl.update_staging.reset();
  impl.rule_ran = true;
  for (auto& lists : impl.devices) {
    for (const auto& prepared : lists.prepared) {
      auto& pair = impl.groups[prepared.group][prepared.index];
      bump_version(pair.visible());
      if (pair.master.defined()) {
        impl.see_written(pair);
      }
    }
  }
  impl.note_saturations(/*wait=*/false);
  return made;
}

} // namespace fp16core
