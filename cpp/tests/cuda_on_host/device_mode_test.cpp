// Steps that the device decides on: what the host waits for, what is sent to
// the device, when messages come, and that the numbers are those of the host.

#include "device_on_host.h"
#include "runtime_on_host.h"

#include "oracle.h"
#include "rule_states.h"

#include <fp16core/optimizer_core.h>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <doctest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

using namespace fp16core;
using fp16core::test::error_of;

namespace {

constexpr const char* kAdam = "torch.optim.adam.Adam";
constexpr const char* kSgd = "torch.optim.sgd.SGD";

// lr, betas, eps, weight_decay, amsgrad, maximize, decoupled
const std::vector<double> kAdamOptions{0.5, 0.5, 0.5, 1e-8, 0, 0, 0, 0};
// lr, momentum, dampening, weight_decay, nesterov, maximize
const std::vector<double> kSgdOptions{0.5, 0.5, 0.25, 0, 0, 0};

DynamicLossScalerOptions scale_options() {
  DynamicLossScalerOptions options;
  options.init_scale = 16.0;
  options.scale_window = 3.0;
  options.min_scale = 4.0;
  return options;
}

at::Tensor parameter(std::vector<double> values, c10::ScalarType type) {
  return at::tensor(values, at::kDouble).to(type).set_requires_grad(true);
}

// A facade around an update rule. Its gradients are given: `x` is the gradient
// of every element, and times the scale it is what a backward pass would leave.
struct Trained {
  std::vector<at::Tensor> parameters;
  const UpdateRule& rule;
  std::shared_ptr<DynamicLossScaler> scaler =
      std::make_shared<DynamicLossScaler>(scale_options());
  OptimizerCore core;
  ParamGroups groups;
  std::vector<RuleOptions> options;
  test::RuleStates state;
  std::vector<std::string> messages;

  explicit Trained(
      const char* optimizer = kAdam,
      bool materialize = true,
      OnMinScale on_min_scale = OnMinScale::kWarn)
      : parameters{
            parameter({1.0, 2.0, 3.0}, at::kHalf),
            parameter({4.0}, at::kFloat),
            parameter({5.0, 6.0}, at::kBFloat16)},
        rule(*find_update_rule(optimizer)),
        core(
            {.owner = "Test",
             .on_min_scale = on_min_scale,
             .materialize_gradients = materialize},
            scaler),
        groups{parameters} {
    for (const auto& a : core.master_weights().ingest(groups)) {
      groups[a.group][a.index] = a.master;
    }
    RuleOptions option;
    option.values = optimizer == kAdam ? kAdamOptions : kSgdOptions;
    option.resolve(rule);
    options.assign(1, option);
  }

  RuleState find(const DueParameter& due) const {
    return test::find_state(state, due);
  }

  // Through autograd, so that the scale is latched where it is read.
  void backward(double x) {
    at::Tensor loss = at::zeros({}, at::kFloat);
    for (const auto& p : parameters) {
      loss = loss + (p.to(at::kFloat) * x).sum();
    }
    core.scale_loss(loss).backward();
    core.update_master_grads();
  }

  // Returns whether the host ran it, as far as it knows.
  bool step(bool may_defer = true) {
    bool ran = core.begin_step(may_defer);
    if (ran) {
      const auto obstacle = core.master_weights().prepare_update(
          rule,
          options,
          [&](const DueParameter& due) { return find(due); });
      REQUIRE_FALSE(obstacle.has_value());
      ran = !core.master_weights().makes_state() || core.settle();
      if (ran) {
        for (auto& made : core.master_weights().run_update(core.deferred())) {
          state[{made.group, made.index}] = std::move(made);
        }
        core.finish_step();
      }
    }
    for (auto& text : core.take_messages()) {
      messages.push_back(std::move(text));
    }
    return ran;
  }

  void iterate(double x, bool may_defer = true) {
    core.zero_grad(true);
    backward(x);
    core.clip_master_grads(1.0);
    step(may_defer);
  }

