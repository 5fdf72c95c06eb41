// The update rules of optimizers that the core can run itself.

#pragma once

#include <fp16core/api.h>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/FunctionRef.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

namespace fp16core {

/// What a facade has to know about an update rule to run it: the names under
/// which an optimizer keeps its options and state.
///
/// A rule is defined in cpp/src/math, in a file of its own.
struct UpdateRule {
  /// A number that an optimizer keeps for each parameter in a tensor of one
  /// element, such as the count of its steps, and what it starts from.
  struct Counter {
    std::string_view name;
    double start;
  };

  /// No rule has more state tensors or counters than this for a parameter.
  static constexpr std::size_t kMostTensors = 3;
  static constexpr std::size_t kMostCounters = 2;

  /// The rule's name, and its position in `update_rules()`.
  std::string_view name;
  std::size_t index;
  /// The Python classes whose `step` follows it, with their modules.
  c10::ArrayRef<std::string_view> optimizers;
  /// The hyper-parameters that it reads from a param group, all as numbers: a
  /// bool counts 0 or 1, "betas[0]" stands for the first item of "betas", and
  /// "float32(lr)" asks whether "lr" is a float32 tensor.
  c10::ArrayRef<std::string_view> options;
  c10::ArrayRef<Counter> counters;
  /// The state tensors, each of the shape of the parameter.
  c10::ArrayRef<std::string_view> tensors;

  /// Returns whether `tensors[i]` is in use under these options.
  bool (*uses)(const double* options, std::size_t i);
  /// Returns what a new state tensor is filled with.
  double (*start)(const double* options);
  /// Advances the counters of a parameter by a step, and writes what `update`
  /// needs of options and counters to `step`, at most kStepBytes, in the
  /// precision of `type` (float32 or float64). `fresh` tells that its state is
  /// new; `single` that its counters are kept in float32.
  void (*prepare)(
      const double* options,
      double* counters,
      bool fresh,
      bool single,
      c10::ScalarType type,
      void* step);

  static constexpr std::size_t kStepBytes = 128;
};

/// Options that no rule follows: with one of them set, the optimizer has to run
/// its own step.
inline constexpr std::array<std::string_view, 2> kOptionsWithoutRule{
    "capturable",
    "differentiable"};

/// Returns all rules.
FP16CORE_API c10::ArrayRef<UpdateRule> update_rules();

/// Returns the rule that a Python class follows, by its module and name, or
/// null.
FP16CORE_API const UpdateRule* find_update_rule(std::string_view optimizer);

/// A parameter that waits for its update: it has a gradient.
struct DueParameter {
  std::int64_t group;
  std::int64_t index;
  /// What the inner optimizer holds: the master, or the parameter itself.
  const at::Tensor* parameter;
};

/// The state of one parameter, by the positions of a rule's names. The tensors
/// stay their owner's.
struct RuleState {
  /// Null where there is none.
  std::array<const at::Tensor*, UpdateRule::kMostTensors> tensors{};
  std::array<const at::Tensor*, UpdateRule::kMostCounters> counters{};
  /// There is no state yet: the update makes it.
  bool fresh = true;
};

/// State that an update made, for its owner to keep.
struct NewRuleState {
  std::int64_t group;
  std::int64_t index;
  /// Undefined where the rule has no use for it.
  std::array<at::Tensor, UpdateRule::kMostTensors> tensors;
  std::array<at::Tensor, UpdateRule::kMostCounters> counters;
};

/// The hyper-parameters of one param group.
struct FP16CORE_API RuleOptions {
  /// In the order of UpdateRule::options.
  std::vector<double> values;
  /// Options that are read on the device instead, where a step is decided
  /// there: their positions in `values`, and tensors of one element that hold
  /// them.
  std::vector<std::pair<std::size_t, at::Tensor>> on_device;
  /// What new counters are made of: float32 or float64.
  c10::ScalarType counter_type = c10::ScalarType::Float;

  /// Which state tensors are in use, and whether there is any state.
  std::array<bool, UpdateRule::kMostTensors> uses{};
  bool has_state = false;

  /// Sets the two above by the values.
  void resolve(const UpdateRule& rule);
};

/// Returns the state of a parameter, as its owner has it.
using FindRuleState = c10::function_ref<RuleState(const DueParameter&)>;

} // namespace fp16core
