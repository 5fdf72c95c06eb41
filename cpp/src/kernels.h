// The one internal door to the list kernels that every backend defines.
//
// A kernel works on a list of dense spans of memory, one call for all
// parameters of a device. Layouts are the caller's business: both sides of an
// item pair their elements by position in memory. Spans may be empty. Factors
// and flags may lie in the memory of the kernels' device, and results stay
// there until they are read: what follows in the device's queue needs no
// answer.

#pragma once

#include <fp16core/update_rule.h>

#include "kernel_items.h"

#include "math/clip.h"
#include "math/end_iteration.h"
#include "math/factor.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/ArrayRef.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace fp16core::detail {

/// A copy of a device's memory that is on its way to the host.
class LateRead {
 public:
  virtual ~LateRead() = default;
  /// Returns whether it has arrived. Never waits. Not to be asked while the
  /// kernels are recording.
  virtual bool ready() const = 0;
  /// Returns it; waits until it is there.
  virtual const std::byte* wait() = 0;
};

/// Which items of a pass stored a finite master as inf, once it is known.
class LateSaturation {
 public:
  virtual ~LateSaturation() = default;
  virtual bool ready() const = 0;
  /// Returns an entry an item. Waits for it.
  virtual const std::vector<std::uint8_t>& wait() = 0;
};

/// The list kernels of one device.
class ListKernels {
 public:
  virtual ~ListKernels() = default;

  /// Returns whether the device works behind the host's back, so that reading
  /// a result waits for it.
  virtual bool asynchronous() const = 0;

  /// Returns whether what is called now is only recorded, to run later and
  /// again: nothing can be read then.
  virtual bool recording() const = 0;

  /// Reads every source once: counts inf and NaN, measures, and writes the
  /// unscaled values. A pass reads 2 and writes 4 bytes an element for a half
  /// gradient and its fp32 master gradient.
  virtual void take_gradients(
      c10::ArrayRef<GradientItem> items,
      const FactorSource& factor) = 0;

  /// Returns where the findings of the last `take_gradients` lie in total, in
  /// the memory of the device. The place stays the same.
  virtual const GradientTotals* totals() = 0;

  /// Returns `totals()->found_inf` as a tensor of no dimensions that aliases
  /// it.
  virtual at::Tensor found_inf() = 0;

  /// Returns a copy of the totals. Waits for the device.
  virtual GradientTotals read_totals() = 0;

  /// Returns the findings of the last `take_gradients`, an entry an item. Waits
  /// for the device.
  virtual const std::vector<GradientStats>& gradient_stats() = 0;

  /// Returns the sum of |x|^power over all sources as they are, in double; at
  /// power 0 the number of elements that are not zero. Waits for the device.
  virtual double sum_of_powers(
      c10::ArrayRef<GradientItem> items,
      double power) = 0;

  /// Multiplies in place.
  virtual void scale_(
      c10::ArrayRef<ScaleItem> items,
      const FactorSource& factor) = 0;

  virtual void zero_(c10::ArrayRef<ZeroItem> items) = 0;

  /// Writes the masters to the model, rounded to nearest even. Returns which
  /// of them saturate.
  virtual std::unique_ptr<LateSaturation> write_model(
      c10::ArrayRef<MasterItem> items) = 0;

  /// Runs an update rule: advances the counters of every item, reads gradient,
  /// weight and state, and writes weight, state and model, in one pass. A
  /// gradient is multiplied by one factor after the other, each product rounded
  /// to the weight's type, so that the bits are those of passes that unscale
  /// and clip. For Adam a pass reads 16 and writes 14 bytes an element with
  /// fp32 gradients, 14 and 14 with half gradients. Nothing is touched where
  /// `skip` is not null and what it points at, in the memory of the device, is
  /// not 0. `options` has the values of each group. Returns which weights
  /// saturate the model.
  virtual std::unique_ptr<LateSaturation> update(
      const UpdateRule& rule,
      std::span<UpdateItem> items,
      c10::ArrayRef<RuleOptions> options,
      c10::ArrayRef<FactorSource> factors,
      const float* skip) = 0;

  /// Where the rounded master differs from the model, the master takes the
  /// model's value. Equal values, and NaN against NaN, change nothing.
  virtual void adopt_model(c10::ArrayRef<MasterItem> items) = 0;

  /// See clip(), end_iteration() and count_applied() in math/; all pointers are
  /// to the memory of the device.
  virtual void clip(
      bool check_overflow,
      bool by_largest,
      double max_norm,
      Clip* result) = 0;
  virtual void end_iteration(
      const ScaleRule& rule,
      bool check_overflow,
      DynamicLossScaleState* scale,
      StepCounts* counts) = 0;
  virtual void count_applied(bool check_overflow, StepCounts* counts) = 0;

  /// Returns memory of the device that starts as `bytes` are.
  virtual at::Tensor store(c10::ArrayRef<std::byte> bytes) = 0;
  /// Writes `bytes` to the start of `memory`.
  virtual void write(
      const at::Tensor& memory,
      c10::ArrayRef<std::byte> bytes) = 0;
  /// Copies the start of `memory` to `target`. Waits for the device.
  virtual void read(const at::Tensor& memory, std::span<std::byte> target) = 0;
  /// The same without waiting.
  virtual std::unique_ptr<LateRead> read_later(
      const at::Tensor& memory,
      std::int64_t bytes) = 0;
};

/// Returns the bytes of a plain value.
template <typename T>
c10::ArrayRef<std::byte> bytes_of(const T& value) {
  return {reinterpret_cast<const std::byte*>(&value), sizeof(value)};
}

/// Returns a number of a struct that lies at the start of `memory`, as a tensor
/// of no dimensions that aliases it.
inline at::Tensor field_of(
    const at::Tensor& memory,
    std::size_t offset,
    c10::ScalarType type) {
  return memory
      .narrow(
          0,
          static_cast<std::int64_t>(offset),
          static_cast<std::int64_t>(c10::elementSize(type)))
      .view(type)
      .squeeze();
}

/// Returns whether this build has kernels for devices of this type.
bool has_kernels(c10::DeviceType type);

/// Makes the kernels of a device. Throws NotImplementedError without them.
std::unique_ptr<ListKernels> make_kernels(c10::Device device);

/// The backends. Those of CUDA are defined in no_cuda.cpp where it is off.
std::unique_ptr<ListKernels> make_cpu_kernels();
std::unique_ptr<ListKernels> make_cuda_kernels(c10::Device device);

/// Returns whether the CUDA backend is there.
bool built_with_cuda();

} // namespace fp16core::detail
