#include "device_step.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <cstddef>
#include <cstring>

namespace fp16core::detail {

namespace {

template <typename T>
T read_from(ListKernels& kernels, const at::Tensor& memory) {
  T value;
  kernels.read(memory, {reinterpret_cast<std::byte*>(&value), sizeof(value)});
  return value;
}

} // namespace

DeviceScale::DeviceScale(c10::Device device)
    : device_(device),
      kernels_(make_kernels(device)),
      memory_(kernels_->store(bytes_of(DynamicLossScaleState{}))) {}

DynamicLossScaleState DeviceScale::read() const {
  return read_from<DynamicLossScaleState>(*kernels_, memory_);
}

void DeviceScale::write(const DynamicLossScaleState& state) {
  kernels_->write(memory_, bytes_of(state));
  ++generation_;
}

DynamicLossScaleState* DeviceScale::state() const {
  return static_cast<DynamicLossScaleState*>(memory_.mutable_data_ptr());
}

DeviceNumber DeviceScale::snapshot() const {
  const at::NoGradGuard no_grad;
  return DeviceNumber(
      field_of(memory_, offsetof(DynamicLossScaleState, cur_scale), at::kDouble)
          .clone());
}

DeviceCounts::DeviceCounts(c10::Device device)
    : device_(device),
      kernels_(make_kernels(device)),
      memory_(kernels_->store(bytes_of(StepCounts{}))) {}

StepCounts* DeviceCounts::counts() const {
  return static_cast<StepCounts*>(memory_.mutable_data_ptr());
}

StepCounts DeviceCounts::read() const {
  return read_from<StepCounts>(*kernels_, memory_);
}

void DeviceCounts::clear() {
  kernels_->write(memory_, bytes_of(StepCounts{}));
}

DynamicLossScaleState* DeviceCounts::static_scale(double scale) {
  const DynamicLossScaleState state{scale, 0, -1, 1};
  if (!static_scale_.defined()) {
    static_scale_ = kernels_->store(bytes_of(state));
  } else if (static_value_ != scale) {
    kernels_->write(static_scale_, bytes_of(state));
  }
  static_value_ = scale;
  return static_cast<DynamicLossScaleState*>(static_scale_.mutable_data_ptr());
}

void DeviceCounts::expect_record(std::int64_t step, Positions positions) {
  if (!kernels_->recording()) {
    expected_.push_back(
        {step,
         kernels_->read_later(memory_, sizeof(StepCounts)),
         std::move(positions)});
  }
}

std::vector<PastIteration> DeviceCounts::take_records() {
  std::vector<PastIteration> records;
  while (!expected_.empty() && !kernels_->recording() &&
         expected_.front().counts->ready()) {
    StepCounts counts;
    std::memcpy(&counts, expected_.front().counts->wait(), sizeof(counts));
    records.push_back(
        {expected_.front().step,
         counts.last,
         std::move(expected_.front().positions)});
    expected_.pop_front();
  }
  return records;
}

} // namespace fp16core::detail
