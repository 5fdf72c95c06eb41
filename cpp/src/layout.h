// Pairing elements by index where two tensors lie differently in memory.

#pragma once

#include <ATen/core/Tensor.h>

#include <list>
#include <utility>
#include <vector>

namespace fp16core::detail {

/// Returns whether both tensors have the same shape and fill their memory in
/// the same order, so that a kernel may walk both as flat spans. Strides of
/// dimensions of size 1 do not matter.
bool same_dense_layout(const at::Tensor& a, const at::Tensor& b);

/// Returns an uninitialized tensor with the shape, device and (if dense)
/// strides of `like`.
at::Tensor empty_dense_like(const at::Tensor& like, c10::ScalarType type);

/// Dense stand-ins for tensors whose layout a kernel cannot walk. They live as
/// long as this object, which must outlive the kernel. Costs nothing until the
/// first of them is needed.
class Staging {
 public:
  /// Returns `tensor`, or a copy of it that lies as `like` does.
  const at::Tensor& readable(const at::Tensor& tensor, const at::Tensor& like);

  /// The same, and `write_back` copies the stand-in to `tensor`. With
  /// `read` off the stand-in starts uninitialized.
  const at::Tensor& writable(
      const at::Tensor& tensor,
      const at::Tensor& like,
      bool read);

  /// Returns whether there was anything to write.
  bool write_back();

 private:
  // A list, since references to its elements are handed out.
  std::list<at::Tensor> held_;
  std::vector<std::pair<at::Tensor, at::Tensor>> to_write_;
};

} // namespace fp16core::detail
