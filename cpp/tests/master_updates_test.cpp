// MasterWeights with update rules: which parameters are updated, what state is
// made, what stands in the way, and gradients that are not materialized.

#include "oracle.h"
#include "rule_states.h"

#include <fp16core/master_weights.h>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <doctest.h>

#include <map>
#include <utility>

using namespace fp16core;
using fp16core::test::error_of;

namespace {

at::Tensor parameter(std::vector<double> values, c10::ScalarType type) {
  return at::tensor(values, at::kDouble).to(type).set_requires_grad(true);
}

void set_grad(const at::Tensor& parameter, std::vector<double> values) {
  parameter.mutable_grad() =
      at::tensor(values, at::kDouble).to(parameter.scalar_type());
}

bool equals(const at::Tensor& tensor, std::vector<double> values) {
  return at::equal(
      tensor.detach().to(at::kDouble).flatten(),
      at::tensor(values, at::kDouble));
}

// MasterWeights with groups, and the state that an inner optimizer would keep.
struct Stepped {
  const UpdateRule& rule;
  MasterWeights weights;
  ParamGroups groups;
  std::vector<RuleOptions> options;
  test::RuleStates state;

  Stepped(
      const char* optimizer,
      std::vector<double> values,
      ParamGroups parameters,
      bool materialize = true)
      : rule(*find_update_rule(optimizer)),
        weights("Test", ModelWrites::kVersion, materialize),
        groups(std::move(parameters)) {
    for (const auto& a : weights.ingest(groups)) {
      groups[a.group][a.index] = a.master;
    }
    RuleOptions option;
    option.values = std::move(values);
    option.resolve(rule);
    options.assign(groups.size(), option);
  }

  RuleState find(const DueParameter& due) const {
    return test::find_state(state, due);
  }

  std::optional<std::string> step() {
    auto obstacle =
        weights.prepare_update(rule, options, [&](const DueParameter& due) {
          return find(due);
        });
    if (!obstacle) {
      for (auto& made : weights.run_update()) {
        state[{made.group, made.index}] = std::move(made);
      }
    }
    return obstacle;
  }
};

constexpr const char* kSgd = "torch.optim.sgd.SGD";
constexpr const char* kAdam = "torch.optim.adam.Adam";

// lr, momentum, dampening, weight_decay, nesterov, maximize
std::vector<double> sgd(double lr, double momentum = 0) {
  return {lr, momentum, 0, 0, 0, 0};
}

// lr, betas, eps, weight_decay, amsgrad, maximize, decoupled
std::vector<double> adam(bool amsgrad = false) {
  return {0.5, 0.5, 0.5, 0, 0, amsgrad ? 1.0 : 0.0, 0, 0};
}

} // namespace

TEST_CASE("an update writes masters, natives and the model in one pass") {
  const auto half = parameter({1.0, 2.0}, at::kHalf);
  const auto bfloat = parameter({1.0}, at::kBFloat16);
  const auto native = parameter({4.0}, at::kFloat);
  const auto wide = parameter({5.0}, at::kDouble);
  const auto idle = parameter({7.0}, at::kHalf);
  Stepped stepped(kSgd, sgd(0.5), {{half, native}, {bfloat, idle, wide}});
  set_grad(half, {8.0, -8.0});
  set_grad(native, {16.0});
  set_grad(bfloat, {8.0});
  set_grad(wide, {24.0});
  stepped.weights.take_gradients(8.0);
  const auto version = half.unsafeGetTensorImpl()->version_counter();
  const auto before = version.current_version();
  const auto idle_before = idle._version();
  CHECK(stepped.step() == std::nullopt);
  CHECK(stepped.state.empty()); // without momentum there is none
  CHECK(equals(stepped.groups[0][0], {0.5, 2.5}));
  CHECK(equals(half, {0.5, 2.5}));
  CHECK(equals(bfloat, {0.5}));
  CHECK(equals(native, {3.0}));
  CHECK(equals(wide, {3.5}));
  CHECK(version.current_version() > before);
  // The core's own writes are not taken for another's, and nothing is stale.
  const auto written = version.current_version();
  stepped.weights.adopt_model_writes();
  stepped.weights.write_model(true);
  CHECK(version.current_version() == written);
  CHECK(idle._version() == idle_before);
  CHECK(equals(half, {0.5, 2.5}));
}

