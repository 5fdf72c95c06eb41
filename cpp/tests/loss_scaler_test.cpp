// The loss scale's state machine against its rule written out once more, and
// the arguments that it refuses.

#include "oracle.h"

#include <fp16core/loss_scaler.h>

#include <doctest.h>

using namespace fp16core;
using fp16core::test::error_of;

namespace {

// The rule as its history reads: the scale is the start value, moved by each
// event in turn. Windows are counted in iterations since the last overflow.
class Rule {
 public:
  explicit Rule(const DynamicLossScalerOptions& options)
      : options_(options),
        scale(options.init_scale),
        tolerance(options.delayed_shift) {}

  void see(bool overflow) {
    if (overflow) {
      last_overflow = iteration;
      const bool tolerated = options_.delayed_shift != 1 && tolerance != 1;
      if (tolerated) {
        --tolerance;
      } else {
        const double lowered = options_.backoff_factor == 0.0
            ? scale / options_.scale_factor
            : scale * options_.backoff_factor;
        scale = std::max(lowered, options_.min_scale);
      }
    } else {
      const double clean = static_cast<double>(iteration - last_overflow) /
          options_.scale_window;
      const bool window_ends = clean == std::floor(clean);
      if (window_ends && std::isfinite(scale * options_.scale_factor)) {
        scale *= options_.scale_factor;
      }
      if (window_ends || options_.consecutive_hysteresis) {
        tolerance = options_.delayed_shift;
      }
    }
    ++iteration;
  }

 private:
  DynamicLossScalerOptions options_;

 public:
  double scale;
  std::int64_t tolerance;
  std::int64_t iteration = 0;
  std::int64_t last_overflow = -1;
};

void check_against_rule(
    const DynamicLossScalerOptions& options,
    double overflow_share,
    unsigned seed) {
  DynamicLossScaler scaler(options);
  Rule rule(options);
  std::mt19937 random(seed);
  std::bernoulli_distribution overflows(overflow_share);
  for (int i = 0; i < 2000; ++i) {
    CAPTURE(i);
    const bool overflow = overflows(random);
    scaler.update_scale(overflow);
    rule.see(overflow);
    REQUIRE(scaler.loss_scale() == rule.scale);
    REQUIRE(scaler.state().cur_scale == rule.scale);
    REQUIRE(scaler.state().cur_iter == rule.iteration);
    REQUIRE(scaler.state().last_overflow_iter == rule.last_overflow);
    REQUIRE(scaler.state().cur_hysteresis == rule.tolerance);
    REQUIRE(scaler.at_floor() == (rule.scale <= options.min_scale));
  }
}

} // namespace

TEST_CASE("a static scale stays where it is put") {
  LossScaler scaler(128.0);
  scaler.update_scale(true);
  scaler.update_scale(false);
  CHECK(scaler.loss_scale() == 128.0);
  CHECK_FALSE(scaler.dynamic());
  CHECK(scaler.at_floor());
  CHECK(scaler.overflows_tolerated() == 0);
  scaler.set_loss_scale(0.5);
  CHECK(scaler.loss_scale() == 0.5);
  CHECK(LossScaler().loss_scale() == 1.0);
}

TEST_CASE("a dynamic scale starts with the original's constants") {
  const DynamicLossScaler scaler;
  CHECK(scaler.loss_scale() == 0x1p32);
  CHECK(scaler.dynamic());
  CHECK(scaler.options().scale_factor == 2.0);
  CHECK(scaler.options().scale_window == 1000.0);
  CHECK(scaler.options().min_scale == 1.0);
  CHECK(scaler.options().delayed_shift == 1);
  CHECK(scaler.options().backoff_factor == 0.0);
  CHECK_FALSE(scaler.options().consecutive_hysteresis);
  CHECK(scaler.state().cur_iter == 0);
  CHECK(scaler.state().last_overflow_iter == -1);
  CHECK(scaler.state().cur_hysteresis == 1);
}

TEST_CASE("a short history, step by step") {
  DynamicLossScaler scaler({.init_scale = 16.0, .scale_window = 2.0});
  const auto after = [&](bool overflow) {
    scaler.update_scale(overflow);
    return scaler.loss_scale();
  };
  // The first window starts one iteration before the first.
  CHECK(after(false) == 16.0);
  CHECK(after(false) == 32.0);
  CHECK(after(true) == 16.0);
  CHECK(after(true) == 8.0);
  CHECK(after(false) == 8.0);
  CHECK(after(false) == 16.0);
  CHECK(after(false) == 16.0);
  CHECK(after(false) == 32.0);
}

