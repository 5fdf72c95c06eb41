#include <fp16core/fp16_optimizer.h>

#include "oracle.h"
#include "torch_optimizers.h"

#include <ATen/ATen.h>
#include <ATen/Version.h>
#include <torch/nn/module.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/optim/sgd.h>

#include <doctest.h>

#include <functional>
#include <thread>

using namespace fp16core;
using fp16core::test::error_of;
using fp16core::test::ignore;
using fp16core::test::MakeOptimizer;
using fp16core::test::maker;
using torch::optim::AdagradOptions;
using torch::optim::AdamOptions;
using torch::optim::AdamWOptions;
using torch::optim::LBFGSOptions;
using torch::optim::RMSpropOptions;
using torch::optim::SGDOptions;

namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

using Options = FP16OptimizerOptions;
struct Known {
  const char* name;
  MakeOptimizer make;
  // Whether the core has its rule.
  bool fused;
};

std::vector<Known> known_optimizers() {
  using namespace torch::optim;
  return {
      {"SGD", maker<SGD>(SGDOptions(0.1).momentum(0.9).nesterov(true)), true},
      {"plain SGD", maker<SGD>(SGDOptions(0.1).weight_decay(0.01)), true},
      {"Adam", maker<Adam>(AdamOptions(0.02).amsgrad(true)), true},
      {"AdamW", maker<AdamW>(AdamWOptions(0.02)), true},
      {"Adagrad", maker<Adagrad>(AdagradOptions(0.1).lr_decay(0.01)), true},
      {"RMSprop",
       maker<RMSprop>(RMSpropOptions(0.01).momentum(0.5).centered(true)),
       true},
      {"LBFGS", maker<LBFGS>(LBFGSOptions(0.5).max_iter(3)), false},
  };
}

// An optimizer that a user wrote, with a state that only he knows.
struct SignState : torch::optim::OptimizerCloneableParamState<SignState> {
  at::Tensor last;
};

class SignDescent : public torch::optim::Optimizer {
 public:
  explicit SignDescent(std::vector<at::Tensor> parameters)
      : Optimizer(std::move(parameters), std::make_unique<SGDOptions>(0.01)) {}

  at::Tensor step(LossClosure closure = nullptr) override {
    at::Tensor loss;
    if (closure) {
      const at::AutoGradMode enable_grad(true);
      loss = closure();
    }
    const at::NoGradGuard no_grad;
    for (auto& group : param_groups()) {
      for (auto& parameter : group.params()) {
        if (parameter.grad().defined()) {
          parameter.sub_(parameter.grad().sign(), group.options().get_lr());
          auto state = std::make_unique<SignState>();
          state->last = parameter.grad().clone();
          this->state()[parameter.unsafeGetTensorImpl()] = std::move(state);
        }
      }
    }
    return loss;
  }
};

// Two layers, in whatever dtypes their weights are.
struct Net {
  explicit Net(c10::ScalarType type = at::kHalf) {
    at::manual_seed(1);
    weights = {
        at::randn({8, 4}).div(2),
        at::zeros({8}),
        at::randn({1, 8}).div(3)};
    for (auto& weight : weights) {
      weight = weight.to(type).requires_grad_();
    }
  }

  at::Tensor loss(const at::Tensor& x, const at::Tensor& y) const {
    // Products in float32, which rounds nothing but operands and gradients.
    const auto hidden = x.mm(weights[0].to(at::kFloat).t())
                            .add(weights[1].to(at::kFloat))
                            .tanh();
    return hidden.mm(weights[2].to(at::kFloat).t()).sub(y).square().mean();
  }

  std::vector<at::Tensor> weights;
};

struct Batch {
  at::Tensor x;
  at::Tensor y;
};

Batch batch(int number) {
  auto generator = at::detail::createCPUGenerator(100 + number);
  auto x = at::randn({16, 4}, generator);
  return {x, x.sum(1, /*keepdim=*/true).tanh()};
}

at::Tensor copy_of(const at::Tensor& tensor) {
  return tensor.detach().clone();
}

bool same(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  bool equal = a.size() == b.size();
  for (std::size_t i = 0; equal && i < a.size(); ++i) {
    equal = a[i].scalar_type() == b[i].scalar_type() && a[i].equal(b[i]);
  }
  return equal;
}

std::vector<at::Tensor> flat(const ParamGroups& groups) {
  std::vector<at::Tensor> all;
  for (const auto& group : groups) {
    for (const auto& tensor : group) {
      all.push_back(copy_of(tensor));
    }
  }
  return all;
}

// Makes one step; a batch of the number -1 overflows.
void iterate(
    FP16Optimizer& optimizer,
    const Net& net,
    int number,
    double max_norm = 0.0) {
  auto [x, y] = batch(number);
  if (number < 0) {
    y = y.mul(kInf);
  }
  const auto evaluate = [&, x = x, y = y] {
    optimizer.zero_grad();
    const auto loss = net.loss(x, y);
    optimizer.backward(loss);
    if (max_norm > 0) {
      optimizer.clip_master_grads(max_norm);
    }
    return loss;
  };
  if (dynamic_cast<torch::optim::LBFGS*>(&optimizer.optimizer()) != nullptr) {
    optimizer.step(evaluate);
  } else {
    evaluate();
    optimizer.step();
  }
}

