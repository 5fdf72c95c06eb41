#include "optimizer_state.h"

#include "../layout.h"
#include "../parameter_text.h"
#include "fields.h"
#include "rule_view.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <cmath>
#include <sstream>
#include <unordered_map>
#include <unordered_set>

namespace fp16core::detail {

namespace {

using torch::optim::Optimizer;
using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamState;

class StateWidener : public FieldVisitor {
 public:
  explicit StateWidener(const at::Tensor& master) : master_(master) {}

  using FieldVisitor::visit;
  void visit(std::string_view, at::Tensor& tensor) override {
    if (tensor.defined()) {
      tensor = widen_state(tensor, master_);
    }
  }
  void visit(std::string_view name, std::deque<at::Tensor>& tensors) override {
    for (auto& tensor : tensors) {
      visit(name, tensor);
    }
  }
  void visit(
      std::string_view name,
      std::optional<std::vector<at::Tensor>>& tensors) override {
    if (tensors) {
      for (auto& tensor : *tensors) {
        visit(name, tensor);
      }
    }
  }

 private:
  const at::Tensor& master_;
};

// Writes fields as Python has them: counts of steps are float32 tensors, and
// what does not exist has no entry.
class DictWriter : public FieldVisitor {
 public:
  explicit DictWriter(StateDict& dict) : dict_(dict) {}

  using FieldVisitor::visit;
  void visit(std::string_view name, double& value) override {
    put(name, value);
  }
  void visit(std::string_view name, std::int64_t& value) override {
    if (name == "step") {
      put(name, at::scalar_tensor(value, at::kFloat));
    } else {
      put(name, value);
    }
  }
  void visit(std::string_view name, bool& value) override { put(name, value); }
  void visit(std::string_view name, std::tuple<double, double>& value)
      override {
    put(name,
        c10::ivalue::Tuple::create(
            {c10::IValue(std::get<0>(value)),
             c10::IValue(std::get<1>(value))}));
  }
  void visit(std::string_view name, std::optional<std::int64_t>& value)
      override {
    put(name, value ? c10::IValue(*value) : c10::IValue());
  }
  void visit(std::string_view name, std::optional<std::string>& value)
      override {
    put(name, value ? c10::IValue(*value) : c10::IValue());
  }
  void visit(std::string_view name, at::Tensor& value) override {
    if (value.defined()) {
      put(name, value.detach());
    }
  }
  void visit(std::string_view name, std::deque<at::Tensor>& value) override {
    c10::impl::GenericList list(c10::AnyType::get());
    for (const auto& tensor : value) {
      list.push_back(tensor.detach());
    }
    put(name, list);
  }

 private:
  void put(std::string_view name, c10::IValue value) {
    dict_.insert_or_assign(std::string(name), std::move(value));
  }

  StateDict& dict_;
};

// Reads fields as Python has them. A tensor that is not there is left
// undefined.
class FieldReader : public FieldVisitor {
 public:
  // State tensors are made like `like`; with `elementwise` they have its shape.
  FieldReader(const DictReader& dict, at::Tensor like, bool elementwise)
      : dict_(dict), like_(std::move(like)), elementwise_(elementwise) {}

