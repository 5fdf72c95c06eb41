// The state of a module: its names and their order, and all or nothing back.

#include "oracle.h"

#include <fp16core/state_dict.h>

#include <torch/nn/module.h>

#include <ATen/ATen.h>

#include <doctest.h>

using namespace fp16core;
using fp16core::test::error_of;

namespace {

struct Layer : torch::nn::Module {
  at::Tensor weight, bias, absent, count;

  Layer() {
    weight = register_parameter("weight", at::ones({2, 3}));
    bias = register_parameter("bias", at::zeros({2}, at::kHalf));
    absent = register_parameter("absent", {}, /*requires_grad=*/false);
    count = register_buffer("count", at::zeros({}, at::kLong));
  }
};

struct Model : torch::nn::Module {
  std::shared_ptr<Layer> first, second;
  at::Tensor scale;

  Model() {
    first = register_module("first", std::make_shared<Layer>());
    second = register_module("second", first);
    scale = register_parameter("scale", at::full({1}, 4.0));
  }
};

std::vector<std::string> names(const StateDict& state) {
  std::vector<std::string> all;
  for (const auto& entry : state) {
    all.push_back(entry.key().toStringRef());
  }
  return all;
}

std::string refused(torch::nn::Module& module, const c10::IValue& state) {
  return error_of<c10::ValueError>([&] { load_state_dict(module, state); });
}

} // namespace

TEST_CASE("a new state dict is empty and holds values of any kind") {
  auto dict = make_state_dict();
  CHECK(dict.empty());
  dict.insert("a", 1);
  dict.insert(1, "a");
  CHECK(dict.at("a").toInt() == 1);
  CHECK(dict.at(1).toStringRef() == "a");
}

TEST_CASE("a module's state has Python's names in Python's order") {
  const Model model;
  const auto state = state_dict(model);
  CHECK(
      names(state) ==
      std::vector<std::string>{
          "scale",
          "first.weight",
          "first.bias",
          "first.count",
          "second.weight",
          "second.bias",
          "second.count"});
  const auto weight = state.at("first.weight").toTensor();
  CHECK_FALSE(weight.requires_grad());
  CHECK(weight.is_alias_of(model.first->weight));
  CHECK(state.at("second.weight").toTensor().is_alias_of(weight));
  CHECK(state_dict(torch::nn::Module()).empty());
}

TEST_CASE("a module takes a state over in its own dtypes") {
  Layer layer;
  auto state = make_state_dict();
  state.insert("count", at::full({}, 5.0));
  state.insert("bias", at::full({2}, 0.1, at::kDouble));
  state.insert("weight", at::arange(6.0).reshape({3, 2}).t());
  const auto* before = layer.weight.data_ptr();
  load_state_dict(layer, state);
  CHECK(layer.weight.data_ptr() == before);
  CHECK(layer.weight.equal(at::arange(6.0).reshape({3, 2}).t()));
  CHECK(layer.weight.requires_grad());
  CHECK(layer.bias.equal(at::full({2}, 0.1, at::kHalf)));
  CHECK(layer.count.item<std::int64_t>() == 5);
}

TEST_CASE("a module takes the state of another over") {
  Model from, into;
  from.scale.detach().fill_(9.0);
  from.first->weight.detach().fill_(3.0);
  load_state_dict(into, state_dict(from));
  CHECK(into.scale.equal(from.scale));
  CHECK(into.second->weight.equal(from.first->weight));
}

TEST_CASE("a state that does not fit a module changes nothing") {
  Layer layer;
  const auto with = [](const char* name, const c10::IValue& value) {
    auto state = make_state_dict();
    state.insert("weight", at::full({2, 3}, 7.0));
    state.insert("bias", at::full({2}, 7.0));
    state.insert("count", at::full({}, 7));
    state.insert_or_assign(name, value);
    return state;
  };
  CHECK(
      refused(layer, c10::IValue()) ==
      "load_state_dict: state must be a dict, but got None");
  CHECK(
      refused(layer, make_state_dict()) ==
      "load_state_dict: state must have exactly the names of the module, but "
      "got no 'weight', 'bias', 'count'");
  CHECK(
      refused(layer, with("other", 1)) ==
      "load_state_dict: state must have exactly the names of the module, but "
      "got unexpected 'other'");
  auto both = with("first.bias", at::ones({1}));
  both.insert(3, at::ones({1}));
  CHECK(both.erase("bias") == 1);
  CHECK(
      refused(layer, both) ==
      "load_state_dict: state must have exactly the names of the module, but "
      "got no 'bias' and unexpected 'first.bias', 3");
  CHECK(
      refused(layer, with("count", 7)) ==
      "load_state_dict: state.count must be a tensor, but got 7");
  CHECK(
      refused(layer, with("bias", at::full({2, 1}, 7.0))) ==
      "load_state_dict: state.bias must be a dense tensor of shape [2], but "
      "got a float32 tensor of shape [2, 1]");
  CHECK(
      refused(layer, with("bias", at::full({2}, 7.0).to_sparse())) ==
      "load_state_dict: state.bias must be a dense tensor of shape [2], but "
      "got a Sparse float32 tensor of shape [2]");
  CHECK(
      refused(layer, with("count", at::empty({}, at::device(at::kMeta)))) ==
      "load_state_dict: state.count must be a dense tensor of shape [], but "
      "got a meta float32 tensor of shape []");
  CHECK(layer.weight.equal(at::ones({2, 3})));
  CHECK(layer.bias.equal(at::zeros({2}, at::kHalf)));
  CHECK(layer.count.item<std::int64_t>() == 0);
}
