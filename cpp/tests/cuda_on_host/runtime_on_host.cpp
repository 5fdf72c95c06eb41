#include "runtime_on_host.h"

#include <ATen/ATen.h>

#include <atomic>
#include <cstring>
#include <utility>

namespace cuda_on_host {

namespace {

struct Settings {
  RuntimeCounts counts;
  cudaStream_t stream = nullptr;
  bool capturing = false;
  bool held = false;
};

// A thread has its own, as it has its own current stream.
Settings& settings() {
  static thread_local Settings all;
  return all;
}

// As CUDA does, for a query of an event too.
void check_not_capturing() {
  TORCH_CHECK(
      !settings().capturing,
      "results must not be read while a CUDA graph is captured, but got such a "
      "read");
}

class HostRead final : public fp16core::detail::LateRead {
 public:
  explicit HostRead(at::Tensor bytes) : bytes_(std::move(bytes)) {}
  bool ready() const override {
    check_not_capturing();
    return !settings().held;
  }
  const std::byte* wait() override {
    check_not_capturing();
    return static_cast<const std::byte*>(bytes_.const_data_ptr());
  }

 private:
  at::Tensor bytes_;
};

class HostRuntime final : public fp16core::detail::cuda::Runtime {
 public:
  std::shared_ptr<void> enter() override { return nullptr; }
  cudaStream_t stream() override { return settings().stream; }
  bool capturing() override { return settings().capturing; }

  at::Tensor allocate(std::int64_t bytes) override {
    // Not zeros, which would be right too often.
    return at::full({bytes}, 0xa5, at::kByte);
  }
  at::Tensor allocate_pinned(std::int64_t bytes) override {
    return allocate(bytes);
  }

  void copy(const at::Tensor& target, const at::Tensor& source) override {
    ++settings().counts.copies;
    settings().counts.copied_bytes += source.numel();
    target.copy_(source);
  }

  void read(void* target, const at::Tensor& source, std::int64_t bytes)
      override {
    check_not_capturing();
    ++settings().counts.reads;
    std::memcpy(target, source.const_data_ptr(), bytes);
  }

  std::unique_ptr<fp16core::detail::LateRead> read_later(
      const at::Tensor& source,
      std::int64_t bytes) override {
    ++settings().counts.late_reads;
    return std::make_unique<HostRead>(source.narrow(0, 0, bytes).clone());
  }
};

} // namespace

RuntimeCounts& runtime_counts() {
  return settings().counts;
}

void reset_counts() {
  settings().counts = {};
}

void set_stream(cudaStream_t stream) {
  settings().stream = stream;
}

void set_capturing(bool capturing) {
  settings().capturing = capturing;
}

void hold_late_reads(bool hold) {
  settings().held = hold;
}

} // namespace cuda_on_host

std::shared_ptr<fp16core::detail::cuda::Runtime> fp16core::detail::cuda::
    make_runtime(c10::Device /*device*/) {
  return std::make_shared<cuda_on_host::HostRuntime>();
}

// For tests in Python, which load the library that this is part of.
extern "C" {

__attribute__((visibility("default"))) std::int64_t fp16core_on_host_reads() {
  return cuda_on_host::runtime_counts().reads;
}

__attribute__((visibility("default"))) void fp16core_on_host_set_capturing(
    int capturing) {
  cuda_on_host::set_capturing(capturing != 0);
}

} // extern "C"