Options dynamic_options() {
  return Options().dynamic_loss_scale(true).init_scale(1024).log(ignore);
}

class TunedAdam : public torch::optim::Adam {
 public:
  using torch::optim::Adam::Adam;
  at::Tensor step(LossClosure closure = nullptr) override {
    ++steps;
    return torch::optim::Adam::step(std::move(closure));
  }
  int steps = 0;
};

} // namespace

// ---- what is wrapped, and what is refused ----

TEST_CASE("masters stand in the groups of the wrapped optimizer") {
  const auto half = at::ones({3}, at::kHalf).requires_grad_();
  const auto brain = at::ones({2, 2}, at::kBFloat16).requires_grad_();
  const auto single = at::ones({4}).requires_grad_();
  const auto wide = at::ones({4}, at::kDouble).requires_grad_();
  const auto frozen = at::ones({5}, at::kHalf);
  torch::optim::SGD sgd({half, single, frozen, brain, wide}, 0.1);
  FP16Optimizer optimizer(sgd);
  const auto& params = sgd.param_groups()[0].params();
  CHECK((params[0].scalar_type() == at::kFloat));
  CHECK(params[0].is_leaf());
  CHECK(params[0].requires_grad());
  CHECK(params[1].is_same(single));
  CHECK(params[2].is_same(frozen));
  CHECK(params[3].sizes() == brain.sizes());
  CHECK(params[4].is_same(wide));
  CHECK(optimizer.fp16_groups()[0][1].is_same(brain));
  CHECK(optimizer.fp32_from_fp16_groups()[0][0].is_same(params[0]));
  CHECK(optimizer.fp32_from_fp32_groups()[0].size() == 2);
  CHECK(&optimizer.optimizer() == &sgd);
}

TEST_CASE("what cannot be wrapped is refused before anything is changed") {
  const auto half = at::ones({3}, at::kHalf).requires_grad_();
  const auto complex = at::ones({3}, at::kComplexFloat).requires_grad_();
  torch::optim::SGD sgd({half, complex}, 0.1);
  CHECK(
      error_of<c10::TypeError>([&] { FP16Optimizer optimizer(sgd); }) ==
      "FP16Optimizer: parameters must be plain strided tensors of float16, "
      "bfloat16, float32 or float64, but got group 0, index 1: shape [3], "
      "complex64, cpu");
  CHECK(sgd.param_groups()[0].params()[0].is_same(half));

  torch::optim::SGD good({half}, 0.1);
  CHECK(error_of<std::invalid_argument>([&] {
          FP16Optimizer optimizer(good, Options().static_loss_scale(0));
        }) == "LossScaler: scale must be finite and greater than 0, but got 0");
  CHECK(
      error_of<std::invalid_argument>([&] {
        FP16Optimizer optimizer(
            good,
            Options().dynamic_loss_scale(true).scale_factor(1));
      }) ==
      "DynamicLossScaler: scale_factor must be finite and greater than 1, but "
      "got 1");
  CHECK(
      error_of<std::invalid_argument>([&] {
        FP16Optimizer optimizer(
            good,
            Options().dynamic_loss_scale(true).check_overflow(false));
      }) ==
      "FP16Optimizer: check_overflow must be on with a dynamic loss scale, but "
      "got off");
  CHECK(good.param_groups()[0].params()[0].is_same(half));

  FP16Optimizer optimizer(good);
  CHECK(
      error_of<c10::ValueError>([&] { FP16Optimizer again(good); }) ==
      "FP16Optimizer: the optimizer must not be wrapped already, but got SGD "
      "that is");
}

TEST_CASE("an optimizer is free again when its wrapper is gone") {
  const auto single = at::ones({3}).requires_grad_();
  torch::optim::SGD sgd({single}, 0.1);
  {
    FP16Optimizer optimizer(sgd);
  }
  FP16Optimizer first(sgd);
  FP16Optimizer second(std::move(first));
  CHECK_FALSE(
      error_of<c10::ValueError>([&] { FP16Optimizer third(sgd); }).empty());
}

TEST_CASE("masters whose wrapper is gone are not taken for parameters") {
  const auto half = at::ones({3}, at::kHalf).requires_grad_();
  torch::optim::SGD sgd({half}, 0.1);
  {
    FP16Optimizer optimizer(sgd);
  }
  CHECK(
      error_of<c10::ValueError>([&] { FP16Optimizer optimizer(sgd); }) ==
      "FP16Optimizer: the optimizer must hold parameters of the model, but got "
      "the master weights of a wrapper that is gone");
}

TEST_CASE("looking for state that is not there does no harm") {
  for (const bool fused : {false, true}) {
    const Net net;
    torch::optim::Adam adam(net.weights, AdamOptions(0.01));
    adam.state()[net.weights[0].unsafeGetTensorImpl()];
    FP16Optimizer optimizer(adam, Options().fused(fused));
    const auto key = adam.param_groups()[0].params()[1].unsafeGetTensorImpl();
    if (fused) {
      adam.state()[key]; // torch's own step does not take it
    }
    optimizer.state_dict();
    iterate(optimizer, net, 0);
    CHECK(optimizer.steps_applied() == 1);
    CHECK(adam.state()[key] != nullptr);
  }
}

