// The loops that run the update rules, compiled once for every instruction set.
//
// One pass reads the gradient, the weight and the state, and writes the weight,
// the state and the model. It goes by groups of two registers, since a register
// of halves holds as many elements. What is left at the end of a chunk is
// padded to a group, so that every element goes through the same code.

#include "blocks.h"
#include "stream.h"
#include "vector_math.h"

#include "../../math/unscale.h"
#include "../../math/update_rules.h"

#include <algorithm>
#include <type_traits>

namespace fp16core::detail::cpu {
namespace CPU_CAPABILITY {
namespace {

// Elements that are converted at once where the types are unusual.
constexpr std::int64_t kStage = 4096;

template <typename Rule>
constexpr std::size_t kTensors = Rule::kTensors.size();

// Where a run of elements lies.
template <typename Real, typename Gradient, typename Model>
struct Run {
  const Gradient* gradient;
  Real* weight;
  Model* model;
  std::array<Real*, UpdateRule::kMostTensors> tensors;

  Run operator+(std::int64_t offset) const {
    Run run = *this;
    run.gradient += offset;
    run.weight += offset;
    if constexpr (!std::is_void_v<Model>) {
      run.model += offset;
    }
    for (auto& tensor : run.tensors) {
      tensor = tensor == nullptr ? nullptr : tensor + offset;
    }
    return run;
  }
};

// How far ahead of its arithmetic the loop asks for memory. Square roots and
// divisions keep it from running ahead by itself far enough, and the
// processor's own guesses end at every page. Measured with 4 and 5 streams on
// two threads: 5 % of a pass.
constexpr std::int64_t kAhead = 768;

// What gradients are multiplied by: more than two factors are rare, and go
// through a stage.
constexpr std::size_t kMostFactors = 2;

// A rule over runs of elements of certain types.
template <typename Rule, typename Real, typename Gradient, typename Model>
struct Updater {
  using Math = VectorMath<Real>;
  using Value = typename Math::Value;
  using Step = typename Rule::template Step<Real>;
  using Pointers = Run<Real, Gradient, Model>;
  static constexpr bool kHasModel = !std::is_void_v<Model>;
  static constexpr int kGroup = 2 * Value::size();
  static constexpr std::size_t kCount = kTensors<Rule>;

  // The factors, in registers.
  struct Scales {
    Value values[kMostFactors];
    std::size_t count;

    explicit Scales(c10::ArrayRef<Factor> factors) : count(factors.size()) {
      for (std::size_t i = 0; i < count; ++i) {
        values[i] = Value(static_cast<Real>(factors[i].f64));
      }
    }

    C10_ALWAYS_INLINE void apply_(Value& gradient) const {
      if (count > 0) {
        gradient = Unscale()(gradient, values[0]);
      }
      if (count > 1) {
        gradient = Unscale()(gradient, values[1]);
      }
    }
  };

  template <bool kRemainder>
  static C10_ALWAYS_INLINE Value update_register(
      const Step& step,
      const Scales& scales,
      const Pointers& at,
      std::int64_t offset) {
    Value gradient = load(at.gradient + offset);
    scales.apply_(gradient);
    Value weight = Value::loadu(at.weight + offset);
    // A rule may have no state; an array may not be empty.
    Value state[kCount + 1];
    for (std::size_t i = 0; i < kCount; ++i) {
      if (at.tensors[i] != nullptr) {
        state[i] = Value::loadu(at.tensors[i] + offset);
      }
    }
    Rule::template update<Math, kRemainder>(step, gradient, weight, state);
    for (std::size_t i = 0; i < kCount; ++i) {
      if (at.tensors[i] != nullptr) {
        state[i].store(at.tensors[i] + offset);
      }
    }
    weight.store(at.weight + offset);
    return weight;
  }

  template <bool kRemainder>
  static C10_ALWAYS_INLINE void update_group(
      const Step& step,
      const Scales& scales,
      const Pointers& at,
      std::int64_t offset,
      bool stream_model,
      Bits& largest) {
    const Value low = update_register<kRemainder>(step, scales, at, offset);
    const Value high =
        update_register<kRemainder>(step, scales, at, offset + Value::size());
    if constexpr (kHasModel) {
      largest = at::vec::maximum(
          largest,
          at::vec::maximum(magnitude_bits(low), magnitude_bits(high)));
      const auto rounded = narrow<Model>(low, high);
      if (stream_model) {
        stream(at.model + offset, rounded);
      } else {
        rounded.store(at.model + offset);
      }
    }
  }

  static C10_ALWAYS_INLINE void prefetch(
      const Pointers& at,
      std::int64_t offset) {
    __builtin_prefetch(at.gradient + offset);
    __builtin_prefetch(at.weight + offset, 1);
    for (std::size_t i = 0; i < kCount; ++i) {
      if (at.tensors[i] != nullptr) {
        __builtin_prefetch(at.tensors[i] + offset, 1);
      }
    }
  }

