#include "step_numbers.h"

#include <array>
#include <optional>

namespace fp16core::detail::cpu {

namespace {

// What the numbers of a step depend on.
struct Key {
  std::int64_t group;
  bool fresh;
  bool single;
  c10::ScalarType type;
  std::array<double, UpdateRule::kMostCounters> counters;

  bool operator==(const Key&) const = default;
};

double read(const CounterMemory& counter) {
  return counter.single
      ? static_cast<double>(*static_cast<const float*>(counter.data))
      : *static_cast<const double*>(counter.data);
}

void write(const CounterMemory& counter, double value) {
  if (counter.single) {
    *static_cast<float*>(counter.data) = static_cast<float>(value);
  } else {
    *static_cast<double*>(counter.data) = value;
  }
}

} // namespace

void StepNumbers::prepare(
    const UpdateRule& rule,
    std::span<UpdateItem> items,
    c10::ArrayRef<RuleOptions> options) {
  const std::size_t counters = rule.counters.size();
  // Most parameters share the numbers of their neighbour.
  std::optional<Key> last;
  std::array<double, UpdateRule::kMostCounters> advanced{};
  numbers_.clear();
  // Nothing may move: the items point at it.
  numbers_.reserve(items.size());
  for (auto& item : items) {
    Key key{item.group, item.fresh, true, item.weight_type, {}};
    for (std::size_t i = 0; i < counters; ++i) {
      key.counters[i] = read(item.counters[i]);
      key.single = item.counters[i].single;
    }
    if (last != key) {
      advanced = key.counters;
      rule.prepare(
          options[item.group].values.data(),
          advanced.data(),
          item.fresh,
          key.single,
          key.type,
          numbers_.emplace_back().bytes);
      last = key;
    }
    item.step = numbers_.back().bytes;
    for (std::size_t i = 0; i < counters; ++i) {
      write(item.counters[i], advanced[i]);
    }
  }
}

} // namespace fp16core::detail::cpu
