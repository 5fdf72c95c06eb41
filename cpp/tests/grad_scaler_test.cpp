// GradScaler against torch's rule and against training without a scale, and
// the gradients and calls that it refuses.

#include "oracle.h"

#include <fp16core/grad_scaler.h>

#include <ATen/ATen.h>
#include <ATen/core/Dict.h>
#include <ATen/core/ivalue.h>
#include <torch/optim/sgd.h>

#include <doctest.h>

#include <utility>

using namespace fp16core;
using fp16core::test::error_of;
using torch::optim::SGD;
using torch::optim::SGDOptions;

namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

at::Tensor parameter(
    std::vector<double> values,
    c10::ScalarType type = at::kFloat) {
  return at::tensor(values, at::kDouble).to(type).set_requires_grad(true);
}

at::Tensor with_gradient(at::Tensor gradient) {
  auto p = at::zeros_like(gradient).set_requires_grad(true);
  p.mutable_grad() = std::move(gradient);
  return p;
}

bool equals(const at::Tensor& tensor, std::vector<double> values) {
  return at::equal(
      tensor.detach().to_dense().to(at::kDouble).flatten(),
      at::tensor(values, at::kDouble));
}

SGD sgd(std::vector<at::Tensor> parameters) {
  return SGD(std::move(parameters), SGDOptions(1.0));
}

GradScaler scaler_of(double scale) {
  return GradScaler(GradScalerOptions().init_scale(scale));
}

// Tells the scaler that a loss was scaled, for tests that make gradients.
void scale_something(GradScaler& scaler) {
  scaler.scale(at::ones({}));
}

// A parameter whose gradients are made by hand, and a scaler around it.
class Iterations {
 public:
  explicit Iterations(const GradScalerOptions& options)
      : weight_(parameter({0.0})),
        optimizer_(sgd({weight_})),
        scaler(options) {}

  // Returns whether the step ran.
  bool run(bool overflow) {
    weight_.mutable_grad() = scaler.scale(at::full({1}, overflow ? kInf : 1.0));
    const bool ran = scaler.step(optimizer_);
    scaler.update();
    return ran;
  }

 private:
  at::Tensor weight_;
  SGD optimizer_;

 public:
  GradScaler scaler;
};

// torch's update of the scale, from its documentation.
struct TorchRule {
  float scale;
  double growth;
  double backoff;
  std::int64_t interval;
  std::int64_t tracker = 0;

  void update(bool overflow) {
    if (overflow) {
      scale = static_cast<float>(scale * backoff);
      tracker = 0;
    } else if (++tracker == interval) {
      const auto grown = static_cast<float>(scale * growth);
      scale = std::isfinite(grown) ? grown : scale;
      tracker = 0;
    }
  }
};

// torch's update itself.
struct TorchKernel {
  at::Tensor scale;
  at::Tensor tracker = at::zeros({1}, at::kInt);

  void update(const TorchRule& rule, bool overflow) {
    at::_amp_update_scale_(
        scale,
        tracker,
        at::full({1}, overflow ? 1.0 : 0.0),
        rule.growth,
        rule.backoff,
        rule.interval);
  }
};

double number(const StateDict& state, const char* key) {
  const auto value = state.at(key);
  return value.isInt() ? static_cast<double>(value.toInt()) : value.toDouble();
}

StateDict state_of(
    double scale,
    double growth,
    double backoff,
    std::int64_t interval,
    std::int64_t tracker) {
  auto state = make_state_dict();
  state.insert("scale", scale);
  state.insert("growth_factor", growth);
  state.insert("backoff_factor", backoff);
  state.insert("growth_interval", interval);
  state.insert("_growth_tracker", tracker);
  return state;
}

} // namespace

TEST_CASE("the scale starts and moves with torch's constants") {
  const GradScaler scaler;
  CHECK(scaler.get_scale() == 65536.0);
  CHECK(scaler.get_growth_factor() == 2.0);
  CHECK(scaler.get_backoff_factor() == 0.5);
  CHECK(scaler.get_growth_interval() == 2000);
  CHECK(scaler.is_enabled());
}

