// What the CUDA backend asks of the CUDA runtime and of torch's streams and
// allocators. Another definition of make_runtime stands in for it in tests.

#pragma once

#include "../kernels.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/ArrayRef.h>

#include <cuda_runtime.h>

#include <cstddef>
#include <memory>

namespace fp16core::detail::cuda {

/// One device. Everything goes into the current stream of the calling thread.
class Runtime {
 public:
  virtual ~Runtime() = default;

  /// Makes the device current for as long as the result lives.
  virtual std::shared_ptr<void> enter() = 0;

  /// Returns the current stream of the device.
  virtual cudaStream_t stream() = 0;

  /// Returns whether a CUDA graph is being captured in the current stream.
  virtual bool capturing() = 0;

  /// Returns uninitialized memory: of the device, and page-locked memory of the
  /// host.
  virtual at::Tensor allocate(std::int64_t bytes) = 0;
  virtual at::Tensor allocate_pinned(std::int64_t bytes) = 0;

  /// Copies between page-locked memory and the device, without waiting. The
  /// memory must stay until the copy is done; torch's allocators see to that
  /// for tensors that they gave out.
  virtual void copy(const at::Tensor& target, const at::Tensor& source) = 0;

  /// Copies from the device and waits.
  virtual void read(
      void* target,
      const at::Tensor& source,
      std::int64_t bytes) = 0;

  /// Starts a copy from the device and returns at once.
  virtual std::unique_ptr<LateRead> read_later(
      const at::Tensor& source,
      std::int64_t bytes) = 0;
};

std::shared_ptr<Runtime> make_runtime(c10::Device device);

/// Throws if a call of the runtime failed.
void check(cudaError_t error);

} // namespace fp16core::detail::cuda
