// The kernels that run an update rule, for weights of one type. They are
// compiled for float32 and for float64 in files of their own, since that takes
// long.

#pragma once

#include "update.cuh"

#include "rounding.cuh"

#include "../math/unscale.h"
#include "../math/update_rules.h"

#include <array>
#include <bit>
#include <tuple>

namespace fp16core::detail::cuda {

// Numbers of 64 bits take twice the registers.
template <typename Real>
constexpr int kBlocksOf = std::is_same_v<Real, double> ? kBlocks / 2 : kBlocks;

__device__ __forceinline__ bool skipped(const UpdateNumbers& numbers) {
  return numbers.skip != nullptr && *numbers.skip != 0.0F;
}

// The task: advance the counters of every parameter and work out what its step
// needs, a thread for each parameter, in double. The awkward case is a step
// that overflowed, which must leave the counters alone.
template <typename Rule, typename Real>
__global__ void __launch_bounds__(kThreads, kBlocksOf<Real>) prepare_kernel(
    const UpdateTask* tasks,
    const std::int64_t count,
    const UpdateNumbers numbers,
    std::byte* steps) {
  const std::int64_t index =
      std::int64_t{blockIdx.x} * kThreads + std::int64_t{threadIdx.x};
  if (index >= count || skipped(numbers)) {
    return;
  }
  constexpr int counters =
      static_cast<int>(std::tuple_size_v<decltype(Rule::kCounters)>);
  const UpdateTask& task = tasks[index];
  double values[counters + 1] = {};
  bool single = true;
  for (int i = 0; i < counters; ++i) {
    single = task.single[i];
    values[i] = single
        ? static_cast<double>(*static_cast<const float*>(task.counters[i]))
        : *static_cast<const double*>(task.counters[i]);
  }
  using Options = typename Rule::Options;
  const auto& options =
      reinterpret_cast<const Options*>(numbers.options)[task.group];
  using Step = typename Rule::template Step<Real>;
  *reinterpret_cast<Step*>(steps + index * kStepBytes) =
      Rule::template prepare<Real>(
          options,
          Counters{values, single},
          task.fresh);
  for (int i = 0; i < counters; ++i) {
    if (task.single[i]) {
      *static_cast<float*>(task.counters[i]) = static_cast<float>(values[i]);
    } else {
      *static_cast<double*>(task.counters[i]) = values[i];
    }
  }
}

// The factors of a task. Mostly there are two at most.
struct Factors {
  Factor first;
  Factor second;
  const FactorSource* sources;
  int count;

  __device__ Factors(const UpdateTask& task, const UpdateNumbers& numbers)
      : sources(numbers.factors),
        count(task.unscale ? numbers.factor_count : 0) {
    if (count > 0) {
      first = sources[0].read();
    }
    if (count > 1) {
      second = sources[1].read();
    }
  }

  // Returns a gradient times all factors, each product rounded. A float64
  // gradient of a float32 weight is rounded after the first.
  template <typename Real, typename Source>
  __device__ __forceinline__ Real apply(Source gradient) const {
    Real value;
    int next = 0;
    if constexpr (std::is_same_v<Source, double>) {
      value = static_cast<Real>(
          count > 0 ? Unscale()(gradient, first.f64) : gradient);
      next = 1;
    } else {
      value = static_cast<Real>(gradient);
    }
    for (int i = next; i < count; ++i) {
      const Factor factor = i == 0 ? first
          : i == 1                 ? second
                                   : sources[i].read();
      value = Unscale()(value, static_cast<Real>(factor.f64));
    }
    return value;
  }
};

// A rule over the elements of one span.
template <typename Rule, typename Real>
struct Updater {
  using Step = typename Rule::template Step<Real>;
  static constexpr int kState =
      static_cast<int>(std::tuple_size_v<decltype(Rule::kTensors)>);
  // A thread takes 16 bytes of weights at a time: with more, registers run out.
  static constexpr int kCount = 16 / sizeof(Real);

  const Span<UpdateTask>& span;
  const Step step;
  const Factors factors;
  // Whether all that is of type Real can be read and written by vectors.
  bool aligned;

  __device__ Updater(
      const Span<UpdateTask>& elements,
      const Step& numbers_of_step,
      const UpdateNumbers& numbers)
      : span(elements),
        step(numbers_of_step),
        factors(elements.task, numbers),
        aligned(is_aligned(elements.task.weight)) {
    for (int t = 0; t < kState; ++t) {
      aligned = aligned && is_aligned(elements.task.tensors[t]);
    }
  }

  template <typename T>
  __device__ T* from(void* tensor) const {
    return static_cast<T*>(tensor) + span.begin;
  }
  template <typename T>
  __device__ const T* from(const void* tensor) const {
    return static_cast<const T*>(tensor) + span.begin;
  }

  template <int kSize>
  __device__ __forceinline__ Vector<Real, kSize> gradients(
      std::int64_t i) const {
    Vector<Real, kSize> result = {};
    with_type(span.task.gradient_type, [&](auto type) {
      const auto values = load<kSize>(
          from<decltype(type)>(span.task.gradient) + i,
          is_aligned(span.task.gradient));
#pragma unroll
      for (int k = 0; k < kSize; ++k) {
        result[k] = factors.template apply<Real>(values[k]);
      }
    });
    return result;
  }

