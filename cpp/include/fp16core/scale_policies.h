// The loss scale rules of other projects, by name.

#pragma once

#include <fp16core/api.h>
#include <fp16core/loss_scaler.h>

#include <map>
#include <optional>
#include <string>
#include <vector>

namespace fp16core {

/// Parameters of a policy under the names that its project gives them. Nothing
/// stands for Python's None, and booleans are 0 or 1.
using ScalePolicyParameters = std::map<std::string, std::optional<double>>;

/// Returns the rule by which another project moves its scale:
///
///     DynamicLossScaler scaler(scale_policy("deepspeed", {{"min_scale", 4}}));
///
/// | name | project | what is special |
/// |---|---|---|
/// | apex | apex.fp16_utils | the floor is 1 |
/// | megatron_v1 | Megatron-LM's fp16 | floor, hysteresis |
/// | apex_amp | apex.amp | factor 2, ceiling 2^24 |
/// | apex_hysteresis_kernel | apex' update_scale_hysteresis | hysteresis that
///   any clean iteration refills |
/// | megatron_core | Megatron-Core | two factors, hysteresis |
/// | deepspeed | DeepSpeed's scaler | the window is one late, error at the
///   floor |
/// | deepspeed_fp16_optimizer | DeepSpeed's FP16_Optimizer | the window is one
///   late |
/// | torch | torch.amp.GradScaler | two factors |
/// | colossalai | ColossalAI | two factors, hysteresis, floor, ceiling |
/// | fairseq | fairseq | tolerates a share of overflows, error at the minimum |
/// | keras | keras' LossScaleOptimizer | factor 2 |
/// | jmp | jmp's DynamicLossScale | |
///
/// Parameters that are not given have the project's defaults, or, where it has
/// none, those of its command line or configuration. The scales are the
/// project's, bit for bit, save where it would lose the scale for good: where
/// there is no floor, this one stops at 2^-126, and a growth that is not finite
/// is left out.
///
/// Throws std::invalid_argument, naming what it got, for an unknown policy or
/// parameter and for None where the project has no use for it.
FP16CORE_API DynamicLossScalerOptions scale_policy(
    const std::string& name,
    const ScalePolicyParameters& parameters = {});

/// Returns the names of all policies.
FP16CORE_API std::vector<std::string> scale_policy_names();

/// Returns the names of the parameters of a policy. Throws like `scale_policy`.
FP16CORE_API std::vector<std::string> scale_policy_parameters(
    const std::string& name);

} // namespace fp16core
