// How kernels are launched, and how a block finds what it works on.
//
// Kernel files include nothing but the CUDA runtime and headers of our own, and
// launch through the runtime's functions, so that another runtime can run them.

#pragma once

#include "work.h"

#include <cuda_runtime.h>

#include <cstdint>

namespace fp16core::detail::cuda {

/// The elements that this block works on.
template <typename Task>
struct Span {
  // A copy: writing elements could change the original, for all that the
  // compiler knows.
  Task task;
  std::int64_t task_index;
  std::int64_t begin;
  std::int64_t size;
};

template <typename Task>
__device__ __forceinline__ Span<Task> span_of_block(const Work<Task>& work) {
  const Chunk chunk = work.chunks[blockIdx.x];
  const Task task = work.tasks[chunk.task];
  const std::int64_t begin = chunk.index * work.chunk_size;
  const std::int64_t left = task.numel - begin;
  return {
      task,
      chunk.task,
      begin,
      left < work.chunk_size ? left : work.chunk_size};
}

/// Runs a kernel on `blocks` blocks, at least one. Returns the launch's error.
template <typename... Parameters, typename... Arguments>
cudaError_t launch(
    void (*kernel)(Parameters...),
    std::int64_t blocks,
    cudaStream_t stream,
    const Arguments&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

} // namespace fp16core::detail::cuda
