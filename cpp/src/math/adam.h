// Adam and AdamW (arXiv:1412.6980, 1711.05101), with the bits of torch's fused
// kernels.

#pragma once

#include "rule_parts.h"

namespace fp16core::detail {

struct Adam {
  static constexpr std::string_view kName = "Adam";
  static constexpr std::array<std::string_view, 2> kOptimizers{
      "torch.optim.adam.Adam",
      "torch.optim.adamw.AdamW"};

  struct Options {
    double lr, beta1, beta2, eps, weight_decay, amsgrad, maximize, decoupled;
  };
  static constexpr std::array<Option<Options>, 8> kOptions{{
      {"lr", &Options::lr},
      {"betas[0]", &Options::beta1},
      {"betas[1]", &Options::beta2},
      {"eps", &Options::eps},
      {"weight_decay", &Options::weight_decay},
      {"amsgrad", &Options::amsgrad},
      {"maximize", &Options::maximize},
      {"decoupled_weight_decay", &Options::decoupled},
  }};

  static constexpr std::array<Counter, 1> kCounters{{{"step", 0}}};

  static constexpr std::array<std::string_view, 3> kTensors{
      "exp_avg",
      "exp_avg_sq",
      "max_exp_avg_sq"};
  static bool uses(const Options& options, std::size_t tensor) {
    return tensor < 2 || options.amsgrad != 0;
  }
  static double start(const Options&) { return 0; }

  template <typename Real>
  struct Step {
    Real weight_decay, shrink, rate1, beta2, rate2, root_correction2, eps;
    Real minus_step_size;
    bool amsgrad, maximize;
  };

  template <typename Real>
  static C10_HOST_DEVICE Step<Real> prepare(
      const Options& o,
      Counters counters,
      bool) {
    const double step = counters[0] += 1;
    const double correction1 = 1 - std::pow(o.beta1, step);
    const double correction2 = 1 - std::pow(o.beta2, step);
    const bool decoupled = o.decoupled != 0;
    return {
        .weight_decay = static_cast<Real>(decoupled ? 0 : o.weight_decay),
        // Fused, as the compiler did in torch's kernels.
        .shrink = static_cast<Real>(
            decoupled ? std::fma(-o.lr, o.weight_decay, 1.0) : 1),
        .rate1 = static_cast<Real>(1 - o.beta1),
        .beta2 = static_cast<Real>(o.beta2),
        .rate2 = static_cast<Real>(1 - o.beta2),
        .root_correction2 = static_cast<Real>(std::sqrt(correction2)),
        .eps = static_cast<Real>(o.eps),
        .minus_step_size = static_cast<Real>(-(o.lr / correction1)),
        .amsgrad = o.amsgrad != 0,
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
    state[1] = square_average<Math, kRemainder>(
        state[1],
        descent,
        step.beta2,
        step.rate2);
    Value variance = state[1];
    if (step.amsgrad) {
      variance = state[2] = Math::maximum(state[2], variance);
    }
    const Value denominator =
        Math::sqrt(variance) / Math::of(step.root_correction2) +
        Math::of(step.eps);
    weight = weight + Math::of(step.minus_step_size) * state[0] / denominator;
  }
};

} // namespace fp16core::detail
