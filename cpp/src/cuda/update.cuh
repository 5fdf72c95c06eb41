// The CUDA kernels that run update rules.

#pragma once

#include "element_type.h"
#include "work.h"

#include "../math/factor.h"

#include <cstddef>

namespace fp16core::detail::cuda {

constexpr std::size_t kMostTensors = 3;
constexpr std::size_t kMostCounters = 2;
constexpr std::size_t kStepBytes = 128;

/// See UpdateItem.
struct UpdateTask {
  const void* gradient;
  void* weight;
  void* model;
  void* tensors[kMostTensors];
  void* counters[kMostCounters];
  std::int64_t numel;
  std::int64_t group;
  ElementType gradient_type;
  ElementType model_type;
  // Whether each counter is float32.
  bool single[kMostCounters];
  bool unscale;
  bool fresh;
};

/// What all tasks of an update share, in device memory.
struct UpdateNumbers {
  // The options of each group, in the order of the rule's names.
  const double* options;
  const FactorSource* factors;
  int factor_count;
  // Nothing is done where it is not null and points at anything but 0.
  const float* skip;
};

/// Runs the rule at position `rule` of the list of rules on weights of float32:
/// first for each task the numbers of its step, kStepBytes in `steps`, and its
/// counters; then the elements. `saturated` gets a byte for each chunk: whether
/// a finite weight was stored as inf.
cudaError_t launch_update(
    std::size_t rule,
    const Work<UpdateTask>& work,
    const UpdateNumbers& numbers,
    std::byte* steps,
    std::uint8_t* saturated,
    cudaStream_t stream);

/// The same on weights of float64.
cudaError_t launch_wide_update(
    std::size_t rule,
    const Work<UpdateTask>& work,
    const UpdateNumbers& numbers,
    std::byte* steps,
    std::uint8_t* saturated,
    cudaStream_t stream);

} // namespace fp16core::detail::cuda