  // Returns the bits of the largest magnitude that a weight became, by lanes.
  // All that the loop reads besides the elements is in copies of its own, which
  // stores through the pointers cannot change.
  static Bits update_run(
      const Step* step,
      c10::ArrayRef<Factor> factors,
      const Pointers at,
      std::int64_t n,
      bool stream_model) {
    const Step numbers = *step;
    const Scales scales(factors);
    Bits largest(0);
    std::int64_t i = 0;
    for (; i + kGroup <= n; i += kGroup) {
      if (i + kAhead < n) {
        prefetch(at, i + kAhead);
      }
      update_group<false>(numbers, scales, at, i, stream_model, largest);
    }
    return i == n ? largest
                  : at::vec::maximum(
                        largest,
                        update_padded<false>(step, factors, at + i, n - i));
  }

  // Fewer elements than a group: in a copy with zeros behind them.
  template <bool kRemainder>
  static Bits update_padded(
      const Step* step,
      c10::ArrayRef<Factor> factors,
      const Pointers at,
      std::int64_t n) {
    Gradient gradient[kGroup] = {};
    Real weight[kGroup] = {};
    Real tensors[UpdateRule::kMostTensors][kGroup] = {};
    std::conditional_t<kHasModel, Model, char> model[kGroup];
    Pointers copy{gradient, weight, nullptr, {}};
    if constexpr (kHasModel) {
      copy.model = model;
    }
    std::copy_n(at.gradient, n, gradient);
    std::copy_n(at.weight, n, weight);
    for (std::size_t i = 0; i < kCount; ++i) {
      if (at.tensors[i] != nullptr) {
        copy.tensors[i] = tensors[i];
        std::copy_n(at.tensors[i], n, tensors[i]);
      }
    }
    Bits largest(0);
    update_group<kRemainder>(*step, Scales(factors), copy, 0, false, largest);
    std::copy_n(weight, n, at.weight);
    for (std::size_t i = 0; i < kCount; ++i) {
      if (at.tensors[i] != nullptr) {
        std::copy_n(tensors[i], n, at.tensors[i]);
      }
    }
    if constexpr (kHasModel) {
      std::copy_n(model, n, at.model);
    }
    return largest;
  }
};

// Runs the rule on `n` elements, of which the last `remainder` end a tensor.
template <typename Rule, typename Real, typename Gradient, typename Model>
bool update_elements(
    const Run<Real, Gradient, Model>& run,
    std::int64_t n,
    std::int64_t remainder,
    const void* numbers,
    c10::ArrayRef<Factor> factors,
    bool use_stream) {
  using Own = Updater<Rule, Real, Gradient, Model>;
  const auto* step = static_cast<const typename Own::Step*>(numbers);
  const std::int64_t body = n - remainder;
  Bits largest = Own::update_run(step, factors, run, body, use_stream);
  if (remainder > 0) {
    largest = at::vec::maximum(
        largest,
        Own::template update_padded<true>(
            step,
            factors,
            run + body,
            remainder));
  }
  if constexpr (std::is_void_v<Model>) {
    return false;
  } else {
    if (use_stream) {
      stream_fence();
    }
    return rounds_to_infinity<Model>(run.weight, n, largest_of(largest));
  }
}

// The gradient times the factors, as passes that unscale and clip would have
// left it.
template <typename Source>
void stage_gradient(
    const void* source,
    std::int64_t begin,
    std::int64_t n,
    c10::ArrayRef<Factor> factors,
    float* target) {
  const auto* values = static_cast<const Source*>(source) + begin;
  for (std::int64_t i = 0; i < n; ++i) {
    float value;
    if (std::is_same_v<Source, double> && !factors.empty()) {
      value = static_cast<float>(values[i] * factors[0].f64);
    } else {
      value = static_cast<float>(values[i]);
      if (!factors.empty()) {
        value = Unscale()(value, factors[0].f32);
      }
    }
    for (std::size_t f = 1; f < factors.size(); ++f) {
      value = Unscale()(value, factors[f].f32);
    }
    target[i] = value;
  }
}

// What is left of a run at the end of its tensor and does not fill a register
// of torch's kernels.
template <typename Real>
std::int64_t remainder_of(
    const UpdateItem& item,
    std::int64_t begin,
    std::int64_t n) {
  return begin + n == item.numel ? item.numel % kRemainderOf<Real> : 0;
}

template <typename Rule, typename Real, typename Gradient, typename Model>
bool update_item(
    const UpdateItem& item,
    std::int64_t begin,
    std::int64_t n,
    c10::ArrayRef<Factor> factors,
    bool use_stream) {
  Run<Real, Gradient, Model> run{
      static_cast<const Gradient*>(item.gradient),
      static_cast<Real*>(item.weight),
      static_cast<Model*>(item.model),
      {}};
  for (std::size_t i = 0; i < kTensors<Rule>; ++i) {
    run.tensors[i] = static_cast<Real*>(item.tensors[i]);
  }
  return update_elements<Rule>(
      run + begin,
      n,
      remainder_of<Real>(item, begin, n),
      item.step,
      factors,
      use_stream);
}

// Any gradient and any model: through copies of fp32, a stage at a time.
template <typename Rule>
bool update_staged(
    const UpdateItem& item,
    std::int64_t begin,
    std::int64_t n,
    c10::ArrayRef<Factor> factors) {
  const auto stage = [&] {
    switch (item.gradient_type) {
      case c10::ScalarType::Half:
        return &stage_gradient<c10::Half>;
      case c10::ScalarType::BFloat16:
        return &stage_gradient<c10::BFloat16>;
      case c10::ScalarType::Float:
        return &stage_gradient<float>;
      default:
        return &stage_gradient<double>;
    }
  }();
  const std::int64_t remainder = remainder_of<float>(item, begin, n);
  float gradient[kStage];
  bool saturated = false;
  for (std::int64_t i = 0; i < n; i += kStage) {
    const std::int64_t size = std::min(kStage, n - i);
    const std::int64_t first = begin + i;
    stage(item.gradient, first, size, factors, gradient);
    float* weight = static_cast<float*>(item.weight) + first;
    const auto update = [&]<typename Model>(Model* model) {
      Run<float, float, Model> run{gradient, weight, model, {}};
      for (std::size_t t = 0; t < kTensors<Rule>; ++t) {
        run.tensors[t] = item.tensors[t] == nullptr
            ? nullptr
            : static_cast<float*>(item.tensors[t]) + first;
      }
      return update_elements<Rule>(
          run,
          size,
          i + size == n ? remainder : 0,
          item.step,
          {},
          false);
    };
    if (item.model == nullptr) {
      update(static_cast<void*>(nullptr));
      continue;
    }
    switch (item.model_type) {
      case c10::ScalarType::Half:
        saturated |= update(static_cast<c10::Half*>(item.model) + first);
        break;
      case c10::ScalarType::BFloat16:
        saturated |= update(static_cast<c10::BFloat16*>(item.model) + first);
        break;
      case c10::ScalarType::Float:
        update(static_cast<void*>(nullptr));
        std::copy_n(weight, size, static_cast<float*>(item.model) + first);
        break;
      default:
        update(static_cast<void*>(nullptr));
        std::copy_n(weight, size, static_cast<double*>(item.model) + first);
    }
  }
  return saturated;
}

template <typename Rule>
bool update(
    const UpdateItem& item,
    std::int64_t begin,
    std::int64_t n,
    c10::ArrayRef<Factor> all_factors,
    bool use_stream) {
  const auto factors = item.unscale ? all_factors : c10::ArrayRef<Factor>();
  const auto gradient = item.gradient_type;
  if (factors.size() > kMostFactors) {
    return update_staged<Rule>(item, begin, n, factors);
  }
  if (item.weight_type == c10::ScalarType::Double) {
    return update_item<Rule, double, double, void>(
        item,
        begin,
        n,
        factors,
        false);
  }
  if (item.model == nullptr && gradient == c10::ScalarType::Float) {
    return update_item<Rule, float, float, void>(
        item,
        begin,
        n,
        factors,
        false);
  }
  const bool plain = gradient == c10::ScalarType::Float;
  if (item.model != nullptr && (plain || gradient == item.model_type)) {
    if (item.model_type == c10::ScalarType::Half) {
      const auto run = plain ? &update_item<Rule, float, float, c10::Half>
                             : &update_item<Rule, float, c10::Half, c10::Half>;
      return run(item, begin, n, factors, use_stream);
    }
    if (item.model_type == c10::ScalarType::BFloat16) {
      const auto run = plain
          ? &update_item<Rule, float, float, c10::BFloat16>
          : &update_item<Rule, float, c10::BFloat16, c10::BFloat16>;
      return run(item, begin, n, factors, use_stream);
    }
  }
  return update_staged<Rule>(item, begin, n, factors);
}

struct KernelOf {
  template <typename Rule>
  constexpr UpdateKernel operator()() const {
    return &update<Rule>;
  }
};

constexpr auto kKernels = AllRules::map(KernelOf());

} // namespace

UpdateKernel update_kernel(std::size_t rule) {
  return kKernels[rule];
}

} // namespace CPU_CAPABILITY
} // namespace fp16core::detail::cpu