TEST_CASE(
    "the scale moves as torch's, through saved and loaded states" *
    doctest::test_suite("many iterations")) {
  std::mt19937 random(11);
  const auto below = [&](unsigned limit) { return random() % limit; };
  for (int sequence = 0; sequence < 300; ++sequence) {
    CAPTURE(sequence);
    const auto options = GradScalerOptions()
                             .init_scale(sequence % 3 == 0 ? 65536.0 : 1000.1)
                             .growth_factor(sequence % 2 == 0 ? 2.0 : 1.7)
                             .backoff_factor(sequence % 5 == 0 ? 0.5 : 0.31)
                             .growth_interval(1 + below(6));
    Iterations iterations(options);
    auto* scaler = &iterations.scaler;
    TorchRule rule{
        static_cast<float>(options.init_scale()),
        options.growth_factor(),
        options.backoff_factor(),
        options.growth_interval()};
    TorchKernel kernel{at::full({1}, rule.scale)};
    const unsigned share = 2 + below(12);
    for (int i = 0; i < 60; ++i) {
      CAPTURE(i);
      const bool overflow = below(share) == 0;
      REQUIRE(iterations.run(overflow) == !overflow);
      rule.update(overflow);
      kernel.update(rule, overflow);
      REQUIRE(scaler->get_scale() == rule.scale);
      REQUIRE(scaler->get_scale() == kernel.scale.item<double>());
      const auto state = scaler->state_dict();
      REQUIRE(number(state, "scale") == rule.scale);
      REQUIRE(number(state, "_growth_tracker") == rule.tracker);
      REQUIRE(
          number(state, "_growth_tracker") == kernel.tracker.item<double>());
      if (below(10) == 0) {
        *scaler = GradScaler();
        scaler->load_state_dict(state);
      }
    }
  }
}

TEST_CASE("the scale never goes below its floor, and comes back") {
  Iterations iterations(GradScalerOptions().init_scale(1.0).growth_interval(2));
  for (int i = 0; i < 400; ++i) {
    REQUIRE_FALSE(iterations.run(true));
  }
  CHECK(iterations.scaler.get_scale() == 0x1p-126);
  CHECK(iterations.run(false));
  CHECK(iterations.run(false));
  CHECK(iterations.scaler.get_scale() == 0x1p-125);

  Iterations high(GradScalerOptions().init_scale(16.0).min_scale(6.0));
  const auto after = [&](bool overflow) {
    high.run(overflow);
    return high.scaler.get_scale();
  };
  CHECK(after(true) == 8.0);
  CHECK(after(true) == 6.0);
  CHECK(after(true) == 6.0);
}

TEST_CASE("the scale never grows beyond float32") {
  Iterations iterations(
      GradScalerOptions().init_scale(0x1p126).growth_interval(1));
  for (int i = 0; i < 4; ++i) {
    CHECK(iterations.run(false));
    CHECK(iterations.scaler.get_scale() == 0x1p127);
  }
  CHECK_FALSE(iterations.run(true));
  CHECK(iterations.scaler.get_scale() == 0x1p126);
}

namespace {

// A small regression, the same each time.
struct Regression {
  at::Tensor first;
  at::Tensor second;
  at::Tensor inputs;
  at::Tensor targets;

  Regression() {
    // Numbers of many digits, without a random generator of torch's.
    const auto waves = [](std::int64_t rows, std::int64_t columns, double f) {
      return (at::arange(rows * columns, at::kFloat) * f)
          .sin()
          .view({rows, columns});
    };
    first = waves(8, 16, 1.3).set_requires_grad(true);
    second = waves(16, 4, 2.7).set_requires_grad(true);
    inputs = waves(32, 8, 0.7);
    targets = waves(32, 4, 3.1);
  }

  at::Tensor loss(int iteration) const {
    const auto shifted = inputs + 0.01 * iteration;
    return (shifted.mm(first).tanh().mm(second) - targets).square().mean();
  }

  SGD optimizer() const {
    return SGD({first, second}, SGDOptions(0.05).momentum(0.9));
  }
};

bool overflows(int iteration) {
  return iteration % 7 == 0;
}

} // namespace

