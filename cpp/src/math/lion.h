// Lion (arXiv:2302.06675), with the bits of fp16core.optim.Lion.

#pragma once

#include "rule_parts.h"

namespace fp16core::detail {

struct Lion {
  static constexpr std::string_view kName = "Lion";
  static constexpr std::array<std::string_view, 1> kOptimizers{
      "fp16core.optim.lion.Lion"};

  struct Options {
    double lr, beta1, beta2, weight_decay, maximize;
  };
  static constexpr std::array<Option<Options>, 5> kOptions{{
      {"lr", &Options::lr},
      {"betas[0]", &Options::beta1},
      {"betas[1]", &Options::beta2},
      {"weight_decay", &Options::weight_decay},
      {"maximize", &Options::maximize},
  }};

  static constexpr std::array<Counter, 0> kCounters{};

  static constexpr std::array<std::string_view, 1> kTensors{"exp_avg"};
  static bool uses(const Options&, std::size_t) { return true; }
  static double start(const Options&) { return 0; }

  template <typename Real>
  struct Step {
    Real shrink, rate1, rate2, minus_lr;
    bool maximize;
  };

  template <typename Real>
  static C10_HOST_DEVICE Step<Real> prepare(const Options& o, Counters, bool) {
    return {
        .shrink = static_cast<Real>(1 - o.lr * o.weight_decay),
        .rate1 = static_cast<Real>(1 - o.beta1),
        .rate2 = static_cast<Real>(1 - o.beta2),
        .minus_lr = static_cast<Real>(-o.lr),
        .maximize = o.maximize != 0,
    };
  }

  template <typename Math, bool kRemainder, typename Value>
  static FP16CORE_PER_ELEMENT void update(
      const Step<typename Math::Real>& step,
      const Value& gradient,
      Value& weight,
      Value* state) {
    const Value descent =
        decayed_gradient<Math>(gradient, weight, step.maximize, 0);
    const Value direction =
        Math::sign(lerp<Math, kRemainder>(state[0], descent, step.rate1));
    weight = weight * Math::of(step.shrink);
    weight = Math::fma(direction, Math::of(step.minus_lr), weight);
    state[0] = lerp<Math, kRemainder>(state[0], descent, step.rate2);
  }
};

} // namespace fp16core::detail
