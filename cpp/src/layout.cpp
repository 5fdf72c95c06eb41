#include "layout.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

namespace fp16core::detail {

bool same_dense_layout(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes()) {
    return false;
  }
  if ((a.is_contiguous() && b.is_contiguous()) || a.numel() == 0) {
    return true;
  }
  if (!a.is_non_overlapping_and_dense() || !b.is_non_overlapping_and_dense()) {
    return false;
  }
  for (std::int64_t d = 0; d < a.dim(); ++d) {
    if (a.size(d) != 1 && a.stride(d) != b.stride(d)) {
      return false;
    }
  }
  return true;
}

at::Tensor empty_dense_like(const at::Tensor& like, c10::ScalarType type) {
  const auto options = at::TensorOptions().device(like.device()).dtype(type);
  return like.is_non_overlapping_and_dense()
      ? at::empty_strided(like.sizes(), like.strides(), options)
      : at::empty(like.sizes(), options);
}

const at::Tensor& Staging::readable(
    const at::Tensor& tensor,
    const at::Tensor& like) {
  if (same_dense_layout(tensor, like)) {
    return tensor;
  }
  const at::NoGradGuard no_grad;
  held_.push_back(empty_dense_like(like, tensor.scalar_type()));
  held_.back().copy_(tensor);
  return held_.back();
}

const at::Tensor& Staging::writable(
    const at::Tensor& tensor,
    const at::Tensor& like,
    bool read) {
  if (same_dense_layout(tensor, like)) {
    return tensor;
  }
  const at::NoGradGuard no_grad;
  held_.push_back(empty_dense_like(like, tensor.scalar_type()));
  if (read) {
    held_.back().copy_(tensor);
  }
  to_write_.emplace_back(tensor, held_.back());
  return held_.back();
}

bool Staging::write_back() {
  const at::NoGradGuard no_grad;
  for (auto& [tensor, stand_in] : to_write_) {
    tensor.copy_(stand_in);
  }
  return !to_write_.empty();
}

} // namespace fp16core::detail