  std::vector<at::Tensor> weights() const {
    std::vector<at::Tensor> all;
    for (const auto& p : groups[0]) {
      all.push_back(p.detach().clone());
    }
    for (const auto& p : parameters) {
      all.push_back(p.detach().clone());
    }
    return all;
  }
};

void check_same(const Trained& a, const Trained& b) {
  const auto left = a.weights();
  const auto right = b.weights();
  for (std::size_t i = 0; i < left.size(); ++i) {
    CAPTURE(i);
    CHECK(at::equal(left[i], right[i]));
  }
  CHECK(a.core.steps_applied() == b.core.steps_applied());
  CHECK(a.core.steps_skipped() == b.core.steps_skipped());
  CHECK(a.scaler->loss_scale() == b.scaler->loss_scale());
  CHECK(a.scaler->state().cur_iter == b.scaler->state().cur_iter);
}

// Gradients of an iteration; some overflow.
double gradient(int i) {
  return i % 5 == 3 ? 1e6 : 1.0 + i % 3;
}

struct Reset {
  Reset() { reset(); }
  ~Reset() { reset(); }
  static void reset() {
    cuda_on_host::reset_counts();
    cuda_on_host::set_capturing(false);
    cuda_on_host::hold_late_reads(false);
    cuda_on_host::set_stream(nullptr);
  }
};

cudaStream_t stream(std::uintptr_t number) {
  return reinterpret_cast<cudaStream_t>(number);
}

} // namespace

TEST_CASE("a step that the device decides on has the numbers of the host's") {
  const Reset reset;
  for (const char* optimizer : {kAdam, kSgd}) {
    for (const bool materialize : {true, false}) {
      Trained device(optimizer, materialize);
      Trained host(optimizer, materialize);
      for (int i = 0; i < 23; ++i) {
        device.iterate(gradient(i));
        host.iterate(gradient(i), /*may_defer=*/false);
        CHECK(device.core.decided_on_device() == (i > 0));
        CHECK_FALSE(host.core.decided_on_device());
        CHECK(device.core.overflow() == (i % 5 == 3));
      }
      check_same(device, host);
      CHECK(device.core.steps_skipped() == 4);
      CHECK(device.messages == host.messages);
    }
  }
}

TEST_CASE("the host waits for nothing, once there is state") {
  const Reset reset;
  for (const bool materialize : {true, false}) {
    Trained trained(kAdam, materialize);
    trained.iterate(1.0);
    cuda_on_host::reset_counts();
    for (int i = 0; i < 12; ++i) {
      trained.iterate(gradient(i));
    }
    CHECK(cuda_on_host::runtime_counts().reads == 0);
  }
}

TEST_CASE("a step that the host decides on waits once") {
  const Reset reset;
  Trained trained;
  trained.iterate(1.0);
  for (int i = 0; i < 12; ++i) {
    cuda_on_host::reset_counts();
    trained.iterate(gradient(i), /*may_defer=*/false);
    CHECK(cuda_on_host::runtime_counts().reads == 1);
    cuda_on_host::reset_counts();
    // Settled late, as for an optimizer without a rule; or asked for before.
    trained.core.zero_grad(true);
    trained.backward(gradient(i));
    trained.core.clip_master_grads(1.0);
    if (i % 2 == 0) {
      CHECK(trained.core.overflow() == (i % 5 == 3));
      CHECK(trained.core.begin_step(true) == (i % 5 != 3));
      CHECK_FALSE(trained.core.deferred());
    } else {
      CHECK(trained.core.begin_step(true));
      CHECK(trained.core.deferred());
      CHECK(trained.core.settle() == (i % 5 != 3));
      CHECK_FALSE(trained.core.deferred());
    }
    trained.core.finish_step();
    CHECK(cuda_on_host::runtime_counts().reads == 1);
  }
}

TEST_CASE("a skipped first step leaves no state behind") {
  const Reset reset;
  Trained trained(kSgd);
  Trained host(kSgd);
  trained.iterate(1e6);
  CHECK(trained.state.empty());
  CHECK(trained.core.steps_skipped() == 1);
  CHECK(trained.core.steps_applied() == 0);
  host.iterate(1e6, false);
  for (int i = 0; i < 3; ++i) {
    trained.iterate(1.0);
    host.iterate(1.0, false);
  }
  check_same(trained, host);
}

