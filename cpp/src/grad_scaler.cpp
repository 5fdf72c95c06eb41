#include <fp16core/grad_scaler.h>

#include <fp16core/tensor_lists.h>

#include "dict_reader.h"
#include "number.h"
#include "parameter_text.h"
#include "seen_tensor.h"

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/core/Dict.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <stdexcept>
#include <string>
#include <unordered_map>

namespace fp16core {

namespace {

using torch::optim::Optimizer;

// The rule that a value breaks, or nothing.
using Broken = std::optional<std::string>;

// Losses are float32, and so is the scale, as in torch.
float rounded(double value) {
  return static_cast<float>(value);
}

Broken broken_scale(double value) {
  if (!std::isfinite(rounded(value)) || value <= 0.0) {
    return "must be finite in float32 and greater than 0";
  }
  if (rounded(value) < 0x1p-126F) {
    return "must be at least 2^-126";
  }
  return std::nullopt;
}

Broken broken_growth(double value) {
  return std::isfinite(value) && value > 1.0
      ? Broken()
      : "must be finite and greater than 1";
}

Broken broken_backoff(double value) {
  return value > 0.0 && value < 1.0 ? Broken() : "must be between 0 and 1";
}

Broken broken_interval(std::int64_t value) {
  return value >= 1 ? Broken() : "must be at least 1";
}

void check(const std::string& name, double value, const Broken& broken) {
  if (broken) {
    throw std::invalid_argument(
        name + " " + *broken + ", but got " + detail::number(value));
  }
}

DynamicLossScalerOptions rule_of(const GradScalerOptions& options) {
  const auto scale = [](const char* name, double value) {
    check(name, value, broken_scale(value));
    return static_cast<double>(rounded(value));
  };
  DynamicLossScalerOptions rule;
  rule.init_scale = scale("GradScaler: init_scale", options.init_scale());
  rule.min_scale = scale("GradScaler: min_scale", options.min_scale());
  check(
      "GradScaler: growth_factor",
      options.growth_factor(),
      broken_growth(options.growth_factor()));
  check(
      "GradScaler: backoff_factor",
      options.backoff_factor(),
      broken_backoff(options.backoff_factor()));
  check(
      "GradScaler: growth_interval",
      static_cast<double>(options.growth_interval()),
      broken_interval(options.growth_interval()));
  rule.scale_factor = options.growth_factor();
  rule.backoff_factor = options.backoff_factor();
  rule.scale_window = static_cast<double>(options.growth_interval());
  rule.delayed_shift = 1;
  return rule;
}

// Calls `body(parameter, group, index)` for those that have a gradient.
template <typename Body>
void for_each_gradient(Optimizer& optimizer, const Body& body) {
  std::int64_t g = 0;
  for (auto& group : optimizer.param_groups()) {
    std::int64_t i = 0;
    for (const auto& parameter : group.params()) {
      if (detail::gradient_of(parameter).defined()) {
        body(parameter, g, i);
      }
      ++i;
    }
    ++g;
  }
}

void check_gradient(
    const char* method,
    const at::Tensor& parameter,
    std::int64_t group,
    std::int64_t index) {
  const auto& gradient = detail::gradient_of(parameter);
  const auto type = gradient.scalar_type();
  TORCH_CHECK_TYPE(
      gradient.layout() == at::kStrided || gradient.is_sparse(),
      "GradScaler.",
      method,
      ": gradients must be strided or sparse COO, but got ",
      gradient.layout(),
      " for ",
      detail::describe_parameter(group, index, parameter));
  TORCH_CHECK_VALUE(
      type != at::kHalf,
      "GradScaler.",
      method,
      ": gradients must not be float16, whose parameters need the master "
      "weights of FP16Optimizer, but got float16 for ",
      detail::describe_parameter(group, index, parameter));
  TORCH_CHECK_TYPE(
      type == at::kBFloat16 || type == at::kFloat || type == at::kDouble,
      "GradScaler.",
      method,
      ": gradients must be bfloat16, float32 or float64, but got ",
      detail::dtype_name(type),
      " for ",
      detail::describe_parameter(group, index, parameter));
}

bool overlaps(const at::Tensor& tensor) {
  return at::has_internal_overlap(tensor) == at::MemOverlap::Yes;
}

// Returns the values of a gradient. Where elements share memory they get their
// own first: autograd leaves such values in sparse gradients.
at::Tensor own_values(const at::Tensor& parameter) {
  auto& gradient = parameter.mutable_grad();
  if (!gradient.is_sparse()) {
    if (overlaps(gradient)) {
      gradient = gradient.contiguous();
    }
    return gradient;
  }
  if (overlaps(gradient._values())) {
    gradient = at::_sparse_coo_tensor_unsafe(
                   gradient._indices(),
                   gradient._values().contiguous(),
                   gradient.sizes())
                   ._coalesced_(gradient.is_coalesced());
  }
  return gradient._values();
}

at::Tensor times(const at::Tensor& output, double scale) {
  return (c10::elementSize(output.scalar_type()) < sizeof(float)
              ? output.to(at::kFloat)
              : output) *
      scale;
}

void check_output(const at::Tensor& output) {
  TORCH_CHECK_TYPE(
      output.defined() && output.is_floating_point(),
      "GradScaler.scale: outputs must be floating point tensors, but got ",
      output.defined() ? detail::dtype_name(output.scalar_type())
                       : "an undefined one");
}

} // namespace

struct GradScaler::Impl {
  // An optimizer that was unscaled since the last update.
  struct Seen {
    bool found_inf = false;
    bool stepped = false;
  };