  // Takes `kSize` elements, by vectors if there are several. Returns whether a
  // weight saturates the model.
  template <int kSize, bool kRemainder>
  __device__ __forceinline__ bool take(std::int64_t i) const {
    auto gradient = gradients<kSize>(i);
    Real* const weights = from<Real>(span.task.weight) + i;
    auto weight = load<kSize>(weights, aligned);
    // Zeros where the rule has no use for it.
    Vector<Real, kSize> states[kState + 1] = {};
#pragma unroll
    for (int t = 0; t < kState; ++t) {
      if (span.task.tensors[t] != nullptr) {
        states[t] = load<kSize>(from<Real>(span.task.tensors[t]) + i, aligned);
      }
    }
#pragma unroll
    for (int k = 0; k < kSize; ++k) {
      Real state[kState + 1];
#pragma unroll
      for (int t = 0; t < kState; ++t) {
        state[t] = states[t][k];
      }
      Rule::template update<ScalarMath<Real>, kRemainder>(
          step,
          gradient[k],
          weight[k],
          state);
#pragma unroll
      for (int t = 0; t < kState; ++t) {
        states[t][k] = state[t];
      }
    }
#pragma unroll
    for (int t = 0; t < kState; ++t) {
      if (span.task.tensors[t] != nullptr) {
        store(from<Real>(span.task.tensors[t]) + i, aligned, states[t]);
      }
    }
    store(weights, aligned, weight);
    bool beyond = false;
    if constexpr (std::is_same_v<Real, float>) {
      if (span.task.model != nullptr) {
        with_type(span.task.model_type, [&](auto type) {
          beyond = store_rounded(
              from<decltype(type)>(span.task.model) + i,
              is_aligned(span.task.model),
              weight);
        });
      }
    }
    return beyond;
  }
};

// The task: read gradient, weight and state of every element once, and write
// weight, state and the rounded weight. The awkward cases: state that is not in
// use, whose pointer is null; the last elements of a tensor, which do not fill
// a vector and are rounded in another order; gradients of another type than the
// model; and a step that overflowed, which must change nothing, but still has
// to say that nothing saturates. One pass: for Adam 16 bytes read and 14
// written an element with fp32 gradients, 14 and 14 with half gradients.
template <typename Rule, typename Real>
__global__ void __launch_bounds__(kThreads, kBlocksOf<Real>) update_kernel(
    const __grid_constant__ Work<UpdateTask> work,
    const UpdateNumbers numbers,
    const std::byte* steps,
    std::uint8_t* saturated) {
  bool beyond = false;
  if (!skipped(numbers)) {
    const auto span = span_of_block(work);
    using Own = Updater<Rule, Real>;
    const Own updater(
        span,
        *reinterpret_cast<const typename Own::Step*>(
            steps + span.task_index * kStepBytes),
        numbers);
    walk<Own::kCount>(
        span.size,
        [&](std::int64_t i) {
          beyond |= updater.template take<Own::kCount, false>(i);
        },
        [&](std::int64_t i) { beyond |= updater.template take<1, true>(i); },
        kRemainderOf<Real>);
  }
  note_saturation(beyond, saturated);
}

// Whether the struct of a rule's options has them in the order of their names,
// so that their values can be read as one.
template <typename Rule>
constexpr bool options_are_in_order() {
  constexpr std::size_t count = Rule::kOptions.size();
  for (std::size_t i = 0; i < count; ++i) {
    typename Rule::Options options{};
    options.*Rule::kOptions[i].member = 1.0;
    if (std::bit_cast<std::array<double, count>>(options)[i] != 1.0) {
      return false;
    }
  }
  return true;
}

using Launch = cudaError_t (*)(
    const Work<UpdateTask>&,
    const UpdateNumbers&,
    std::byte*,
    std::uint8_t*,
    cudaStream_t);

template <typename Rule, typename Real>
cudaError_t launch_rule(
    const Work<UpdateTask>& work,
    const UpdateNumbers& numbers,
    std::byte* steps,
    std::uint8_t* saturated,
    cudaStream_t stream) {
  static_assert(sizeof(typename Rule::template Step<Real>) <= kStepBytes);
  static_assert(options_are_in_order<Rule>());
  const cudaError_t error = launch(
      &prepare_kernel<Rule, Real>,
      (work.task_count + kThreads - 1) / kThreads,
      stream,
      work.tasks,
      work.task_count,
      numbers,
      steps);
  return error != cudaSuccess || work.chunk_count == 0
      ? error
      : launch(
            &update_kernel<Rule, Real>,
            work.chunk_count,
            stream,
            work,
            numbers,
            steps,
            saturated);
}

template <typename Real>
struct LaunchOf {
  template <typename Rule>
  Launch operator()() const {
    return &launch_rule<Rule, Real>;
  }
};

/// Runs the rule at position `rule` of the list of rules; see launch_update.
template <typename Real>
cudaError_t launch_update_of(
    std::size_t rule,
    const Work<UpdateTask>& work,
    const UpdateNumbers& numbers,
    std::byte* steps,
    std::uint8_t* saturated,
    cudaStream_t stream) {
  static const auto launches = AllRules::map(LaunchOf<Real>());
  return launches[rule](work, numbers, steps, saturated, stream);
}

} // namespace fp16core::detail::cuda