TEST_CASE("training is that without a scaler, less the skipped steps") {
  const Regression scaled;
  const Regression plain;
  auto scaled_optimizer = scaled.optimizer();
  auto plain_optimizer = plain.optimizer();
  GradScaler scaler(GradScalerOptions().growth_interval(3));
  for (int i = 0; i < 60; ++i) {
    CAPTURE(i);
    scaled_optimizer.zero_grad();
    auto loss = scaled.loss(i);
    if (overflows(i)) {
      loss = loss * kInf;
    }
    scaler.scale(loss).backward();
    if (i % 2 == 0) {
      scaler.unscale_(scaled_optimizer);
      CHECK(scaler.found_inf(scaled_optimizer) == overflows(i));
    }
    CHECK(scaler.step(scaled_optimizer) == !overflows(i));
    CHECK(scaler.found_inf(scaled_optimizer) == overflows(i));
    scaler.update();
    CHECK_FALSE(scaler.found_inf(scaled_optimizer));
    if (!overflows(i)) {
      plain_optimizer.zero_grad();
      plain.loss(i).backward();
      plain_optimizer.step();
    }
    // Scales are powers of two, by which products and sums are exact.
    REQUIRE(at::equal(scaled.first, plain.first));
    REQUIRE(at::equal(scaled.second, plain.second));
  }
  // It has moved: 9 overflows, and two growths in each of 8 runs of 6 clean
  // iterations, one in the last of 3.
  CHECK(scaler.get_scale() == 65536.0 * 0x1p-9 * 0x1p17);
}

TEST_CASE("outputs are multiplied by the scale, in float32 at least") {
  auto scaler = scaler_of(65536.0);
  for (const auto type : {at::kHalf, at::kBFloat16, at::kFloat}) {
    for (const auto& sizes : std::vector<std::vector<std::int64_t>>{{}, {2}}) {
      const auto scaled = scaler.scale(at::full(sizes, 2.0, type));
      CHECK((scaled.scalar_type() == at::kFloat));
      CHECK(at::equal(scaled, at::full(sizes, 131072.0)));
    }
  }
  const auto wide = scaler.scale(at::full({}, 1e300, at::kDouble));
  CHECK((wide.scalar_type() == at::kDouble));
  CHECK(wide.item<double>() == 1e300 * 65536.0);
  const auto leaf = parameter({2.0}, at::kHalf);
  scaler.scale(leaf.sum()).backward();
  CHECK((leaf.grad().scalar_type() == at::kHalf));
  const auto all = scaler.scale({at::ones({1}), at::ones({1}, at::kHalf)});
  REQUIRE(all.size() == 2);
  CHECK(equals(all[0], {65536.0}));
  CHECK(equals(all[1], {65536.0}));
}

TEST_CASE("outputs that are not floating point are refused") {
  auto scaler = scaler_of(2.0);
  const std::string rule =
      "GradScaler.scale: outputs must be floating point tensors, but got ";
  CHECK(error_of<c10::TypeError>([&] {
          scaler.scale(at::ones({1}, at::kInt));
        }) == rule + "int32");
  CHECK(error_of<c10::TypeError>([&] {
          scaler.scale({at::ones({1}), at::Tensor()});
        }) == rule + "an undefined one");
}

TEST_CASE("gradients of every layout are unscaled in place") {
  auto scaler = scaler_of(4.0);
  const auto turned = at::full({3, 2}, 8.0).t();
  const auto gapped = at::full({2, 6}, 8.0).slice(1, 0, 6, 2);
  const auto wide = at::full({2}, 8.0, at::kDouble);
  const auto narrow = at::full({2}, 8.0, at::kBFloat16);
  std::vector<at::Tensor> parameters{parameter({1.0})};
  std::vector<std::int64_t> versions;
  for (const auto& gradient : {turned, gapped, wide, narrow}) {
    versions.push_back(gradient._version());
    auto p =
        at::zeros(gradient.sizes(), gradient.options()).set_requires_grad(true);
    p.mutable_grad() = gradient;
    parameters.push_back(p);
  }
  auto optimizer = sgd(parameters);
  scale_something(scaler);
  scaler.unscale_(optimizer);
  CHECK_FALSE(scaler.found_inf(optimizer));
  for (std::size_t i = 1; i < parameters.size(); ++i) {
    CAPTURE(i);
    const auto& gradient = parameters[i].grad();
    CHECK(at::equal(gradient, at::full_like(gradient, 2.0)));
    CHECK(gradient._version() > versions[i - 1]);
  }
  CHECK(parameters[1].grad().is_same(turned));
}

