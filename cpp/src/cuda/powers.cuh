// The CUDA kernel for norms other than the 2-norm and the inf-norm.

#pragma once

#include "gradients.cuh"

namespace fp16core::detail::cuda {

/// Sums up |x|^power over all sources, for each chunk in `sums`. At power 0,
/// counts what is not zero.
cudaError_t launch_sum_of_powers(
    const Work<GradientTask>& work,
    double power,
    double* sums,
    cudaStream_t stream);

} // namespace fp16core::detail::cuda
