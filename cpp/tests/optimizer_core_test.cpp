// OptimizerCore: the phases of a step, alone and around torch::optim::SGD as a
// facade drives them.

#include "oracle.h"

#include <fp16core/optimizer_core.h>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <torch/optim/sgd.h>

#include <doctest.h>

using namespace fp16core;
using fp16core::test::error_of;

namespace {

at::Tensor parameter(std::vector<double> values, c10::ScalarType type) {
  return at::tensor(values, at::kDouble).to(type).set_requires_grad(true);
}

std::shared_ptr<LossScaler> fixed(double scale) {
  return std::make_shared<LossScaler>(scale);
}

std::shared_ptr<DynamicLossScaler> dynamic(
    const DynamicLossScalerOptions& options) {
  return std::make_shared<DynamicLossScaler>(options);
}

bool equals(const at::Tensor& tensor, std::vector<double> values) {
  return at::equal(
      tensor.detach().to(at::kDouble).flatten(),
      at::tensor(values, at::kDouble));
}

// The least that a facade does around an optimizer of LibTorch.
class Facade {
 public:
  Facade(
      const std::vector<at::Tensor>& parameters,
      torch::optim::SGDOptions sgd,
      std::shared_ptr<LossScaler> scaler,
      OptimizerCoreOptions options = {})
      : inner_(parameters, sgd), core_(std::move(options), std::move(scaler)) {
    ingest();
  }

  OptimizerCore& core() { return core_; }

  std::vector<at::Tensor>& visible() {
    return inner_.param_groups()[0].params();
  }

  void backward(const at::Tensor& loss) { core_.scale_loss(loss).backward(); }

  void update() {
    ingest();
    core_.update_master_grads();
  }

  bool step() {
    ingest();
    if (!core_.begin_step()) {
      return false;
    }
    inner_.step();
    core_.finish_step();
    return true;
  }

 private:
  void ingest() {
    ParamGroups groups;
    for (auto& group : inner_.param_groups()) {
      groups.push_back(group.params());
    }
    for (const auto& a : core_.master_weights().ingest(groups)) {
      inner_.param_groups()[a.group].params()[a.index] = a.master;
    }
  }

  torch::optim::SGD inner_;
  OptimizerCore core_;
};

// A half (or other) weight under a loss whose gradient is `gradient`.
struct OneWeight {
  at::Tensor weight;
  Facade facade;

  explicit OneWeight(
      std::shared_ptr<LossScaler> scaler,
      OptimizerCoreOptions options = {},
      c10::ScalarType type = at::kHalf)
      : weight(parameter({1.0}, type)),
        facade(
            {weight},
            torch::optim::SGDOptions(0.5),
            std::move(scaler),
            std::move(options)) {}

  void backward(double gradient) {
    facade.backward((weight.to(at::kDouble) * gradient).sum().to(at::kFloat));
  }

  bool iterate(double gradient) {
    facade.core().zero_grad(false);
    backward(gradient);
    facade.update();
    return facade.step();
  }

  at::Tensor& gradient() { return facade.visible()[0].mutable_grad(); }
};

constexpr double kTooLarge = 1e9; // times any scale here: inf in half

} // namespace

// ---- trajectories ----