TEST_CASE("sparse gradients are unscaled by their values") {
  auto scaler = scaler_of(4.0);
  const auto table = at::zeros({3, 2}).set_requires_grad(true);
  const auto indices = at::tensor({2, 0, 2}, at::kLong);
  // Autograd leaves the expanded gradient of a sum in the values.
  scaler.scale(at::embedding(table, indices, -1, false, true).sum()).backward();
  REQUIRE(table.grad().is_sparse());
  auto optimizer = sgd({table});
  CHECK(scaler.step(optimizer));
  CHECK(equals(table, {-1.0, -1.0, 0.0, 0.0, -2.0, -2.0}));
  scaler.update();

  const auto values = at::tensor({8.0, 12.0}, at::kFloat);
  const auto plain = at::zeros({3}).set_requires_grad(true);
  plain.mutable_grad() = at::sparse_coo_tensor(
      at::tensor({1, 1}, at::kLong).view({1, 2}),
      values,
      {3});
  auto other = sgd({plain});
  const auto version = plain.grad()._version();
  scale_something(scaler);
  scaler.unscale_(other);
  CHECK(equals(plain.grad(), {0.0, 5.0, 0.0}));
  CHECK(plain.grad()._version() > version);
  scaler.update();
  plain.grad()._values()[1] = kNan;
  scale_something(scaler);
  CHECK_FALSE(scaler.step(other));
}

TEST_CASE("shared gradients and elements are unscaled once") {
  auto scaler = scaler_of(4.0);
  const auto shared = at::full({2}, 8.0);
  const auto a = with_gradient(shared);
  const auto b = with_gradient(shared);
  const auto expanded = parameter({0.0, 0.0});
  expanded.mutable_grad() = at::full({1}, 8.0).expand({2});
  auto optimizer = sgd({a, a, b, expanded});
  scale_something(scaler);
  scaler.unscale_(optimizer);
  CHECK(equals(shared, {2.0, 2.0}));
  CHECK(equals(expanded.grad(), {2.0, 2.0}));
}

TEST_CASE("an overflow skips its optimizer and lowers the common scale") {
  auto scaler = scaler_of(16.0);
  const auto clean = parameter({1.0});
  const auto dirty = parameter({1.0});
  auto first = sgd({dirty});
  auto second = sgd({clean});
  scaler.scale((dirty * kInf).sum()).backward();
  scaler.scale(clean.sum()).backward();
  scaler.unscale_(first);
  CHECK(scaler.found_inf(first));
  CHECK_FALSE(scaler.found_inf(second));
  CHECK_FALSE(scaler.step(first));
  CHECK(scaler.step(second));
  CHECK_FALSE(scaler.found_inf(second));
  scaler.update();
  CHECK(scaler.get_scale() == 8.0);
  CHECK(equals(dirty, {1.0}));
  CHECK(equals(clean, {0.0}));
}

TEST_CASE("gradients of other dtypes are refused, and none is changed") {
  auto scaler = scaler_of(4.0);
  const auto good = with_gradient(at::full({2}, 8.0));
  const auto without = parameter({1.0});
  const auto half = with_gradient(at::ones({3}, at::kHalf));
  const auto small = parameter({1.0, 2.0});
  const auto csr = at::zeros({2, 2}).set_requires_grad(true);
  csr.mutable_grad() = at::ones({2, 2}).to_sparse_csr();
  auto optimizer = sgd({good, without, half});
  scale_something(scaler);
  const std::string rule =
      ": gradients must not be float16, whose parameters need the master "
      "weights of FP16Optimizer, but got float16 for group 0, index 2: shape "
      "[3], float16, cpu";
  CHECK(error_of<c10::ValueError>([&] {
          scaler.unscale_(optimizer);
        }) == "GradScaler.unscale_" + rule);
  CHECK(error_of<c10::ValueError>([&] {
          scaler.step(optimizer);
        }) == "GradScaler.step" + rule);
  small.unsafeGetTensorImpl()->mutable_grad() =
      at::ones({2}, at::kComplexFloat);
  auto complex = sgd({good, small});
  CHECK(
      error_of<c10::TypeError>([&] { scaler.unscale_(complex); }) ==
      "GradScaler.unscale_: gradients must be bfloat16, float32 or float64, "
      "but got complex64 for group 0, index 1: shape [2], float32, cpu");
  auto rows = sgd({good, csr});
  CHECK(
      error_of<c10::TypeError>([&] { scaler.unscale_(rows); }) ==
      "GradScaler.unscale_: gradients must be strided or sparse COO, but got "
      "SparseCsr for group 0, index 1: shape [2, 2], float32, cpu");
  CHECK(equals(good.grad(), {8.0, 8.0}));
  // Nothing was unscaled, so that it can be done yet.
  half.mutable_grad().reset();
  CHECK(scaler.step(optimizer));
  CHECK(equals(good, {-2.0, -2.0}));
}

