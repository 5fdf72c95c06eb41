// The half of MasterWeights that deals with gradients.

#include "weight_pairs.h"

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace fp16core {

namespace {

using detail::bump_version;
using detail::Factor;
using detail::gradient_of;
using detail::is_half;
using detail::is_supported;

// What the list kernels multiply values of this type by.
double applied(const Factor& factor, c10::ScalarType type) {
  return type == at::kDouble ? factor.f64 : static_cast<double>(factor.f32);
}

// The dense tensor that holds the values of a gradient.
at::Tensor values_of(const at::Tensor& gradient) {
  return gradient.is_sparse() ? gradient._values() : gradient;
}

// Returns a gradient in a form that can be written in place: duplicate rows of
// a sparse one are summed, and elements that share memory get their own.
const at::Tensor& own_gradient(const at::Tensor& parameter) {
  auto& gradient = parameter.mutable_grad();
  if (gradient.is_sparse()) {
    if (!gradient.is_coalesced()) {
      gradient = gradient.coalesce();
    }
  } else if (
      !gradient.is_non_overlapping_and_dense() &&
      at::has_internal_overlap(gradient) == at::MemOverlap::Yes) {
    gradient = gradient.contiguous();
  }
  return gradient;
}

} // namespace

// Returns the number, read if it is out of reach for one of the gradients.
DeviceNumber MasterWeights::Impl::usable(const DeviceNumber& number) const {
  if (number.on_host()) {
    return number;
  }
  const auto device = number.memory().device();
  for (const auto& group : groups) {
    for (const auto& pair : group) {
      if (gradient_of(pair.model).defined() &&
          pair.visible().device() != device) {
        return number.read();
      }
    }
  }
  return number;
}

at::Tensor& MasterWeights::Impl::master_gradient(Pair& pair) {
  auto& gradient = pair.master.mutable_grad();
  if (!gradient.defined() || gradient.is_sparse() ||
      gradient.scalar_type() != at::kFloat ||
      gradient.device() != pair.master.device() ||
      !detail::same_dense_layout(gradient, pair.master)) {
    gradient = detail::empty_dense_like(pair.master, at::kFloat);
  }
  return gradient;
}

void MasterWeights::Impl::check_gradient(
    const Pair& pair,
    const at::Tensor& gradient,
    std::int64_t group,
    std::int64_t index) const {
  TORCH_CHECK_NOT_IMPLEMENTED(
      gradient.layout() == at::kStrided || gradient.is_sparse(),
      owner,
      ".update_master_grads: gradients must be strided or sparse COO, but got ",
      gradient.layout(),
      " for ",
      describe(pair, group, index));
  TORCH_CHECK_NOT_IMPLEMENTED(
      materialize_gradients || !pair.master.defined() || !gradient.is_sparse(),
      owner,
      ".update_master_grads: gradients must be strided with "
      "materialize_master_grads=False, but got ",
      gradient.layout(),
      " for ",
      describe(pair, group, index));
  TORCH_CHECK_TYPE(
      is_supported(gradient.scalar_type()) &&
          (pair.master.defined() ||
           gradient.scalar_type() == pair.model.scalar_type()),
      owner,
      ".update_master_grads: gradients must be floating point, and of the "
      "parameter's dtype where it has no master, but got ",
      detail::dtype_name(gradient.scalar_type()),
      " for ",
      describe(pair, group, index));
  check_shape(pair, group, index);
}

void MasterWeights::Impl::check_shape(
    const Pair& pair,
    std::int64_t group,
    std::int64_t index) const {
  TORCH_CHECK(
      !pair.master.defined() || pair.model.sizes() == pair.master.sizes(),
      owner,
      ": a parameter must keep its shape ",
      pair.master.sizes(),
      ", but got ",
      describe(pair, group, index));
}

// Duplicate rows are summed in fp32, where half sums could overflow.
at::Tensor MasterWeights::Impl::widen_sparse(
    const Pair& pair,
    const at::Tensor& gradient) const {
  return at::_sparse_coo_tensor_unsafe(
             gradient._indices(),
             gradient._values().to(
                 pair.master.device(),
                 at::kFloat,
                 /*non_blocking=*/false,
                 /*copy=*/true),
             gradient.sizes())
      .coalesce();
}

// Adds the gradient of a parameter to the lists that `run_scales` runs.
void MasterWeights::Impl::add_scale(
    const at::Tensor& parameter,
    const DeviceNumber& factor) {
  const at::NoGradGuard no_grad;
  const auto& gradient = own_gradient(parameter);
  const at::Tensor values = values_of(gradient);
  if (values.is_non_overlapping_and_dense()) {
    lists(values.device())
        .scales.push_back(
            {values.data_ptr(), values.numel(), values.scalar_type()});
  } else {
    values.copy_(factor.times(values));
  }
  bump_version(gradient);
}

// An exception may have left entries behind.
void MasterWeights::Impl::clear_scales() {
  for (auto& lists : devices) {
    lists.scales.clear();
  }
}

void MasterWeights::Impl::run_scales(const DeviceNumber& factor) {
  for (auto& lists : devices) {
    // A factor may be out of reach for a device that has nothing to do.
    if (!lists.scales.empty()) {
      lists.kernels->scale_(lists.scales, detail::source_of(factor));
    }
    lists.scales.clear();
  }
}

// Divides out of native gradients what was multiplied into them, except where
// that is just what `keep` would multiply in again. Factors rarely differ from
// one parameter to the next, and each pass takes all that have the same. A
// gradient that is new `at_update` is scaled; before a backward pass, what
// there is has been unscaled, whichever tensor it was moved to.
void MasterWeights::Impl::scale_natives_back(
    bool at_update,
    const Factor* keep) {
  scale_natives_back_on_device(at_update);
  double factor = 1.0;
  do {
    factor = 1.0;
    clear_scales();
    for_each([&](Pair& pair, std::int64_t, std::int64_t) {
      const auto& gradient = gradient_of(pair.model);
      if (!gradient.defined() ||
          (at_update && !pair.taken_gradient.same(gradient))) {
        pair.native_factor = 1.0;
      }
      if (pair.native_factor == 1.0 ||
          (keep != nullptr &&
           pair.native_factor == applied(*keep, pair.model.scalar_type()))) {
        return;
      }
      if (factor == 1.0) {
        factor = pair.native_factor;
      }
      if (pair.native_factor == factor) {
        add_scale(pair.model, 1.0 / factor);
        pair.native_factor = 1.0;
      }
    });
    run_scales(1.0 / factor);
  } while (factor != 1.0);
}

// The same for what was multiplied into them by a number of the device.
void MasterWeights::Impl::scale_natives_back_on_device(bool at_update) {
  for (const auto type : {at::kFloat, at::kDouble}) {
    const DeviceNumber back = DeviceNumber(1.0) /
        (type == at::kFloat ? native_on_device : wide_native_on_device);
    clear_scales();
    bool any = false;
    for_each([&](Pair& pair, std::int64_t, std::int64_t) {
      if (!pair.scaled_on_device || pair.model.scalar_type() != type) {
        return;
      }
      pair.scaled_on_device = false;
      const auto& gradient = gradient_of(pair.model);
      if (gradient.defined() &&
          !(at_update && !pair.taken_gradient.same(gradient))) {
        add_scale(pair.model, back);
        any = true;
      }
    });
    if (any) {
      run_scales(back);
    }
  }
  native_on_device = wide_native_on_device = 1.0;
}

// Prepares one gradient for the kernel: where it is read, where it is written.
detail::GradientItem MasterWeights::Impl::gradient_item(
    Pair& pair,
    const DeviceNumber& factor,
    detail::Staging& staging) {
  const auto& gradient = gradient_of(pair.model);
  detail::GradientItem item{};
  item.source_type = gradient.scalar_type();
  item.destination_type = at::kFloat;
  item.unscale = true;
  if (pair.native()) {
    const auto values = values_of(own_gradient(pair.model));
    const auto& dense = values.is_non_overlapping_and_dense()
        ? values
        : staging.writable(values, values.contiguous(), true);
    bool write = true;
    if (factor.on_host()) {
      const double wanted =
          applied(Factor::of(factor.value()), item.source_type);
      item.unscale = pair.native_factor != wanted;
      write = item.unscale && wanted != 1.0;
      pair.native_factor = wanted;
      natives_scaled |= wanted != 1.0;
    } else {
      pair.scaled_on_device = natives_scaled = true;
    }
    item.source = dense.const_data_ptr();
    item.destination = write ? dense.data_ptr() : nullptr;
    item.destination_type = item.source_type;
    item.numel = dense.numel();
    if (write) {
      bump_version(gradient_of(pair.model));
    }
  } else if (!materialize_gradients) {
    item.source = staging.readable(gradient, pair.master).const_data_ptr();
    item.destination = nullptr;
    item.numel = pair.master.numel();
  } else if (gradient.is_sparse()) {
    auto& target = pair.master.mutable_grad();
    target = widen_sparse(pair, gradient);
    const auto values = target._values();
    item.source_type = at::kFloat;
    item.source = item.destination = values.data_ptr();
    item.numel = values.numel();
  } else {
    const auto& target = master_gradient(pair);
    item.source = staging.readable(gradient, pair.master).const_data_ptr();
    item.destination = target.data_ptr();
    item.numel = target.numel();
    bump_version(target);
  }
  return item;
}

void MasterWeights::take_gradients(const DeviceNumber& scale) {
  const at::NoGradGuard no_grad;
  auto& impl = *impl_;
  const DeviceNumber factor = impl.usable(DeviceNumber(1.0) / scale);
  detail::Staging staging;
  impl.for_each([&](Pair& pair, std::int64_t group, std::int64_t index) {
    const auto& gradient = gradient_of(pair.model);
    if (gradient.defined()) {
      impl.check_gradient(pair, gradient, group, index);
    } else {
      impl.check_shape(pair, group, index);
    }
  });
  impl.measured = false;
  if (impl.natives_scaled) {
    const auto keep = Factor::of(factor.value());
    impl.scale_natives_back(true, factor.on_host() ? &keep : nullptr);
  }
  for (auto& lists : impl.devices) {
    lists.gradients.clear();
    lists.gradient_positions.clear();
  }
  impl.for_each([&](Pair& pair, std::int64_t group, std::int64_t index) {
    if (!gradient_of(pair.model).defined()) {
      pair.taken_gradient.forget();
      pair.has_taken = false;
      if (pair.master.defined()) {
        pair.master.mutable_grad().reset();
      }
    } else if (pair.master.defined() || pair.native()) {
      const auto item = impl.gradient_item(pair, factor, staging);
      auto& lists = impl.lists(pair.visible().device());
      lists.gradients.push_back(item);
      lists.gradient_positions.emplace_back(group, index);
      impl.see_gradients(pair);
    }
  });
  if (!factor.on_host()) {
    impl.native_on_device = factor.rounded();
    impl.wide_native_on_device = factor;
  }
  impl.factors.assign(impl.materialize_gradients ? 0 : 1, factor);
  for (auto& lists : impl.devices) {
    lists.took = !lists.gradients.empty();
    lists.kernels->take_gradients(
        lists.gradients,
        lists.took ? detail::source_of(factor) : detail::FactorSource{});
  }
  if (staging.write_back()) {
    impl.for_each([&](Pair& pair, std::int64_t, std::int64_t) {
      if (pair.native() && gradient_of(pair.model).defined()) {
        impl.see_gradients(pair); // again, since copies bump versions
      }
    });
  }
  impl.measured = true;
}

double MasterWeights::taken_norm() const {
  double sum_of_squares = 0.0;
  for (const auto& lists : impl_->devices) {
    if (lists.took) {
      sum_of_squares += lists.kernels->read_totals().sum_of_squares;
    }
  }
  return std::sqrt(sum_of_squares);
}

bool MasterWeights::overflow() const {
  return std::any_of(
      impl_->devices.begin(),
      impl_->devices.end(),
      [](const auto& lists) {
        return lists.took && lists.kernels->read_totals().found_inf != 0.0F;
      });
}

// The lists of the one device that has gradients, if it is asynchronous.
MasterWeights::Impl::DeviceLists* MasterWeights::Impl::only_lists() {
  DeviceLists* only = nullptr;
  for (auto& lists : devices) {
    if (lists.took) {
      if (only != nullptr) {
        return nullptr;
      }
      only = &lists;
    }
  }
  return only != nullptr && only->kernels->asynchronous() ? only : nullptr;
}

std::optional<c10::Device> MasterWeights::only_device() const {
  const auto* lists = impl_->only_lists();
  return lists == nullptr ? std::nullopt
                          : std::optional<c10::Device>(lists->device);
}

detail::ListKernels* MasterWeights::only_kernels() const {
  const auto* lists = impl_->only_lists();
  return lists == nullptr ? nullptr : lists->kernels.get();
}

std::vector<std::pair<std::int64_t, std::int64_t>> MasterWeights::
    taken_positions() const {
  const auto* lists = impl_->only_lists();
  return lists == nullptr ? std::vector<std::pair<std::int64_t, std::int64_t>>()
                          : lists->gradient_positions;
}

std::optional<TensorReport> MasterWeights::entry(
    std::int64_t group,
    std::int64_t index) const {
  const auto& groups = impl_->groups;
  if (group >= static_cast<std::int64_t>(groups.size()) ||
      index >= static_cast<std::int64_t>(groups[group].size())) {
    return std::nullopt;
  }
  return impl_->entry(groups[group][index], group, index);
}

at::Tensor MasterWeights::found_inf() const {
  const auto* lists = impl_->only_lists();
  TORCH_CHECK(
      lists != nullptr,
      impl_->owner,
      ".found_inf: all gradients must be on one CUDA device, but got others");
  return lists->kernels->found_inf();
}

GradientReport MasterWeights::report() const {
  impl_->note_saturations(/*wait=*/true);
  GradientReport report;
  double sum_of_squares = 0.0;
  for (const auto& lists : impl_->devices) {
    const auto& stats = lists.kernels->gradient_stats();
    for (std::size_t i = 0; i < lists.gradient_positions.size(); ++i) {
      const auto& [group, index] = lists.gradient_positions[i];
      const auto& found = stats[i];
      const auto& pair = impl_->groups[group][index];
      report.tensors.push_back(
          {group,
           index,
           pair.model,
           found.inf_count,
           found.nan_count,
           std::sqrt(found.sum_of_squares),
           found.largest,
           pair.saturated,
           impl_->name_of(group, index)});
      report.overflow |= found.inf_count + found.nan_count > 0;
      sum_of_squares += found.sum_of_squares;
      if (std::isnan(found.largest) || found.largest > report.largest) {
        report.largest = found.largest;
      }
    }
  }
  report.norm = std::sqrt(sum_of_squares);
  // By position where several devices took part.
  std::stable_sort(
      report.tensors.begin(),
      report.tensors.end(),
      [](const TensorReport& a, const TensorReport& b) {
        return std::pair(a.group, a.index) < std::pair(b.group, b.index);
      });
  return report;
}

void MasterWeights::restore_scaled_gradients(const DeviceNumber& factor) {
  auto& impl = *impl_;
  const auto ratio = impl.usable(factor);
  if (impl.natives_scaled) {
    impl.scale_natives_back(false, nullptr);
    impl.natives_scaled = false;
  }
  if (!ratio.on_host() || ratio.value() != 1.0) {
    impl.clear_scales();
    impl.for_each([&](Pair& pair, std::int64_t, std::int64_t) {
      const auto& gradient = gradient_of(pair.model);
      if (gradient.defined() && (pair.master.defined() || pair.native())) {
        impl.add_scale(pair.model, ratio);
      }
    });
    impl.run_scales(ratio);
  }
}

void MasterWeights::forget_native_factors() {
  auto& impl = *impl_;
  impl.for_each([](Pair& pair, std::int64_t, std::int64_t) {
    pair.native_factor = 1.0;
    pair.scaled_on_device = false;
  });
  impl.native_on_device = impl.wide_native_on_device = 1.0;
  impl.natives_scaled = false;
}

// The gradient of a master, made where none is kept: the model's, multiplied as
// it would have been.
at::Tensor MasterWeights::Impl::unscaled_gradient(const Pair& pair) const {
  const at::NoGradGuard no_grad;
  const auto& gradient = gradient_of(pair.model);
  const bool wide = gradient.scalar_type() == at::kDouble && !factors.empty();
  auto result = detail::empty_dense_like(pair.master, at::kFloat);
  result.copy_(wide ? factors[0].times(gradient) : gradient);
  for (std::size_t f = wide ? 1 : 0; f < factors.size(); ++f) {
    result.copy_(factors[f].rounded().times(result));
  }
  return result;
}

// Calls `use(kernels, items)` for the gradients that the inner optimizer sees,
// to be measured as they are: all of a device at once, or one after the other
// where they have to be made, so that no more than one is in memory.
template <typename Use>
void MasterWeights::Impl::measure(const Use& use) {
  detail::Staging staging;
  const auto list = [&](Pair& pair,
                        const at::Tensor& gradient) -> DeviceLists& {
    const auto values = values_of(gradient);
    const auto& dense = values.is_non_overlapping_and_dense()
        ? values
        : staging.readable(values, values.contiguous());
    auto& lists = Impl::lists(measuring, values.device());
    lists.gradients.push_back(
        {dense.const_data_ptr(),
         nullptr,
         dense.numel(),
         dense.scalar_type(),
         dense.scalar_type() == at::kDouble ? at::kDouble : at::kFloat,
         false});
    pair.measured_gradient.record(inner_gradient(pair));
    return lists;
  };
  for (auto& lists : measuring) {
    lists.gradients.clear();
  }
  for_each([&](Pair& pair, std::int64_t group, std::int64_t index) {
    const auto& gradient = inner_gradient(pair);
    if (!gradient.defined() || !is_supported(gradient.scalar_type()) ||
        !counts(group, index)) {
      return;
    }
    if (materialize_gradients) {
      list(pair, gradient);
      return;
    }
    const auto made = lean(pair) ? unscaled_gradient(pair) : gradient;
    auto& lists = list(pair, made);
    use(*lists.kernels, lists.gradients);
    lists.gradients.clear();
  });
  for (auto& lists : measuring) {
    if (!lists.gradients.empty()) {
      use(*lists.kernels, lists.gradients);
    }
  }
}

namespace {

// Sums up what passes over the gradients found.
struct Norms {
  double sum_of_squares = 0.0;
  double largest = 0.0;

  void add(const detail::GradientStats& found) {
    sum_of_squares += found.sum_of_squares;
    if (std::isnan(found.largest) || found.largest > largest) {
      largest = found.largest;
    }
  }
};

} // namespace

// Whether the last update measured the gradients as they are.
bool MasterWeights::Impl::norm_is_measured() const {
  bool fresh = measured;
  std::size_t count = 0;
  for (const auto& group : groups) {
    for (const auto& pair : group) {
      const auto& gradient = inner_gradient(pair);
      if (gradient.defined()) {
        ++count;
        fresh = fresh && pair.measured_gradient.unchanged(gradient);
      }
    }
  }
  for (const auto& lists : devices) {
    count -= lists.gradients.size();
  }
  return fresh && count == 0;
}

std::optional<MasterWeights::DeviceClip> MasterWeights::clip_on_device(
    double max_norm,
    double norm_type,
    bool check_overflow) const {
  auto* lists = impl_->only_lists();
  if (lists == nullptr || !(norm_type == 2.0 || norm_type == HUGE_VAL) ||
      !impl_->norm_is_measured()) {
    return std::nullopt;
  }
  const auto memory = at::empty(
      {static_cast<std::int64_t>(sizeof(detail::Clip))},
      at::TensorOptions(at::kByte).device(lists->device));
  lists->kernels->clip(
      check_overflow,
      norm_type == HUGE_VAL,
      max_norm,
      static_cast<detail::Clip*>(memory.data_ptr()));
  return DeviceClip{
      // Copied, so that the caller does not see what the coefficient is.
      detail::field_of(memory, offsetof(detail::Clip, norm), at::kFloat)
          .clone(),
      DeviceNumber(
          detail::field_of(
              memory,
              offsetof(detail::Clip, coefficient),
              at::kDouble))};
}

double MasterWeights::gradient_norm(double norm_type, const Combine& combine) {
  const at::NoGradGuard no_grad;
  auto& impl = *impl_;
  const auto combined = [&](double value, Reduction reduction) {
    // A maximum of NaN and numbers may be either.
    const bool hidden = reduction == Reduction::kMax && std::isnan(value);
    return combine ? combine(hidden ? HUGE_VAL : value, reduction) : value;
  };
  if (norm_type == -HUGE_VAL) {
    double smallest = HUGE_VAL;
    impl.for_each([&](Pair& pair, std::int64_t group, std::int64_t index) {
      const auto& gradient = impl.inner_gradient(pair);
      if (gradient.defined() && gradient.numel() > 0 &&
          impl.counts(group, index)) {
        const auto values = impl.lean(pair) ? impl.unscaled_gradient(pair)
                                            : values_of(gradient);
        const auto least = values.abs().min().item<double>();
        smallest = least < smallest || std::isnan(least) ? least : smallest;
      }
    });
    smallest = -combined(-smallest, Reduction::kMax);
    if (smallest < 0.0) {
      return std::nan(""); // what stood for it among the others
    }
    return std::isinf(smallest) ? 0.0 : smallest;
  }
  if (norm_type != 2.0 && norm_type != HUGE_VAL) {
    double sum = 0.0;
    impl.measure([&](detail::ListKernels& kernels, const auto& items) {
      sum += kernels.sum_of_powers(items, norm_type);
    });
    sum = combined(sum, Reduction::kSum);
    return norm_type == 0.0 ? sum : std::pow(sum, 1.0 / norm_type);
  }
  Norms norms;
  if (impl.norm_is_measured()) {
    for (const auto& lists : impl.devices) {
      const auto& stats = lists.kernels->gradient_stats();
      for (std::size_t i = 0; i < lists.gradient_positions.size(); ++i) {
        const auto& [group, index] = lists.gradient_positions[i];
        if (impl.counts(group, index)) {
          norms.add(stats[i]);
        }
      }
    }
  } else {
    impl.measured = false;
    impl.measure([&](detail::ListKernels& kernels, const auto& items) {
      kernels.take_gradients(items, {});
      for (const auto& found : kernels.gradient_stats()) {
        norms.add(found);
      }
    });
  }
  return norm_type == 2.0
      ? std::sqrt(combined(norms.sum_of_squares, Reduction::kSum))
      : combined(norms.largest, Reduction::kMax);
}

void MasterWeights::scale_gradients(const DeviceNumber& factor) {
  auto& impl = *impl_;
  // Natives are marked as having all of the device's factors, or none.
  bool marked = false;
  bool unmarked = false;
  impl.for_each([&](const Pair& pair, std::int64_t, std::int64_t) {
    if (pair.native() && gradient_of(pair.model).defined()) {
      (pair.scaled_on_device ? marked : unmarked) = true;
    }
  });
  const DeviceNumber coefficient =
      marked && unmarked ? DeviceNumber(factor.read()) : impl.usable(factor);
  const auto known = Factor::of(coefficient.value());
  impl.clear_scales();
  impl.for_each([&](Pair& pair, std::int64_t, std::int64_t) {
    const auto& gradient = impl.inner_gradient(pair);
    if (!gradient.defined() || impl.lean(pair)) {
      return;
    }
    const bool taken = pair.taken_gradient.unchanged(gradient);
    const auto& parameter = pair.visible();
    impl.add_scale(parameter, coefficient);
    if (pair.native()) {
      if (!coefficient.on_host()) {
        pair.scaled_on_device = true;
      } else {
        pair.native_factor *= applied(known, pair.model.scalar_type());
        if (pair.native_factor == 0.0 || !std::isfinite(pair.native_factor)) {
          pair.native_factor = 1.0; // zeros or NaN now, on any scale
        }
      }
      impl.natives_scaled = true;
      if (taken) {
        pair.taken_gradient.record(gradient_of(parameter));
      }
    }
  });
  impl.run_scales(coefficient);
  if (!coefficient.on_host() && (marked || unmarked)) {
    impl.native_on_device =
        (impl.native_on_device * coefficient.rounded()).or_one();
    impl.wide_native_on_device =
        (impl.wide_native_on_device * coefficient).or_one();
  }
  if (!impl.materialize_gradients) {
    impl.factors.push_back(coefficient);
  }
  impl.measured = false;
}

ParamGroups MasterWeights::master_gradients() const {
  return impl_->collect([&](const Pair& pair, std::vector<at::Tensor>& group) {
    const auto& gradient = impl_->inner_gradient(pair);
    if (!impl_->lean(pair)) {
      group.push_back(gradient);
    } else if (gradient.defined() && pair.taken_gradient.unchanged(gradient)) {
      group.push_back(impl_->unscaled_gradient(pair));
    } else {
      group.emplace_back();
    }
  });
}

void MasterWeights::zero_grad(bool set_to_none) {
  auto& impl = *impl_;
  for (auto& lists : impl.devices) {
    lists.zeros.clear();
  }
  const auto clear = [&](const at::Tensor& parameter) {
    auto& gradient = parameter.mutable_grad();
    if (!gradient.defined()) {
      return;
    }
    if (set_to_none) {
      gradient.reset();
      return;
    }
    if (gradient.requires_grad()) {
      gradient.detach_();
    }
    if (gradient.layout() == at::kStrided &&
        gradient.is_non_overlapping_and_dense() &&
        detail::has_kernels(gradient.device().type())) {
      impl.lists(gradient.device())
          .zeros.push_back(
              {gradient.data_ptr(),
               static_cast<std::int64_t>(gradient.nbytes())});
      bump_version(gradient);
    } else {
      const at::NoGradGuard no_grad;
      gradient.zero_();
    }
  };
  impl.for_each([&](Pair& pair, std::int64_t, std::int64_t) {
    const bool lean = impl.lean(pair);
    const bool kept = lean && !set_to_none && pair.has_taken &&
        pair.taken_gradient.same(gradient_of(pair.model));
    clear(pair.model);
    if (pair.master.defined()) {
      clear(pair.master);
    }
    if (kept) {
      pair.taken_gradient.record(gradient_of(pair.model));
      pair.taken_is_zero = true;
    } else if (lean) {
      pair.has_taken = false;
    }
    pair.native_factor = 1.0;
    pair.scaled_on_device = false;
  });
  impl.native_on_device = impl.wide_native_on_device = 1.0;
  for (auto& lists : impl.devices) {
    lists.kernels->zero_(lists.zeros);
    lists.zeros.clear();
  }
  impl.natives_scaled = false;
  impl.measured = false;
  impl.factors.clear();
}

// Whether the gradient that was taken is zeros: as `take_gradients` found them,
// or as `zero_grad` has left them since.
bool MasterWeights::Impl::took_zeros(
    const Pair& pair,
    std::int64_t group,
    std::int64_t index) const {
  if (pair.taken_is_zero) {
    return true;
  }
  for (const auto& lists : devices) {
    const auto& positions = lists.gradient_positions;
    const auto found =
        std::find(positions.begin(), positions.end(), std::pair(group, index));
    if (found != positions.end()) {
      return lists.kernels->gradient_stats()[found - positions.begin()]
                 .largest == 0.0;
    }
  }
  return false;
}

std::optional<TensorReport> MasterWeights::lost_gradient() const {
  const at::NoGradGuard no_grad;
  std::optional<TensorReport> lost;
  if (impl_->materialize_gradients) {
    return lost;
  }
  impl_->for_each([&](Pair& pair, std::int64_t group, std::int64_t index) {
    const auto& gradient = gradient_of(pair.model);
    if (!lost && impl_->lean(pair) && pair.has_taken &&
        !(gradient.defined() &&
          (pair.taken_gradient.unchanged(gradient) ||
           // Zeros that became zeros are lost by nobody.
           (impl_->took_zeros(pair, group, index) &&
            !gradient.ne(0).any().item<bool>())))) {
      lost = impl_->entry(pair, group, index);
    }
  });
  return lost;
}

std::optional<TensorReport> MasterWeights::waiting_gradient(bool native) const {
  std::optional<TensorReport> waiting;
  impl_->for_each([&](Pair& pair, std::int64_t group, std::int64_t index) {
    const auto& gradient = gradient_of(pair.model);
    if (waiting || !gradient.defined() ||
        pair.taken_gradient.unchanged(gradient) ||
        !(pair.master.defined() || is_half(pair.model.scalar_type()) ||
          (native && pair.native()))) {
      return;
    }
    const at::NoGradGuard no_grad;
    if (values_of(gradient).ne(0).any().item<bool>()) {
      waiting = impl_->entry(pair, group, index);
    }
  });
  return waiting;
}

} // namespace fp16core