TEST_CASE("SGD with masters equals a hand-written loop, bit for bit") {
  for (const auto type : {at::kHalf, at::kBFloat16}) {
    CAPTURE(std::string(c10::toString(type)));
    const auto options =
        torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.01);
    const auto start = at::arange(12, at::kFloat).mul(0.37).cos().view({4, 3});
    const auto bias = at::arange(4, at::kFloat).mul(0.11);
    const auto input = at::arange(15, at::kFloat).mul(0.7).sin().view({5, 3});
    const auto loss_of = [&](const at::Tensor& w, const at::Tensor& b, int i) {
      // The fifth loss is beyond every scale that half can bear.
      const double weight = i == 4 ? 1e9 : 1.0 + i;
      const auto out = at::linear(input.to(at::kFloat), w.to(at::kFloat), b);
      return out.square().mean() * weight;
    };

    const auto w = start.to(type).set_requires_grad(true);
    const auto b = bias.clone().set_requires_grad(true);
    auto scaler = dynamic({.init_scale = 1024.0, .scale_window = 4.0});
    Facade facade({w, b}, options, scaler);

    // By hand: fp32 copies in a plain optimizer, gradients divided by the
    // scale.
    const auto hand_master =
        start.to(type).to(at::kFloat).set_requires_grad(true);
    const auto hand_bias = bias.clone().set_requires_grad(true);
    torch::optim::SGD hand({hand_master, hand_bias}, options);
    double scale = 1024.0;
    int since_overflow = 1;
    int skipped = 0;

    for (int i = 0; i < 12; ++i) {
      CAPTURE(i);
      facade.core().zero_grad(true);
      facade.backward(loss_of(w, b, i));
      facade.update();
      facade.step();

      const auto model = hand_master.detach().to(type).set_requires_grad(true);
      hand_bias.mutable_grad().reset();
      (loss_of(model, hand_bias, i) * scale).backward();
      if (model.grad().isfinite().all().item<bool>() &&
          hand_bias.grad().isfinite().all().item<bool>()) {
        hand_master.mutable_grad() = model.grad().to(at::kFloat) / scale;
        hand_bias.mutable_grad() = hand_bias.grad() / scale;
        hand.step();
        scale *= since_overflow % 4 == 0 ? 2.0 : 1.0;
        ++since_overflow;
      } else {
        ++skipped;
        scale /= 2.0;
        since_overflow = 1;
      }
      REQUIRE(at::equal(facade.visible()[0], hand_master));
      REQUIRE(at::equal(b, hand_bias));
      REQUIRE(at::equal(w, hand_master.detach().to(type)));
      REQUIRE(scaler->loss_scale() == scale);
    }
    // bf16 has the range of fp32 and bears the fifth loss.
    CHECK(skipped == (type == at::kHalf ? 1 : 0));
    CHECK(facade.core().steps_skipped() == skipped);
    CHECK(facade.core().steps_applied() == 12 - skipped);
  }
}

TEST_CASE("updates too small for half add up in the master") {
  OneWeight one(fixed(1.0));
  for (int i = 0; i < 8; ++i) {
    REQUIRE(one.iterate(-0x1p-12));
  }
  CHECK(one.facade.visible()[0].item<float>() == 1.0F + 8 * 0x1p-13F);
  CHECK(one.weight.item<float>() == 1.0F + 0x1p-10F);
}

// ---- the scale ----

TEST_CASE("a loss is multiplied by the scale in float32 or float64") {
  OptimizerCore core({}, fixed(8.0));
  const auto half = at::full({}, 3.0, at::kHalf).set_requires_grad(true);
  auto scaled = core.scale_loss(half);
  CHECK((scaled.scalar_type() == at::kFloat));
  CHECK(scaled.item<float>() == 24.0F);
  scaled.backward();
  CHECK(half.grad().item<float>() == 8.0F);
  const auto wide = at::full({1}, 0.1, at::kDouble).set_requires_grad(true);
  scaled = core.scale_loss(wide);
  CHECK((scaled.scalar_type() == at::kDouble));
  CHECK(scaled.item<double>() == 0.1 * 8.0);
}

TEST_CASE("losses that cannot be differentiated are refused") {
  OptimizerCore core({}, fixed(8.0));
  CHECK(
      error_of<c10::Error>(
          [&] { core.scale_loss(at::ones({2}).set_requires_grad(true)); }) ==
      "FP16_Optimizer.backward: loss must be a scalar, but got shape [2]");
  CHECK(
      error_of<c10::Error>([&] { core.scale_loss(at::ones({})); }) ==
      "FP16_Optimizer.backward: loss must require grad, but got one without a "
      "graph");
  CHECK(
      error_of<c10::TypeError>(
          [&] { core.scale_loss(at::ones({}, at::kLong)); })
          .find(
              "FP16_Optimizer.backward: loss must be a floating point tensor, "
              "but got ") == 0);
}

TEST_CASE("the scale of the backward pass is the one that unscales") {
  for (const auto type : {at::kHalf, at::kFloat}) {
    OneWeight one(fixed(8.0), {}, type);
    one.backward(1.0);
    one.facade.core().loss_scaler()->set_loss_scale(32.0);
    one.backward(2.0); // with 8 still
    one.facade.update();
    CHECK(one.gradient().item<float>() == 3.0F);
    one.facade.update(); // no backward in between: the same
    CHECK(one.gradient().item<float>() == 3.0F);
    one.backward(1.0); // with 32, onto gradients that were made with 8
    one.facade.update();
    CHECK(one.gradient().item<float>() == 4.0F);
  }
}

