// The CUDA kernels between masters and model.

#pragma once

#include "element_type.h"
#include "work.h"

namespace fp16core::detail::cuda {

/// See MasterItem.
struct MasterTask {
  float* master;
  void* model;
  std::int64_t numel;
  ElementType model_type;
};

/// Writes the masters to the model, rounded to nearest even. `saturated` has a
/// byte for each chunk: whether a finite master in it was stored as inf.
cudaError_t launch_write_model(
    const Work<MasterTask>& work,
    std::uint8_t* saturated,
    cudaStream_t stream);

/// Lets the masters take the model's values where they differ once rounded.
cudaError_t launch_adopt_model(
    const Work<MasterTask>& work,
    cudaStream_t stream);

} // namespace fp16core::detail::cuda
