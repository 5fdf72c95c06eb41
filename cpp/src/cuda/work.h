// How the blocks of a launch share a list of spans.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace fp16core::detail::cuda {

/// Threads in a block, and blocks that a multiprocessor should hold at least,
/// which leaves 64 registers a thread. Left to itself the compiler spills some
/// to hold more of them.
constexpr int kThreads = 256;
constexpr int kBlocks = 4;

/// A part of one task: elements from index * Work::chunk_size on.
struct Chunk {
  std::int32_t task;
  std::int32_t index;
};

/// What the blocks of a launch share: tasks of a kind, and a chunk of one of
/// them for each block. A task without elements has no chunk. All lists lie in
/// device memory.
template <typename Task>
struct Work {
  const Task* tasks;
  const Chunk* chunks;
  // The first chunk of each task, and the number of all chunks at the end.
  const std::int64_t* first_chunks;
  std::int64_t chunk_count;
  std::int64_t task_count;
  std::int64_t chunk_size;
};

} // namespace fp16core::detail::cuda