TEST_CASE("a scaler may be put in the place of another") {
  OneWeight one(fixed(8.0));
  one.backward(1.0);
  const auto other = dynamic({.init_scale = 2.0});
  one.facade.core().set_loss_scaler(other);
  CHECK(one.facade.core().loss_scaler() == other);
  one.facade.update();
  CHECK(one.gradient().item<float>() == 1.0F);
  CHECK_THROWS_AS(
      one.facade.core().set_loss_scaler(nullptr),
      std::invalid_argument);
  CHECK(one.facade.core().loss_scaler() == other);
}

TEST_CASE("a scaler of one's own is driven through its virtual functions") {
  class Counting final : public LossScaler {
   public:
    double loss_scale() const override { return 4.0; }
    void update_scale(bool overflow) override { seen.push_back(overflow); }
    bool dynamic() const override { return true; }
    bool at_floor() const override { return false; }
    std::vector<bool> seen;
  };
  const auto scaler = std::make_shared<Counting>();
  OneWeight one(scaler);
  CHECK(one.iterate(1.0));
  CHECK_FALSE(one.iterate(kTooLarge));
  CHECK(one.iterate(1.0));
  CHECK(scaler->seen == std::vector<bool>{false, true, false});
  CHECK(equals(one.weight, {0.0}));
}

TEST_CASE("a dynamic scale needs the check for overflow") {
  const OptimizerCoreOptions unchecked{.check_overflow = false};
  CHECK(
      error_of<std::invalid_argument>(
          [&] { OptimizerCore(unchecked, dynamic({})); }) ==
      "FP16_Optimizer: check_overflow must be on with a dynamic loss scale, "
      "but "
      "got off");
  OptimizerCore core(unchecked, fixed(1.0));
  CHECK_THROWS_AS(core.set_loss_scaler(dynamic({})), std::invalid_argument);
}

// ---- overflow ----

TEST_CASE("an overflow skips the step and lowers the scale once") {
  const auto scaler = dynamic({.init_scale = 64.0});
  OneWeight one(scaler);
  auto& core = one.facade.core();
  CHECK(one.iterate(1.0));
  const auto master = one.facade.visible()[0].detach().clone();
  CHECK_FALSE(one.iterate(kTooLarge));
  CHECK(core.overflow());
  CHECK(scaler->loss_scale() == 32.0);
  // A second step without another update changes nothing more.
  CHECK_FALSE(one.facade.step());
  CHECK(scaler->loss_scale() == 32.0);
  CHECK(scaler->state().cur_iter == 2);
  CHECK(core.steps_skipped() == 1);
  CHECK(core.steps_applied() == 1);
  CHECK(at::equal(one.facade.visible()[0], master));
  CHECK(equals(one.weight, {0.5}));
  CHECK(one.iterate(1.0));
  CHECK_FALSE(core.overflow());
  CHECK(equals(one.weight, {0.0}));
}

TEST_CASE("unchecked, inf reaches the inner optimizer") {
  OneWeight one(fixed(1.0), {.check_overflow = false});
  CHECK(one.iterate(kTooLarge));
  CHECK_FALSE(one.facade.core().overflow());
  CHECK(std::isinf(one.weight.item<float>()));
}

TEST_CASE("a step skipped at the floor warns once a streak, or raises") {
  const auto warnings = [](Facade& facade) {
    int count = 0;
    for (const auto& message : facade.core().take_messages()) {
      count += message.find("at its floor") != std::string::npos ? 1 : 0;
    }
    return count;
  };
  for (const bool quiet : {false, true}) {
    OneWeight one(
        fixed(2.0),
        {.on_min_scale = quiet ? OnMinScale::kContinue : OnMinScale::kWarn});
    CHECK_FALSE(one.iterate(kTooLarge));
    CHECK_FALSE(one.iterate(kTooLarge));
    CHECK(warnings(one.facade) == (quiet ? 0 : 1));
    CHECK(one.iterate(1.0));
    CHECK_FALSE(one.iterate(kTooLarge));
    CHECK(warnings(one.facade) == (quiet ? 0 : 1));
  }
  OneWeight strict(fixed(2.0), {.on_min_scale = OnMinScale::kRaise});
  CHECK(
      error_of<LossScaleError>([&] { strict.iterate(kTooLarge); }) ==
      "FP16_Optimizer.step: gradient overflow with the loss scale at its floor "
      "2, the step is skipped; first at group 0, index 0: shape [1], float16, "
      "cpu, with 1 inf and 0 NaN");
  CHECK(strict.facade.core().steps_skipped() == 1);
  CHECK(equals(strict.weight, {1.0}));
}