TEST_CASE("calls out of order are refused") {
  auto scaler = scaler_of(4.0);
  const auto weight = with_gradient(at::full({1}, 8.0));
  auto optimizer = sgd({weight});
  const auto text = [](const auto& call) { return error_of<c10::Error>(call); };
  const auto unscale = [&] { scaler.unscale_(optimizer); };
  const auto step = [&] { scaler.step(optimizer); };
  const auto update = [&] { scaler.update(); };
  const std::string none_scaled =
      ": losses must be scaled first, but got none since the last update";
  const std::string once =
      "GradScaler.unscale_: an optimizer must be unscaled once between two "
      "calls of update, and before its step, but got one that was ";
  const std::string none_seen =
      "GradScaler.update: an optimizer with gradients must be unscaled or "
      "stepped first, but got none since the last update";
  CHECK(text(unscale) == "GradScaler.unscale_" + none_scaled);
  CHECK(text(step) == "GradScaler.step" + none_scaled);
  CHECK(text(update) == none_seen);

  scale_something(scaler);
  CHECK(text(update) == none_seen);
  unscale();
  CHECK(text(unscale) == once + "unscaled");
  step();
  CHECK(text(unscale) == once + "stepped");
  CHECK(
      text(step) ==
      "GradScaler.step: an optimizer must be stepped once between two calls of "
      "update, but got one that was stepped");
  CHECK(equals(weight.grad(), {2.0}));
  CHECK(equals(weight, {-2.0}));

  auto empty = sgd({parameter({1.0})});
  CHECK(
      text([&] { scaler.step(empty); }) ==
      "GradScaler.step: the optimizer must have gradients, but got none");
  update();
  CHECK(text(step) == "GradScaler.step" + none_scaled);
}

TEST_CASE("an optimizer without gradients yet can be unscaled later") {
  auto scaler = scaler_of(4.0);
  const auto weight = parameter({0.0});
  auto optimizer = sgd({weight});
  scale_something(scaler);
  scaler.unscale_(optimizer);
  CHECK_THROWS_AS(scaler.update(), c10::Error);
  scaler.scale(weight.sum()).backward();
  CHECK(scaler.step(optimizer));
  CHECK(equals(weight, {-1.0}));
}

TEST_CASE("a scale that changed between loss and step is no longer used") {
  const auto weight = parameter({0.0});
  auto optimizer = sgd({weight});
  auto scaler = scaler_of(4.0);
  const auto state = scaler.state_dict();
  const auto change = [&](int way) {
    if (way == 0) {
      scaler.update(8.0);
    } else {
      scaler.load_state_dict(state);
    }
  };
  for (const int way : {0, 1}) {
    for (const bool unscaled : {false, true}) {
      optimizer.zero_grad();
      scaler.scale(weight.sum()).backward();
      if (unscaled) {
        scaler.unscale_(optimizer);
      }
      change(way);
      CHECK(
          error_of<c10::Error>([&] { scaler.step(optimizer); }) ==
          "GradScaler.step: losses must be scaled first, but got none since "
          "the last update");
      CHECK(equals(weight, {0.0}));
    }
  }
}

TEST_CASE("the scale can be set, and growth comes when it would have") {
  Iterations iterations(
      GradScalerOptions().init_scale(16.0).growth_interval(3));
  auto& scaler = iterations.scaler;
  iterations.run(false);
  scaler.update(5.0);
  CHECK(scaler.get_scale() == 5.0);
  iterations.run(false);
  CHECK(scaler.get_scale() == 5.0);
  iterations.run(false);
  CHECK(scaler.get_scale() == 10.0);
  // The nearest float32.
  scaler.update(1000.1);
  CHECK(scaler.get_scale() == static_cast<double>(1000.1F));
}