TEST_CASE("a rule that is insisted on must be there") {
  const auto half = at::ones({3}, at::kHalf).requires_grad_();
  torch::optim::LBFGS lbfgs({half}, 0.1);
  CHECK(
      error_of<c10::ValueError>(
          [&] { FP16Optimizer optimizer(lbfgs, Options().fused(true)); }) ==
      "FP16Optimizer: fused(true) needs a step by an update rule, but got "
      "LBFGS, for which the core has no update rule");
  torch::optim::SGD sgd({half}, 0.1);
  CHECK(
      error_of<c10::ValueError>([&] {
        FP16Optimizer optimizer(
            sgd,
            Options().fused(false).materialize_master_grads(false));
      }) ==
      "FP16Optimizer: materialize_master_grads(false) needs a step by an "
      "update rule, but got fused(false)");
  TunedAdam tuned({half});
  CHECK(
      error_of<c10::ValueError>([&] {
        FP16Optimizer optimizer(
            tuned,
            Options().materialize_master_grads(false));
      }) ==
      "FP16Optimizer: materialize_master_grads(false) needs a step by an "
      "update rule, but got TunedAdam, for which the core has no update rule");
  CHECK(tuned.param_groups()[0].params()[0].is_same(half));
}

TEST_CASE("state that is there moves to the master, in float32") {
  // Adagrad makes its state when it is made.
  const auto half = at::ones({3}, at::kHalf).requires_grad_();
  torch::optim::Adagrad adagrad(
      {half},
      AdagradOptions(0.1).initial_accumulator_value(0.5));
  FP16Optimizer optimizer(adagrad);
  const auto& master = adagrad.param_groups()[0].params()[0];
  CHECK(adagrad.state().size() == 1);
  const auto& state = static_cast<torch::optim::AdagradParamState&>(
      *adagrad.state().at(master.unsafeGetTensorImpl()));
  CHECK((state.sum().scalar_type() == at::kFloat));
  CHECK(state.sum().equal(at::full({3}, 0.5)));
}

TEST_CASE("state of an unknown class on a half parameter is refused") {
  const auto half = at::ones({3}, at::kHalf).requires_grad_();
  const auto single = at::ones({3}).requires_grad_();
  for (const auto& parameter : {half, single}) {
    parameter.mutable_grad() = at::ones_like(parameter);
  }
  SignDescent descent({single, half});
  descent.step();
  CHECK(
      error_of<c10::TypeError>([&] { FP16Optimizer optimizer(descent); }) ==
      "FP16Optimizer: a half parameter must have no state, or state of "
      "torch::optim's own classes, but got SignState for group 0, index 1: "
      "shape [3], float16, cpu");
  CHECK(descent.param_groups()[0].params()[1].is_same(half));
  descent.state().erase(half.unsafeGetTensorImpl());
  FP16Optimizer optimizer(descent); // a native parameter keeps what it has
  CHECK(descent.state().size() == 1);
}

// ---- the numbers ----

TEST_CASE("a step is that of the optimizer on fp32 weights") {
  for (const auto& known : known_optimizers()) {
    for (const auto type : {at::kHalf, at::kBFloat16, at::kFloat}) {
      for (const double scale : {1.0, 4096.0}) {
        CAPTURE(known.name);
        CAPTURE(type);
        CAPTURE(scale);
        const Net net(type);
        auto inner = known.make(net.weights);
        FP16Optimizer optimizer(
            *inner,
            Options().static_loss_scale(scale).fused(false));
        // The oracle: fp32 weights, with gradients rounded as the model's are.
        std::vector<at::Tensor> weights;
        for (const auto& weight : net.weights) {
          weights.push_back(
              weight.detach().to(at::kFloat, false, true).requires_grad_());
        }
        auto plain = known.make(weights);
        for (int i = 0; i < 5; ++i) {
          const auto [x, y] = batch(i);
          const auto evaluate = [&, x = x, y = y] {
            Net rounded(type);
            for (std::size_t k = 0; k < weights.size(); ++k) {
              rounded.weights[k].detach().copy_(weights[k].detach());
            }
            const auto loss = rounded.loss(x, y);
            loss.mul(scale).backward();
            for (std::size_t k = 0; k < weights.size(); ++k) {
              weights[k].mutable_grad() =
                  rounded.weights[k].grad().to(at::kFloat).div(scale);
            }
            return loss;
          };
          plain->step(evaluate);
          const auto own = [&, x = x, y = y] {
            optimizer.zero_grad();
            const auto loss = net.loss(x, y);
            optimizer.backward(loss);
            return loss;
          };
          optimizer.step(own);
        }
        std::vector<at::Tensor> expected;
        for (std::size_t k = 0; k < weights.size(); ++k) {
          CHECK(net.weights[k].equal(weights[k].to(type)));
          expected.push_back(copy_of(weights[k]));
        }
        CHECK(same(flat({inner->param_groups()[0].params()}), expected));
      }
    }
  }
}

