// Stochastic gradient descent with momentum, dampening and Nesterov's variant,
// with the bits of torch's fused kernel.

#pragma once

#include "rule_parts.h"

namespace fp16core::detail {

struct Sgd {
  static constexpr std::string_view kName = "SGD";
  static constexpr std::array<std::string_view, 1> kOptimizers{
      "torch.optim.sgd.SGD"};

  struct Options {
    double lr, momentum, dampening, weight_decay, nesterov, maximize;
  };
  static constexpr std::array<Option<Options>, 6> kOptions{{
      {"lr", &Options::lr},
      {"momentum", &Options::momentum},
      {"dampening", &Options::dampening},
      {"weight_decay", &Options::weight_decay},
      {"nesterov", &Options::nesterov},
      {"maximize", &Options::maximize},
  }};

  static constexpr std::array<Counter, 0> kCounters{};

  static constexpr std::array<std::string_view, 1> kTensors{"momentum_buffer"};
  static bool uses(const Options& options, std::size_t) {
    return options.momentum != 0;
  }
  static double start(const Options&) { return 0; }

  template <typename Real>
  struct Step {
    Real weight_decay, momentum, rate, minus_lr;
    bool with_momentum, nesterov, maximize, first;
  };

  template <typename Real>
  static C10_HOST_DEVICE Step<Real> prepare(
      const Options& o,
      Counters,
      bool fresh) {
    return {
        .weight_decay = static_cast<Real>(o.weight_decay),
        .momentum = static_cast<Real>(o.momentum),
        .rate = static_cast<Real>(1 - o.dampening),
        .minus_lr = static_cast<Real>(-o.lr),
        .with_momentum = o.momentum != 0,
        .nesterov = o.nesterov != 0,
        .maximize = o.maximize != 0,
        .first = fresh,
    };
  }

  template <typename Math, bool kRemainder, typename Value>
  static FP16CORE_PER_ELEMENT void update(
      const Step<typename Math::Real>& step,
      const Value& gradient,
      Value& weight,
      Value* state) {
    Value descent = decayed_gradient<Math>(
        gradient,
        weight,
        step.maximize,
        step.weight_decay);
    if (step.with_momentum) {
      const Value momentum = Math::of(step.momentum);
      const Value rate = Math::of(step.rate);
      if (step.first) {
        // Dampening holds from the second step on.
        state[0] = descent;
      } else if constexpr (kRemainder) {
        // See square_average.
        state[0] = Math::fma(state[0], momentum, descent * rate);
      } else {
        state[0] = Math::fma(descent, rate, state[0] * momentum);
      }
      descent =
          step.nesterov ? Math::fma(state[0], momentum, descent) : state[0];
    }
    weight = Math::fma(descent, Math::of(step.minus_lr), weight);
  }
};

} // namespace fp16core::detail
