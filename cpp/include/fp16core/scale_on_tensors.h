// The state machine of the loss scale on tensors of one element, for programs
// that keep their scale in tensors.

#pragma once

#include <fp16core/api.h>

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace fp16core {

/// Advances a scale by one iteration, in place, by the rule of apex'
/// `update_scale_hysteresis` kernel (the policy "apex_hysteresis_kernel" of
/// scale_policies.h), and returns `current_scale`.
///
/// `current_scale` and `found_inf` are float32, `growth_tracker` (clean
/// iterations since the last overflow or growth) and `hysteresis_tracker`
/// (overflows until the next backoff) int32, each of one element; `found_inf`
/// greater than 0 is an overflow. `hysteresis` is what a clean iteration
/// refills. Waits for the device of CUDA tensors. Throws TypeError and
/// ValueError for tensors of another kind, std::invalid_argument for factors
/// without sense, before anything is changed.
FP16CORE_API at::Tensor update_scale_hysteresis(
    const at::Tensor& current_scale,
    const at::Tensor& growth_tracker,
    const at::Tensor& hysteresis_tracker,
    const at::Tensor& found_inf,
    double growth_factor,
    double backoff_factor,
    std::int64_t growth_interval,
    std::int64_t hysteresis);

} // namespace fp16core
