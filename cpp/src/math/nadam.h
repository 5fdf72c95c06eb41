// NAdam (Dozat 2016), in the order of roundings of torch's loop over tensors,
// whose square root is not exact.

#pragma once

#include "rule_parts.h"

namespace fp16core::detail {

struct NAdam {
  static constexpr std::string_view kName = "NAdam";
  static constexpr std::array<std::string_view, 1> kOptimizers{
      "torch.optim.nadam.NAdam"};

  struct Options {
    double lr, lr_single, beta1, beta2, eps, weight_decay, momentum_decay,
        decoupled, maximize;
  };
  static constexpr std::array<Option<Options>, 9> kOptions{{
      {"lr", &Options::lr},
      {"float32(lr)", &Options::lr_single},
      {"betas[0]", &Options::beta1},
      {"betas[1]", &Options::beta2},
      {"eps", &Options::eps},
      {"weight_decay", &Options::weight_decay},
      {"momentum_decay", &Options::momentum_decay},
      {"decoupled_weight_decay", &Options::decoupled},
      {"maximize", &Options::maximize},
  }};

  static constexpr std::array<Counter, 2> kCounters{
      {{"step", 0}, {"mu_product", 1}}};

  static constexpr std::array<std::string_view, 2> kTensors{
      "exp_avg",
      "exp_avg_sq"};
  static bool uses(const Options&, std::size_t) { return true; }
  static double start(const Options&) { return 0; }

  template <typename Real>
  struct Step {
    Real weight_decay, shrink, rate1, beta2, rate2, correction2, eps;
    Real minus_gradient_size, minus_average_size;
    bool maximize;
  };

  template <typename Real>
  static C10_HOST_DEVICE Step<Real> prepare(
      const Options& o,
      Counters counters,
      bool) {
    const double step = counters[0] += 1;
    // The momentum of this step and of the next one.
    const auto momentum = [&](double at) {
      return o.beta1 * (1 - 0.5 * std::pow(0.96, at * o.momentum_decay));
    };
    const double now = momentum(step);
    const double next = momentum(step + 1);
    counters.multiply(1, now);
    const double product = counters[1];
    const bool decoupled = o.decoupled != 0;
    const RateArithmetic rounded{o.lr_single != 0};
    const auto minus_rate = [&](double share, double correction) {
      return rounded(rounded(-o.lr * rounded(share)) / rounded(correction));
    };
    const double decay = rounded(o.lr * rounded(o.weight_decay));
    return {
        .weight_decay = static_cast<Real>(decoupled ? 0 : o.weight_decay),
        .shrink = static_cast<Real>(decoupled ? rounded(1 - decay) : 1),
        .rate1 = static_cast<Real>(1 - o.beta1),
        .beta2 = static_cast<Real>(o.beta2),
        .rate2 = static_cast<Real>(1 - o.beta2),
        .correction2 = static_cast<Real>(1 - std::pow(o.beta2, step)),
        .eps = static_cast<Real>(o.eps),
        .minus_gradient_size =
            static_cast<Real>(minus_rate(1 - now, 1 - product)),
        .minus_average_size =
            static_cast<Real>(minus_rate(next, 1 - product * next)),
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
    weight = weight * Math::of(step.shrink);
    state[0] = lerp<Math, kRemainder>(state[0], descent, step.rate1);
    state[1] =
        square_average<Math, false>(state[1], descent, step.beta2, step.rate2);
    const Value denominator =
        Math::sqrt(state[1] / Math::of(step.correction2)) + Math::of(step.eps);
    weight =
        weight + Math::of(step.minus_gradient_size) * descent / denominator;
    weight =
        weight + Math::of(step.minus_average_size) * state[0] / denominator;
  }
};

} // namespace fp16core::detail
