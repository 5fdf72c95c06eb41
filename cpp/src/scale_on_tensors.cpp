#include <fp16core/scale_on_tensors.h>

#include <fp16core/scale_policies.h>

#include "parameter_text.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>

namespace fp16core {

namespace {

void check(const char* name, const at::Tensor& tensor, c10::ScalarType type) {
  TORCH_CHECK_TYPE(
      tensor.defined() && tensor.scalar_type() == type,
      "update_scale_hysteresis: ",
      name,
      " must be ",
      detail::dtype_name(type),
      ", but got ",
      tensor.defined() ? detail::dtype_name(tensor.scalar_type())
                       : "an undefined tensor");
  TORCH_CHECK_VALUE(
      tensor.numel() == 1,
      "update_scale_hysteresis: ",
      name,
      " must have one element, but got shape ",
      tensor.sizes());
}

} // namespace

at::Tensor update_scale_hysteresis(
    const at::Tensor& current_scale,
    const at::Tensor& growth_tracker,
    const at::Tensor& hysteresis_tracker,
    const at::Tensor& found_inf,
    double growth_factor,
    double backoff_factor,
    std::int64_t growth_interval,
    std::int64_t hysteresis) {
  check("current_scale", current_scale, at::kFloat);
  check("growth_tracker", growth_tracker, at::kInt);
  check("hysteresis_tracker", hysteresis_tracker, at::kInt);
  check("found_inf", found_inf, at::kFloat);
  const at::NoGradGuard no_grad;
  const auto tolerance = hysteresis_tracker.item<std::int64_t>();
  DynamicLossScaler scaler(scale_policy(
      "apex_hysteresis_kernel",
      {{"init_scale", current_scale.item<double>()},
       {"growth_factor", growth_factor},
       {"backoff_factor", backoff_factor},
       {"growth_interval", static_cast<double>(growth_interval)},
       {"hysteresis", static_cast<double>(std::max(hysteresis, tolerance))}}));
  const auto clean = growth_tracker.item<std::int64_t>();
  auto state = scaler.state();
  state.cur_iter = clean;
  state.last_overflow_iter = -1;
  state.cur_hysteresis = std::max(tolerance, std::int64_t(1));
  scaler.set_state(state);
  const bool overflow = found_inf.item<float>() > 0.0F;
  scaler.update_scale(overflow);
  state = scaler.state();
  const auto tracker = overflow || clean + 1 >= growth_interval ? 0 : clean + 1;
  current_scale.fill_(state.cur_scale);
  growth_tracker.fill_(tracker);
  if (!overflow) {
    hysteresis_tracker.fill_(hysteresis);
  } else {
    hysteresis_tracker.sub_(1);
  }
  return current_scale;
}

} // namespace fp16core
