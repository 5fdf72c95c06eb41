#include "device_list.h"

#include <algorithm>
#include <cstring>

namespace fp16core::detail::cuda {

at::Tensor pinned_copy(Runtime& runtime, c10::ArrayRef<std::byte> bytes) {
  auto pinned =
      runtime.allocate_pinned(static_cast<std::int64_t>(bytes.size()));
  std::memcpy(pinned.mutable_data_ptr(), bytes.data(), bytes.size());
  return pinned;
}

void* DeviceList::send(Runtime& runtime, c10::ArrayRef<std::byte> bytes) {
  if (bytes.empty()) {
    return nullptr;
  }
  const auto size = static_cast<std::int64_t>(bytes.size());
  if (runtime.capturing()) {
    const auto pinned = pinned_copy(runtime, bytes);
    const auto memory = runtime.allocate(size);
    runtime.copy(memory, pinned);
    captured_.push_back(pinned);
    captured_.push_back(memory);
    return memory.mutable_data_ptr();
  }
  const cudaStream_t stream = runtime.stream();
  // What was sent in one stream is not there yet for another.
  const bool known = stream == stream_ && memory_.defined() &&
      std::equal(bytes.begin(), bytes.end(), sent_.begin(), sent_.end());
  if (!known) {
    if (stream != stream_ || !memory_.defined() || memory_.numel() < size) {
      // Given back to the stream that it was made in, which may still read it.
      memory_ = runtime.allocate(size);
      stream_ = stream;
    }
    sent_.clear(); // unknown, should the copy fail
    runtime.copy(memory_.narrow(0, 0, size), pinned_copy(runtime, bytes));
    sent_.assign(bytes.begin(), bytes.end());
  }
  return memory_.mutable_data_ptr();
}

} // namespace fp16core::detail::cuda