TEST_CASE("a master that changes after an update is stale") {
  const auto half = parameter({1.0}, at::kHalf);
  Stepped stepped(kSgd, sgd(0.5), {{half}});
  set_grad(half, {1.0});
  stepped.weights.take_gradients(1.0);
  CHECK(stepped.step() == std::nullopt);
  const at::NoGradGuard no_grad;
  stepped.groups[0][0].fill_(3.0);
  stepped.weights.write_model(true);
  CHECK(equals(half, {3.0}));
  // Without an update since, everything is written.
  std::fill_n(stepped.groups[0][0].data_ptr<float>(), 1, 4.0F);
  stepped.weights.write_model(true);
  CHECK(equals(half, {4.0}));
}

TEST_CASE("state is made where there is none, like the weight") {
  const auto turned = at::arange(6, at::kHalf)
                          .view({2, 3})
                          .t()
                          .detach()
                          .set_requires_grad(true);
  const auto wide = parameter({1.0}, at::kDouble);
  Stepped stepped(kAdam, adam(true), {{turned, wide}});
  turned.mutable_grad() = at::ones({3, 2}, at::kHalf);
  set_grad(wide, {1.0});
  stepped.weights.take_gradients(1.0);
  CHECK(stepped.step() == std::nullopt);
  REQUIRE(stepped.state.size() == 2);
  const auto& of_half = stepped.state.at({0, 0});
  for (const auto& tensor : of_half.tensors) {
    CHECK((tensor.scalar_type() == at::kFloat));
    CHECK(tensor.strides() == turned.strides());
  }
  CHECK(of_half.counters[0].item<double>() == 1.0);
  CHECK_FALSE(of_half.counters[1].defined());
  CHECK((stepped.state.at({0, 1}).tensors[0].scalar_type() == at::kDouble));
  // The averages are half of the gradient and of its square.
  CHECK(at::equal(of_half.tensors[0], at::full({3, 2}, 0.5)));
  CHECK(at::equal(of_half.tensors[2], at::full({3, 2}, 0.5)));
  stepped.weights.take_gradients(1.0);
  CHECK(stepped.step() == std::nullopt);
  CHECK(of_half.counters[0].item<double>() == 2.0);
  CHECK(at::equal(of_half.tensors[0], at::full({3, 2}, 0.75)));
}

TEST_CASE("counters of either precision advance") {
  const auto half = parameter({1.0}, at::kHalf);
  Stepped stepped(kAdam, adam(), {{half}});
  stepped.options[0].counter_type = at::kDouble;
  set_grad(half, {1.0});
  stepped.weights.take_gradients(1.0);
  CHECK(stepped.step() == std::nullopt);
  auto& counter = stepped.state.at({0, 0}).counters[0];
  CHECK((counter.scalar_type() == at::kDouble));
  CHECK(stepped.step() == std::nullopt);
  CHECK(counter.item<double>() == 2.0);
  counter = counter.to(at::kFloat);
  CHECK(stepped.step() == std::nullopt);
  CHECK(counter.item<double>() == 3.0);
}

TEST_CASE("what stands in the way is named, and nothing is changed") {
  const auto half = parameter({1.0, 2.0}, at::kHalf);
  Stepped stepped(kAdam, adam(), {{half}});
  set_grad(half, {1.0, 1.0});
  stepped.weights.take_gradients(1.0);
  REQUIRE(stepped.step() == std::nullopt);
  const std::string where = "group 0, index 0: shape [2], float16, cpu";
  const auto good = stepped.state.at({0, 0});
  const auto master = stepped.groups[0][0].detach().clone();
  const auto obstacle = [&](const char* text) {
    const auto found = stepped.step();
    REQUIRE(found.has_value());
    CHECK(*found == text + where);
    CHECK(at::equal(stepped.groups[0][0], master));
    CHECK(good.counters[0].item<double>() == 1.0);
    stepped.state.at({0, 0}) = good;
  };
  auto& state = stepped.state.at({0, 0});
  state.tensors[1] = good.tensors[1].to(at::kHalf);
  obstacle("exp_avg_sq of shape [2], float16, cpu for ");
  state.tensors[0] = at::zeros({3});
  obstacle("exp_avg of shape [3], float32, cpu for ");
  state.counters[0] = at::zeros({2});
  obstacle("step of shape [2], float32, cpu for ");
  state.counters[0] = at::zeros({}, at::kLong);
  obstacle("step of shape [], int64, cpu for ");
  stepped.groups[0][0].mutable_grad() = at::eye(2)[0].to_sparse();
  obstacle("a sparse gradient for ");
  stepped.groups[0][0].mutable_grad() = at::ones({2}, at::kHalf);
  obstacle("a gradient of another kind for ");
  // amsgrad was off when the state was made.
  stepped.groups[0][0].mutable_grad() = at::ones({2});
  stepped.options[0].values = adam(true);
  stepped.options[0].resolve(stepped.rule);
  const auto found = stepped.weights.prepare_update(
      stepped.rule,
      stepped.options,
      [&](const DueParameter& due) {
        auto none = stepped.find(due);
        none.tensors[2] = nullptr;
        return none;
      });
  CHECK(found == "no max_exp_avg_sq for " + where);
}

