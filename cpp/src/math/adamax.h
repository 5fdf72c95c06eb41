// Adamax (arXiv:1412.6980, section 7), with the bits of torch's loop over
// tensors.

#pragma once

#include "rule_parts.h"

namespace fp16core::detail {

struct Adamax {
  static constexpr std::string_view kName = "Adamax";
  static constexpr std::array<std::string_view, 1> kOptimizers{
      "torch.optim.adamax.Adamax"};

  struct Options {
    double lr, lr_single, beta1, beta2, eps, weight_decay, maximize;
  };
  static constexpr std::array<Option<Options>, 7> kOptions{{
      {"lr", &Options::lr},
      {"float32(lr)", &Options::lr_single},
      {"betas[0]", &Options::beta1},
      {"betas[1]", &Options::beta2},
      {"eps", &Options::eps},
      {"weight_decay", &Options::weight_decay},
      {"maximize", &Options::maximize},
  }};

  static constexpr std::array<Counter, 1> kCounters{{{"step", 0}}};

  static constexpr std::array<std::string_view, 2> kTensors{
      "exp_avg",
      "exp_inf"};
  static bool uses(const Options&, std::size_t) { return true; }
  static double start(const Options&) { return 0; }

  template <typename Real>
  struct Step {
    Real weight_decay, rate1, beta2, eps, minus_step_size;
    bool maximize;
  };

  template <typename Real>
  static C10_HOST_DEVICE Step<Real> prepare(
      const Options& o,
      Counters counters,
      bool) {
    const double step = counters[0] += 1;
    const RateArithmetic rounded{o.lr_single != 0};
    const double correction1 = rounded(1 - std::pow(o.beta1, step));
    return {
        .weight_decay = static_cast<Real>(o.weight_decay),
        .rate1 = static_cast<Real>(1 - o.beta1),
        .beta2 = static_cast<Real>(o.beta2),
        .eps = static_cast<Real>(o.eps),
        .minus_step_size = static_cast<Real>(-rounded(o.lr / correction1)),
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
    state[0] = lerp<Math, kRemainder>(state[0], descent, step.rate1);
    state[1] = Math::maximum(
        state[1] * Math::of(step.beta2),
        Math::abs(descent) + Math::of(step.eps));
    weight = weight + Math::of(step.minus_step_size) * state[0] / state[1];
  }
};

} // namespace fp16core::detail
