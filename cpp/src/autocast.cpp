#include <fp16core/autocast.h>

#include "parameter_text.h"

#include <ATen/autocast_mode.h>
#include <c10/util/Exception.h>

namespace fp16core {

namespace autocast = at::autocast;

AutocastGuard::AutocastGuard(
    c10::DeviceType device,
    std::optional<c10::ScalarType> dtype,
    bool enabled,
    bool cache_enabled)
    : device_(device) {
  TORCH_CHECK_VALUE(
      autocast::is_autocast_available(device),
      "AutocastGuard: device must be one that has autocast, but got ",
      c10::DeviceTypeName(device, /*lower_case=*/true));
  dtype_before_ = autocast::get_autocast_dtype(device);
  const auto dtype_inside = dtype.value_or(dtype_before_);
  TORCH_CHECK_VALUE(
      dtype_inside == at::kHalf || dtype_inside == at::kBFloat16,
      "AutocastGuard: dtype must be float16 or bfloat16, but got ",
      detail::dtype_name(dtype_inside));
  enabled_before_ = autocast::is_autocast_enabled(device);
  cache_enabled_before_ = autocast::is_autocast_cache_enabled();
  // The cache knows the weights but not the dtypes that they were cast to.
  if (dtype_inside != dtype_before_) {
    autocast::clear_cache();
  }
  autocast::set_autocast_enabled(device, enabled);
  autocast::set_autocast_dtype(device, dtype_inside);
  autocast::increment_nesting();
  autocast::set_autocast_cache_enabled(cache_enabled);
}

AutocastGuard::~AutocastGuard() {
  const bool outermost = autocast::decrement_nesting() == 0;
  if (outermost || autocast::get_autocast_dtype(device_) != dtype_before_) {
    autocast::clear_cache();
  }
  autocast::set_autocast_cache_enabled(cache_enabled_before_);
  autocast::set_autocast_dtype(device_, dtype_before_);
  autocast::set_autocast_enabled(device_, enabled_before_);
}

} // namespace fp16core