TEST_CASE("messages tell what the scale does, and are handed out once") {
  const auto scaler =
      dynamic({.init_scale = 64.0, .scale_window = 2.0, .delayed_shift = 2});
  OneWeight one(scaler);
  const auto next = [&](double gradient) {
    one.iterate(gradient);
    std::string text;
    for (const auto& message : one.facade.core().take_messages()) {
      text += message;
    }
    CHECK(one.facade.core().take_messages().empty());
    return text;
  };
  CHECK(
      next(kTooLarge) ==
      "FP16_Optimizer.step: gradient overflow, the step is skipped, tolerated: "
      "loss scale stays at 64, and so it will for 0 more");
  CHECK(
      next(kTooLarge) ==
      "FP16_Optimizer.step: gradient overflow, the step is skipped, loss scale "
      "64 -> 32");
  CHECK(next(0.0).empty());
  CHECK(next(0.0) == "FP16_Optimizer.step: loss scale grows, 32 -> 64");
}

// ---- order ----

TEST_CASE("a step with gradients that nothing has taken is refused") {
  OneWeight one(fixed(2.0));
  one.backward(1.0);
  const auto text = error_of<c10::Error>([&] { one.facade.step(); });
  for (const char* name :
       {"update_master_grads()",
        "backward(loss)",
        "group 0, index 0: shape [1], float16, cpu"}) {
    CAPTURE(name);
    CHECK(text.find(name) != std::string::npos);
  }
  CHECK(equals(one.weight, {1.0}));
  one.facade.update();
  CHECK(one.facade.step());
  CHECK(equals(one.weight, {0.5}));
}

TEST_CASE("a step without gradients runs the inner step and no counter") {
  const auto scaler = dynamic({.init_scale = 2.0});
  OneWeight one(scaler);
  CHECK(one.facade.step());
  CHECK(scaler->state().cur_iter == 0);
  CHECK(equals(one.weight, {1.0}));
  CHECK(one.facade.core().steps_applied() == 1);
}

TEST_CASE("an update from its two halves gives the same gradient") {
  for (const auto type : {at::kHalf, at::kFloat}) {
    OneWeight one(fixed(8.0), {}, type);
    one.backward(3.0);
    one.facade.core().copy_gradients();
    CHECK(one.gradient().item<float>() == 24.0F);
    one.facade.core().downscale_gradients();
    CHECK(one.gradient().item<float>() == 3.0F);
    one.facade.update();
    CHECK(one.gradient().item<float>() == 3.0F);
  }
}

// ---- clipping ----

TEST_CASE("clipping returns the norm before, and torch's coefficient") {
  for (const auto type : {at::kHalf, at::kFloat, at::kDouble}) {
    CAPTURE(std::string(c10::toString(type)));
    OneWeight one(fixed(4.0), {}, type);
    one.backward(8.0);
    one.facade.update();
    const auto norm = one.facade.core().clip_master_grads(2.0);
    CHECK(norm.dim() == 0);
    CHECK((norm.scalar_type() == at::kFloat));
    CHECK(norm.item<float>() == 8.0F);
    const double coefficient = 2.0 / (8.0 + 1e-6);
    CHECK(
        one.gradient().item<double>() ==
        (type == at::kDouble
             ? 8.0 * coefficient
             : static_cast<float>(8.0 * static_cast<float>(coefficient))));
    // Within the bound nothing is touched.
    const auto before = one.gradient().item<double>();
    one.facade.core().clip_master_grads(10.0);
    CHECK(one.gradient().item<double>() == before);
    // The next update undoes it.
    one.facade.update();
    CHECK(one.gradient().item<double>() == 8.0);
  }
}

TEST_CASE("clipping after an overflow touches nothing") {
  OneWeight one(fixed(4.0));
  one.backward(kTooLarge);
  one.facade.update();
  CHECK(one.facade.core().clip_master_grads(1.0).item<float>() == -1.0F);
  CHECK(std::isinf(one.gradient().item<float>()));
}

