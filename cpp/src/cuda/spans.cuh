// The CUDA kernels that change spans of memory in place.

#pragma once

#include "element_type.h"
#include "work.h"

#include "../math/factor.h"

namespace fp16core::detail::cuda {

/// See ScaleItem.
struct ScaleTask {
  void* values;
  std::int64_t numel;
  ElementType type;
};

/// See ZeroItem.
struct ZeroTask {
  void* values;
  // Bytes.
  std::int64_t numel;
};

/// Multiplies every span by the factor.
cudaError_t launch_scale(
    const Work<ScaleTask>& work,
    const FactorSource& factor,
    cudaStream_t stream);

/// Clears every span.
cudaError_t launch_zero(const Work<ZeroTask>& work, cudaStream_t stream);

} // namespace fp16core::detail::cuda