TEST_CASE("what did not change is not sent to the device again") {
  const Reset reset;
  Trained trained;
  // Gradients that stay where they are.
  const auto iterate = [&](double x) {
    trained.core.zero_grad(false);
    trained.backward(x);
    trained.step();
  };
  iterate(1.0);
  iterate(2.0);
  cuda_on_host::reset_counts();
  for (int i = 0; i < 5; ++i) {
    iterate(1.0);
  }
  CHECK(cuda_on_host::runtime_counts().copies == 0);
  // A learning rate is sent, and nothing else: eight numbers.
  trained.options[0].values[0] = 0.25;
  iterate(1.0);
  CHECK(cuda_on_host::runtime_counts().copies == 1);
  CHECK(cuda_on_host::runtime_counts().copied_bytes == 8 * sizeof(double));
}

TEST_CASE("lists are sent again for another stream") {
  const Reset reset;
  Trained trained;
  Trained other;
  for (std::uintptr_t i = 0; i < 6; ++i) {
    cuda_on_host::set_stream(stream(i % 2));
    cuda_on_host::reset_counts();
    cuda_on_host::reset();
    trained.iterate(1.0);
    CHECK(cuda_on_host::runtime_counts().copies > 0);
    for (const auto& launch : cuda_on_host::launches()) {
      CHECK(launch.stream == stream(i % 2));
    }
    cuda_on_host::set_stream(nullptr);
    other.iterate(1.0);
  }
  check_same(trained, other);
}

TEST_CASE("messages come when the device has told") {
  const Reset reset;
  Trained trained;
  trained.iterate(1.0);
  trained.messages.clear();
  cuda_on_host::hold_late_reads(true);
  trained.iterate(1e6);
  trained.iterate(1.0);
  CHECK(trained.messages.empty());
  cuda_on_host::hold_late_reads(false);
  trained.iterate(1.0);
  REQUIRE(trained.messages.size() == 1);
  CHECK(
      trained.messages[0] ==
      "Test.step: gradient overflow, the step is skipped, loss scale 16 -> 8");
  // 16 -> 8 at the overflow, then two clean ones; the third grows.
  trained.iterate(1.0);
  REQUIRE(trained.messages.size() == 2);
  CHECK(trained.messages[1] == "Test.step: loss scale grows, 8 -> 16");
}

TEST_CASE("a skip at the floor names the first gradient with inf, once") {
  const Reset reset;
  Trained trained;
  trained.iterate(1.0);
  trained.messages.clear();
  for (int i = 0; i < 5; ++i) {
    trained.iterate(1e6);
  }
  REQUIRE(trained.messages.size() == 3);
  CHECK(trained.messages[0].ends_with("loss scale 16 -> 8"));
  CHECK(trained.messages[1].ends_with("loss scale 8 -> 4"));
  CHECK(
      trained.messages[2] ==
      "Test.step: gradient overflow with the loss scale at its floor 4, the "
      "step is skipped; first at group 0, index 0: shape [3], float16, cpu, "
      "with 3 inf and 0 NaN");
}

TEST_CASE("a weight that outgrows its model is told late") {
  const Reset reset;
  Trained trained(kSgd);
  trained.iterate(1.0);
  {
    const at::NoGradGuard no_grad;
    trained.groups[0][0].fill_(70000.0);
  }
  trained.messages.clear();
  cuda_on_host::hold_late_reads(true);
  trained.iterate(1.0);
  trained.iterate(1.0);
  CHECK(trained.messages.empty());
  cuda_on_host::hold_late_reads(false);
  trained.iterate(1.0);
  // Once, although it did so in every step; the scale has grown beside it.
  const auto told = std::count_if(
      trained.messages.begin(),
      trained.messages.end(),
      [](const std::string& text) {
        return text.find("beyond the range") != std::string::npos;
      });
  CHECK(told == 1);
}

TEST_CASE("an iteration is captured without a read, and can be repeated") {
  const Reset reset;
  for (const bool materialize : {true, false}) {
    Trained trained(kAdam, materialize);
    Trained host(kAdam, materialize);
    const auto iterate = [](Trained& it, double x) {
      it.core.zero_grad(true);
      it.backward(x);
      it.core.clip_master_grads(1.0, HUGE_VAL);
      it.step();
    };
    iterate(trained, 1.0);
    iterate(host, 1.0);
    const auto expected = trained.messages.size();
    cuda_on_host::set_capturing(true);
    // On the host every launch of a capture runs at once.
    iterate(trained, 2.0);
    CHECK(trained.core.decided_on_device());
    CHECK(trained.messages.size() == expected);
    CHECK(
        error_of<c10::Error>([&] {
          trained.core.steps_applied();
        }).find("must not be read while a CUDA graph is captured") !=
        std::string::npos);
    cuda_on_host::set_capturing(false);
    iterate(host, 2.0);
    // A list of the graph is not taken for one of the launches outside.
    iterate(trained, 1e6);
    iterate(host, 1e6);
    check_same(trained, host);
    CHECK(trained.core.overflow());
  }
}