TEST_CASE("the dynamic scale follows its rule") {
  unsigned seed = 0;
  for (const std::int64_t shift : {1, 2, 5}) {
    for (const bool consecutive : {false, true}) {
      for (const double window : {1.0, 2.0, 3.0, 17.0}) {
        for (const double share : {0.02, 0.3, 0.9}) {
          CAPTURE(shift);
          CAPTURE(consecutive);
          CAPTURE(window);
          CAPTURE(share);
          check_against_rule(
              {.init_scale = 1024.0,
               .scale_factor = 2.0,
               .scale_window = window,
               .min_scale = 0.25,
               .delayed_shift = shift,
               .consecutive_hysteresis = consecutive},
              share,
              ++seed);
        }
      }
    }
  }
}

TEST_CASE("factors and floors need not be powers of two") {
  check_against_rule(
      {.init_scale = 1000.0,
       .scale_factor = 1.7,
       .scale_window = 5.0,
       .min_scale = 3.3},
      0.2,
      1);
}

TEST_CASE("backoff may have a factor of its own") {
  for (const double factor : {0.75, 0.31}) {
    CAPTURE(factor);
    for (const std::int64_t shift : {1, 3}) {
      CAPTURE(shift);
      check_against_rule(
          {.init_scale = 1000.0,
           .scale_factor = 2.0,
           .scale_window = 5.0,
           .min_scale = 3.3,
           .delayed_shift = shift,
           .backoff_factor = factor},
          0.3,
          5);
    }
  }
  DynamicLossScaler scaler({.init_scale = 64.0, .backoff_factor = 0.25});
  scaler.update_scale(true);
  CHECK(scaler.loss_scale() == 16.0);
  auto options = scaler.options();
  options.backoff_factor = 0.0;
  scaler.set_options(options);
  scaler.update_scale(true);
  CHECK(scaler.loss_scale() == 8.0);
}

TEST_CASE("a window may be a fraction") {
  // Every 2.5 iterations: only each fifth iteration lies on the grid.
  DynamicLossScaler scaler({.init_scale = 1.0, .scale_window = 2.5});
  for (int i = 1; i <= 20; ++i) {
    scaler.update_scale(false);
    CHECK(scaler.loss_scale() == std::exp2(i / 5));
  }
}

TEST_CASE("the scale never leaves the range of double") {
  DynamicLossScaler scaler({.init_scale = 0x1p1020, .scale_window = 1.0});
  for (int i = 0; i < 10; ++i) {
    scaler.update_scale(false);
  }
  CHECK(scaler.loss_scale() == 0x1p1023);
  scaler.update_scale(true);
  CHECK(scaler.loss_scale() == 0x1p1022);
}

TEST_CASE("an overflow lifts a scale below its floor up to it") {
  DynamicLossScaler scaler({.init_scale = 4.0, .min_scale = 8.0});
  CHECK(scaler.at_floor());
  scaler.update_scale(true);
  CHECK(scaler.loss_scale() == 8.0);
}

TEST_CASE("tolerated overflows are told ahead") {
  DynamicLossScaler scaler({.init_scale = 64.0, .delayed_shift = 3});
  CHECK(scaler.overflows_tolerated() == 2);
  scaler.update_scale(true);
  CHECK(scaler.overflows_tolerated() == 1);
  scaler.update_scale(true);
  CHECK(scaler.overflows_tolerated() == 0);
  CHECK(scaler.loss_scale() == 64.0);
  scaler.update_scale(true);
  CHECK(scaler.loss_scale() == 32.0);
  CHECK(scaler.overflows_tolerated() == 0);
}

TEST_CASE("a scale set by hand leaves the counters alone") {
  DynamicLossScaler scaler({.init_scale = 64.0, .delayed_shift = 3});
  scaler.update_scale(true);
  scaler.update_scale(false);
  const auto before = scaler.state();
  scaler.set_loss_scale(7.0);
  CHECK(scaler.loss_scale() == 7.0);
  CHECK(scaler.state().cur_iter == before.cur_iter);
  CHECK(scaler.state().last_overflow_iter == before.last_overflow_iter);
  CHECK(scaler.state().cur_hysteresis == before.cur_hysteresis);
}

TEST_CASE("a state that is put back goes on as before") {
  DynamicLossScaler scaler(
      {.init_scale = 64.0, .scale_window = 3.0, .delayed_shift = 2});
  for (const bool overflow : {false, true, false, false}) {
    scaler.update_scale(overflow);
  }
  DynamicLossScaler other(scaler.options());
  other.set_state(scaler.state());
  for (const bool overflow : {false, true, true, false, false, false}) {
    scaler.update_scale(overflow);
    other.update_scale(overflow);
    CHECK(other.loss_scale() == scaler.loss_scale());
  }
}