TEST_CASE("an update must be prepared") {
  const auto half = parameter({1.0}, at::kHalf);
  Stepped stepped(kSgd, sgd(1.0), {{half}});
  const auto run = [&] { stepped.weights.run_update(); };
  const std::string text =
      "Test.run_update: prepare_update must come first, but got none that "
      "found "
      "no obstacle";
  CHECK(error_of<c10::Error>(run) == text);
  set_grad(half, {1.0});
  stepped.weights.take_gradients(1.0);
  CHECK(stepped.step() == std::nullopt);
  CHECK(error_of<c10::Error>(run) == text);
  CHECK(equals(half, {0.0}));
}

TEST_CASE("a native parameter with gaps has no update by rule") {
  const auto gapped =
      at::zeros({4}).slice(0, 0, 4, 2).detach().set_requires_grad(true);
  Stepped stepped(kSgd, sgd(1.0), {{gapped}});
  gapped.mutable_grad() = at::ones({2});
  stepped.weights.take_gradients(1.0);
  CHECK(
      stepped.step() ==
      "gaps in the memory of group 0, index 0: shape [2], float32, cpu");
}

TEST_CASE("elements pair by index whatever the layouts") {
  const auto values = at::arange(6, at::kFloat).view({2, 3});
  for (const bool materialize : {true, false}) {
    // A model with gaps, a gradient turned, a native whose gradient is turned.
    const auto gapped = at::zeros({2, 6}, at::kHalf)
                            .slice(1, 0, 6, 2)
                            .detach()
                            .set_requires_grad(true);
    const auto native = at::zeros({2, 3}).set_requires_grad(true);
    Stepped stepped(kSgd, sgd(1.0), {{gapped, native}}, materialize);
    gapped.mutable_grad() = values.t().contiguous().t().to(at::kHalf).mul(4.0);
    native.mutable_grad() = values.t().contiguous().t().mul(4.0);
    stepped.weights.take_gradients(4.0);
    CAPTURE(materialize);
    CHECK(stepped.step() == std::nullopt);
    CHECK(at::equal(gapped, -values.to(at::kHalf)));
    CHECK(at::equal(stepped.groups[0][0], -values));
    CHECK(at::equal(native, -values));
  }
}

TEST_CASE("a weight beyond the half range is told once") {
  const auto half = parameter({65000.0}, at::kHalf);
  Stepped stepped(kSgd, sgd(1.0), {{half}});
  set_grad(half, {-1000.0});
  stepped.weights.take_gradients(1.0);
  CHECK(stepped.step() == std::nullopt);
  CHECK(stepped.weights.take_new_saturations().size() == 1);
  CHECK(std::isinf(half.item<double>()));
  CHECK(stepped.step() == std::nullopt);
  CHECK(stepped.weights.take_new_saturations().empty());
}

// ---- gradients that are not materialized ----