TEST_CASE("SGD has the same bits fused and not") {
  // Where torch's loops multiply and add in one rounding: not on the baseline.
  const bool exact = at::get_cpu_capability() != "DEFAULT";
  for (const double momentum : {0.0, 0.9}) {
    CAPTURE(momentum);
    std::vector<std::vector<at::Tensor>> results;
    for (const bool fused : {false, true}) {
      const Net net;
      torch::optim::SGD sgd(net.weights, SGDOptions(0.1).momentum(momentum));
      FP16Optimizer optimizer(sgd, dynamic_options().fused(fused));
      for (int i = 0; i < 20; ++i) {
        iterate(optimizer, net, i % 7 == 3 ? -1 : i, 0.5);
      }
      CHECK(optimizer.steps_skipped() == 3);
      results.push_back(flat(optimizer.fp32_from_fp16_groups()));
    }
    for (std::size_t i = 0; i < results[0].size(); ++i) {
      // Else roundings of 17 updates, and what the model's own make of them.
      CHECK(
          (exact ? results[0][i].equal(results[1][i])
                 : at::allclose(results[0][i], results[1][i], 1e-2, 1e-3)));
    }
  }
}

TEST_CASE("the fused step follows torch's loop closely, state included") {
  for (const auto& known : known_optimizers()) {
    if (!known.fused) {
      continue;
    }
    CAPTURE(known.name);
    std::vector<std::vector<at::Tensor>> results;
    for (const bool fused : {false, true}) {
      const Net net;
      auto inner = known.make(net.weights);
      FP16Optimizer optimizer(*inner, dynamic_options().fused(fused));
      CHECK(
          optimizer.step_mode().starts_with(fused ? "fused " : "generic (") ==
          true);
      for (int i = 0; i < 10; ++i) {
        iterate(optimizer, net, i);
      }
      results.push_back(flat(optimizer.fp32_from_fp16_groups()));
      CHECK(inner->state().size() == (known.name[0] == 'p' ? 0 : 3));
    }
    // Ten updates of a few rounding errors each, of weights around 1, where the
    // model's own rounding to half lets the runs drift apart by some of its
    // ulps.
    for (std::size_t i = 0; i < results[0].size(); ++i) {
      CHECK(at::allclose(results[0][i], results[1][i], 1e-2, 1e-3));
    }
  }
}

TEST_CASE("lean gradients give the same bits") {
  for (const auto& known : known_optimizers()) {
    if (!known.fused) {
      continue;
    }
    CAPTURE(known.name);
    std::vector<std::vector<at::Tensor>> results;
    for (const bool materialize : {false, true}) {
      const Net net;
      auto inner = known.make(net.weights);
      FP16Optimizer optimizer(
          *inner,
          dynamic_options().materialize_master_grads(materialize));
      for (int i = 0; i < 20; ++i) {
        iterate(optimizer, net, i == 5 ? -1 : i, 0.3);
      }
      CHECK(
          inner->param_groups()[0].params()[0].grad().defined() == materialize);
      results.push_back(flat(optimizer.fp32_from_fp16_groups()));
    }
    CHECK(same(results[0], results[1]));
  }
}

TEST_CASE("an overflow skips the step and leaves everything as it is") {
  for (const auto& known : known_optimizers()) {
    CAPTURE(known.name);
    const Net net;
    auto inner = known.make(net.weights);
    FP16Optimizer optimizer(*inner, dynamic_options().min_scale(256));
    iterate(optimizer, net, 0);
    const auto masters = flat(optimizer.fp32_from_fp16_groups());
    const auto model = flat({net.weights});
    const auto applied = optimizer.steps_applied();
    iterate(optimizer, net, -1);
    CHECK(optimizer.overflow());
    CHECK(optimizer.loss_scale() < 1024);
    CHECK(optimizer.steps_applied() == applied);
    CHECK(optimizer.steps_skipped() == 1);
    CHECK(same(flat(optimizer.fp32_from_fp16_groups()), masters));
    CHECK(same(flat({net.weights}), model));
    iterate(optimizer, net, 1);
    CHECK_FALSE(optimizer.overflow());
    CHECK(optimizer.steps_applied() == applied + 1);
    CHECK_FALSE(same(flat({net.weights}), model));
  }
}

TEST_CASE("counts of steps are the optimizer's own, whoever writes them") {
  const Net net;
  torch::optim::Adam adam(net.weights, AdamOptions(0.01));
  FP16Optimizer optimizer(adam, Options().fused(true));
  const auto state_of = [&](std::size_t i) -> auto& {
    return static_cast<torch::optim::AdamParamState&>(*adam.state().at(
        adam.param_groups()[0].params()[i].unsafeGetTensorImpl()));
  };
  iterate(optimizer, net, 0);
  iterate(optimizer, net, 1);
  CHECK(state_of(0).step() == 2);
  // Someone resumes another run's count; both ways must see it.
  const Net twin;
  torch::optim::Adam generic(twin.weights, AdamOptions(0.01));
  FP16Optimizer other(generic, Options().fused(false));
  iterate(other, twin, 0);
  iterate(other, twin, 1);
  for (std::size_t i = 0; i < 3; ++i) {
    state_of(i).step(100);
    static_cast<torch::optim::AdamParamState&>(
        *generic.state().at(
            generic.param_groups()[0].params()[i].unsafeGetTensorImpl()))
        .step(100);
  }
  iterate(optimizer, net, 2);
  iterate(other, twin, 2);
  CHECK(state_of(0).step() == 101);
  for (std::size_t i = 0; i < 3; ++i) {
    // As above: rounding errors of Adam's two forms, and of the model.
    CHECK(
        at::allclose(
            adam.param_groups()[0].params()[i],
            generic.param_groups()[0].params()[i],
            1e-3,
            1e-4));
  }
  // More than float32 can count.
  state_of(0).step((std::int64_t{1} << 24) + 1);
  iterate(optimizer, net, 3);
  CHECK(state_of(0).step() == (std::int64_t{1} << 24) + 2);
}

