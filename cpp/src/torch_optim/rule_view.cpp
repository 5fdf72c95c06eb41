#include "rule_view.h"

#include "fields.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

namespace fp16core::detail {

namespace {

// The largest count that float32 holds together with all smaller ones.
constexpr std::int64_t kMostInFloat = std::int64_t{1} << 24;

class OptionReader : public FieldVisitor {
 public:
  OptionReader(const UpdateRule& rule, std::vector<double>& values)
      : rule_(rule), values_(values) {}

  using FieldVisitor::visit;
  void visit(std::string_view name, double& value) override {
    set(name, value);
  }
  void visit(std::string_view name, bool& value) override {
    set(name, value ? 1.0 : 0.0);
  }
  void visit(std::string_view name, std::tuple<double, double>& value)
      override {
    set(std::string(name) + "[0]", std::get<0>(value));
    set(std::string(name) + "[1]", std::get<1>(value));
  }

  void set(std::string_view name, double value) {
    for (std::size_t i = 0; i < rule_.options.size(); ++i) {
      if (rule_.options[i] == name) {
        values_[i] = value;
      }
    }
  }

 private:
  const UpdateRule& rule_;
  std::vector<double>& values_;
};

// Finds what a rule needs of a parameter's state. There is one counter at most,
// the count of steps.
class StateReader : public FieldVisitor {
 public:
  StateReader(const UpdateRule& rule, const RuleOptions& options)
      : rule_(rule), options_(options) {}

  using FieldVisitor::visit;
  void visit(std::string_view name, std::int64_t& value) override {
    if (!rule_.counters.empty() && rule_.counters[0].name == name) {
      steps = &value;
    }
  }
  void visit(std::string_view name, at::Tensor& value) override {
    for (std::size_t i = 0; i < rule_.tensors.size(); ++i) {
      if (rule_.tensors[i] == name && options_.uses[i] && value.defined()) {
        tensors[i] = &value;
      }
    }
  }

  std::int64_t* steps = nullptr;
  std::array<at::Tensor*, UpdateRule::kMostTensors> tensors{};

 private:
  const UpdateRule& rule_;
  const RuleOptions& options_;
};

// Puts state that the core made into an object of torch's.
class StateWriter : public FieldVisitor {
 public:
  StateWriter(const UpdateRule& rule, const NewRuleState& made)
      : rule_(rule), made_(made) {}

  using FieldVisitor::visit;
  void visit(std::string_view name, std::int64_t& value) override {
    if (!rule_.counters.empty() && rule_.counters[0].name == name) {
      value = 1;
    }
  }
  void visit(std::string_view name, at::Tensor& value) override {
    for (std::size_t i = 0; i < rule_.tensors.size(); ++i) {
      if (rule_.tensors[i] == name && made_.tensors[i].defined()) {
        value = made_.tensors[i];
      }
    }
  }

 private:
  const UpdateRule& rule_;
  const NewRuleState& made_;
};

} // namespace

RuleOptions read_rule_options(
    const OptimizerKind& kind,
    torch::optim::OptimizerOptions& options) {
  RuleOptions result;
  result.values.assign(kind.rule->options.size(), 0.0);
  OptionReader reader(*kind.rule, result.values);
  for (const auto& option : kind.python_options) {
    if (option.value == PythonOption::Value::kTrue) {
      reader.set(option.name, 1.0);
    }
  }
  visit_fields(options, reader);
  result.resolve(*kind.rule);
  return result;
}

TorchRuleView::Counter& TorchRuleView::counter_of(
    const torch::optim::Optimizer& optimizer,
    const DueParameter& due) {
  const auto& groups = optimizer.param_groups();
  counters_.resize(groups.size());
  auto& group = counters_[due.group];
  // All at once, since addresses are taken.
  group.resize(groups[due.group].params().size());
  return group[due.index];
}

std::optional<std::string> TorchRuleView::update(
    OptimizerCore& core,
    const OptimizerKind& kind,
    torch::optim::Optimizer& optimizer) {
  const auto& rule = *kind.rule;
  auto& weights = core.master_weights();
  auto& groups = optimizer.param_groups();
  auto& states = optimizer.state();
  options_.clear();
  for (std::size_t g = 0; g < groups.size(); ++g) {
    auto& options = groups[g].options();
    if (typeid(options) != *kind.options) {
      return "options of class " + class_name(typeid(options)) + " in group " +
          std::to_string(g);
    }
    options_.push_back(read_rule_options(kind, options));
  }

  due_.clear();
  std::optional<std::string> strange;
  auto obstacle =
      weights.prepare_update(rule, options_, [&](const DueParameter& due) {
        RuleState found;
        const auto& options = options_[due.group];
        auto* state =
            options.has_state ? state_of(optimizer, *due.parameter) : nullptr;
        if (state == nullptr) {
          return found;
        }
        StateReader reader(rule, options);
        if (typeid(*state) != *kind.state || !visit_fields(*state, reader)) {
          strange = "state of class " + class_name(typeid(*state));
          found.fresh = false; // with nothing to go with: an obstacle
          return found;
        }
        for (std::size_t i = 0; i < rule.tensors.size(); ++i) {
          found.tensors[i] = reader.tensors[i];
          found.fresh &= reader.tensors[i] == nullptr;
        }
        if (reader.steps != nullptr) {
          const std::int64_t steps = *reader.steps;
          auto& counter = counter_of(optimizer, due);
          if (!counter.tensor.defined() || counter.value != steps ||
              (steps == kMostInFloat &&
               counter.tensor.scalar_type() == at::kFloat) ||
              counter.tensor.device() != due.parameter->device()) {
            counter.tensor = at::scalar_tensor(
                steps,
                steps < kMostInFloat ? at::kFloat : at::kDouble);
            counter.value = steps;
          }
          found.counters[0] = &counter.tensor;
          found.fresh = false;
          due_.push_back({reader.steps, &counter});
        }
        return found;
      });
  if (obstacle || strange) {
    return strange ? strange : obstacle;
  }

  for (const auto& made : weights.run_update()) {
    const DueParameter due{made.group, made.index, nullptr};
    const bool fresh = std::any_of(
        made.tensors.begin(),
        made.tensors.end(),
        [](const at::Tensor& tensor) { return tensor.defined(); });
    if (made.counters[0].defined()) {
      auto& counter = counter_of(optimizer, due);
      counter.tensor = made.counters[0];
      counter.value = fresh ? 1 : counter.value;
    }
    if (fresh) {
      auto& state =
          states[groups[made.group].params()[made.index].unsafeGetTensorImpl()];
      if (state == nullptr) {
        state = kind.make_state();
      }
      StateWriter writer(rule, made);
      visit_fields(*state, writer);
    }
  }
  for (const auto& due : due_) {
    due.counter->value = ++*due.steps;
  }
  return std::nullopt;
}

} // namespace fp16core::detail