TEST_CASE("without master gradients the update gives the same bits") {
  at::manual_seed(5);
  const auto values = at::randn({300}).mul(8.0).to(at::kHalf);
  const auto gradient = at::randn({300}).mul(50.0).to(at::kHalf);
  std::vector<at::Tensor> results;
  std::vector<double> norms;
  for (const bool materialize : {true, false}) {
    const auto half = values.clone().set_requires_grad(true);
    const auto native = values.to(at::kFloat).set_requires_grad(true);
    Stepped stepped(kAdam, adam(), {{half, native}}, materialize);
    for (int i = 0; i < 3; ++i) {
      half.mutable_grad() = gradient.clone();
      native.mutable_grad() = gradient.to(at::kFloat);
      stepped.weights.take_gradients(3.0);
      for (const double p : {2.0, 1.0, 3.0, 0.0, HUGE_VAL, -HUGE_VAL}) {
        const double norm = stepped.weights.gradient_norm(p);
        norms.push_back(norm);
        stepped.weights.scale_gradients(0.7);
      }
      const auto seen = stepped.weights.master_gradients();
      results.push_back(seen[0][0].clone());
      CHECK(stepped.groups[0][0].mutable_grad().defined() == materialize);
      CHECK(stepped.step() == std::nullopt);
    }
    results.push_back(stepped.groups[0][0].detach());
    results.push_back(half.detach());
    results.push_back(native.detach());
  }
  const auto half = results.size() / 2;
  for (std::size_t i = 0; i < half; ++i) {
    CHECK(at::equal(results[i], results[half + i]));
    CHECK(norms[i] == norms[norms.size() / 2 + i]);
  }
}

TEST_CASE("a gradient counts once it was taken, until it is dropped") {
  const auto half = parameter({1.0}, at::kHalf);
  Stepped stepped(kSgd, sgd(1.0, 0.5), {{half}}, false);
  set_grad(half, {1.0});
  CHECK_FALSE(stepped.weights.master_gradients()[0][0].defined());
  CHECK(stepped.step() == std::nullopt);
  CHECK(equals(half, {1.0}));
  stepped.weights.take_gradients(2.0);
  CHECK(equals(stepped.weights.master_gradients()[0][0], {0.5}));
  CHECK_FALSE(stepped.weights.lost_gradient().has_value());
  CHECK(stepped.step() == std::nullopt);
  CHECK(equals(half, {0.5}));
  // Zeroed by its owner it is a gradient of zeros: momentum goes on.
  stepped.weights.zero_grad(false);
  CHECK_FALSE(stepped.weights.lost_gradient().has_value());
  CHECK(stepped.step() == std::nullopt);
  CHECK(equals(half, {0.25}));
  stepped.weights.zero_grad(true);
  CHECK_FALSE(stepped.weights.lost_gradient().has_value());
  CHECK(stepped.step() == std::nullopt);
  CHECK(equals(half, {0.25}));
}

TEST_CASE("a taken gradient that someone cleared is missed") {
  for (const bool drop : {false, true}) {
    const auto half = parameter({1.0}, at::kHalf);
    Stepped stepped(kSgd, sgd(1.0), {{half}}, false);
    set_grad(half, {1.0});
    stepped.weights.take_gradients(1.0);
    if (drop) {
      half.mutable_grad().reset();
    } else {
      half.mutable_grad().zero_();
    }
    REQUIRE(stepped.weights.lost_gradient().has_value());
    CHECK(stepped.weights.lost_gradient()->parameter.is_same(half));
  }
}

TEST_CASE("sparse gradients need master gradients") {
  const auto half = parameter({1.0, 2.0}, at::kHalf);
  Stepped stepped(kSgd, sgd(1.0), {{half}}, false);
  half.mutable_grad() = at::eye(2)[0].to(at::kHalf).to_sparse();
  CHECK(
      error_of<c10::NotImplementedError>(
          [&] { stepped.weights.take_gradients(1.0); }) ==
      "Test.update_master_grads: gradients must be strided with "
      "materialize_master_grads=False, but got Sparse for group 0, index 0: "
      "shape [2], float16, cpu");
}

TEST_CASE("a gradient set on a master stands in the way") {
  const auto half = parameter({1.0}, at::kHalf);
  Stepped stepped(kSgd, sgd(1.0), {{half}}, false);
  set_grad(half, {1.0});
  stepped.weights.take_gradients(1.0);
  stepped.groups[0][0].mutable_grad() = at::ones({1});
  CHECK(
      stepped.step() ==
      "a gradient set on the master of group 0, index 0: shape [1], float16, "
      "cpu");
}
