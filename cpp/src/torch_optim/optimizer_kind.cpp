#include "optimizer_kind.h"

#include <c10/util/Type.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <array>

namespace fp16core::detail {

namespace {

using namespace torch::optim;
using enum PythonOption::Meaning;
using Value = PythonOption::Value;

constexpr PythonOption kMaximize{"maximize", Value::kFalse, kFixed};
constexpr PythonOption kDifferentiable{"differentiable", Value::kFalse, kFixed};
constexpr PythonOption kForeach{"foreach", Value::kNone, kImplementation};
constexpr PythonOption kFused{"fused", Value::kNone, kImplementation};
constexpr PythonOption kCapturable{
    "capturable",
    Value::kFalse,
    kImplementation};

constexpr std::array kSGD{kMaximize, kForeach, kDifferentiable, kFused};
constexpr std::array kAdagrad = kSGD;
constexpr std::array kAdam{
    kMaximize,
    kForeach,
    kCapturable,
    kDifferentiable,
    kFused,
    PythonOption{"decoupled_weight_decay", Value::kFalse, kFixed}};
constexpr std::array kAdamW{
    kMaximize,
    kForeach,
    kCapturable,
    kDifferentiable,
    kFused,
    PythonOption{"decoupled_weight_decay", Value::kTrue, kFixed}};
constexpr std::array kRMSprop{
    kCapturable,
    kForeach,
    kMaximize,
    kDifferentiable};

template <typename Class, typename Options, typename State>
OptimizerKind kind(
    std::string_view name,
    std::string_view python,
    c10::ArrayRef<PythonOption> python_options) {
  return {
      name,
      find_update_rule(python),
      python_options,
      &typeid(Class),
      &typeid(Options),
      &typeid(State),
      []() -> std::unique_ptr<OptimizerParamState> {
        return std::make_unique<State>();
      }};
}

const auto& kinds() {
  static const std::array all{
      kind<SGD, SGDOptions, SGDParamState>("SGD", "torch.optim.sgd.SGD", kSGD),
      kind<Adam, AdamOptions, AdamParamState>(
          "Adam",
          "torch.optim.adam.Adam",
          kAdam),
      kind<AdamW, AdamWOptions, AdamWParamState>(
          "AdamW",
          "torch.optim.adamw.AdamW",
          kAdamW),
      kind<Adagrad, AdagradOptions, AdagradParamState>(
          "Adagrad",
          "torch.optim.adagrad.Adagrad",
          kAdagrad),
      kind<RMSprop, RMSpropOptions, RMSpropParamState>(
          "RMSprop",
          "torch.optim.rmsprop.RMSprop",
          kRMSprop),
      kind<LBFGS, LBFGSOptions, LBFGSParamState>(
          "LBFGS",
          "torch.optim.lbfgs.LBFGS",
          {}),
  };
  return all;
}

} // namespace

c10::IValue PythonOption::to_python() const {
  return value == Value::kNone ? c10::IValue()
                               : c10::IValue(value == Value::kTrue);
}

const OptimizerKind* find_kind(const Optimizer& optimizer) {
  for (const auto& kind : kinds()) {
    if (*kind.optimizer == typeid(optimizer)) {
      return &kind;
    }
  }
  return nullptr;
}

const OptimizerKind* find_kind(const OptimizerOptions& options) {
  for (const auto& kind : kinds()) {
    if (*kind.options == typeid(options)) {
      return &kind;
    }
  }
  return nullptr;
}

OptimizerParamState* state_of(
    Optimizer& optimizer,
    const at::Tensor& parameter) {
  const auto& states = optimizer.state();
  const auto entry = states.find(parameter.unsafeGetTensorImpl());
  return entry == states.end() ? nullptr : entry->second.get();
}

std::string class_name(const std::type_info& type) {
  const std::string full = c10::demangle(type.name());
  const auto colon = full.rfind(':', full.find('<'));
  return colon == std::string::npos ? full : full.substr(colon + 1);
}

} // namespace fp16core::detail