// ---- the iteration ----

TEST_CASE("losses accumulate in both ways") {
  std::vector<std::vector<at::Tensor>> results;
  for (const bool delayed : {false, true}) {
    const Net net;
    torch::optim::SGD sgd(net.weights, 0.1);
    FP16Optimizer optimizer(sgd, Options().static_loss_scale(128));
    for (int i = 0; i < 2; ++i) {
      const auto [x, y] = batch(i);
      optimizer.backward(net.loss(x, y), !delayed);
    }
    if (delayed) {
      CHECK(
          error_of<c10::Error>([&] { optimizer.step(); })
              .starts_with(
                  "FP16Optimizer.step: gradients must be taken before "
                  "the step by update_master_grads()"));
      optimizer.update_master_grads();
    }
    optimizer.step();
    results.push_back(flat({net.weights}));
  }
  CHECK(same(results[0], results[1]));
}

TEST_CASE("backward keeps graphs and stops at inputs as it is told") {
  const Net net;
  torch::optim::SGD sgd(net.weights, 0.1);
  FP16Optimizer optimizer(sgd);
  const auto [x, y] = batch(0);
  const auto loss = net.loss(x, y);
  optimizer.backward(loss, false, /*retain_graph=*/true);
  optimizer.zero_grad();
  optimizer.backward(
      loss,
      true,
      true,
      false,
      std::vector<at::Tensor>{net.weights[0]});
  CHECK(net.weights[0].grad().defined());
  CHECK_FALSE(net.weights[2].grad().defined());
  optimizer.scale_loss(loss).backward();
  optimizer.update_master_grads();
  CHECK(net.weights[2].grad().defined());
}

TEST_CASE("losses that cannot be differentiated are refused") {
  const Net net;
  torch::optim::SGD sgd(net.weights, 0.1);
  FP16Optimizer optimizer(sgd);
  CHECK(
      error_of<c10::TypeError>([&] { optimizer.backward(at::Tensor()); }) ==
      "FP16Optimizer.backward: loss must be a tensor, but got an undefined "
      "one");
  CHECK(
      error_of<c10::TypeError>(
          [&] { optimizer.backward(at::ones({}, at::kLong)); }) ==
      "FP16Optimizer.backward: loss must be a floating point tensor, but got "
      "int64");
}

TEST_CASE("clipping returns the norm before, on both kinds of gradients") {
  const auto half = at::zeros({2}, at::kHalf).requires_grad_();
  const auto single = at::zeros({1}).requires_grad_();
  torch::optim::SGD sgd({half, single}, 1.0);
  FP16Optimizer optimizer(sgd, Options().static_loss_scale(64));
  const auto loss = half.to(at::kFloat).dot(at::tensor({2.0F, 1.0F})) +
      single.mul(2.0F).sum();
  optimizer.backward(loss);
  CHECK(optimizer.clip_master_grads(1.5).item<float>() == 3.0F);
  const auto gradients = optimizer.master_gradients()[0];
  // In double: 1.5 / (3 + 1e-6), rounded with the product.
  const auto coefficient = static_cast<float>(1.5 / (3 + 1e-6));
  CHECK(gradients[0][0].item<float>() == 2.0F * coefficient);
  CHECK(gradients[1][0].item<float>() == 2.0F * coefficient);
  CHECK(
      error_of<c10::ValueError>([&] { optimizer.clip_master_grads(-1); }) ==
      "FP16Optimizer.clip_master_grads: max_norm must be at least 0, but got "
      "-1");
  optimizer.zero_grad();
  optimizer.backward(half.to(at::kFloat).sum().mul(kInf));
  CHECK(optimizer.clip_master_grads(1.0).item<float>() == -1.0F);
}

TEST_CASE("the report says where the overflow was") {
  const auto clean = at::zeros({3}, at::kHalf).requires_grad_();
  const auto dirty = at::zeros({3}, at::kHalf).requires_grad_();
  torch::optim::SGD sgd({clean, dirty}, 1.0);
  FP16Optimizer optimizer(sgd);
  const auto weights = at::tensor({1.0F, 1e30F, -1e30F});
  optimizer.backward(
      clean.to(at::kFloat).sum() + dirty.to(at::kFloat).dot(weights));
  const auto report = optimizer.gradient_report();
  CHECK(report.overflow);
  REQUIRE(report.first_offender() != nullptr);
  CHECK(report.first_offender()->index == 1);
  CHECK(report.first_offender()->inf_count == 2);
  CHECK(report.tensors[0].norm == std::sqrt(3.0));
}