TEST_CASE("the rule can be changed, and clean iterations stay counted") {
  Iterations iterations(
      GradScalerOptions().init_scale(16.0).growth_interval(5));
  auto& scaler = iterations.scaler;
  const auto after = [&](bool overflow) {
    iterations.run(overflow);
    return scaler.get_scale();
  };
  CHECK(after(false) == 16.0);
  CHECK(after(false) == 16.0);
  scaler.set_growth_interval(4);
  scaler.set_growth_factor(3.0);
  scaler.set_backoff_factor(0.25);
  CHECK(scaler.get_growth_interval() == 4);
  CHECK(scaler.get_growth_factor() == 3.0);
  CHECK(scaler.get_backoff_factor() == 0.25);
  CHECK(after(false) == 16.0);
  CHECK(after(false) == 48.0);
  CHECK(after(true) == 12.0);
  CHECK(after(false) == 12.0);
  CHECK(after(false) == 12.0);
  CHECK(after(false) == 12.0);
  // Overdue, where torch would wait for its counter for good.
  scaler.set_growth_interval(2);
  CHECK(after(false) == 36.0);
  CHECK(after(false) == 36.0);
  CHECK(after(false) == 108.0);
}

TEST_CASE("a scaler that is off changes nothing") {
  GradScaler scaler(GradScalerOptions().enabled(false));
  CHECK_FALSE(scaler.is_enabled());
  CHECK(scaler.get_scale() == 1.0);
  CHECK(scaler.get_growth_interval() == 2000);
  const auto loss = at::ones({}, at::kHalf);
  CHECK(scaler.scale(loss).is_same(loss));
  CHECK(scaler.scale(std::vector{loss})[0].is_same(loss));
  const auto weight = with_gradient(at::full({1}, kInf));
  auto optimizer = sgd({weight});
  scaler.unscale_(optimizer);
  scaler.unscale_(optimizer);
  CHECK(scaler.step(optimizer));
  CHECK(scaler.step(optimizer));
  CHECK(equals(weight, {-kInf}));
  CHECK_FALSE(scaler.found_inf(optimizer));
  scaler.update();
  scaler.update(8.0);
  CHECK(scaler.get_scale() == 1.0);
  CHECK(scaler.state_dict().empty());
  scaler.load_state_dict(state_of(8.0, 3.0, 0.5, 7, 2));
  CHECK(scaler.get_growth_factor() == 2.0);
}

TEST_CASE("a state has torch's keys, in torch's order") {
  Iterations iterations(GradScalerOptions().init_scale(8.0).growth_interval(7));
  iterations.run(true);
  iterations.run(false);
  iterations.run(false);
  const auto state = iterations.scaler.state_dict();
  std::vector<std::string> keys;
  for (const auto& entry : state) {
    keys.push_back(entry.key().toStringRef());
  }
  CHECK(
      keys ==
      std::vector<std::string>{
          "scale",
          "growth_factor",
          "backoff_factor",
          "growth_interval",
          "_growth_tracker"});
  CHECK(state.at("scale").toDouble() == 4.0);
  CHECK(state.at("growth_factor").toDouble() == 2.0);
  CHECK(state.at("backoff_factor").toDouble() == 0.5);
  CHECK(state.at("growth_interval").toInt() == 7);
  CHECK(state.at("_growth_tracker").toInt() == 2);
}

TEST_CASE("a tracker at its interval, torch's or not, is due") {
  for (const std::int64_t tracker : {2, 3, 1000}) {
    Iterations iterations(GradScalerOptions{});
    iterations.scaler.load_state_dict(state_of(8.0, 2.0, 0.5, 3, tracker));
    iterations.run(false);
    CHECK(iterations.scaler.get_scale() == 16.0);
    CHECK(number(iterations.scaler.state_dict(), "_growth_tracker") == 0.0);
  }
}

