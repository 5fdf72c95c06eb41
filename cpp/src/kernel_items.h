// What list kernels work on: an item for each tensor.

#pragma once

#include <fp16core/update_rule.h>

#include "math/factor.h"
#include "math/gradient_stats.h"

#include <c10/core/ScalarType.h>

#include <array>
#include <cstdint>

namespace fp16core::detail {

/// A gradient to check, measure, and (with a destination) unscale and cast.
struct GradientItem {
  const void* source;
  // May be `source` itself; null if the gradient is only measured.
  void* destination;
  std::int64_t numel;
  // float16, bfloat16, float32 or float64.
  c10::ScalarType source_type;
  // float32, or float64 where the source is float64.
  c10::ScalarType destination_type;
  // Whether to multiply by the factor; otherwise the values count as they are.
  bool unscale;
};

/// Values to multiply in place.
struct ScaleItem {
  void* values;
  std::int64_t numel;
  c10::ScalarType type;
};

/// Bytes to clear.
struct ZeroItem {
  void* values;
  std::int64_t bytes;
};

/// A float32 master and the parameter it belongs to.
struct MasterItem {
  float* master;
  void* model;
  std::int64_t numel;
  // float16, bfloat16, float32 or float64.
  c10::ScalarType model_type;
};

/// A number in memory that an optimizer keeps for a parameter.
struct CounterMemory {
  void* data;
  // float32, or else float64.
  bool single;
};

/// A weight to update, with what belongs to it.
struct UpdateItem {
  // float32 or float64, as the weight; with `unscale` any of the four types.
  const void* gradient;
  // float32 or float64.
  void* weight;
  // Takes the rounded weight; null where the weight is the parameter itself.
  void* model;
  // Of the weight's type; null where the rule has no use for one.
  std::array<void*, UpdateRule::kMostTensors> tensors;
  // In the memory of the kernels' device. The update advances them.
  std::array<CounterMemory, UpdateRule::kMostCounters> counters;
  // For the kernels: what UpdateRule::prepare made.
  const void* step;
  std::int64_t numel;
  // Which options hold for it.
  std::int64_t group;
  // Whether its state is new.
  bool fresh;
  c10::ScalarType gradient_type;
  c10::ScalarType weight_type;
  c10::ScalarType model_type;
  // Whether the gradient is multiplied by the factors first.
  bool unscale;
};

} // namespace fp16core::detail