TEST_CASE("parameters are named, and skipped steps recorded and told") {
  struct Module : torch::nn::Module {
    Module() {
      half = register_parameter("half", at::zeros({1}, at::kHalf));
      native = register_parameter("native", at::zeros({1}));
    }
    at::Tensor half, native;
  } module;
  torch::optim::SGD sgd(module.parameters(), 1.0);
  std::vector<StepRecord> skips;
  FP16Optimizer optimizer(
      sgd,
      Options()
          .static_loss_scale(4)
          .parameter_names(names_of(module))
          .log(ignore)
          .history_size(2)
          .on_skip([&](const StepRecord& record) { skips.push_back(record); }));
  for (const double weight : {1.0, kInf, 2.0}) {
    optimizer.zero_grad();
    optimizer.backward(
        module.half.to(at::kFloat).sum() + module.native.sum() * weight);
    optimizer.step();
  }
  REQUIRE(skips.size() == 1);
  CHECK(skips[0].step == 2);
  CHECK(skips[0].scale == 4.0);
  REQUIRE(skips[0].culprits.size() == 1);
  CHECK(skips[0].culprits[0].name == "native");
  REQUIRE(optimizer.history().size() == 2);
  CHECK(optimizer.history()[1].norm == std::sqrt(5.0));
  CHECK(optimizer.gradient_report().tensors[0].name == "half");
  CHECK(error_of<c10::ValueError>([&] {
          torch::optim::SGD other(module.parameters(), 1.0);
          const FP16Optimizer refused(other, Options().history_size(-1));
        }) == "FP16Optimizer: history_size must be at least 0, but got -1");
}

TEST_CASE("processes of an application decide alike") {
  const auto half = at::zeros({2}, at::kHalf).requires_grad_();
  const auto shared = at::zeros({1}).requires_grad_();
  torch::optim::SGD sgd({half, shared}, 1.0);
  double other = 0.0;
  FP16Optimizer optimizer(
      sgd,
      Options()
          .dynamic_loss_scale(true)
          .init_scale(4)
          .log(ignore)
          .combine([&](double value, Reduction reduction) {
            return reduction == Reduction::kSum ? value + other
                                                : std::max(value, other);
          })
          .counts_in_norm([&](const at::Tensor& parameter) {
            return !parameter.is_same(shared);
          }));
  const auto backward = [&] {
    optimizer.zero_grad();
    optimizer.backward(
        half.to(at::kFloat).dot(at::tensor({3.0F, 4.0F})) + shared.sum());
  };
  backward();
  other = 144.0;
  CHECK(optimizer.clip_master_grads(100.0).item<float>() == 13.0F);
  other = 1.0;
  backward();
  optimizer.step();
  CHECK(optimizer.overflow());
  CHECK(optimizer.loss_scale() == 2.0);
  other = 2.0;
  CHECK_THROWS_AS(backward(), c10::Error);
  CHECK_THROWS_AS(optimizer.backward(at::ones({2})), c10::Error);
}

TEST_CASE("gradients are cleared on masters and model") {
  const Net net;
  torch::optim::SGD sgd(net.weights, 0.1);
  FP16Optimizer optimizer(sgd, Options().fused(false));
  for (const bool to_none : {false, true}) {
    const auto [x, y] = batch(0);
    optimizer.backward(net.loss(x, y));
    optimizer.zero_grad(to_none);
    for (const auto& weights : {net.weights, sgd.param_groups()[0].params()}) {
      for (const auto& weight : weights) {
        CHECK(weight.grad().defined() == !to_none);
        CHECK((to_none || weight.grad().abs().max().item<float>() == 0));
      }
    }
  }
}

TEST_CASE("schedulers and options on the wrapped optimizer take effect") {
  for (const bool fused : {false, true}) {
    const auto half = at::zeros({1}, at::kHalf).requires_grad_();
    torch::optim::SGD sgd({half}, 1.0);
    FP16Optimizer optimizer(sgd, Options().fused(fused));
    torch::optim::StepLR scheduler(sgd, 1, 0.5);
    // torch's schedule in C++ begins one step late.
    for (const double expected : {-1.0, -2.0, -2.5}) {
      optimizer.zero_grad();
      optimizer.backward(half.to(at::kFloat).sum());
      optimizer.step();
      scheduler.step();
      CHECK(half.item<double>() == expected);
    }
  }
}

TEST_CASE("messages go where they are sent") {
  std::vector<std::string> lines;
  const auto half = at::zeros({1500}, at::kHalf).requires_grad_();
  const auto frozen = at::zeros({2, 3});
  torch::optim::SGD sgd({half, frozen}, 1.0);
  FP16Optimizer optimizer(
      sgd,
      Options().dynamic_loss_scale(true).init_scale(4).verbose(true).log(
          [&](const std::string& line) { lines.push_back(line); }));
  REQUIRE(lines.size() == 3);
  CHECK(
      lines[0] ==
      "FP16Optimizer: group 0: 1 half parameters (1,500 elements, 6,000 bytes "
      "of masters), 0 native, 1 frozen");
  CHECK(lines[1] == "  0: [1500] float16, master float32");
  CHECK(lines[2] == "  1: [2, 3] float32, frozen");
  lines.clear();
  optimizer.backward(half.to(at::kFloat).sum().mul(kInf));
  optimizer.step();
  REQUIRE(lines.size() == 1);
  CHECK(
      lines[0] ==
      "FP16Optimizer.step: gradient overflow, the step is skipped, loss scale "
      "4 -> 2");
}

TEST_CASE("the scale is read, set and replaced") {
  const Net net;
  torch::optim::SGD sgd(net.weights, 0.1);
  FP16Optimizer optimizer(sgd, Options().static_loss_scale(8));
  CHECK_FALSE(optimizer.dynamic_loss_scale());
  optimizer.set_loss_scale(16);
  CHECK(optimizer.loss_scale() == 16);
  CHECK_FALSE(error_of<std::invalid_argument>([&] {
                optimizer.set_loss_scale(0);
              }).empty());
  const auto scaler = std::make_shared<DynamicLossScaler>();
  optimizer.set_loss_scaler(scaler);
  CHECK(optimizer.loss_scaler() == scaler);
  CHECK(optimizer.dynamic_loss_scale());
  const Net other;
  torch::optim::SGD second(other.weights, 0.1);
  const FP16Optimizer shared(second, Options().loss_scaler(scaler));
  CHECK(shared.loss_scaler() == scaler);
}

