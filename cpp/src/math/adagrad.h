// Adagrad (Duchi, Hazan, Singer 2011), with the bits of torch's fused kernel.

#pragma once

#include "rule_parts.h"

namespace fp16core::detail {

struct Adagrad {
  static constexpr std::string_view kName = "Adagrad";
  static constexpr std::array<std::string_view, 1> kOptimizers{
      "torch.optim.adagrad.Adagrad"};

  struct Options {
    double lr, lr_decay, eps, weight_decay, initial_accumulator_value, maximize;
  };
  static constexpr std::array<Option<Options>, 6> kOptions{{
      {"lr", &Options::lr},
      {"lr_decay", &Options::lr_decay},
      {"eps", &Options::eps},
      {"weight_decay", &Options::weight_decay},
      {"initial_accumulator_value", &Options::initial_accumulator_value},
      {"maximize", &Options::maximize},
  }};

  static constexpr std::array<Counter, 1> kCounters{{{"step", 0}}};

  static constexpr std::array<std::string_view, 1> kTensors{"sum"};
  static bool uses(const Options&, std::size_t) { return true; }
  static double start(const Options& options) {
    return options.initial_accumulator_value;
  }

  template <typename Real>
  struct Step {
    Real weight_decay, eps, lr;
    bool maximize;
  };

  template <typename Real>
  static C10_HOST_DEVICE Step<Real> prepare(
      const Options& o,
      Counters counters,
      bool) {
    const double step = counters[0] += 1;
    return {
        .weight_decay = static_cast<Real>(o.weight_decay),
        .eps = static_cast<Real>(o.eps),
        .lr = static_cast<Real>(o.lr / (1 + (step - 1) * o.lr_decay)),
        .maximize = o.maximize != 0,
    };
  }

  template <typename Math, bool kRemainder, typename Value>
  static FP16CORE_PER_ELEMENT void update(
      const Step<typename Math::Real>& step,
      const Value& gradient,
      Value& weight,
      Value* state) {
    const Value descent = decayed_gradient<Math>(
        gradient,
        weight,
        step.maximize,
        step.weight_decay);
    state[0] = Math::fma(descent, descent, state[0]);
    const Value denominator = Math::sqrt(state[0]) + Math::of(step.eps);
    weight = weight - Math::of(step.lr) * descent / denominator;
  }
};

} // namespace fp16core::detail
