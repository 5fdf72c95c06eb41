// A number that only the device may know.

#pragma once

#include <fp16core/api.h>

#include <ATen/core/Tensor.h>

namespace fp16core {

/// A number that the host knows, or one in the memory of a device, for what
/// runs there to read: a loss scale or a clip coefficient that the host need
/// not wait for.
///
/// Arithmetic is in double, on the device where one of the numbers is there.
class FP16CORE_API DeviceNumber {
 public:
  DeviceNumber(double value) : value_(value) {}
  /// `memory` is a float64 tensor of one element; it is held, not copied.
  explicit DeviceNumber(at::Tensor memory);

  bool on_host() const { return !memory_.defined(); }

  /// Returns the number. Waits for the device where it is not on the host.
  double read() const;

  /// The number as the host has it, or the tensor that holds it. One of them is
  /// without meaning.
  double value() const { return value_; }
  const at::Tensor& memory() const { return memory_; }

  DeviceNumber operator*(const DeviceNumber& other) const;
  DeviceNumber operator/(const DeviceNumber& other) const;
  /// Returns its rounding to float32.
  DeviceNumber rounded() const;
  /// Returns the number, or 1 if it is 0 or not finite.
  DeviceNumber or_one() const;

  /// Returns `tensor` times the number, on the device of `tensor`.
  at::Tensor times(const at::Tensor& tensor) const;

 private:
  double value_ = 0.0;
  at::Tensor memory_;
};

} // namespace fp16core