TEST_CASE("a group may be added") {
  const auto first = at::zeros({1}, at::kHalf).requires_grad_();
  const auto second = at::zeros({1}, at::kHalf).requires_grad_();
  torch::optim::SGD sgd({first}, 1.0);
  FP16Optimizer optimizer(sgd);
  optimizer.add_param_group(
      {{second}, std::make_unique<SGDOptions>(SGDOptions(0.25))});
  CHECK((sgd.param_groups()[1].params()[0].scalar_type() == at::kFloat));
  optimizer.backward((first + second).to(at::kFloat).sum());
  optimizer.step();
  CHECK(first.item<float>() == -1.0F);
  CHECK(second.item<float>() == -0.25F);
  CHECK(
      error_of<c10::ValueError>([&] {
        optimizer.add_param_group(torch::optim::OptimizerParamGroup({second}));
      }) ==
      "FP16Optimizer: a parameter must stand in the groups once, but got it "
      "again as group 2, index 0: shape [1], float16, cpu");
  CHECK(sgd.param_groups().size() == 2);
}

TEST_CASE("what others write to the model is noticed") {
  const auto half = at::zeros({2}, at::kHalf).requires_grad_();
  torch::optim::SGD sgd({half}, 1.0);
  FP16Optimizer optimizer(sgd);
  {
    const at::NoGradGuard no_grad;
    half.fill_(3);
  }
  CHECK(optimizer.fp32_from_fp16_groups()[0][0].equal(at::full({2}, 3.0F)));
  static_cast<at::Half*>(half.data_ptr())[0] = 5;
  optimizer.model_params_to_master_params();
  CHECK(optimizer.fp32_from_fp16_groups()[0][0][0].item<float>() == 5);
  {
    const at::NoGradGuard no_grad;
    sgd.param_groups()[0].params()[0].fill_(7);
  }
  optimizer.master_params_to_model_params();
  CHECK(half.equal(at::full({2}, 7, at::kHalf)));
}

// ---- closures ----

TEST_CASE("a closure's overflow is repeated at a lower scale") {
  for (const auto& known : known_optimizers()) {
    CAPTURE(known.name);
    const Net net;
    auto inner = known.make(net.weights);
    FP16Optimizer optimizer(*inner, dynamic_options().init_scale(4294967296.0));
    const auto [x, y] = batch(0);
    int evaluations = 0;
    const auto loss = optimizer.step([&, x = x, y = y] {
      ++evaluations;
      optimizer.zero_grad();
      const auto loss = net.loss(x, y);
      optimizer.backward(loss);
      return loss;
    });
    CHECK(loss.item<float>() > 0);
    CHECK(evaluations > 1);
    CHECK(optimizer.loss_scale() < 4294967296.0);
    CHECK(optimizer.steps_applied() == 1);
  }
}

TEST_CASE("an overflow for good skips a step with a closure, or throws") {
  const auto half = at::ones({2}, at::kHalf).requires_grad_();
  torch::optim::LBFGS lbfgs({half}, LBFGSOptions(1).max_iter(5));
  FP16Optimizer optimizer(lbfgs, Options().on_min_scale(OnMinScale::kContinue));
  int evaluations = 0;
  int overflow_at = 1;
  const auto closure = [&] {
    optimizer.zero_grad();
    auto loss = half.to(at::kFloat).square().sum();
    if (++evaluations >= overflow_at) {
      loss = loss.mul(kInf);
    }
    optimizer.backward(loss);
    return loss;
  };
  CHECK_FALSE(optimizer.step(closure).defined());
  CHECK(optimizer.steps_skipped() == 1);
  CHECK(lbfgs.state().size() <= 1);
  evaluations = 0;
  overflow_at = 2;
  CHECK(error_of<LossScaleError>([&] {
          optimizer.step(closure);
        }).find("group 0, index 0") != std::string::npos);
  CHECK(half.equal(at::ones({2}, at::kHalf)));
}

TEST_CASE("an exception from a closure leaves by itself") {
  const Net net;
  torch::optim::SGD sgd(net.weights, 0.1);
  FP16Optimizer optimizer(sgd);
  CHECK_THROWS_AS(
      optimizer.step([]() -> at::Tensor { throw std::logic_error("own"); }),
      std::logic_error);
  iterate(optimizer, net, 0);
  CHECK(optimizer.steps_applied() == 1);
}

TEST_CASE("an optimizer of a user's own is run as it is") {
  const auto half = at::zeros({2}, at::kHalf).requires_grad_();
  SignDescent descent({half});
  FP16Optimizer optimizer(descent);
  CHECK(
      optimizer.step_mode() ==
      "generic (SignDescent, for which the core has no update rule)");
  optimizer.backward(half.to(at::kFloat).dot(at::tensor({3.0F, -2.0F})));
  optimizer.step();
  CHECK(half.equal(at::tensor({-0.01F, 0.01F}).to(at::kHalf)));
  const Net net;
  TunedAdam tuned(net.weights);
  FP16Optimizer around(tuned);
  iterate(around, net, 0);
  CHECK(tuned.steps == 1);
}

