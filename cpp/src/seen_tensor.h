// Recognizing a tensor, and whether it was written, without keeping it alive.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace fp16core::detail {

/// Returns the version counter; 0 for inference tensors, which have none.
inline std::uint32_t version_of(const at::Tensor& tensor) {
  const auto& counter = tensor.unsafeGetTensorImpl()->version_counter();
  return counter.enabled() ? counter.current_version() : 0;
}

/// Tells autograd and other watchers that `tensor` was written.
inline void bump_version(const at::Tensor& tensor) {
  auto* impl = tensor.unsafeGetTensorImpl();
  if (impl->version_counter().enabled()) {
    impl->bump_version();
  }
}

/// Returns the gradient or an undefined tensor, without the checks and
/// warnings of `Tensor::grad`.
inline const at::Tensor& gradient_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->grad();
}

/// A tensor as it was when it was last seen.
///
/// It is held weakly: the data may go, but the address of the tensor is not
/// given to another one meanwhile, so that comparing addresses is safe.
class SeenTensor {
 public:
  void record(const at::Tensor& tensor) {
    if (!same(tensor)) {
      impl_.emplace(tensor.getIntrusivePtr());
    }
    version_ = version_of(tensor);
  }

  void forget() { impl_.reset(); }

  /// Returns whether this is the tensor that was seen.
  bool same(const at::Tensor& tensor) const {
    return impl_.has_value() &&
        impl_->_unsafe_get_target() == tensor.unsafeGetTensorImpl();
  }

  /// Returns whether it also was not written since.
  bool unchanged(const at::Tensor& tensor) const {
    return same(tensor) && version_ == version_of(tensor);
  }

 private:
  std::optional<
      c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>>
      impl_;
  std::uint32_t version_ = 0;
};

} // namespace fp16core::detail