  using FieldVisitor::visit;
  void visit(std::string_view name, double& value) override {
    value = dict_.number(name);
  }
  void visit(std::string_view name, std::int64_t& value) override {
    const double number = dict_.number(name);
    if (number != std::floor(number) || !(std::abs(number) < 0x1p53)) {
      dict_.refuse(name, "must be whole", describe(dict_.at(name)));
    }
    value = static_cast<std::int64_t>(number);
  }
  void visit(std::string_view name, bool& value) override {
    value = dict_.boolean(name);
  }
  void visit(std::string_view name, std::tuple<double, double>& value)
      override {
    const auto items = dict_.list(name);
    double numbers[2] = {};
    for (std::size_t i = 0; i < 2; ++i) {
      if (items.size() != 2 || !(items[i].isDouble() || items[i].isInt())) {
        dict_.refuse(name, "must be two numbers", describe(dict_.at(name)));
      }
      numbers[i] = items[i].isInt() ? static_cast<double>(items[i].toInt())
                                    : items[i].toDouble();
    }
    value = {numbers[0], numbers[1]};
  }
  void visit(std::string_view name, std::optional<std::int64_t>& value)
      override {
    value = std::nullopt;
    if (!dict_.at(name).isNone()) {
      value = dict_.integer(name);
    }
  }
  void visit(std::string_view name, std::optional<std::string>& value)
      override {
    value = std::nullopt;
    if (!dict_.at(name).isNone()) {
      value = dict_.string(name);
    }
  }
  void visit(std::string_view name, at::Tensor& value) override {
    value = at::Tensor();
    if (dict_.has(name) && !dict_.at(name).isNone()) {
      // LBFGS in Python begins with a plain number.
      const bool plain = !elementwise_ && !dict_.at(name).isTensor();
      value =
          own(name,
              plain ? at::scalar_tensor(dict_.number(name), at::kDouble)
                    : dict_.tensor(name));
    }
  }
  void visit(std::string_view name, std::deque<at::Tensor>& value) override {
    value.clear();
    for (const auto& item : dict_.list(name)) {
      if (!item.isTensor()) {
        dict_.refuse(name, "must hold tensors", describe(item));
      }
      value.push_back(own(name, item.toTensor()));
    }
  }

 private:
  at::Tensor own(std::string_view name, const at::Tensor& tensor) const {
    if (!elementwise_) {
      return tensor.detach().to(
          like_.device(),
          like_.scalar_type(),
          /*non_blocking=*/false,
          /*copy=*/true);
    }
    if (tensor.sizes() != like_.sizes() || !tensor.is_floating_point()) {
      std::ostringstream rule;
      rule << "must be floating point with shape " << like_.sizes();
      dict_.refuse(name, rule.str(), describe_tensor(tensor));
    }
    return empty_dense_like(like_, like_.scalar_type()).copy_(tensor.detach());
  }

  const DictReader& dict_;
  at::Tensor like_;
  bool elementwise_;
};

// Collects the names of all fields.
class FieldNames : public FieldVisitor {
 public:
  void visit(std::string_view name, double&) override { add(name); }
  void visit(std::string_view name, std::int64_t&) override { add(name); }
  void visit(std::string_view name, bool&) override { add(name); }
  void visit(std::string_view name, std::tuple<double, double>&) override {
    add(name);
  }
  void visit(std::string_view name, std::optional<std::int64_t>&) override {
    add(name);
  }
  void visit(std::string_view name, std::optional<std::string>&) override {
    add(name);
  }
  using FieldVisitor::visit;

  std::unordered_set<std::string> names;

 private:
  void add(std::string_view name) { names.emplace(name); }
};

[[noreturn]] void refuse_class(
    const std::type_info& type,
    const Optimizer& optimizer,
    const std::string& owner) {
  TORCH_CHECK_TYPE(
      false,
      owner,
      ": the wrapped optimizer must have options and state of torch::optim's "
      "own classes (save() and load() take any), but got ",
      class_name(type),
      " in ",
      class_name(typeid(optimizer)));
}

const OptimizerKind& known_kind(
    Optimizer& optimizer,
    const OptimizerOptions& options,
    const std::string& owner) {
  const auto* kind = find_kind(options);
  if (kind == nullptr) {
    refuse_class(typeid(options), optimizer, owner);
  }
  return *kind;
}

// Finds out whether saved state has any tensor.
class TensorFinder : public FieldVisitor {
 public:
  explicit TensorFinder(const DictReader& dict) : dict_(dict) {}

  using FieldVisitor::visit;
  void visit(std::string_view name, at::Tensor&) override {
    found |= dict_.has(name) && !dict_.at(name).isNone();
  }

  bool found = false;

