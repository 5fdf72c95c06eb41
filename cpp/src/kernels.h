// The one internal door to the list kernels that every backend defines.
//
// A kernel works on a list of dense spans of memory, one call for all
// parameters of a device. Layouts are the caller's business: both sides of an
// item pair their elements by position in memory. Spans may be empty. Scales
// are taken by pointer to memory of the kernels' device, and results stay
// there until they are read.

#pragma once

#include <fp16core/update_rule.h>

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

namespace fp16core::detail {

/// A factor in both precisions; `f32` is the rounding of `f64`.
struct Factor {
  double f64 = 1.0;
  float f32 = 1.0F;

  static Factor of(double value) { return {value, static_cast<float>(value)}; }
};

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

/// What a pass found in one gradient.
struct GradientStats {
  // Over the values after unscaling; combined in double.
  double sum_of_squares = 0.0;
  double largest = 0.0;
  // Over the values of the source.
  std::int64_t inf_count = 0;
  std::int64_t nan_count = 0;
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
  // What UpdateRule::prepare made.
  const void* step;
  std::int64_t numel;
  c10::ScalarType gradient_type;
  c10::ScalarType weight_type;
  c10::ScalarType model_type;
  // Whether the gradient is multiplied by the factors first.
  bool unscale;
};

/// The list kernels of one device.
class ListKernels {
 public:
  virtual ~ListKernels() = default;

  /// Reads every source once: counts inf and NaN, measures, and writes the
  /// unscaled values. A pass reads 2 and writes 4 bytes an element for a half
  /// gradient and its fp32 master gradient.
  virtual void take_gradients(
      c10::ArrayRef<GradientItem> items,
      const Factor* factor) = 0;

  /// Returns the findings of the last `take_gradients`, an entry an item.
  /// Synchronizes where the device is not the host.
  virtual const std::vector<GradientStats>& gradient_stats() = 0;

  /// Returns the sum of |x|^power over all sources as they are, in double; at
  /// power 0 the number of elements that are not zero. Synchronizes where the
  /// device is not the host.
  virtual double sum_of_powers(
      c10::ArrayRef<GradientItem> items,
      double power) = 0;

  /// Multiplies in place.
  virtual void scale_(c10::ArrayRef<ScaleItem> items, const Factor* factor) = 0;

  virtual void zero_(c10::ArrayRef<ZeroItem> items) = 0;

  /// Writes the masters to the model, rounded to nearest even.
  virtual void write_model(c10::ArrayRef<MasterItem> items) = 0;

  /// Runs an update rule: reads gradient, weight and state, and writes weight,
  /// state and model, in one pass. A gradient is multiplied by one factor after
  /// the other, each product rounded to the weight's type, so that the bits are
  /// those of passes that unscale and clip. For Adam a pass reads 16 and writes
  /// 14 bytes an element with fp32 gradients, 14 and 14 with half gradients.
  virtual void update(
      const UpdateRule& rule,
      c10::ArrayRef<UpdateItem> items,
      c10::ArrayRef<Factor> factors) = 0;

  /// Returns, an entry an item of the last `write_model` or `update`, whether a
  /// finite master was stored as inf. Synchronizes where the device is not the
  /// host.
  virtual const std::vector<std::uint8_t>& saturated() = 0;

  /// Where the rounded master differs from the model, the master takes the
  /// model's value. Equal values, and NaN against NaN, change nothing.
  virtual void adopt_model(c10::ArrayRef<MasterItem> items) = 0;
};

/// Returns whether this build has kernels for devices of this type.
bool has_kernels(c10::DeviceType type);

/// Makes the kernels of a device. Throws NotImplementedError without them.
std::unique_ptr<ListKernels> make_kernels(c10::Device device);

/// The backends. Those of CUDA are defined in no_cuda.cpp where it is off.
std::unique_ptr<ListKernels> make_cpu_kernels();
std::unique_ptr<ListKernels> make_cuda_kernels(c10::Device device);

/// Returns whether the CUDA backend was compiled, and whether it has all of the
/// kernels, so that CUDA parameters can be accepted.
bool built_with_cuda();
bool has_cuda_kernels();

} // namespace fp16core::detail