TEST_CASE(
    "a norm beyond float32 is returned as inf, and clipped all the same") {
  OneWeight one(fixed(1.0), {}, at::kDouble);
  one.weight.mutable_grad() = at::full({1}, 1e50, at::kDouble);
  one.facade.update();
  const auto norm = one.facade.core().clip_master_grads(2.0);
  CHECK(norm.item<float>() == std::numeric_limits<float>::infinity());
  CHECK(one.gradient().item<double>() == 1e50 * (2.0 / (1e50 + 1e-6)));
}

TEST_CASE("bounds and norms without sense are refused") {
  OneWeight one(fixed(4.0));
  one.backward(1.0);
  one.facade.update();
  auto& core = one.facade.core();
  CHECK(
      error_of<c10::ValueError>([&] { core.clip_master_grads(-1.0); }) ==
      "FP16_Optimizer.clip_master_grads: max_norm must be at least 0, but got "
      "-1");
  CHECK_FALSE(error_of<c10::ValueError>([&] {
                core.clip_master_grads(std::nan(""));
              }).empty());
  CHECK_FALSE(error_of<c10::ValueError>([&] {
                core.clip_master_grads(1.0, std::nan(""));
              }).empty());
  CHECK(one.gradient().item<float>() == 1.0F);
  core.clip_master_grads(0.0);
  CHECK(one.gradient().item<float>() == 0.0F);
}

// ---- closures ----

namespace {

// Runs a line search that evaluates the closure twice, moving the weight by
// -0.5 in between, as an inner optimizer would.
struct TwoEvaluations {
  OneWeight& one;

  Evaluation evaluate(double gradient) {
    auto& core = one.facade.core();
    core.begin_evaluation();
    core.zero_grad(false);
    one.backward(gradient);
    one.facade.update();
    return core.end_evaluation();
  }

  void move() {
    const c10::NoGradGuard no_grad;
    one.facade.visible()[0].sub_(0.5);
  }
};

} // namespace

TEST_CASE("a closure's model is refreshed between evaluations") {
  OneWeight one(dynamic({.init_scale = 4.0}));
  TwoEvaluations search{one};
  auto& core = one.facade.core();
  core.begin_closure_step();
  CHECK(core.first_evaluation());
  CHECK(search.evaluate(1.0) == Evaluation::kAccept);
  CHECK_FALSE(core.first_evaluation());
  search.move();
  CHECK(equals(one.weight, {1.0}));
  CHECK(search.evaluate(1.0) == Evaluation::kAccept);
  CHECK(equals(one.weight, {0.5}));
  search.move();
  core.finish_step();
  CHECK(equals(one.weight, {0.0}));
  CHECK(core.steps_applied() == 1);
  CHECK(core.first_evaluation());
}

TEST_CASE("an evaluation that overflows is repeated at a lower scale") {
  const auto scaler = dynamic({.init_scale = 65536.0});
  OneWeight one(scaler);
  TwoEvaluations search{one};
  auto& core = one.facade.core();
  core.begin_closure_step();
  int repeats = 0;
  while (search.evaluate(4.0) == Evaluation::kRepeat) {
    ++repeats;
  }
  // 65536 * 4 and half and a quarter of it are beyond half's 65504.
  CHECK(repeats == 3);
  CHECK(scaler->loss_scale() == 8192.0);
  CHECK(one.gradient().item<float>() == 4.0F);
  core.finish_step();
}

TEST_CASE("an incurable overflow in the first evaluation skips the step") {
  OneWeight one(fixed(4.0));
  TwoEvaluations search{one};
  auto& core = one.facade.core();
  core.begin_closure_step();
  CHECK(search.evaluate(kTooLarge) == Evaluation::kSkip);
  core.abandon_step(true);
  CHECK(core.steps_skipped() == 1);
  CHECK(core.overflow());
  CHECK(equals(one.weight, {1.0}));
}

TEST_CASE("an incurable overflow later puts everything back and throws") {
  OneWeight one(fixed(4.0));
  TwoEvaluations search{one};
  auto& core = one.facade.core();
  core.begin_closure_step();
  REQUIRE(search.evaluate(1.0) == Evaluation::kAccept);
  search.move();
  const auto text =
      error_of<LossScaleError>([&] { search.evaluate(kTooLarge); });
  CHECK(
      text ==
      "FP16_Optimizer.step: an evaluation of the closure overflows with the "
      "loss scale at its floor 4; first at group 0, index 0: shape [1], "
      "float16, cpu, with 1 inf and 0 NaN");
  CHECK(equals(one.weight, {1.0}));
  CHECK(equals(one.facade.visible()[0], {1.0}));
  CHECK(core.steps_applied() == 0);
}

