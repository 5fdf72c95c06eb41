// The kernel behind update.cuh and its launch.

#include "update.cuh"

#include "../math/update_rules.h"

#include <array>

namespace fp16core::detail::cuda {

namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kMostBlocks = 65536;

// The task: read gradient, weight and state of every element once, and write
// weight, state and the rounded weight. The awkward cases are state that is not
// in use, whose pointer is null, and the last few elements, which are rounded
// in another order. A thread strides over the grid by elements, so neighbours
// touch neighbours and no index is 32 bits wide. One pass.
template <typename Rule>
__global__ void __launch_bounds__(kThreads) update_kernel(
    const __grid_constant__ UpdateSpan span,
    const __grid_constant__ typename Rule::template Step<float> step) {
  using Math = ScalarMath<float>;
  constexpr std::size_t count = std::tuple_size_v<decltype(Rule::kTensors)>;
  const std::int64_t stride = std::int64_t{gridDim.x} * kThreads;
  const std::int64_t remainder = span.numel - span.numel % kRemainderOf<float>;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
       i < span.numel;
       i += stride) {
    float state[count + 1] = {}; // some rules may have none
    for (std::size_t t = 0; t < count; ++t) {
      if (span.tensors[t] != nullptr) {
        state[t] = span.tensors[t][i];
      }
    }
    float weight = span.weight[i];
    if (i < remainder) {
      Rule::template update<Math, false>(step, span.gradient[i], weight, state);
    } else {
      Rule::template update<Math, true>(step, span.gradient[i], weight, state);
    }
    for (std::size_t t = 0; t < count; ++t) {
      if (span.tensors[t] != nullptr) {
        span.tensors[t][i] = state[t];
      }
    }
    span.weight[i] = weight;
    if (span.half_model != nullptr) {
      span.half_model[i] = __float2half_rn(weight);
    }
    if (span.bfloat16_model != nullptr) {
      span.bfloat16_model[i] = __float2bfloat16_rn(weight);
    }
  }
}

using Launch =
    cudaError_t (*)(const UpdateSpan& span, const void* step, cudaStream_t);

template <typename Rule>
cudaError_t launch(
    const UpdateSpan& span,
    const void* step,
    cudaStream_t stream) {
  const std::int64_t wanted = (span.numel + kThreads - 1) / kThreads;
  const auto blocks =
      static_cast<unsigned>(wanted < kMostBlocks ? wanted : kMostBlocks);
  update_kernel<Rule><<<blocks, kThreads, 0, stream>>>(
      span,
      *static_cast<const typename Rule::template Step<float>*>(step));
  return cudaGetLastError();
}

struct LaunchOf {
  template <typename Rule>
  Launch operator()() const {
    return &launch<Rule>;
  }
};

} // namespace

cudaError_t launch_update(
    std::size_t rule,
    const UpdateSpan& span,
    const void* step,
    cudaStream_t stream) {
  static const auto launches = AllRules::map(LaunchOf());
  return launches[rule](span, step, stream);
}

} // namespace fp16core::detail::cuda