// ---- what torch's own tests ask of its optimizers ----

TEST_CASE(
    "every optimizer learns XOR with a half model" *
    doctest::test_suite("many iterations")) {
  using namespace torch::optim;
  const std::vector<Known> learners{
      {"SGD", maker<SGD>(SGDOptions(0.1).momentum(0.9).nesterov(true)), true},
      {"Adam", maker<Adam>(AdamOptions(0.1)), true},
      {"AdamW", maker<AdamW>(AdamWOptions(0.1)), true},
      {"Adagrad", maker<Adagrad>(AdagradOptions(1.0)), true},
      {"RMSprop", maker<RMSprop>(RMSpropOptions(0.1).centered(true)), true},
      {"LBFGS",
       maker<LBFGS>(LBFGSOptions(0.1).line_search_fn("strong_wolfe")),
       false},
      {"SignDescent",
       [](std::vector<at::Tensor> parameters) {
         return std::make_unique<SignDescent>(std::move(parameters));
       },
       false},
  };
  const auto x =
      at::tensor({0., 0., 0., 1., 1., 0., 1., 1.}, at::kFloat).view({4, 2});
  const auto y = at::tensor({0., 1., 1., 0.}, at::kFloat).view({4, 1});
  for (const auto& learner : learners) {
    for (const auto type : {at::kHalf, at::kBFloat16}) {
      CAPTURE(learner.name);
      CAPTURE(type);
      at::manual_seed(0);
      std::vector<at::Tensor> weights{
          at::randn({8, 2}),
          at::randn({8}),
          at::randn({1, 8}),
          at::randn({1})};
      for (auto& weight : weights) {
        weight = weight.to(type).requires_grad_();
      }
      auto inner = learner.make(weights);
      FP16Optimizer optimizer(*inner, dynamic_options());
      const auto evaluate = [&] {
        optimizer.zero_grad();
        const auto wide = [&](int i) { return weights[i].to(at::kFloat); };
        const auto hidden = x.mm(wide(0).t()).add(wide(1)).sigmoid();
        const auto loss = at::binary_cross_entropy_with_logits(
            hidden.mm(wide(2).t()).add(wide(3)),
            y);
        optimizer.backward(loss);
        return loss;
      };
      double running = 1.0;
      int epoch = 0;
      for (; running > 0.1 && epoch < 3000; ++epoch) {
        running =
            running * 0.99 + optimizer.step(evaluate).item<double>() * 0.01;
      }
      CHECK(running <= 0.1);
    }
  }
}

TEST_CASE("a vector of parameters outside of any module is trained") {
  std::vector<at::Tensor> parameters;
  for (int i = 0; i < 3; ++i) {
    parameters.push_back(at::full({2}, i, at::kHalf).requires_grad_());
  }
  torch::optim::SGD sgd(parameters, 1.0);
  FP16Optimizer optimizer(sgd);
  CHECK(sgd.size() == 3);
  CHECK(sgd.parameters().size() == 3);
  CHECK(static_cast<SGDOptions&>(sgd.defaults()).lr() == 1.0);
  for (const auto& parameter : parameters) {
    parameter.mutable_grad() = at::ones_like(parameter);
  }
  optimizer.update_master_grads();
  optimizer.step();
  for (int i = 0; i < 3; ++i) {
    CHECK(parameters[i].equal(at::full({2}, i - 1, at::kHalf)));
  }
}

TEST_CASE("parameters without gradients stay") {
  const auto with = at::zeros({2}, at::kHalf).requires_grad_();
  const auto without = at::zeros({2}, at::kHalf).requires_grad_();
  for (const auto& known : known_optimizers()) {
    CAPTURE(known.name);
    auto inner = known.make({with, without});
    FP16Optimizer optimizer(*inner);
    optimizer.step([&] {
      optimizer.zero_grad();
      const auto loss = with.to(at::kFloat).sub(1).square().sum();
      optimizer.backward(loss);
      return loss;
    });
    CHECK(without.equal(at::zeros({2}, at::kHalf)));
    CHECK(with.abs().max().item<float>() > 0);
  }
}

TEST_CASE("two optimizers step in two threads") {
  const auto run = [] {
    const Net net;
    torch::optim::AdamW adam(net.weights, AdamWOptions(0.02));
    FP16Optimizer optimizer(adam, dynamic_options());
    for (int i = 0; i < 50; ++i) {
      iterate(optimizer, net, i % 11 == 4 ? -1 : i, 1.0);
    }
    return flat(optimizer.fp32_from_fp16_groups());
  };
  // Net seeds a generator that all threads share, so they take turns with it.
  const auto expected = run();
  std::vector<std::vector<at::Tensor>> results(2);
  std::vector<Net> nets(2);
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([&, t] {
      torch::optim::AdamW adam(nets[t].weights, AdamWOptions(0.02));
      FP16Optimizer optimizer(adam, dynamic_options());
      for (int i = 0; i < 50; ++i) {
        iterate(optimizer, nets[t], i % 11 == 4 ? -1 : i, 1.0);
      }
      results[t] = flat(optimizer.fp32_from_fp16_groups());
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  CHECK(same(results[0], expected));
  CHECK(same(results[1], expected));
}
