// The list kernels of CUDA, as far as they go: scaling in place is there, and
// a CUDA parameter is refused until the rest is.

#include "../kernels.h"
#include "scale.cuh"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

namespace fp16core::detail {

namespace {

using cuda::ElementType;
using cuda::ScaleList;

ElementType element_type(c10::ScalarType type) {
  switch (type) {
    case c10::ScalarType::Half:
      return ElementType::kHalf;
    case c10::ScalarType::BFloat16:
      return ElementType::kBFloat16;
    case c10::ScalarType::Float:
      return ElementType::kFloat;
    default:
      return ElementType::kDouble;
  }
}

class CudaListKernels final : public ListKernels {
 public:
  explicit CudaListKernels(c10::Device device) : device_(device) {}

  void scale_(c10::ArrayRef<ScaleItem> items, const Factor* factor) override {
    const c10::cuda::CUDAGuard guard(device_);
    ScaleList list{};
    std::int64_t blocks = 0;
    const auto flush = [&] {
      if (list.count > 0) {
        C10_CUDA_CHECK(
            cuda::launch_scale(
                list,
                blocks,
                &factor->f32,
                &factor->f64,
                c10::cuda::getCurrentCUDAStream(device_.index())));
      }
      list.count = 0;
      blocks = 0;
    };
    for (const auto& item : items) {
      if (item.numel == 0) {
        continue;
      }
      if (list.count == ScaleList::kCapacity) {
        flush();
      }
      list.values[list.count] = item.values;
      list.numel[list.count] = item.numel;
      list.first_block[list.count] = blocks;
      list.type[list.count] = element_type(item.type);
      ++list.count;
      blocks += (item.numel + cuda::kBlockElements - 1) / cuda::kBlockElements;
    }
    flush();
  }

  void take_gradients(c10::ArrayRef<GradientItem>, const Factor*) override {
    refuse();
  }
  const std::vector<GradientStats>& gradient_stats() override { refuse(); }
  double sum_of_powers(c10::ArrayRef<GradientItem>, double) override {
    refuse();
  }
  void zero_(c10::ArrayRef<ZeroItem>) override { refuse(); }
  void write_model(c10::ArrayRef<MasterItem>) override { refuse(); }
  void update(
      const UpdateRule&,
      c10::ArrayRef<UpdateItem>,
      c10::ArrayRef<Factor>) override {
    refuse();
  }
  const std::vector<std::uint8_t>& saturated() override { refuse(); }
  void adopt_model(c10::ArrayRef<MasterItem>) override { refuse(); }

 private:
  [[noreturn]] static void refuse() {
    TORCH_CHECK_NOT_IMPLEMENTED(
        false,
        "fp16core: this CUDA kernel does not exist yet");
  }

  c10::Device device_;
};

} // namespace

bool built_with_cuda() {
  return true;
}

bool has_cuda_kernels() {
  return false;
}

std::unique_ptr<ListKernels> make_cuda_kernels(c10::Device device) {
  return std::make_unique<CudaListKernels>(device);
}

} // namespace fp16core::detail