// ---- state ----

TEST_CASE("step counts are restored or refused") {
  OptimizerCore core({}, fixed(1.0));
  core.set_step_counts(3, 4);
  CHECK(core.steps_applied() == 3);
  CHECK(core.steps_skipped() == 4);
  CHECK(
      error_of<c10::ValueError>([&] { core.set_step_counts(-1, 0); }) ==
      "FP16_Optimizer.load_state_dict: step counts must be at least 0, but got "
      "-1");
  CHECK(core.steps_applied() == 3);
}

TEST_CASE("errors name the facade that was given") {
  OptimizerCore core({.owner = "FP16Optimizer"}, fixed(1.0));
  CHECK(error_of<c10::Error>([&] {
          core.scale_loss(at::ones({}));
        }).find("FP16Optimizer.backward: ") == 0);
}

TEST_CASE("a weight beyond the half range is a message") {
  OneWeight one(fixed(1.0));
  {
    const c10::NoGradGuard no_grad;
    one.facade.visible()[0].fill_(1e6);
  }
  CHECK(one.facade.step());
  const auto messages = one.facade.core().take_messages();
  REQUIRE(messages.size() == 1);
  CHECK(
      messages[0] ==
      "FP16_Optimizer.step: a master weight is beyond the range of the model's "
      "dtype and was stored as inf, in group 0, index 0: shape [1], float16, "
      "cpu");
}

// ---- other processes ----

namespace {

// A door behind which another process says what it is told to say.
struct Other {
  double flag = 0.0;
  double sum = 0.0;
  double largest = 0.0;
  // What was asked of it since the last `forget`.
  std::vector<double> maxima;
  std::vector<double> sums;

  void forget() {
    maxima.clear();
    sums.clear();
  }

  Combine door() {
    return [this](double value, Reduction reduction) {
      if (reduction == Reduction::kSum) {
        sums.push_back(value);
        return value + sum;
      }
      maxima.push_back(value);
      return std::max(value, std::max(flag, largest));
    };
  }
};

OptimizerCoreOptions with(const Combine& combine) {
  OptimizerCoreOptions options;
  options.combine = combine;
  return options;
}

} // namespace

TEST_CASE("an overflow in another process skips the step here") {
  Other other;
  OneWeight one(dynamic({.init_scale = 8.0}), with(other.door()));
  CHECK(one.iterate(1.0));
  other.flag = 1.0;
  CHECK_FALSE(one.iterate(1.0));
  CHECK(one.facade.core().overflow());
  CHECK(equals(one.weight, {0.5}));
  CHECK(one.facade.core().loss_scaler()->loss_scale() == 4.0);
  CHECK(one.facade.core().clip_master_grads(1.0).item<float>() == -1.0F);
  const auto& last = one.facade.core().history().back();
  CHECK(last.overflow);
  CHECK(last.culprits.empty());
  one.facade.core().loss_scaler()->set_loss_scale(1.0);
  CHECK_FALSE(one.iterate(1.0));
  CHECK(
      one.facade.core().take_messages().back().find(
          "first at a parameter of another process") != std::string::npos);
  other.flag = 0.0;
  CHECK(one.iterate(1.0));
  CHECK(equals(one.weight, {0.0}));
}

TEST_CASE("an overflow here is told, in one call an update") {
  Other other;
  OneWeight one(dynamic({.init_scale = 8.0}), with(other.door()));
  one.iterate(kTooLarge);
  CHECK(other.maxima == std::vector<double>{1.0});
  other.forget();
  one.facade.core().zero_grad(true);
  one.facade.update(); // no gradients here
  CHECK(other.maxima == std::vector<double>{0.0});
}

