// Cuts a list of spans into chunks and shares them among ATen's threads.

#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace fp16core::detail::cpu {

/// A run of elements of one item.
struct Chunk {
  std::int64_t item;
  std::int64_t begin;
  std::int64_t size;
};

/// Chunks have at most this many elements, whatever the number of threads: it
/// is large against the cost of a call and small against a thread's share.
constexpr std::int64_t kChunkSize = 65536;

/// Below this many elements (bytes, when clearing) one thread does it all: it
/// takes some 30 us, about what it costs to wake the others.
constexpr std::int64_t kParallelAbove = 131072;

/// The chunks of a list, rebuilt for every pass in memory that is kept.
class Chunks {
 public:
  /// `size_of(item)` returns the number of elements of an item.
  template <typename Items, typename SizeOf>
  void build(const Items& items, const SizeOf& size_of) {
    chunks_.clear();
    ends_.clear();
    std::int64_t total = 0;
    for (std::int64_t item = 0; item < static_cast<std::int64_t>(items.size());
         ++item) {
      const std::int64_t numel = size_of(items[item]);
      for (std::int64_t begin = 0; begin < numel; begin += kChunkSize) {
        const std::int64_t size = std::min(kChunkSize, numel - begin);
        total += size;
        chunks_.push_back({item, begin, size});
        ends_.push_back(total);
      }
    }
  }

  std::int64_t count() const {
    return static_cast<std::int64_t>(chunks_.size());
  }
  const Chunk& operator[](std::int64_t index) const { return chunks_[index]; }
  std::int64_t total() const { return ends_.empty() ? 0 : ends_.back(); }

  /// Calls `body(index, chunk)` for every chunk. Each thread gets a run of
  /// chunks with an even share of the elements, so that one huge tensor and a
  /// hundred small ones are no different.
  template <typename Body>
  void for_each(const Body& body) const {
    const std::int64_t threads =
        total() < kParallelAbove ? 1 : at::get_num_threads();
    at::parallel_for(0, threads, 1, [&](std::int64_t first, std::int64_t last) {
      const std::int64_t end = share(last, threads);
      for (std::int64_t i = share(first, threads); i < end; ++i) {
        body(i, chunks_[i]);
      }
    });
  }

 private:
  // The first chunk of a thread: the one in which its share begins.
  std::int64_t share(std::int64_t thread, std::int64_t threads) const {
    const auto start = total() / threads * thread;
    return thread == threads
        ? count()
        : std::upper_bound(ends_.begin(), ends_.end(), start) - ends_.begin();
  }

  std::vector<Chunk> chunks_;
  // Elements up to and including each chunk.
  std::vector<std::int64_t> ends_;
};

} // namespace fp16core::detail::cpu
