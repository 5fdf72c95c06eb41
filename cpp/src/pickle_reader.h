// Reads pickled data without executing anything.

#pragma once

#include <ATen/core/ivalue.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

namespace fp16core::detail {

/// How deep values may lie in one another, so that no recursion over them can
/// exhaust the stack.
constexpr int kDeepestValue = 500;

/// A storage that a pickle refers to.
struct StorageRequest {
  std::string key;
  std::string location;
  std::uint64_t nbytes;
};

/// Returns a storage of `nbytes`, the same one for the same key.
using LoadStorage = std::function<c10::Storage(const StorageRequest&)>;

/// Returns the value that `pickle` holds: the plain data that `torch.load`
/// reads with its defaults. Tensors come without `requires_grad`; those of one
/// storage share it.
///
/// Throws RuntimeError, beginning with `owner`, for anything else. Whatever the
/// bytes, it uses memory in proportion to their number.
c10::IValue read_pickle(
    std::string_view pickle,
    const LoadStorage& load_storage,
    const std::string& owner);

} // namespace fp16core::detail