TEST_CASE("states that make no sense are refused, and change nothing") {
  auto scaler = scaler_of(8.0);
  const auto refused = [&](const char* key, const c10::IValue& value) {
    auto state = state_of(4.0, 3.0, 0.25, 5, 1);
    state.insert_or_assign(key, value);
    const auto text =
        error_of<c10::ValueError>([&] { scaler.load_state_dict(state); });
    CHECK(scaler.get_scale() == 8.0);
    CHECK(scaler.get_growth_factor() == 2.0);
    const std::string start = "GradScaler.load_state_dict: state.";
    CHECK(text.find(start + key + " ") == 0);
    return text.substr(std::min(text.size(), (start + key + " ").size()));
  };
  const std::string scale = "must be finite in float32 and greater than 0";
  CHECK(refused("scale", 0.0) == scale + ", but got 0");
  CHECK(refused("scale", -1.0) == scale + ", but got -1");
  CHECK(refused("scale", 1e39) == scale + ", but got 1e+39");
  CHECK(refused("scale", kNan) == scale + ", but got nan");
  CHECK(
      refused("scale", 0x1p-130) ==
      "must be at least 2^-126, but got 7.34683969264e-40");
  CHECK(refused("scale", "8") == "must be a number, but got '8'");
  const std::string growth = "must be finite and greater than 1";
  CHECK(refused("growth_factor", 1.0) == growth + ", but got 1");
  CHECK(refused("growth_factor", kInf) == growth + ", but got inf");
  CHECK(refused("backoff_factor", 0.0) == "must be between 0 and 1, but got 0");
  CHECK(refused("backoff_factor", 1.0) == "must be between 0 and 1, but got 1");
  CHECK(refused("growth_interval", 0) == "must be at least 1, but got 0");
  CHECK(refused("growth_interval", 2.5) == "must be an integer, but got 2.5");
  CHECK(refused("_growth_tracker", -1) == "must be at least 0, but got -1");
  CHECK(
      error_of<c10::ValueError>(
          [&] { scaler.load_state_dict(make_state_dict()); }) ==
      "GradScaler.load_state_dict: state must have 'scale', but got an empty "
      "dict");
  CHECK(error_of<c10::ValueError>([&] {
          scaler.load_state_dict(3);
        }) == "GradScaler.load_state_dict: state must be a dict, but got 3");
  CHECK(scaler.get_scale() == 8.0);
}

TEST_CASE("arguments that make no sense are named, with their values") {
  using Error = std::invalid_argument;
  const auto text = [](const auto& make) { return error_of<Error>(make); };
  const std::string scale = " must be finite in float32 and greater than 0";
  for (const auto& [value, shown] :
       {std::pair(0.0, "0"),
        std::pair(-2.0, "-2"),
        std::pair(1e39, "1e+39"),
        std::pair(kInf, "inf"),
        std::pair(kNan, "nan")}) {
    const auto end = scale + ", but got " + shown;
    CHECK(text([&] {
            GradScaler(GradScalerOptions().init_scale(value));
          }) == "GradScaler: init_scale" + end);
    CHECK(text([&] {
            GradScaler(GradScalerOptions().min_scale(value));
          }) == "GradScaler: min_scale" + end);
    CHECK(text([&] {
            GradScaler().update(value);
          }) == "GradScaler.update: new_scale" + end);
  }
  CHECK(
      text([] { GradScaler(GradScalerOptions().min_scale(0x1p-127)); }) ==
      "GradScaler: min_scale must be at least 2^-126, but got "
      "5.87747175411e-39");
  for (const double value : {1.0, 0.5, kInf, kNan}) {
    const auto end = " must be finite and greater than 1, but got " +
        std::string(value == 1.0        ? "1"
                        : value == 0.5  ? "0.5"
                        : value == kInf ? "inf"
                                        : "nan");
    CHECK(text([&] {
            GradScaler(GradScalerOptions().growth_factor(value));
          }) == "GradScaler: growth_factor" + end);
    CHECK(text([&] {
            GradScaler().set_growth_factor(value);
          }) == "GradScaler.set_growth_factor: new_factor" + end);
  }
  for (const auto& [value, shown] :
       {std::pair(0.0, "0"),
        std::pair(1.0, "1"),
        std::pair(-0.5, "-0.5"),
        std::pair(kNan, "nan")}) {
    const auto end = std::string(" must be between 0 and 1, but got ") + shown;
    CHECK(text([&] {
            GradScaler(GradScalerOptions().backoff_factor(value));
          }) == "GradScaler: backoff_factor" + end);
    CHECK(text([&] {
            GradScaler().set_backoff_factor(value);
          }) == "GradScaler.set_backoff_factor: new_factor" + end);
  }
  CHECK(text([] {
          GradScaler(GradScalerOptions().growth_interval(0));
        }) == "GradScaler: growth_interval must be at least 1, but got 0");
  CHECK(
      text([] { GradScaler().set_growth_interval(-3); }) ==
      "GradScaler.set_growth_interval: new_interval must be at least 1, but "
      "got -3");
}

TEST_CASE("a scaler can be moved") {
  auto scaler = scaler_of(4.0);
  const auto weight = with_gradient(at::full({1}, 8.0));
  auto optimizer = sgd({weight});
  scale_something(scaler);
  scaler.unscale_(optimizer);
  auto moved = std::move(scaler);
  CHECK(moved.step(optimizer));
  CHECK(equals(weight, {-2.0}));
}
