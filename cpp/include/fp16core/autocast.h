// Automatic mixed precision for a scope.

#pragma once

#include <fp16core/api.h>

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <optional>

namespace fp16core {

/// Runs operations on one type of device in mixed precision for as long as it
/// lives, on the thread that made it: what `torch.autocast` is in Python.
///
///     {
///       const fp16core::AutocastGuard autocast(torch::kCUDA, torch::kHalf);
///       loss = criterion(model->forward(x), y);
///     }
///     scaler.scale(loss).backward();
///
/// Guards nest, and go in the reverse order of their making. When the outermost
/// one goes, weights that were cast and kept are dropped; so they are where a
/// scope inside of another has its own dtype.
class FP16CORE_API AutocastGuard {
 public:
  /// Without a `dtype` it is what torch has for the device: float16 on CUDA,
  /// bfloat16 on the CPU. With `enabled` false the scope runs without mixed
  /// precision, inside of one with it. `cache_enabled` keeps the casts of
  /// weights that require grad, so that each is cast once.
  ///
  /// Throws ValueError for a dtype that is not float16 or bfloat16, and for a
  /// device that has no autocast.
  explicit AutocastGuard(
      c10::DeviceType device,
      std::optional<c10::ScalarType> dtype = std::nullopt,
      bool enabled = true,
      bool cache_enabled = true);
  ~AutocastGuard();
  AutocastGuard(const AutocastGuard&) = delete;
  AutocastGuard& operator=(const AutocastGuard&) = delete;

 private:
  c10::DeviceType device_;
  bool enabled_before_;
  c10::ScalarType dtype_before_;
  bool cache_enabled_before_;
};

} // namespace fp16core
