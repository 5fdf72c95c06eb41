#include <fp16core/tensor_lists.h>

#include "kernels.h"
#include "parameter_text.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

namespace fp16core {

bool has_overflow(const std::vector<at::Tensor>& tensors) {
  const at::NoGradGuard no_grad;
  for (const auto& tensor : tensors) {
    if (!tensor.defined()) {
      continue;
    }
    at::Tensor values = tensor.is_sparse() ? tensor._values() : tensor;
    if (!values.is_non_overlapping_and_dense()) {
      values = values.contiguous();
    }
    const auto type = values.scalar_type();
    TORCH_CHECK_TYPE(
        type == at::kHalf || type == at::kBFloat16 || type == at::kFloat ||
            type == at::kDouble,
        "has_overflow: tensors must be float16, bfloat16, float32 or "
        "float64, but got ",
        detail::dtype_name(type));
    const auto kernels = detail::make_kernels(values.device());
    kernels->take_gradients(
        detail::GradientItem{
            values.const_data_ptr(),
            nullptr,
            values.numel(),
            type,
            type == at::kDouble ? at::kDouble : at::kFloat,
            false},
        {});
    if (kernels->read_totals().found_inf != 0.0F) {
      return true;
    }
  }
  return false;
}

} // namespace fp16core
