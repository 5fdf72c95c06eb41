// What one pass over the gradients found.

#pragma once

#include <fp16core/api.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace fp16core {

/// The findings for one parameter's gradient.
struct TensorReport {
  /// Position of the parameter: group, and index within the group.
  std::int64_t group;
  std::int64_t index;
  /// The parameter in the module.
  at::Tensor parameter;
  /// Elements of the model gradient that are infinite, and that are NaN.
  std::int64_t inf_count;
  std::int64_t nan_count;
  /// 2-norm of the unscaled gradient. Not finite after an overflow here.
  double norm;
  /// Largest magnitude of the unscaled gradient; NaN if an element is NaN.
  double largest;
  /// Whether the last write of the model stored a finite master of this
  /// parameter as infinity.
  bool saturated;
  /// The parameter's name in the module; empty where nobody has told.
  std::string name = {};

  /// Whether an element is infinite or NaN.
  bool overflows() const { return inf_count + nan_count > 0; }
};

/// The findings of one pass over all gradients, in the order of the groups.
/// Parameters without a gradient have no entry.
struct FP16CORE_API GradientReport {
  std::vector<TensorReport> tensors;
  /// Whether any element of any model gradient is infinite or NaN.
  bool overflow = false;
  /// 2-norm over all unscaled gradients, accumulated in double.
  double norm = 0.0;
  /// Largest magnitude over all unscaled gradients; NaN if an element is NaN.
  double largest = 0.0;

  /// Returns the first entry with a non-finite element, or null.
  const TensorReport* first_offender() const;

  /// Returns the entries with a non-finite element. Infinite elements mean that
  /// the scale is too high, or the gradient too large at any scale; NaN means
  /// that something went wrong before: no scale cures it.
  std::vector<TensorReport> culprits() const;

  /// Returns one line for people: position, name, shape, dtype and counts.
  static std::string describe(const TensorReport& tensor);
};

} // namespace fp16core
