// The CUDA runtime as torch uses it.

#include "runtime.h"

#include <ATen/ATen.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <cstring>
#include <utility>

namespace fp16core::detail::cuda {

namespace {

// An event of CUDA's, without timing, which would make it slower.
class Event {
 public:
  Event() {
    C10_CUDA_CHECK(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming));
  }
  // Fails when the process ends, which is no news.
  ~Event() { (void)cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void record(cudaStream_t stream) {
    C10_CUDA_CHECK(cudaEventRecord(event_, stream));
  }
  bool done() const {
    const cudaError_t state = cudaEventQuery(event_);
    if (state == cudaErrorNotReady) {
      (void)cudaGetLastError(); // no error, and not to be taken for one later
      return false;
    }
    C10_CUDA_CHECK(state);
    return true;
  }
  void wait() const { C10_CUDA_CHECK(cudaEventSynchronize(event_)); }

 private:
  cudaEvent_t event_ = nullptr;
};

bool in_capture() {
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() !=
      c10::cuda::CaptureStatus::None;
}

void check_not_in_capture() {
  TORCH_CHECK(
      !in_capture(),
      "fp16core: results must not be read while a CUDA graph is captured, but "
      "got such a read");
}

class PinnedRead final : public LateRead {
 public:
  PinnedRead(c10::Device device, at::Tensor memory)
      : device_(device), memory_(std::move(memory)) {}

  void sent(cudaStream_t stream) { event_.record(stream); }

  bool ready() const override {
    const c10::cuda::CUDAGuard guard(device_);
    return event_.done();
  }
  const std::byte* wait() override {
    const c10::cuda::CUDAGuard guard(device_);
    check_not_in_capture();
    event_.wait();
    return static_cast<const std::byte*>(memory_.const_data_ptr());
  }

 private:
  c10::Device device_;
  at::Tensor memory_;
  Event event_;
};

class TorchRuntime final : public Runtime {
 public:
  explicit TorchRuntime(c10::Device device) : device_(device) {}

  std::shared_ptr<void> enter() override {
    return std::make_shared<c10::cuda::CUDAGuard>(device_);
  }

  cudaStream_t stream() override {
    return c10::cuda::getCurrentCUDAStream(device_.index());
  }

  bool capturing() override { return in_capture(); }

  at::Tensor allocate(std::int64_t bytes) override {
    return at::empty({bytes}, at::TensorOptions(at::kByte).device(device_));
  }

  at::Tensor allocate_pinned(std::int64_t bytes) override {
    return at::empty({bytes}, at::TensorOptions(at::kByte).pinned_memory(true));
  }

  void copy(const at::Tensor& target, const at::Tensor& source) override {
    target.copy_(source, /*non_blocking=*/true);
  }

  void read(void* target, const at::Tensor& source, std::int64_t bytes)
      override {
    check_not_in_capture();
    const auto there = source.narrow(0, 0, bytes).cpu();
    std::memcpy(target, there.const_data_ptr(), bytes);
  }

  std::unique_ptr<LateRead> read_later(
      const at::Tensor& source,
      std::int64_t bytes) override {
    auto memory = allocate_pinned(bytes);
    auto result = std::make_unique<PinnedRead>(device_, memory);
    copy(memory, source.narrow(0, 0, bytes));
    result->sent(stream());
    return result;
  }

 private:
  c10::Device device_;
};

} // namespace

std::shared_ptr<Runtime> make_runtime(c10::Device device) {
  return std::make_shared<TorchRuntime>(device);
}

} // namespace fp16core::detail::cuda
