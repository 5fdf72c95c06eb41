#include <fp16core/state_dict.h>

#include "dict_reader.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace fp16core {

namespace {

void collect(
    const torch::nn::Module& module,
    const std::string& prefix,
    const StateDict& into) {
  const auto insert = [&](const auto& tensors) {
    for (const auto& item : tensors) {
      if (item.value().defined()) {
        into.insert_or_assign(prefix + item.key(), item.value().detach());
      }
    }
  };
  insert(module.named_parameters(/*recurse=*/false));
  insert(module.named_buffers(/*recurse=*/false));
  for (const auto& child : module.named_children()) {
    if (child.value() != nullptr) {
      collect(*child.value(), prefix + child.key() + ".", into);
    }
  }
}

void append(std::string& names, const c10::IValue& name) {
  names += (names.empty() ? "" : ", ") + detail::describe(name);
}

// Returns "no 'a', 'b' and an unexpected 'c'", or nothing if the keys are
// equal.
std::string differing_names(const StateDict& own, const StateDict& given) {
  std::string missing;
  for (const auto& entry : own) {
    if (!given.contains(entry.key())) {
      append(missing, entry.key());
    }
  }
  std::string unexpected;
  for (const auto& entry : given) {
    if (!own.contains(entry.key())) {
      append(unexpected, entry.key());
    }
  }
  std::string text;
  if (!missing.empty()) {
    text = "no " + missing;
  }
  if (!unexpected.empty()) {
    text += (missing.empty() ? "" : " and ") + ("unexpected " + unexpected);
  }
  return text;
}

} // namespace

StateDict make_state_dict() {
  return StateDict(c10::AnyType::get(), c10::AnyType::get());
}

StateDict state_dict(const torch::nn::Module& module) {
  auto state = make_state_dict();
  collect(module, "", state);
  return state;
}

void load_state_dict(torch::nn::Module& module, const c10::IValue& state) {
  const detail::DictReader given(state, "load_state_dict", "state");
  const auto own = state_dict(module);
  const auto differing = differing_names(own, given.values());
  TORCH_CHECK_VALUE(
      differing.empty(),
      given.owner(),
      ": state must have exactly the names of the module, but got ",
      differing);
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;
  for (const auto& entry : own) {
    const auto& name = entry.key().toStringRef();
    auto source = given.tensor(name);
    auto target = entry.value().toTensor();
    if (source.sizes() != target.sizes() || source.layout() != at::kStrided ||
        source.is_meta()) {
      std::ostringstream rule;
      rule << "must be a dense tensor of shape " << target.sizes();
      given.refuse(name, rule.str(), detail::describe(source));
    }
    copies.emplace_back(std::move(target), std::move(source));
  }
  const at::NoGradGuard no_grad;
  for (const auto& [target, source] : copies) {
    target.copy_(source);
  }
}

} // namespace fp16core
