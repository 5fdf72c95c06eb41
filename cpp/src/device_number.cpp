#include <fp16core/device_number.h>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <cmath>
#include <utility>

namespace fp16core {

DeviceNumber::DeviceNumber(at::Tensor memory) : memory_(std::move(memory)) {
  TORCH_CHECK_VALUE(
      memory_.defined() && memory_.scalar_type() == at::kDouble &&
          memory_.numel() == 1,
      "DeviceNumber: memory must be a float64 tensor of one element, but got ",
      memory_.defined() ? memory_.toString() : "none");
}

double DeviceNumber::read() const {
  return on_host() ? value_ : memory_.item<double>();
}

DeviceNumber DeviceNumber::operator*(const DeviceNumber& other) const {
  if (on_host()) {
    return other.on_host() ? DeviceNumber(value_ * other.value_)
                           : other * *this;
  }
  const at::NoGradGuard no_grad;
  return DeviceNumber(other.times(memory_));
}

DeviceNumber DeviceNumber::operator/(const DeviceNumber& other) const {
  if (on_host() && other.on_host()) {
    return value_ / other.value_;
  }
  const at::NoGradGuard no_grad;
  if (on_host()) {
    return DeviceNumber(at::full_like(other.memory_, value_) / other.memory_);
  }
  return DeviceNumber(
      other.on_host() ? memory_ / other.value_
                      : memory_ / other.memory_.to(memory_.device()));
}

DeviceNumber DeviceNumber::rounded() const {
  if (on_host()) {
    return static_cast<double>(static_cast<float>(value_));
  }
  const at::NoGradGuard no_grad;
  return DeviceNumber(memory_.to(at::kFloat).to(at::kDouble));
}

DeviceNumber DeviceNumber::or_one() const {
  if (on_host()) {
    return value_ == 0.0 || !std::isfinite(value_) ? 1.0 : value_;
  }
  const at::NoGradGuard no_grad;
  return DeviceNumber(
      at::where(
          at::isfinite(memory_).logical_and_(memory_ != 0.0),
          memory_,
          at::ones_like(memory_)));
}

at::Tensor DeviceNumber::times(const at::Tensor& tensor) const {
  // A tensor of no dimensions takes the type of the other one.
  return on_host()
      ? tensor * value_
      : tensor * memory_.reshape({}).to(tensor.device(), tensor.scalar_type());
}

} // namespace fp16core
