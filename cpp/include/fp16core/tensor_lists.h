// Functions on lists of tensors, for training loops that are written by hand.
//
// Each is one call of a list kernel for a device's tensors: no loop over
// tensors on the way, one pass over memory. float16, bfloat16, float32 and
// float64, in any strides and mixed. Undefined tensors, such as the gradients
// of parameters without one, are passed over. What returns a bool or a norm
// waits for a CUDA device.
//
// What is changed in place is changed once, however often it is listed. Apart
// from that, tensors of a call that are written must not share memory with
// others of it.

#pragma once

#include <fp16core/api.h>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <vector>

namespace fp16core {

/// Returns the gradients of `parameters`, undefined where there is none.
FP16CORE_API std::vector<at::Tensor> gradients_of(
    const std::vector<at::Tensor>& parameters);

/// Returns whether any element of `tensors` is infinite or NaN. Sparse COO
/// tensors are judged by their values. Copies no dense tensor. Throws TypeError
/// for another dtype or layout.
FP16CORE_API bool has_overflow(const std::vector<at::Tensor>& tensors);

/// Divides `gradients` by `scale` in place, and returns whether any element of
/// them is infinite or NaN, before or after; they are unscaled all the same.
///
/// Multiplies by the float32 rounding of the float64 reciprocal, float64
/// tensors by the reciprocal itself. A half gradient takes two passes, and
/// rounds: small values are lost. Half parameters are for FP16Optimizer.
/// Throws TypeError for another dtype, a sparse tensor or one that overlaps
/// itself, and std::invalid_argument unless `scale` is finite and at least
/// 2^-126, before anything is changed.
FP16CORE_API bool unscale_(
    const std::vector<at::Tensor>& gradients,
    double scale);

/// Multiplies `gradients` in place by max_norm / (norm + 1e-6) where that is
/// below 1, and returns their p-norm over all elements before, a float32 tensor
/// without dimensions; p is `norm_type`, and may be infinite.
///
/// The coefficient is that of torch.nn.utils.clip_grad_norm_, in double. Where
/// the norm is not finite nothing is changed, so that the caller can skip the
/// step. The norm is on the device of the first gradient. Throws ValueError for
/// a negative or NaN `max_norm` and a NaN `norm_type`, and TypeError like
/// `unscale_`.
FP16CORE_API at::Tensor clip_grad_norm_(
    const std::vector<at::Tensor>& gradients,
    double max_norm,
    double norm_type = 2.0);

/// Returns copies of `tensors` as `dtype`, of equal strides where those are
/// dense, and without a graph. Half to float32 is exact; float32 to half rounds
/// to nearest even. Throws TypeError for another dtype and a sparse tensor.
FP16CORE_API std::vector<at::Tensor> cast(
    const std::vector<at::Tensor>& tensors,
    c10::ScalarType dtype);

/// Writes `sources` to `targets`, each in its target's dtype. Elements pair by
/// index, whatever the strides, and pairs of undefined tensors are passed over.
/// Throws ValueError if the lists or a pair of shapes differ, TypeError for
/// another dtype, a sparse tensor or a target that overlaps itself, and
/// RuntimeError for a pair that overlaps in part, before anything is changed.
FP16CORE_API void copy_(
    const std::vector<at::Tensor>& targets,
    const std::vector<at::Tensor>& sources);

/// Writes `factor` times `sources` to `targets`, each in its target's dtype,
/// and returns whether any element of the sources is infinite or NaN;
/// everything is written all the same.
///
/// The product is made in float32 with the float32 rounding of `factor` (in
/// float64 where the source is) and rounded to the target's dtype. A half
/// target takes two passes. A target may be its own source. Throws like
/// `copy_`, and std::invalid_argument for a factor that is NaN, before anything
/// is changed.
FP16CORE_API bool scaled_copy_(
    const std::vector<at::Tensor>& targets,
    const std::vector<at::Tensor>& sources,
    double factor);

/// Writes a * x + b * y to `targets`, computed in float32 (in float64 where x
/// or y is) and rounded to the target's dtype, one tensor after the other.
/// Throws like `copy_`.
FP16CORE_API void axpby_(
    const std::vector<at::Tensor>& targets,
    double a,
    const std::vector<at::Tensor>& x,
    double b,
    const std::vector<at::Tensor>& y);

/// 2-norms of tensors, in float32 on the device of the first.
struct TensorNorms {
  /// Over all elements of all tensors; of shape [1].
  at::Tensor total;
  /// Of each tensor, 0 for an undefined one; of shape [n].
  at::Tensor per_tensor;
};

/// Returns the 2-norms of `factor` times `tensors`, which are left as they are.
/// Summed in double where float32 would not do: a norm is infinite only where
/// an element is, or where it exceeds float32. Throws TypeError for another
/// dtype and a sparse tensor.
FP16CORE_API TensorNorms
norms(const std::vector<at::Tensor>& tensors, double factor = 1.0);

} // namespace fp16core
