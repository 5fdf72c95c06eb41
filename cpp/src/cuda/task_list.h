// The tasks of a launch, cut into chunks.

#pragma once

#include "device_list.h"
#include "work.h"

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

namespace fp16core::detail::cuda {

/// Chunks of a launch are as large as leaves kWantedChunks of them, within
/// bounds: that many keep the largest GPU busy, and a chunk should be large
/// against what a block costs. Only the list decides, so that results are the
/// same on every GPU.
constexpr std::int64_t kWantedChunks = 4096;
constexpr std::int64_t kSmallestChunk = 2048;
constexpr std::int64_t kLargestChunk = 65536;

inline std::int64_t chunk_size_for(std::int64_t total) {
  std::int64_t size = kSmallestChunk;
  while (size < kLargestChunk && total / size > kWantedChunks) {
    size *= 2;
  }
  return size;
}

/// Returns a record whose padding is zero too, since lists are compared by
/// their bytes.
template <typename Record>
Record blank() {
  static_assert(std::is_trivially_copyable_v<Record>);
  Record record;
  std::memset(static_cast<void*>(&record), 0, sizeof(record));
  return record;
}

/// Collects tasks and sends them to the device.
template <typename Task>
class TaskList {
 public:
  void clear() {
    tasks_.clear();
    items_.clear();
    total_ = 0;
  }

  /// Adds a task that stands for the item at position `item` of the caller's
  /// list. One without elements has no chunk, and is left out unless
  /// `keep_empty`.
  void add(std::int64_t item, const Task& task, bool keep_empty = false) {
    if (task.numel > 0 || keep_empty) {
      tasks_.push_back(task);
      items_.push_back(item);
      total_ += task.numel;
    }
  }

  bool empty() const { return tasks_.empty(); }
  std::int64_t size() const { return static_cast<std::int64_t>(tasks_.size()); }

  /// The items that have tasks, and the first chunk of each.
  const std::vector<std::int64_t>& items() const { return items_; }
  const std::vector<std::int64_t>& first_chunks() const {
    return first_chunks_;
  }

  /// Returns the work, with its lists on the device.
  Work<Task> send(Runtime& runtime) {
    const std::int64_t chunk_size = chunk_size_for(total_);
    chunks_.clear();
    first_chunks_.clear();
    for (std::size_t t = 0; t < tasks_.size(); ++t) {
      first_chunks_.push_back(static_cast<std::int64_t>(chunks_.size()));
      const std::int64_t count =
          (tasks_[t].numel + chunk_size - 1) / chunk_size;
      for (std::int64_t c = 0; c < count; ++c) {
        chunks_.push_back(
            {static_cast<std::int32_t>(t), static_cast<std::int32_t>(c)});
      }
    }
    first_chunks_.push_back(static_cast<std::int64_t>(chunks_.size()));
    return {
        static_cast<const Task*>(device_tasks_.send(runtime, bytes_of(tasks_))),
        static_cast<const Chunk*>(
            device_chunks_.send(runtime, bytes_of(chunks_))),
        static_cast<const std::int64_t*>(
            device_first_chunks_.send(runtime, bytes_of(first_chunks_))),
        first_chunks_.back(),
        size(),
        chunk_size};
  }

 private:
  std::vector<Task> tasks_;
  std::vector<std::int64_t> items_;
  std::int64_t total_ = 0;
  std::vector<Chunk> chunks_;
  std::vector<std::int64_t> first_chunks_;
  DeviceList device_tasks_;
  DeviceList device_chunks_;
  DeviceList device_first_chunks_;
};

} // namespace fp16core::detail::cuda