TEST_CASE("a step that makes state cannot be captured") {
  const Reset reset;
  Trained trained;
  trained.iterate(1e6); // skipped: there is a scale on the device, and no state
  cuda_on_host::set_capturing(true);
  CHECK(error_of<c10::Error>([&] {
          trained.iterate(1.0);
        }).find("apply a step before the capture") != std::string::npos);
}

TEST_CASE("a captured backward pass leaves natives scaled for each update") {
  const Reset reset;
  Trained trained;
  trained.iterate(1.0);
  trained.core.zero_grad(true);
  // A graph that holds the backward pass alone.
  cuda_on_host::set_capturing(true);
  at::Tensor loss = at::zeros({}, at::kFloat);
  for (const auto& p : trained.parameters) {
    loss = loss + (p.to(at::kFloat) * 2.0).sum();
  }
  trained.core.scale_loss(loss).backward();
  cuda_on_host::set_capturing(false);
  const auto gradient = trained.parameters[1].grad();
  const auto scaled = gradient.clone();
  for (int i = 0; i < 3; ++i) {
    gradient.copy_(scaled); // as a replay leaves it
    trained.core.update_master_grads();
    CHECK(gradient.item<float>() == 2.0F);
    trained.step();
  }
}

TEST_CASE("steps are counted on the device where nothing is checked") {
  const Reset reset;
  const auto half = parameter({1.0, 2.0}, at::kHalf);
  OptimizerCore core(
      {.owner = "Test", .check_overflow = false},
      std::make_shared<LossScaler>(8.0));
  core.master_weights().ingest({{half}});
  for (int i = 0; i < 3; ++i) {
    cuda_on_host::reset_counts();
    half.mutable_grad() = at::full_like(half, i == 1 ? HUGE_VAL : 1.0);
    core.update_master_grads();
    CHECK(core.begin_step(true));
    CHECK_FALSE(core.deferred());
    CHECK(core.decided_on_device());
    // A graph would do what follows as often as it runs.
    core.finish_step();
    CHECK(cuda_on_host::runtime_counts().reads == 0);
  }
  CHECK(core.steps_applied() == 3);
  CHECK(core.steps_skipped() == 0);
}

TEST_CASE("an overflow is asked for anew after a graph") {
  const Reset reset;
  Trained trained;
  trained.iterate(1.0);
  cuda_on_host::set_capturing(true);
  trained.iterate(1.0);
  cuda_on_host::set_capturing(false);
  trained.iterate(1e6, /*may_defer=*/false);
  CHECK(trained.core.overflow());
  cuda_on_host::reset_counts();
  CHECK(trained.core.overflow());
  CHECK(cuda_on_host::runtime_counts().reads == 1);
}

TEST_CASE("a first step cannot be captured") {
  const Reset reset;
  Trained trained;
  trained.backward(1.0);
  cuda_on_host::set_capturing(true);
  CHECK(
      error_of<c10::Error>([&] {
        trained.core.begin_step(true);
      }).find("a step must have run before one is captured") !=
      std::string::npos);
}

TEST_CASE("a scale set by hand holds from the next backward pass") {
  const Reset reset;
  Trained trained;
  Trained host;
  for (int i = 0; i < 8; ++i) {
    for (auto* each : {&trained, &host}) {
      each->core.zero_grad(true);
      each->backward(gradient(i));
      if (i % 3 == 1) {
        each->scaler->set_loss_scale(32.0);
      }
      each->step(each == &trained);
    }
  }
  check_same(trained, host);
}

TEST_CASE("gradients that are kept are brought to the present scale") {
  const Reset reset;
  Trained trained;
  Trained host;
  for (int i = 0; i < 7; ++i) {
    for (auto* each : {&trained, &host}) {
      // Nothing is cleared: halves and natives accumulate over scales.
      each->backward(i == 2 ? 1e6 : 1.0);
      each->step(each == &trained);
      if (i == 2) {
        each->core.zero_grad(false);
      }
    }
  }
  check_same(trained, host);
}