TEST_CASE("scales that make no sense are refused") {
  using Error = std::invalid_argument;
  const double inf = std::numeric_limits<double>::infinity();
  LossScaler fixed(2.0);
  DynamicLossScaler dynamic({.init_scale = 2.0});
  for (const double bad : {0.0, -1.0, 0x1p-127, inf, std::nan("")}) {
    CAPTURE(bad);
    CHECK_THROWS_AS(LossScaler{bad}, Error);
    CHECK_THROWS_AS(fixed.set_loss_scale(bad), Error);
    CHECK_THROWS_AS(dynamic.set_loss_scale(bad), Error);
    CHECK_THROWS_AS(DynamicLossScaler({.init_scale = bad}), Error);
    CHECK_THROWS_AS(DynamicLossScaler({.min_scale = bad}), Error);
    CHECK_THROWS_AS(DynamicLossScaler({.scale_factor = bad}), Error);
    CHECK_THROWS_AS(DynamicLossScaler({.scale_window = bad}), Error);
    auto state = dynamic.state();
    state.cur_scale = bad;
    CHECK_THROWS_AS(dynamic.set_state(state), Error);
  }
  CHECK(fixed.loss_scale() == 2.0);
  CHECK(dynamic.loss_scale() == 2.0);
}

TEST_CASE("the smallest scale is one whose reciprocal float32 holds") {
  CHECK(LossScaler(0x1p-126).loss_scale() == 0x1p-126);
  CHECK(
      DynamicLossScaler({.min_scale = 0x1p-126}).options().min_scale ==
      0x1p-126);
}

TEST_CASE("an argument that makes no sense is named, with its value") {
  using Error = std::invalid_argument;
  const auto named = [](const std::string& name, const auto& set) {
    CAPTURE(name);
    CHECK(error_of<Error>([&] {
            set(-2.0);
          }) == name + " must be finite and greater than 0, but got -2");
    const auto text = error_of<Error>([&] { set(0x1p-127); });
    CHECK(text.find(name + " must be at least 2^-126, but got ") == 0);
  };
  named("LossScaler: scale", [](double v) { LossScaler{v}; });
  named("LossScaler.loss_scale:", [](double v) {
    LossScaler().set_loss_scale(v);
  });
  named("DynamicLossScaler.loss_scale:", [](double v) {
    DynamicLossScaler().set_loss_scale(v);
  });
  named("DynamicLossScaler: init_scale", [](double v) {
    DynamicLossScaler({.init_scale = v});
  });
  named("DynamicLossScaler: min_scale", [](double v) {
    DynamicLossScaler({.min_scale = v});
  });
  CHECK(
      error_of<Error>([] { DynamicLossScaler({.scale_factor = 1.0}); }) ==
      "DynamicLossScaler: scale_factor must be finite and greater than 1, but "
      "got 1");
  CHECK(
      error_of<Error>([] { DynamicLossScaler({.scale_window = 0.5}); }) ==
      "DynamicLossScaler: scale_window must be finite and at least 1, but got "
      "0.5");
  CHECK(error_of<Error>([] {
          DynamicLossScaler({.delayed_shift = 0});
        }) == "DynamicLossScaler: delayed_shift must be at least 1, but got 0");
  for (const auto& [value, shown] :
       {std::pair(1.0, "1"),
        std::pair(-0.5, "-0.5"),
        std::pair(std::numeric_limits<double>::infinity(), "inf"),
        std::pair(std::numeric_limits<double>::quiet_NaN(), "nan")}) {
    CHECK(
        error_of<Error>(
            [&] { DynamicLossScaler({.backoff_factor = value}); }) ==
        std::string(
            "DynamicLossScaler: backoff_factor must be between 0 and 1, but "
            "got ") +
            shown);
  }
  DynamicLossScaler scaler;
  auto state = scaler.state();
  state.cur_hysteresis = 0;
  CHECK(
      error_of<Error>([&] { scaler.set_state(state); }) ==
      "DynamicLossScaler.cur_hysteresis: must be at least 1, but got 0");
}

TEST_CASE("a refused change of rule or state changes nothing") {
  DynamicLossScaler scaler({.init_scale = 64.0, .delayed_shift = 2});
  auto options = scaler.options();
  options.scale_factor = 4.0;
  options.delayed_shift = 0;
  CHECK_THROWS_AS(scaler.set_options(options), std::invalid_argument);
  CHECK(scaler.options().scale_factor == 2.0);
  options.delayed_shift = 2;
  scaler.set_options(options);
  CHECK(scaler.loss_scale() == 64.0);
  scaler.update_scale(true);
  scaler.update_scale(true);
  CHECK(scaler.loss_scale() == 16.0);
}