 private:
  const DictReader& dict_;
};

// Returns the state of a parameter; null if the saved one is as good as none,
// like that of SGD before its first step.
std::unique_ptr<OptimizerParamState> read_state(
    const OptimizerKind& kind,
    OptimizerOptions& options,
    const DictReader& saved,
    const at::Tensor& parameter) {
  auto state = kind.make_state();
  TensorFinder finder(saved);
  visit_fields(*state, finder);
  if (!finder.found) {
    return nullptr;
  }
  FieldReader reader(saved, parameter, kind.rule != nullptr);
  visit_fields(*state, reader);
  if (kind.rule != nullptr) {
    const auto needed = read_rule_options(kind, options);
    for (std::size_t i = 0; i < kind.rule->tensors.size(); ++i) {
      if (needed.uses[i]) {
        saved.tensor(kind.rule->tensors[i]);
      }
    }
  }
  return state;
}

} // namespace

void check_state_is_known(Optimizer& optimizer, const std::string& owner) {
  const auto& groups = optimizer.param_groups();
  FieldVisitor nobody;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const auto& params = groups[g].params();
    for (std::size_t i = 0; i < params.size(); ++i) {
      auto* state = state_of(optimizer, params[i]);
      TORCH_CHECK_TYPE(
          state == nullptr ||
              (params[i].scalar_type() != at::kHalf &&
               params[i].scalar_type() != at::kBFloat16) ||
              visit_fields(*state, nobody),
          owner,
          ": a half parameter must have no state, or state of torch::optim's "
          "own classes, but got ",
          class_name(typeid(*state)),
          " for ",
          describe_parameter(
              static_cast<std::int64_t>(g),
              static_cast<std::int64_t>(i),
              params[i]));
    }
  }
}

void adopt(Optimizer& optimizer, const std::vector<Adoption>& adoptions) {
  auto& states = optimizer.state();
  for (const auto& adoption : adoptions) {
    auto& place =
        optimizer.param_groups()[adoption.group].params()[adoption.index];
    const auto entry = states.find(adoption.model.unsafeGetTensorImpl());
    // Someone who looks for state with operator[] leaves nothing behind.
    if (entry != states.end() && entry->second != nullptr) {
      StateWidener widener(adoption.master);
      visit_fields(*entry->second, widener);
      auto state = std::move(entry->second);
      states.erase(entry);
      states[adoption.master.unsafeGetTensorImpl()] = std::move(state);
    }
    place = adoption.master;
  }
}

StateDict optimizer_state_dict(
    Optimizer& optimizer,
    const PythonEntries& python_entries,
    const std::string& owner) {
  auto states = make_state_dict();
  c10::impl::GenericList groups(c10::AnyType::get());
  std::int64_t number = 0;
  auto& param_groups = optimizer.param_groups();
  for (std::size_t g = 0; g < param_groups.size(); ++g) {
    auto& options = param_groups[g].options();
    const auto& kind = known_kind(optimizer, options, owner);
    auto group = make_state_dict();
    DictWriter writer(group);
    visit_fields(options, writer);
    for (const auto& option : kind.python_options) {
      group.insert(std::string(option.name), option.to_python());
    }
    if (python_entries.size() == param_groups.size()) {
      for (const auto& entry : python_entries[g]) {
        group.insert_or_assign(entry.key(), entry.value());
      }
    }
    c10::impl::GenericList params(c10::AnyType::get());
    for (const auto& parameter : param_groups[g].params()) {
      if (auto* state = state_of(optimizer, parameter)) {
        auto saved = make_state_dict();
        DictWriter state_writer(saved);
        if (!visit_fields(*state, state_writer)) {
          refuse_class(typeid(*state), optimizer, owner);
        }
        states.insert(number, saved);
      }
      params.push_back(number++);
    }
    group.insert("params", params);
    groups.push_back(group);
  }
  auto result = make_state_dict();
  result.insert("state", states);
  result.insert("param_groups", groups);
  return result;
}

