// RMSprop (Hinton 2012), plain, centered and with momentum, in the
// order of roundings of torch's loop over tensors, whose square root is not
// exact.

#pragma once

#include "rule_parts.h"

namespace fp16core::detail {

struct RmsProp {
  static constexpr std::string_view kName = "RMSprop";
  static constexpr std::array<std::string_view, 1> kOptimizers{
      "torch.optim.rmsprop.RMSprop"};

  struct Options {
    double lr, alpha, eps, weight_decay, momentum, centered, maximize;
  };
  static constexpr std::array<Option<Options>, 7> kOptions{{
      {"lr", &Options::lr},
      {"alpha", &Options::alpha},
      {"eps", &Options::eps},
      {"weight_decay", &Options::weight_decay},
      {"momentum", &Options::momentum},
      {"centered", &Options::centered},
      {"maximize", &Options::maximize},
  }};

  static constexpr std::array<Counter, 1> kCounters{{{"step", 0}}};

  static constexpr std::array<std::string_view, 3> kTensors{
      "square_avg",
      "momentum_buffer",
      "grad_avg"};
  static bool uses(const Options& options, std::size_t tensor) {
    return tensor == 0 || (tensor == 1 && options.momentum > 0) ||
        (tensor == 2 && options.centered != 0);
  }
  static double start(const Options&) { return 0; }

  template <typename Real>
  struct Step {
    Real weight_decay, alpha, rate, eps, momentum, minus_lr;
    bool centered, maximize;
  };

  template <typename Real>
  static C10_HOST_DEVICE Step<Real> prepare(
      const Options& o,
      Counters counters,
      bool) {
    counters[0] += 1;
    return {
        .weight_decay = static_cast<Real>(o.weight_decay),
        .alpha = static_cast<Real>(o.alpha),
        .rate = static_cast<Real>(1 - o.alpha),
        .eps = static_cast<Real>(o.eps),
        .momentum = static_cast<Real>(o.momentum),
        .minus_lr = static_cast<Real>(-o.lr),
        .centered = o.centered != 0,
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
    state[0] =
        square_average<Math, false>(state[0], descent, step.alpha, step.rate);
    Value variance = state[0];
    if (step.centered) {
      state[2] = lerp<Math, kRemainder>(state[2], descent, step.rate);
      const Value minus_one = Math::of(typename Math::Real(-1));
      variance = Math::fma(minus_one * state[2], state[2], variance);
    }
    const Value root = Math::sqrt(variance) + Math::of(step.eps);
    if (step.momentum > 0) {
      state[1] = state[1] * Math::of(step.momentum) + descent / root;
      weight = Math::fma(state[1], Math::of(step.minus_lr), weight);
    } else {
      weight = weight + Math::of(step.minus_lr) * descent / root;
    }
  }
};

} // namespace fp16core::detail
