#include <fp16core/update_rule.h>

#include "math/update_rules.h"

#include <algorithm>
#include <new>
#include <type_traits>

namespace fp16core {

namespace {

template <typename Rule>
constexpr auto option_names() {
  std::array<std::string_view, Rule::kOptions.size()> names{};
  for (std::size_t i = 0; i < names.size(); ++i) {
    names[i] = Rule::kOptions[i].name;
  }
  return names;
}
template <typename Rule>
constexpr auto kOptionNames = option_names<Rule>();

template <typename Rule>
constexpr auto counters() {
  std::array<UpdateRule::Counter, Rule::kCounters.size()> all{};
  for (std::size_t i = 0; i < all.size(); ++i) {
    all[i] = {Rule::kCounters[i].name, Rule::kCounters[i].start};
  }
  return all;
}
template <typename Rule>
constexpr auto kCounters = counters<Rule>();

template <typename Rule>
bool uses(const double* options, std::size_t tensor) {
  return Rule::uses(detail::named_options<Rule>(options), tensor);
}

template <typename Rule>
double start(const double* options) {
  return Rule::start(detail::named_options<Rule>(options));
}

template <typename Rule, typename Real>
void prepare_as(
    const double* options,
    const detail::Counters& counters,
    bool fresh,
    void* step) {
  using Step = typename Rule::template Step<Real>;
  static_assert(sizeof(Step) <= UpdateRule::kStepBytes);
  static_assert(std::is_trivially_copyable_v<Step>);
  new (step) Step(
      Rule::template prepare<Real>(
          detail::named_options<Rule>(options),
          counters,
          fresh));
}

template <typename Rule>
void prepare(
    const double* options,
    double* counters,
    bool fresh,
    bool single,
    c10::ScalarType type,
    void* step) {
  const detail::Counters own{counters, single};
  if (type == c10::ScalarType::Double) {
    prepare_as<Rule, double>(options, own, fresh, step);
  } else {
    prepare_as<Rule, float>(options, own, fresh, step);
  }
}

struct Describe {
  template <typename Rule>
  UpdateRule operator()() const {
    static_assert(Rule::kTensors.size() <= UpdateRule::kMostTensors);
    static_assert(Rule::kCounters.size() <= UpdateRule::kMostCounters);
    return {
        .name = Rule::kName,
        .index = 0,
        .optimizers = Rule::kOptimizers,
        .options = kOptionNames<Rule>,
        .counters = kCounters<Rule>,
        .tensors = Rule::kTensors,
        .uses = &uses<Rule>,
        .start = &start<Rule>,
        .prepare = &prepare<Rule>,
    };
  }
};

} // namespace

c10::ArrayRef<UpdateRule> update_rules() {
  static const auto rules = [] {
    auto all = detail::AllRules::map(Describe());
    for (std::size_t i = 0; i < all.size(); ++i) {
      all[i].index = i;
    }
    return all;
  }();
  return rules;
}

void RuleOptions::resolve(const UpdateRule& rule) {
  has_state = !rule.counters.empty();
  for (std::size_t i = 0; i < rule.tensors.size(); ++i) {
    uses[i] = rule.uses(values.data(), i);
    has_state |= uses[i];
  }
}

const UpdateRule* find_update_rule(std::string_view optimizer) {
  for (const auto& rule : update_rules()) {
    if (std::find(rule.optimizers.begin(), rule.optimizers.end(), optimizer) !=
        rule.optimizers.end()) {
      return &rule;
    }
  }
  return nullptr;
}

} // namespace fp16core
