#include <fp16core/scale_policies.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <stdexcept>
#include <utility>

namespace fp16core {

namespace {

using Options = DynamicLossScalerOptions;

// The smallest scale whose reciprocal float32 has: the floor where a project
// has none.
constexpr double kNoFloor = 0x1p-126;

// One parameter of a policy: its name and default there, and what it sets.
struct Parameter {
  const char* name;
  std::optional<double> default_value;
  void (*set)(Options& options, double value);
  // For None, where the project knows it.
  void (*set_none)(Options& options) = nullptr;
};

struct Policy {
  const char* name;
  std::vector<Parameter> parameters;
  // What is fixed, and what several parameters decide together.
  void (*fix)(Options& options) = nullptr;
};

template <double Options::* Member>
void set(Options& options, double value) {
  options.*Member = value;
}

template <bool Options::* Member>
void set_flag(Options& options, double value) {
  options.*Member = value != 0.0;
}

void set_hysteresis(Options& options, double value) {
  options.delayed_shift = static_cast<std::int64_t>(value);
}

void set_no_floor(Options& options) {
  options.min_scale = kNoFloor;
}

void set_optional_floor(Options& options, double value) {
  options.min_scale = value == 0.0 ? kNoFloor : value;
}

void set_no_ceiling(Options& options) {
  options.max_scale = HUGE_VAL;
}

void set_optional_ceiling(Options& options, double value) {
  options.max_scale = value == 0.0 ? HUGE_VAL : value;
}

constexpr auto kInit = &set<&Options::init_scale>;
constexpr auto kFactor = &set<&Options::scale_factor>;
constexpr auto kBackoff = &set<&Options::backoff_factor>;
constexpr auto kWindow = &set<&Options::scale_window>;
constexpr auto kFloor = &set<&Options::min_scale>;

// Of those that keep the scale in float32 and multiply by doubles.
void round_scale(Options& options) {
  options.float32_scale = true;
}

// Of those that round the factors too.
void round_factors(Options& options) {
  options.float32_scale = options.float32_factors = true;
}

const std::vector<Policy>& policies() {
  static const std::vector<Policy> all = {
      {"apex",
       {{"init_scale", 0x1p32, kInit},
        {"scale_factor", 2.0, kFactor},
        {"scale_window", 1000.0, kWindow}}},
      {"megatron_v1",
       {{"init_scale", 0x1p32, kInit},
        {"scale_factor", 2.0, kFactor},
        {"scale_window", 1000.0, kWindow},
        {"min_scale", 1.0, kFloor},
        {"delayed_shift", 1.0, set_hysteresis},
        {"consecutive_hysteresis",
         0.0,
         set_flag<&Options::consecutive_hysteresis>}}},
      {"apex_amp",
       {{"init_scale", 0x1p16, kInit},
        {"scale_window", 2000.0, kWindow},
        {"min_loss_scale", std::nullopt, set_optional_floor, set_no_floor},
        {"max_loss_scale", 0x1p24, set<&Options::max_scale>}},
       [](Options& options) {
         options.init_scale = std::min(options.init_scale, options.max_scale);
       }},
      {"apex_hysteresis_kernel",
       {{"init_scale", 0x1p16, kInit},
        {"growth_factor", 2.0, kFactor},
        {"backoff_factor", 0.5, kBackoff},
        {"growth_interval", 2000.0, kWindow},
        {"hysteresis", 1.0, set_hysteresis}},
       [](Options& options) {
         options.consecutive_hysteresis = true;
         set_no_floor(options);
         round_scale(options);
       }},
      {"megatron_core",
       {{"initial_scale", 0x1p32, kInit},
        {"min_scale", 1.0, kFloor},
        {"growth_factor", 2.0, kFactor},
        {"backoff_factor", 0.5, kBackoff},
        {"growth_interval", 1000.0, kWindow},
        {"hysteresis", 2.0, set_hysteresis}},
       round_factors},
      {"deepspeed",
       {{"init_scale", 0x1p16, kInit},
        {"scale_window", 1000.0, kWindow},
        {"min_scale", 1.0, kFloor},
        {"delayed_shift", 2.0, set_hysteresis},
        {"consecutive_hysteresis",
         0.0,
         set_flag<&Options::consecutive_hysteresis>},
        {"raise_error_at_min_scale", 1.0, set_flag<&Options::raise_at_floor>}},
       [](Options& options) { options.window_lag = 1; }},
      {"deepspeed_fp16_optimizer",
       {{"init_scale", 0x1p32, kInit},
        {"scale_window", 1000.0, kWindow},
        {"min_scale", 1.0, kFloor}},
       [](Options& options) { options.window_lag = 1; }},
      {"torch",
       {{"init_scale", 0x1p16, kInit},
        {"growth_factor", 2.0, kFactor},
        {"backoff_factor", 0.5, kBackoff},
        {"growth_interval", 2000.0, kWindow}},
       [](Options& options) {
         set_no_floor(options);
         round_scale(options);
       }},
      {"colossalai",
       {{"initial_scale", 0x1p16, kInit},
        {"growth_factor", 2.0, kFactor},
        {"backoff_factor", 0.5, kBackoff},
        {"growth_interval", 1000.0, kWindow},
        {"min_scale", std::nullopt, set_optional_floor, set_no_floor},
        {"max_scale", std::nullopt, set_optional_ceiling, set_no_ceiling},
        {"hysteresis", 2.0, set_hysteresis}},
       [](Options& options) {
         options.delayed_shift =
             std::max(options.delayed_shift, std::int64_t(1));
         round_factors(options);
       }},
      {"fairseq",
       {{"init_scale", 0x1p15, kInit},
        {"scale_factor", 2.0, kFactor},
        {"scale_window", 2000.0, kWindow},
        {"tolerance", 0.0, set<&Options::tolerance>},
        {"threshold", std::nullopt, kFloor, set_no_floor},
        {"min_loss_scale", 1e-4, set<&Options::error_scale>}}},
      {"keras",
       {{"initial_scale", 0x1p15, kInit},
        {"dynamic_growth_steps", 2000.0, kWindow}},
       [](Options& options) {
         set_no_floor(options);
         round_factors(options);
       }},
      {"jmp",
       {{"loss_scale", 0x1p15, kInit},
        {"period", 2000.0, kWindow},
        {"factor", 2.0, kFactor},
        {"min_loss_scale", 1.0, kFloor}},
       round_factors},
  };
  return all;
}

template <typename Items>
std::string names_of(const Items& items) {
  std::string names;
  for (const auto& item : items) {
    names += names.empty() ? "" : ", ";
    names += item.name;
  }
  return names;
}

const Policy& find_policy(const std::string& name) {
  const auto& all = policies();
  const auto found =
      std::find_if(all.begin(), all.end(), [&](const Policy& policy) {
        return policy.name == name;
      });
  if (found == all.end()) {
    throw std::invalid_argument(
        "scale_policy: name must be one of " + names_of(all) + ", but got '" +
        name + "'");
  }
  return *found;
}

void apply(
    const Parameter& parameter,
    const std::optional<double>& value,
    const Policy& policy,
    Options& options) {
  if (value) {
    parameter.set(options, *value);
  } else if (parameter.set_none != nullptr) {
    parameter.set_none(options);
  } else {
    throw std::invalid_argument(
        std::string("scale_policy: ") + parameter.name + " of " + policy.name +
        " must be a number, but got None");
  }
}

} // namespace

DynamicLossScalerOptions scale_policy(
    const std::string& name,
    const ScalePolicyParameters& parameters) {
  const auto& policy = find_policy(name);
  for (const auto& [given, value] : parameters) {
    if (std::none_of(
            policy.parameters.begin(),
            policy.parameters.end(),
            [&given = given](const Parameter& p) { return p.name == given; })) {
      throw std::invalid_argument(
          "scale_policy: parameters of " + name + " must be among " +
          names_of(policy.parameters) + ", but got '" + given + "'");
    }
  }
  Options options;
  for (const auto& parameter : policy.parameters) {
    const auto given = parameters.find(parameter.name);
    apply(
        parameter,
        given == parameters.end() ? parameter.default_value : given->second,
        policy,
        options);
  }
  if (policy.fix != nullptr) {
    policy.fix(options);
  }
  return options;
}

std::vector<std::string> scale_policy_names() {
  std::vector<std::string> names;
  for (const auto& policy : policies()) {
    names.emplace_back(policy.name);
  }
  return names;
}

std::vector<std::string> scale_policy_parameters(const std::string& name) {
  std::vector<std::string> names;
  for (const auto& parameter : find_policy(name).parameters) {
    names.emplace_back(parameter.name);
  }
  return names;
}

} // namespace fp16core
