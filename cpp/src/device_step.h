// What the step logic keeps on the device, so that the host need not know how
// an iteration went before it goes on.

#pragma once

#include <fp16core/device_number.h>
#include <fp16core/loss_scaler.h>

#include "kernels.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace fp16core::detail {

/// The state of a dynamic loss scaler in the memory of a device.
class DeviceScale final : public LossScaleStorage {
 public:
  explicit DeviceScale(c10::Device device);

  DynamicLossScaleState read() const override;
  void write(const DynamicLossScaleState& state) override;

  c10::Device device() const { return device_; }
  DynamicLossScaleState* state() const;

  /// Returns the scale as it is when the device gets here, whatever becomes of
  /// it later.
  DeviceNumber snapshot() const;

  /// Tells that the device was asked to advance the state.
  void advanced() { ++generation_; }
  /// Two snapshots of one generation are equal.
  std::int64_t generation() const { return generation_; }

 private:
  c10::Device device_;
  std::unique_ptr<ListKernels> kernels_;
  at::Tensor memory_;
  std::int64_t generation_ = 0;
};

using Positions = std::vector<std::pair<std::int64_t, std::int64_t>>;

/// What an iteration came to, once the device has told.
struct PastIteration {
  // The number of the step.
  std::int64_t step = 0;
  IterationRecord record;
  // Of the gradients that the record counts.
  Positions positions;
};

/// The counts of the steps of one optimizer in the memory of a device.
class DeviceCounts {
 public:
  explicit DeviceCounts(c10::Device device);

  c10::Device device() const { return device_; }
  StepCounts* counts() const;

  /// Returns the counts. Waits for the device.
  StepCounts read() const;
  void clear();

  /// Returns the state of a scale that stays where it is.
  DynamicLossScaleState* static_scale(double scale);

  /// Asks for the record of the iteration that was just ended.
  void expect_record(std::int64_t step, Positions positions);
  /// Returns the records that have arrived, in order. Never waits.
  std::vector<PastIteration> take_records();

 private:
  struct Expected {
    std::int64_t step;
    std::unique_ptr<LateRead> counts;
    Positions positions;
  };

  c10::Device device_;
  std::unique_ptr<ListKernels> kernels_;
  at::Tensor memory_;
  std::deque<Expected> expected_;
  at::Tensor static_scale_;
  double static_value_ = 0.0;
};

} // namespace fp16core::detail