  explicit Impl(const GradScalerOptions& given)
      : options(given), scaler(rule_of(given)) {}

  // Clean iterations since the last overflow or growth.
  std::int64_t tracker() const {
    const auto& state = scaler.state();
    return (state.cur_iter - state.last_overflow_iter - 1) %
        options.growth_interval();
  }

  // Changes scale, rule and tracker; they are known to make sense.
  void put(
      double scale,
      const GradScalerOptions& changed,
      std::int64_t tracker) {
    options = changed;
    scaler.set_options(rule_of(options));
    scaler.set_state(
        {rounded(scale),
         std::min(tracker, options.growth_interval() - 1),
         -1,
         1});
  }

  void change(const GradScalerOptions& changed) {
    put(scaler.loss_scale(), changed, tracker());
  }

  // Ends the iteration.
  void forget() {
    optimizers.clear();
    scaled = false;
  }

  // Returns null if there are no gradients.
  Seen* unscale(Optimizer& optimizer, const char* method);

  GradScalerOptions options;
  DynamicLossScaler scaler;
  // Whether `scale` was called since the last update, and so with this scale.
  bool scaled = false;
  std::unordered_map<const Optimizer*, Seen> optimizers;
};

GradScaler::GradScaler(const GradScalerOptions& options)
    : impl_(std::make_unique<Impl>(options)) {}

GradScaler::~GradScaler() = default;
GradScaler::GradScaler(GradScaler&&) noexcept = default;
GradScaler& GradScaler::operator=(GradScaler&&) noexcept = default;

at::Tensor GradScaler::scale(const at::Tensor& output) {
  if (!is_enabled()) {
    return output;
  }
  check_output(output);
  impl_->scaled = true;
  return times(output, get_scale());
}

std::vector<at::Tensor> GradScaler::scale(
    const std::vector<at::Tensor>& outputs) {
  if (!is_enabled()) {
    return outputs;
  }
  std::for_each(outputs.begin(), outputs.end(), check_output);
  impl_->scaled = true;
  std::vector<at::Tensor> scaled;
  scaled.reserve(outputs.size());
  for (const auto& output : outputs) {
    scaled.push_back(times(output, get_scale()));
  }
  return scaled;
}

GradScaler::Impl::Seen* GradScaler::Impl::unscale(
    Optimizer& optimizer,
    const char* method) {
  TORCH_CHECK(
      scaled,
      "GradScaler.",
      method,
      ": losses must be scaled first, but got none since the last update");
  for_each_gradient(optimizer, [&](const auto& parameter, auto g, auto i) {
    check_gradient(method, parameter, g, i);
  });
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> values;
  for_each_gradient(optimizer, [&](const auto& parameter, auto, auto) {
    values.push_back(own_values(parameter));
  });
  if (values.empty()) {
    return nullptr;
  }
  const bool found_inf = fp16core::unscale_(values, scaler.loss_scale());
  for_each_gradient(optimizer, [](const auto& parameter, auto, auto) {
    if (detail::gradient_of(parameter).is_sparse()) {
      detail::bump_version(detail::gradient_of(parameter));
    }
  });
  return &(optimizers[&optimizer] = {found_inf, false});
}

void GradScaler::unscale_(Optimizer& optimizer) {
  if (!is_enabled()) {
    return;
  }
  const auto seen = impl_->optimizers.find(&optimizer);
  TORCH_CHECK(
      seen == impl_->optimizers.end(),
      "GradScaler.unscale_: an optimizer must be unscaled once between two "
      "calls of update, and before its step, but got one that was ",
      seen->second.stepped ? "stepped" : "unscaled");
  impl_->unscale(optimizer, "unscale_");
}

bool GradScaler::step(Optimizer& optimizer) {
  if (!is_enabled()) {
    optimizer.step();
    return true;
  }
  const auto found = impl_->optimizers.find(&optimizer);
  auto* seen = found == impl_->optimizers.end()
      ? impl_->unscale(optimizer, "step")
      : &found->second;
  TORCH_CHECK(
      seen != nullptr,
      "GradScaler.step: the optimizer must have gradients, but got none");
  TORCH_CHECK(
      !seen->stepped,
      "GradScaler.step: an optimizer must be stepped once between two calls of "
      "update, but got one that was stepped");
  if (!seen->found_inf) {
    optimizer.step();
  }
  seen->stepped = true;
  return !seen->found_inf;
}

void GradScaler::update() {
  if (!is_enabled()) {
    return;
  }
  const auto& optimizers = impl_->optimizers;
  TORCH_CHECK(
      !optimizers.empty(),
      "GradScaler.update: an optimizer with gradients must be unscaled or "
      "stepped first, but got none since the last update");
  const bool overflow =
      std::any_of(optimizers.begin(), optimizers.end(), [](const auto& entry) {
        return entry.second.found_inf;
      });
  const double before = get_scale();
  impl_->scaler.update_scale(overflow);
  const float after = rounded(get_scale());
  impl_->scaler.set_loss_scale(std::isfinite(after) ? after : before);
  impl_->forget();
}

void GradScaler::update(double new_scale) {
  if (!is_enabled()) {
    return;
  }
  check("GradScaler.update: new_scale", new_scale, broken_scale(new_scale));
  impl_->scaler.set_loss_scale(rounded(new_scale));
  impl_->forget();
}

bool GradScaler::found_inf(const Optimizer& optimizer) const {
  const auto found = impl_->optimizers.find(&optimizer);
  return found != impl_->optimizers.end() && found->second.found_inf;
}

double GradScaler::get_scale() const {
  return is_enabled() ? impl_->scaler.loss_scale() : 1.0;
}

double GradScaler::get_growth_factor() const {
  return impl_->options.growth_factor();
}

double GradScaler::get_backoff_factor() const {
  return impl_->options.backoff_factor();
}

std::int64_t GradScaler::get_growth_interval() const {
  return impl_->options.growth_interval();
}

void GradScaler::set_growth_factor(double new_factor) {
  check(
      "GradScaler.set_growth_factor: new_factor",
      new_factor,
      broken_growth(new_factor));
  impl_->change(GradScalerOptions(impl_->options).growth_factor(new_factor));
}

void GradScaler::set_backoff_factor(double new_factor) {
  check(
      "GradScaler.set_backoff_factor: new_factor",
      new_factor,
      broken_backoff(new_factor));
  impl_->change(GradScalerOptions(impl_->options).backoff_factor(new_factor));
}

void GradScaler::set_growth_interval(std::int64_t new_interval) {
  check(
      "GradScaler.set_growth_interval: new_interval",
      static_cast<double>(new_interval),
      broken_interval(new_interval));
  impl_->change(
      GradScalerOptions(impl_->options).growth_interval(new_interval));
}

bool GradScaler::is_enabled() const {
  return impl_->options.enabled();
}

StateDict GradScaler::state_dict() const {
  auto state = make_state_dict();
  if (is_enabled()) {
    state.insert("scale", get_scale());
    state.insert("growth_factor", get_growth_factor());
    state.insert("backoff_factor", get_backoff_factor());
    state.insert("growth_interval", get_growth_interval());
    state.insert("_growth_tracker", impl_->tracker());
  }
  return state;
}

void GradScaler::load_state_dict(const c10::IValue& state) {
  if (!is_enabled()) {
    return;
  }
  const detail::DictReader reader(state, "GradScaler.load_state_dict", "state");
  const auto check_value =
      [&](const char* key, auto value, const Broken& broken) {
        if (broken) {
          reader.refuse(key, *broken, detail::describe(value));
        }
      };
  const double scale = reader.number("scale");
  const double growth = reader.number("growth_factor");
  const double backoff = reader.number("backoff_factor");
  const auto interval = reader.integer("growth_interval");
  const auto tracker = reader.integer("_growth_tracker");
  check_value("scale", scale, broken_scale(scale));
  check_value("growth_factor", growth, broken_growth(growth));
  check_value("backoff_factor", backoff, broken_backoff(backoff));
  check_value("growth_interval", interval, broken_interval(interval));
  check_value(
      "_growth_tracker",
      tracker,
      tracker >= 0 ? Broken() : "must be at least 0");
  impl_->put(
      scale,
      GradScalerOptions(impl_->options)
          .growth_factor(growth)
          .backoff_factor(backoff)
          .growth_interval(interval),
      tracker);
  impl_->forget();
}

} // namespace fp16core