TEST_CASE("where a process fails the others throw, and none steps") {
  Other other;
  OneWeight one(fixed(8.0), with(other.door()));
  other.flag = 2.0;
  CHECK(
      error_of<c10::Error>([&] { one.iterate(1.0); }) ==
      "FP16_Optimizer.update_master_grads: all processes must take their "
      "gradients, but got an error in another one");
  CHECK_FALSE(one.facade.step());
  CHECK(one.facade.core().steps_skipped() == 0);
  other.flag = 0.0;
  other.forget();
  one.weight.mutable_grad().reset();
  one.backward(1.0);
  // A sparse CSR gradient is of a kind that nobody takes.
  one.weight.mutable_grad() = at::ones({1, 1}).to_sparse_csr();
  CHECK_THROWS_AS(one.facade.update(), c10::NotImplementedError);
  CHECK(other.maxima == std::vector<double>{2.0});
  other.forget();
  one.facade.core().fail_update();
  CHECK(other.maxima == std::vector<double>{2.0});
}

TEST_CASE("norms count what each process has to count") {
  Other other;
  const auto shared = parameter({0.0, 0.0}, at::kHalf);
  const auto own = parameter({0.0}, at::kFloat);
  OptimizerCoreOptions options = with(other.door());
  Facade facade(
      {shared, own},
      torch::optim::SGDOptions(1.0),
      fixed(2.0),
      options);
  facade.core().master_weights().set_counted({{false}});
  const auto take = [&] {
    facade.core().zero_grad(true);
    facade.backward(
        shared.to(at::kFloat).dot(at::tensor({3.0F, 4.0F})) + own.sum() * 12);
    facade.update();
    other.forget();
  };
  take();
  other.sum = 25.0; // the other one counts what both have
  CHECK(facade.core().clip_master_grads(6.5).item<float>() == 13.0F);
  CHECK(other.sums == std::vector<double>{144.0});
  const double half = 6.5 / (13.0 + 1e-6);
  CHECK(own.grad().item<float>() == 12.0F * static_cast<float>(half));
  // After clipping nothing is measured any more.
  other.forget();
  other.sum = 0.0;
  CHECK(
      facade.core().clip_master_grads(100.0).item<double>() ==
      doctest::Approx(6.0).epsilon(1e-6));
  take();
  other.largest = 40.0;
  CHECK(facade.core().clip_master_grads(100.0, HUGE_VAL).item<float>() == 40);
  CHECK(other.maxima == std::vector<double>{12.0});
  other.largest = 0.0;
  take();
  other.sum = 7.0;
  CHECK(facade.core().clip_master_grads(100.0, 1.0).item<float>() == 19.0F);
  CHECK(other.sums == std::vector<double>{12.0});
}

TEST_CASE("an exception at the door comes out") {
  OneWeight one(fixed(8.0), with([](double, Reduction) -> double {
                  throw std::runtime_error("the others are gone");
                }));
  CHECK_THROWS_WITH_AS(
      one.iterate(1.0),
      "the others are gone",
      std::runtime_error);
}

// ---- names and history ----

TEST_CASE("names are told in reports, errors and messages") {
  OneWeight one(dynamic({.init_scale = 2.0, .min_scale = 2.0}));
  one.facade.core().master_weights().set_names({{"layer.weight"}});
  one.backward(1.0);
  CHECK(
      error_of<c10::Error>([&] { one.facade.step(); })
          .find(
              "group 0, index 0, "
              "layer.weight: "
              "shape [1]") != std::string::npos);
  one.iterate(kTooLarge);
  const auto report = one.facade.core().master_weights().report();
  CHECK(report.tensors[0].name == "layer.weight");
  REQUIRE(report.culprits().size() == 1);
  CHECK(report.culprits()[0].inf_count == 1);
  const auto messages = one.facade.core().take_messages();
  REQUIRE(messages.size() == 1);
  CHECK(
      messages[0].find(
          "first at group 0, index 0, layer.weight: shape [1], float16, cpu, "
          "with 1 inf and 0 NaN") != std::string::npos);
}