SavedOptimizer::SavedOptimizer(const DictReader& saved, Optimizer& optimizer) {
  const auto states = saved.dict("state");
  const auto groups = saved.list("param_groups");
  auto& own = optimizer.param_groups();
  if (groups.size() != own.size()) {
    saved.refuse(
        "param_groups",
        "must be " + std::to_string(own.size()),
        std::to_string(groups.size()));
  }
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const auto& group = groups_.emplace_back(
        groups[g],
        saved.owner(),
        saved.path("param_groups") + "[" + std::to_string(g) + "]");
    const auto& options = own[g].options();
    const auto& kind = known_kind(optimizer, options, saved.owner());
    const auto& params = own[g].params();
    for (const auto& parameter : params) {
      const auto* state = state_of(optimizer, parameter);
      if (state != nullptr && typeid(*state) != *kind.state) {
        refuse_class(typeid(*state), optimizer, saved.owner());
      }
    }

    // What cannot be read is found on a copy.
    const auto copy = options.clone();
    FieldReader reader(group, at::Tensor(), true);
    visit_fields(*copy, reader);
    FieldNames fields;
    visit_fields(*copy, fields);
    for (const auto& option : kind.python_options) {
      if (option.meaning == PythonOption::Meaning::kFixed &&
          group.has(option.name) &&
          group.boolean(option.name) !=
              (option.value == PythonOption::Value::kTrue)) {
        group.refuse(
            option.name,
            "must be as torch::optim::" + std::string(kind.name) + " has it (" +
                (option.value == PythonOption::Value::kTrue ? "True"
                                                            : "False") +
                ")",
            group.boolean(option.name) ? "True" : "False");
      }
    }
    auto entries = make_state_dict();
    for (const auto& entry : group.values()) {
      if (entry.key().isString() && entry.key().toStringRef() != "params" &&
          fields.names.count(entry.key().toStringRef()) == 0) {
        entries.insert(entry.key(), entry.value());
      }
    }
    python_entries_.push_back(std::move(entries));

    const auto numbers = group.list("params");
    if (numbers.size() != params.size()) {
      group.refuse(
          "params",
          "must be " + std::to_string(params.size()),
          std::to_string(numbers.size()));
    }
    for (std::size_t i = 0; i < params.size(); ++i) {
      if (!numbers[i].isInt()) {
        group.refuse("params", "must be numbers", describe(numbers[i]));
      }
      if (!states.values().contains(numbers[i])) {
        continue;
      }
      const DictReader state(
          states.values().at(numbers[i]),
          saved.owner(),
          saved.path("state") + "[" + std::to_string(numbers[i].toInt()) + "]");
      read_state(kind, *copy, state, params[i]);
      states_.emplace_back(std::make_pair(g, i), state);
    }
  }
}

void SavedOptimizer::load(Optimizer& optimizer) const {
  const at::NoGradGuard no_grad;
  auto& groups = optimizer.param_groups();
  const auto read_options = [&](std::size_t g, OptimizerOptions& options) {
    FieldReader reader(groups_[g], at::Tensor(), true);
    visit_fields(options, reader);
  };
  // All that may fail first.
  std::vector<std::unique_ptr<OptimizerOptions>> options;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    options.push_back(groups[g].options().clone());
    read_options(g, *options.back());
  }
  std::remove_reference_t<decltype(optimizer.state())> states;
  for (const auto& [position, saved] : states_) {
    auto& own = *options[position.first];
    const auto& parameter = groups[position.first].params()[position.second];
    if (auto state = read_state(*find_kind(own), own, saved, parameter)) {
      states[parameter.unsafeGetTensorImpl()] = std::move(state);
    }
  }
  optimizer.state() = std::move(states);
  for (std::size_t g = 0; g < groups.size(); ++g) {
    read_options(g, groups[g].options());
  }
}

void check_shapes(Optimizer& optimizer, const std::string& owner) {
  // Shows the tensors of a parameter's state.
  class Shapes : public FieldVisitor {
   public:
    Shapes(const at::Tensor& parameter, const std::string& owner)
        : parameter_(parameter), owner_(owner) {}
    using FieldVisitor::visit;
    void visit(std::string_view name, at::Tensor& tensor) override {
      TORCH_CHECK_VALUE(
          !tensor.defined() || tensor.sizes() == parameter_.sizes(),
          owner_,
          ": ",
          name,
          " must have shape ",
          parameter_.sizes(),
          ", but got ",
          tensor.sizes());
    }

   private:
    const at::Tensor& parameter_;
    const std::string& owner_;
  };
  for (auto& group : optimizer.param_groups()) {
    const auto* kind =
        group.has_options() ? find_kind(group.options()) : nullptr;
    for (const auto& parameter : group.params()) {
      auto* state = state_of(optimizer, parameter);
      if (kind != nullptr && kind->rule != nullptr && state != nullptr) {
        Shapes shapes(parameter, owner);
        visit_fields(*state, shapes);
      }
    }
  }
}

} // namespace fp16core::detail
