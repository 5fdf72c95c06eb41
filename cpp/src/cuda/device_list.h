// Lists in device memory that mostly are what they were at the last launch.

#pragma once

#include "runtime.h"

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <cstddef>
#include <vector>

namespace fp16core::detail::cuda {

/// Returns a copy in page-locked memory.
at::Tensor pinned_copy(Runtime& runtime, c10::ArrayRef<std::byte> bytes);

/// A list of the host and its copy on the device.
///
/// Parameters and masters rarely move, so a list is compared with what was sent
/// last and sent again only if it differs, through page-locked memory and in
/// the order of the stream, without waiting. It may have any length.
///
/// While a graph is captured, every list is sent to memory of its own, which
/// stays for as long as this object: a replay finds the list that belongs to
/// it, and leaves the lists of launches outside the graph alone.
class DeviceList {
 public:
  /// Returns where `bytes` lie on the device, valid for launches in the current
  /// stream until the next call.
  void* send(Runtime& runtime, c10::ArrayRef<std::byte> bytes);

 private:
  std::vector<std::byte> sent_;
  cudaStream_t stream_ = nullptr;
  at::Tensor memory_;
  // Both ends of the copies that graphs repeat.
  std::vector<at::Tensor> captured_;
};

/// The bytes of a list of plain records.
template <typename Record>
c10::ArrayRef<std::byte> bytes_of(const std::vector<Record>& records) {
  return {
      reinterpret_cast<const std::byte*>(records.data()),
      records.size() * sizeof(Record)};
}

} // namespace fp16core::detail::cuda