TEST_CASE("the history has a record for every step") {
  OptimizerCoreOptions options;
  options.history_size = 3;
  OneWeight one(dynamic({.init_scale = 1024.0}), options);
  one.iterate(1.0);
  one.iterate(kTooLarge);
  one.iterate(std::nan(""));
  one.iterate(2.0);
  one.facade.core().take_messages(); // what a device has decided comes with it
  const auto& history = one.facade.core().history();
  REQUIRE(history.size() == 3);
  CHECK(history[0].step == 2);
  CHECK(history[0].scale == 1024.0);
  CHECK(history[0].overflow);
  CHECK(history[0].skipped_in_a_row == 1);
  REQUIRE(history[0].culprits.size() == 1);
  CHECK(history[0].culprits[0].inf_count == 1);
  CHECK(history[0].culprits[0].nan_count == 0);
  CHECK(history[1].scale == 512.0);
  CHECK(history[1].culprits[0].nan_count == 1);
  CHECK(history[1].skipped_in_a_row == 2);
  CHECK(history[2].step == 4);
  CHECK(history[2].scale == 256.0);
  CHECK_FALSE(history[2].overflow);
  CHECK(history[2].norm == 2.0);
  CHECK(history[2].skipped_in_a_row == 0);
  CHECK(history[2].culprits.empty());
  const auto skips = one.facade.core().take_skips();
  REQUIRE(skips.size() == 2);
  CHECK(skips[1].step == 3);
  CHECK(one.facade.core().take_skips().empty());
}

TEST_CASE("a step that a scaler refuses to go on after is a skipped one") {
  DynamicLossScalerOptions rule{.init_scale = 1.0};
  rule.raise_at_floor = true;
  OneWeight one(dynamic(rule));
  CHECK_THROWS_AS(one.iterate(kTooLarge), LossScaleError);
  CHECK(one.facade.core().steps_skipped() == 1);
  CHECK(one.facade.core().history().size() == 1);
  CHECK(equals(one.weight, {1.0}));
  CHECK(one.iterate(1.0));
}

TEST_CASE("a scaler that tolerates every overflow does not hold a closure up") {
  DynamicLossScalerOptions rule{.init_scale = 4.0};
  rule.tolerance = 1.0;
  OneWeight one(dynamic(rule));
  REQUIRE(one.iterate(1.0)); // now no share of overflows is all of them
  auto& core = one.facade.core();
  core.begin_closure_step();
  int evaluations = 0;
  auto outcome = Evaluation::kRepeat;
  while (outcome == Evaluation::kRepeat) {
    REQUIRE(++evaluations < 5000);
    core.begin_evaluation();
    core.zero_grad(true);
    one.backward(std::nan(""));
    one.facade.update();
    outcome = core.end_evaluation();
  }
  CHECK((outcome == Evaluation::kSkip));
  core.abandon_step(true);
  CHECK(core.loss_scaler()->loss_scale() == 4.0);
  // Evaluations that are repeated skip nothing.
  CHECK(core.steps_skipped() == 1);
  REQUIRE(core.take_skips().size() == 1);
  CHECK(core.history().back().skipped);
  CHECK(core.history().back().skipped_in_a_row == 1);
}

// ---- a scaler for several ----

TEST_CASE("a pass for several optimizers is unscaled by its own scale") {
  for (const auto type : {at::kHalf, at::kFloat}) {
    for (const bool overflow : {true, false}) {
      CAPTURE(overflow);
      // The first step moves the scale: down, or up.
      const auto scaler = dynamic({.init_scale = 8.0, .scale_window = 1.0});
      OneWeight first(scaler, {}, at::kHalf);
      OneWeight second(scaler, {}, type);
      OneWeight apart(dynamic({.init_scale = 8.0}));
      const auto loss =
          first.weight.to(at::kFloat).sum() * (overflow ? 1e9F : 1.0F) +
          second.weight.to(at::kFloat).sum();
      first.facade.backward(loss);
      first.facade.update();
      CHECK(first.facade.step() == !overflow);
      CHECK(scaler->loss_scale() == (overflow ? 4.0 : 16.0));
      second.facade.update();
      CHECK(second.gradient().item<float>() == 1.0F);
      CHECK(second.facade.step());
      CHECK(equals(second.weight, {0.5}));
      // What is there is of that scale, and what comes of the new one.
      second.backward(1.0);
      second.facade.update();
      CHECK(second.gradient().item<float>() == 2.0F);
      CHECK(apart.iterate(1.0));
      CHECK(equals(apart.weight, {0.5}));
    }
  }
}

TEST_CASE("a pass of another optimizer is forgotten with the gradients") {
  const auto scaler = dynamic({.init_scale = 8.0, .scale_window = 1.0});
  OneWeight first(scaler);
  OneWeight second(scaler);
  CHECK(first.iterate(1.0));
  second.facade.core().zero_grad(true);
  // Scaled by hand, with the scale of now.
  second.weight.mutable_grad() = at::full({1}, 16.0, at::kHalf);
  second.facade.update();
  CHECK(second.gradient().item<float>() == 1.0F);
}