TEST_CASE("clipping natives on the device is undone by the next update") {
  const Reset reset;
  Trained trained;
  trained.iterate(1.0);
  trained.core.zero_grad(true);
  trained.backward(2.0);
  trained.core.clip_master_grads(1e-3);
  trained.core.update_master_grads();
  const auto norm = trained.core.clip_master_grads(1e9);
  // Six elements with a gradient of 2.
  CHECK(norm.item<float>() == doctest::Approx(std::sqrt(24.0)).epsilon(1e-6));
  CHECK(trained.parameters[1].grad().item<float>() == 2.0F);
}

TEST_CASE("a learning rate on the device is read there") {
  const Reset reset;
  Trained trained;
  Trained host;
  const auto rate = at::full({}, 0.25, at::kFloat);
  for (int i = 0; i < 4; ++i) {
    if (i == 2) {
      rate.fill_(0.125);
    }
    trained.options[0].values[0] = std::nan("");
    trained.options[0].on_device = {{0, rate}};
    host.options[0].values[0] = i < 2 ? 0.25 : 0.125;
    trained.iterate(1.0);
    host.iterate(1.0, false);
  }
  check_same(trained, host);
  // And a float again.
  trained.options[0].on_device.clear();
  for (auto* each : {&trained, &host}) {
    each->options[0].values[0] = 0.0;
    each->iterate(1.0, each == &trained);
  }
  check_same(trained, host);
}

TEST_CASE("a scaler of the user's own keeps the host deciding") {
  struct Own : DynamicLossScaler {
    using DynamicLossScaler::DynamicLossScaler;
    void update_scale(bool overflow) override {
      ++calls;
      DynamicLossScaler::update_scale(overflow);
    }
    int calls = 0;
  };
  const Reset reset;
  Trained trained;
  const auto own = std::make_shared<Own>(scale_options());
  trained.core.set_loss_scaler(own);
  Trained host;
  for (int i = 0; i < 7; ++i) {
    trained.iterate(gradient(i));
    host.iterate(gradient(i), false);
    CHECK_FALSE(trained.core.decided_on_device());
  }
  CHECK(own->calls == 7);
  CHECK(own->loss_scale() == host.scaler->loss_scale());
  CHECK(at::equal(trained.groups[0][0], host.groups[0][0]));
}

TEST_CASE("a scaler that moves to another core keeps its state") {
  const Reset reset;
  auto first = std::make_unique<Trained>();
  first->iterate(1.0);
  first->iterate(1e6);
  const auto scaler = first->scaler;
  first.reset();
  CHECK(scaler->loss_scale() == 8.0);
  CHECK(scaler->state().cur_iter == 2);
  const DynamicLossScaler copy = *scaler;
  Trained second;
  second.core.set_loss_scaler(scaler);
  second.iterate(1e6);
  CHECK(scaler->loss_scale() == 4.0);
  CHECK(copy.loss_scale() == 8.0);
  scaler->set_storage(nullptr);
  CHECK(scaler->loss_scale() == 4.0);
}

TEST_CASE("an error at the floor is the host's to throw") {
  const Reset reset;
  Trained trained(kAdam, true, OnMinScale::kRaise);
  trained.iterate(1.0);
  trained.iterate(1e6);
  trained.iterate(1e6);
  CHECK_FALSE(trained.core.decided_on_device());
  trained.core.zero_grad(true);
  trained.backward(1e6);
  CHECK_THROWS_AS(trained.core.begin_step(true), LossScaleError);
}

TEST_CASE("counts set by hand replace those of the device") {
  const Reset reset;
  Trained trained;
  trained.iterate(1.0);
  trained.iterate(1.0);
  trained.core.set_step_counts(10, 20);
  trained.iterate(1e6);
  trained.iterate(1.0);
  CHECK(trained.core.steps_applied() == 11);
  CHECK(trained.core.steps_skipped() == 21);
}

TEST_CASE("an overflow outlives a change of the groups") {
  const Reset reset;
  Trained trained;
  trained.iterate(1.0);
  trained.backward(1e6);
  auto groups = trained.groups;
  groups.push_back({parameter({1.0}, at::kHalf)});
  trained.core.master_weights().ingest(groups);
  CHECK(trained.core.overflow());
  CHECK_FALSE(trained.core.begin_step(true));
}
