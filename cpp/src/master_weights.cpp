#include <fp16core/master_weights.h>

#include "kernels.h"
#include "layout.h"
#include "parameter_text.h"
#include "seen_tensor.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <unordered_map>
#include <unordered_set>

namespace fp16core {

namespace {

using detail::bump_version;
using detail::describe_parameter;
using detail::Factor;
using detail::gradient_of;
using detail::SeenTensor;
using detail::version_of;

bool is_half(c10::ScalarType type) {
  return type == at::kHalf || type == at::kBFloat16;
}

bool is_supported(c10::ScalarType type) {
  return is_half(type) || type == at::kFloat || type == at::kDouble;
}

// What the list kernels multiply values of this type by.
double applied(const Factor& factor, c10::ScalarType type) {
  return type == at::kDouble ? factor.f64 : static_cast<double>(factor.f32);
}

// The dense tensor that holds the values of a gradient.
at::Tensor values_of(const at::Tensor& gradient) {
  return gradient.is_sparse() ? gradient._values() : gradient;
}

} // namespace

at::Tensor widen_state(const at::Tensor& state, const at::Tensor& master) {
  return is_half(state.scalar_type())
      ? state.detach().to(master.device(), at::kFloat)
      : state;
}

namespace {

at::Tensor make_master(const at::Tensor& model) {
  // One conversion without an intermediate: nothing but the master is
  // allocated.
  const at::NoGradGuard no_grad;
  auto master = detail::empty_dense_like(model, at::kFloat);
  master.copy_(model);
  master.set_requires_grad(true);
  return master;
}

} // namespace

struct MasterWeights::Pair {
  at::Tensor model;
  // Undefined for native and frozen parameters.
  at::Tensor master;

  // The weights of the model as the core saw or wrote them last.
  const void* model_data = nullptr;
  std::uint32_t model_version = 0;
  c10::ScalarType model_type = c10::ScalarType::Undefined;
  c10::Device model_device = c10::kCPU;

  // The model's gradient as the last update left it.
  SeenTensor taken_gradient;
  // The gradient that the inner optimizer sees, as it was measured.
  SeenTensor measured_gradient;
  // What the values in a native gradient have been multiplied by since the
  // last backward pass.
  double native_factor = 1.0;

  bool saturation_reported = false;

  // The tensor that the inner optimizer holds.
  const at::Tensor& visible() const {
    return master.defined() ? master : model;
  }

  bool native() const {
    return !master.defined() &&
        (model.scalar_type() == at::kFloat || model.scalar_type() == at::kDouble);
  }

  // A half parameter without a master that has a gradient all the same: it was
  // frozen, or not half, when it was ingested.
  bool late_half() const {
    return !master.defined() && is_half(model.scalar_type()) &&
        gradient_of(model).defined();
  }

  bool model_written_by_others() const {
    return model.const_data_ptr() != model_data ||
        version_of(model) != model_version ||
        model.scalar_type() != model_type || model.device() != model_device;
  }

  void see_model() {
    model_data = model.const_data_ptr();
    model_version = version_of(model);
    model_type = model.scalar_type();
    model_device = model.device();
  }
};

struct MasterWeights::Impl {
  // The lists of one device, kept between calls for their memory.
  struct DeviceLists {
    explicit DeviceLists(c10::Device where)
        : device(where), kernels(detail::make_kernels(where)) {}

    c10::Device device;
    std::unique_ptr<detail::ListKernels> kernels;
    std::vector<detail::GradientItem> gradients;
    // The position of the parameter of each gradient.
    std::vector<std::pair<std::int64_t, std::int64_t>> gradient_positions;
    std::vector<detail::ScaleItem> scales;
    std::vector<detail::ZeroItem> zeros;
    std::vector<detail::MasterItem> masters;
    std::vector<std::pair<std::int64_t, std::int64_t>> master_positions;
  };

  std::string owner;
  ModelWrites model_writes;
  std::vector<std::vector<Pair>> groups;
  std::vector<DeviceLists> devices;
  detail::Staging staging;
  // The measurements of the last update still hold for the gradients, apart
  // from changes by others.
  bool measured = false;
  bool natives_scaled = false;
  std::vector<TensorReport> new_saturations;
  std::vector<std::vector<at::Tensor>> snapshot;

  DeviceLists& lists(c10::Device device) {
    for (auto& lists : devices) {
      if (lists.device == device) {
        return lists;
      }
    }
    return devices.emplace_back(device);
  }

  template <typename Body>
  void for_each(const Body& body) {
    for (std::size_t g = 0; g < groups.size(); ++g) {
      for (std::size_t i = 0; i < groups[g].size(); ++i) {
        body(groups[g][i], static_cast<std::int64_t>(g),
             static_cast<std::int64_t>(i));
      }
    }
  }

  template <typename Choose>
  ParamGroups collect(const Choose& choose) const {
    ParamGroups result(groups.size());
    for (std::size_t g = 0; g < groups.size(); ++g) {
      for (const auto& pair : groups[g]) {
        choose(pair, result[g]);
      }
    }
    return result;
  }

  void check_one(
      const at::Tensor& parameter,
      std::int64_t group,
      std::int64_t index) const;
  Adoption adopt(Pair& pair, std::int64_t group, std::int64_t index);
  at::Tensor& master_gradient(Pair& pair);
  void check_gradient(
      const Pair& pair,
      const at::Tensor& gradient,
      std::int64_t group,
      std::int64_t index) const;
  at::Tensor widen_sparse(const Pair& pair, const at::Tensor& gradient) const;
  void add_scale(const at::Tensor& gradient, double factor);
  void run_scales(double factor);
  void scale_natives_back(const Factor* keep);
  void measure();
  template <typename Add>
  void fill_masters(const Add& add);
  detail::MasterItem master_item(
      const Pair& pair,
      const at::Tensor& model) const;
  void check_shape(const Pair& pair, std::int64_t group, std::int64_t index)
      const;
};

MasterWeights::MasterWeights(std::string owner, ModelWrites model_writes)
    : impl_(std::make_unique<Impl>()) {
  impl_->owner = std::move(owner);
  impl_->model_writes = model_writes;
}

MasterWeights::~MasterWeights() = default;

// ---- ingestion ----

void MasterWeights::Impl::check_one(
    const at::Tensor& parameter,
    std::int64_t group,
    std::int64_t index) const {
  // Frozen parameters of any kind are passed by.
  if (!parameter.requires_grad() && !gradient_of(parameter).defined()) {
    return;
  }
  const auto* impl = parameter.unsafeGetTensorImpl();
  TORCH_CHECK_TYPE(
      is_supported(parameter.scalar_type()) &&
          parameter.layout() == at::kStrided && !impl->is_python_dispatch() &&
          !parameter.is_meta() && !parameter.is_quantized(),
      owner,
      ": parameters must be plain strided tensors of float16, bfloat16, "
      "float32 or float64, but got ",
      describe_parameter(group, index, parameter),
      parameter.layout() == at::kStrided ? "" : ", not strided",
      impl->is_python_dispatch() ? ", a subclass with its own dispatch" : "");
  TORCH_CHECK_NOT_IMPLEMENTED(
      detail::has_kernels(parameter.device().type()),
      owner,
      ": parameters must be on a device that this build of fp16core has "
      "kernels for (the CPU), but got ",
      describe_parameter(group, index, parameter));
}

void MasterWeights::check(const ParamGroups& groups, std::int64_t first_group)
    const {
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& pairs : impl_->groups) {
    for (const auto& pair : pairs) {
      seen.insert(pair.model.unsafeGetTensorImpl());
    }
  }
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const auto group = first_group + static_cast<std::int64_t>(g);
    for (std::size_t i = 0; i < groups[g].size(); ++i) {
      const auto& parameter = groups[g][i];
      const auto index = static_cast<std::int64_t>(i);
      impl_->check_one(parameter, group, index);
      TORCH_CHECK_VALUE(
          seen.insert(parameter.unsafeGetTensorImpl()).second,
          impl_->owner,
          ": a parameter must stand in the groups once, but got it again as ",
          describe_parameter(group, index, parameter));
    }
  }
}

Adoption MasterWeights::Impl::adopt(
    Pair& pair,
    std::int64_t group,
    std::int64_t index) {
  pair.master = make_master(pair.model);
  pair.see_model();
  return {group, index, pair.model, pair.master};
}

std::vector<Adoption> MasterWeights::ingest(const ParamGroups& groups) {
  auto& known = impl_->groups;
  impl_->for_each([&](const Pair& pair, std::int64_t group, std::int64_t index) {
    if (pair.late_half()) {
      impl_->check_one(pair.model, group, index);
    }
  });
  bool changed = groups.size() != known.size();
  for (std::size_t g = 0; !changed && g < groups.size(); ++g) {
    changed = groups[g].size() != known[g].size();
    for (std::size_t i = 0; !changed && i < groups[g].size(); ++i) {
      changed = !groups[g][i].is_same(known[g][i].visible());
    }
  }
  std::vector<Adoption> adoptions;
  if (changed) {
    // What is new is checked, and all masters are made, before the first pair
    // changes.
    std::unordered_map<const c10::TensorImpl*, Pair*> by_visible;
    std::unordered_set<const c10::TensorImpl*> models;
    impl_->for_each([&](Pair& pair, std::int64_t, std::int64_t) {
      by_visible.emplace(pair.visible().unsafeGetTensorImpl(), &pair);
    });
    std::vector<std::vector<Pair>> fresh(groups.size());
    for (std::size_t g = 0; g < groups.size(); ++g) {
      fresh[g].reserve(groups[g].size());
      for (std::size_t i = 0; i < groups[g].size(); ++i) {
        const auto& parameter = groups[g][i];
        const auto group = static_cast<std::int64_t>(g);
        const auto index = static_cast<std::int64_t>(i);
        const auto found = by_visible.find(parameter.unsafeGetTensorImpl());
        Pair pair;
        if (found != by_visible.end()) {
          pair = *found->second;
        } else {
          impl_->check_one(parameter, group, index);
          pair.model = parameter;
          pair.see_model();
          if (is_half(parameter.scalar_type()) && parameter.requires_grad()) {
            adoptions.push_back(impl_->adopt(pair, group, index));
          }
        }
        TORCH_CHECK_VALUE(
            models.insert(pair.model.unsafeGetTensorImpl()).second,
            impl_->owner,
            ": a parameter must stand in the groups once, but got it again as ",
            describe_parameter(group, index, parameter));
        fresh[g].push_back(std::move(pair));
      }
    }
    known = std::move(fresh);
  }
  impl_->for_each([&](Pair& pair, std::int64_t group, std::int64_t index) {
    if (pair.late_half()) {
      adoptions.push_back(impl_->adopt(pair, group, index));
    }
  });
  return adoptions;
}

ParamGroups MasterWeights::model_params() const {
  return impl_->collect([](const Pair& pair, std::vector<at::Tensor>& group) {
    if (pair.master.defined()) {
      group.push_back(pair.model);
    }
  });
}

ParamGroups MasterWeights::master_params() const {
  return impl_->collect([](const Pair& pair, std::vector<at::Tensor>& group) {
    if (pair.master.defined()) {
      group.push_back(pair.master);
    }
  });
}

ParamGroups MasterWeights::native_params() const {
  return impl_->collect([](const Pair& pair, std::vector<at::Tensor>& group) {
    if (pair.native() && pair.model.requires_grad()) {
      group.push_back(pair.model);
    }
  });
}

std::vector<std::vector<std::int64_t>> MasterWeights::master_positions()
    const {
  std::vector<std::vector<std::int64_t>> positions(impl_->groups.size());
  impl_->for_each([&](const Pair& pair, std::int64_t group, std::int64_t index) {
    if (pair.master.defined()) {
      positions[group].push_back(index);
    }
  });
  return positions;
}

std::vector<Adoption> MasterWeights::adopt_at(
    const std::vector<std::vector<std::int64_t>>& positions) {
  auto& groups = impl_->groups;
  TORCH_CHECK_VALUE(
      positions.size() == groups.size(),
      impl_->owner,
      ".load_state_dict: there must be ",
      groups.size(),
      " groups of masters, but got ",
      positions.size());
  for (std::size_t g = 0; g < positions.size(); ++g) {
    for (const auto index : positions[g]) {
      TORCH_CHECK_VALUE(
          index >= 0 && index < static_cast<std::int64_t>(groups[g].size()) &&
              (groups[g][index].master.defined() ||
               is_half(groups[g][index].model.scalar_type())),
          impl_->owner,
          ".load_state_dict: masters must belong to half parameters, but got "
          "one for group ",
          g,
          ", index ",
          index);
    }
  }
  std::vector<Adoption> adoptions;
  for (std::size_t g = 0; g < positions.size(); ++g) {
    for (const auto index : positions[g]) {
      auto& pair = groups[g][index];
      if (!pair.master.defined()) {
        adoptions.push_back(
            impl_->adopt(pair, static_cast<std::int64_t>(g), index));
      }
    }
  }
  return adoptions;
}

// ---- gradients ----

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
      describe_parameter(group, index, pair.model));
  TORCH_CHECK_TYPE(
      is_supported(gradient.scalar_type()) &&
          (pair.master.defined() ||
           gradient.scalar_type() == pair.model.scalar_type()),
      owner,
      ".update_master_grads: gradients must be floating point, and of the "
      "parameter's dtype where it has no master, but got ",
      detail::dtype_name(gradient.scalar_type()),
      " for ",
      describe_parameter(group, index, pair.model));
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
      describe_parameter(group, index, pair.model));
}

// Duplicate rows are summed in fp32, where half sums could overflow.
at::Tensor MasterWeights::Impl::widen_sparse(
    const Pair& pair,
    const at::Tensor& gradient) const {
  return at::_sparse_coo_tensor_unsafe(
             gradient._indices(),
             gradient._values().to(
                 pair.master.device(), at::kFloat, /*non_blocking=*/false,
                 /*copy=*/true),
             gradient.sizes())
      .coalesce();
}

void MasterWeights::Impl::add_scale(const at::Tensor& gradient, double factor) {
  const at::Tensor values = values_of(gradient);
  if (values.is_non_overlapping_and_dense()) {
    lists(values.device())
        .scales.push_back(
            {values.data_ptr(), values.numel(), values.scalar_type()});
  } else {
    const at::NoGradGuard no_grad;
    values.mul_(factor);
  }
  bump_version(gradient);
}

void MasterWeights::Impl::run_scales(double value) {
  const auto factor = Factor::of(value);
  for (auto& lists : devices) {
    lists.kernels->scale_(lists.scales, &factor);
    lists.scales.clear();
  }
}

// Divides out of native gradients what was multiplied into them, except where
// that is just what `keep` would multiply in again. Factors rarely differ from
// one parameter to the next, and each pass takes all that have the same.
void MasterWeights::Impl::scale_natives_back(const Factor* keep) {
  double factor = 1.0;
  do {
    factor = 1.0;
    for_each([&](Pair& pair, std::int64_t, std::int64_t) {
      const auto& gradient = gradient_of(pair.model);
      if (!gradient.defined() || !pair.taken_gradient.same(gradient)) {
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
        add_scale(gradient, 1.0 / factor);
        pair.native_factor = 1.0;
      }
    });
    run_scales(1.0 / factor);
  } while (factor != 1.0);
}

void MasterWeights::take_gradients(double scale) {
  const at::NoGradGuard no_grad;
  auto& impl = *impl_;
  const auto factor = Factor::of(1.0 / scale);
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
    impl.scale_natives_back(&factor);
  }
  for (auto& lists : impl.devices) {
    lists.gradients.clear();
    lists.gradient_positions.clear();
  }
  impl.for_each([&](Pair& pair, std::int64_t group, std::int64_t index) {
    const auto& gradient = gradient_of(pair.model);
    if (!gradient.defined()) {
      pair.taken_gradient.forget();
      if (pair.master.defined()) {
        pair.master.mutable_grad().reset();
      }
      return;
    }
    detail::GradientItem item{};
    item.source_type = gradient.scalar_type();
    item.unscale = true;
    c10::Device device = pair.visible().device();
    if (pair.master.defined() && gradient.is_sparse()) {
      auto& target = pair.master.mutable_grad();
      target = impl.widen_sparse(pair, gradient);
      const auto values = target._values();
      item.source_type = at::kFloat;
      item.source = item.destination = values.data_ptr();
      item.numel = values.numel();
    } else if (pair.master.defined()) {
      const auto& target = impl.master_gradient(pair);
      item.source =
          impl.staging.readable(gradient, pair.master).const_data_ptr();
      item.destination = target.data_ptr();
      item.numel = target.numel();
      bump_version(target);
    } else if (pair.native()) {
      if (gradient.is_sparse() && !gradient.is_coalesced()) {
        pair.model.mutable_grad() = gradient.coalesce();
      }
      const auto values = values_of(gradient_of(pair.model));
      const double wanted = applied(factor, pair.model.scalar_type());
      item.unscale = pair.native_factor != wanted;
      const bool write = item.unscale && wanted != 1.0;
      const auto& dense = values.is_non_overlapping_and_dense()
          ? values
          : impl.staging.writable(values, values.contiguous(), true);
      item.source = dense.const_data_ptr();
      item.destination = write ? dense.data_ptr() : nullptr;
      item.numel = dense.numel();
      if (write) {
        bump_version(gradient_of(pair.model));
      }
      pair.native_factor = wanted;
      impl.natives_scaled |= wanted != 1.0;
    } else {
      return; // frozen, of a kind that is none of our business
    }
    item.destination_type =
        item.source_type == at::kDouble && !pair.master.defined() ? at::kDouble
                                                                  : at::kFloat;
    auto& lists = impl.lists(device);
    lists.gradients.push_back(item);
    lists.gradient_positions.emplace_back(group, index);
  });
  for (auto& lists : impl.devices) {
    lists.kernels->take_gradients(lists.gradients, &factor);
  }
  impl.staging.write_back();
  impl.staging.clear();
  for (auto& lists : impl.devices) {
    for (const auto& [group, index] : lists.gradient_positions) {
      auto& pair = impl.groups[group][index];
      pair.taken_gradient.record(gradient_of(pair.model));
      pair.measured_gradient.record(gradient_of(pair.visible()));
    }
  }
  impl.measured = true;
}

bool MasterWeights::overflow() const {
  return std::any_of(
      impl_->devices.begin(), impl_->devices.end(), [](const auto& lists) {
        const auto& stats = lists.kernels->gradient_stats();
        return std::any_of(stats.begin(), stats.end(), [](const auto& found) {
          return found.inf_count + found.nan_count > 0;
        });
      });
}

GradientReport MasterWeights::report() const {
  GradientReport report;
  double sum_of_squares = 0.0;
  for (const auto& lists : impl_->devices) {
    const auto& stats = lists.kernels->gradient_stats();
    for (std::size_t i = 0; i < lists.gradient_positions.size(); ++i) {
      const auto& [group, index] = lists.gradient_positions[i];
      const auto& found = stats[i];
      report.tensors.push_back(
          {group,
           index,
           impl_->groups[group][index].model,
           found.inf_count,
           found.nan_count,
           std::sqrt(found.sum_of_squares),
           found.largest});
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

void MasterWeights::restore_scaled_gradients(double ratio) {
  auto& impl = *impl_;
  if (impl.natives_scaled) {
    impl.scale_natives_back(nullptr);
    impl.natives_scaled = false;
  }
  if (ratio != 1.0) {
    impl.for_each([&](Pair& pair, std::int64_t, std::int64_t) {
      const auto& gradient = gradient_of(pair.model);
      if (gradient.defined() && (pair.master.defined() || pair.native())) {
        impl.add_scale(gradient, ratio);
      }
    });
    impl.run_scales(ratio);
  }
}

// Measures the gradients that the inner optimizer sees, as they are.
void MasterWeights::Impl::measure() {
  const at::NoGradGuard no_grad;
  for (auto& lists : devices) {
    lists.gradients.clear();
    lists.gradient_positions.clear();
  }
  for_each([&](Pair& pair, std::int64_t group, std::int64_t index) {
    const auto& gradient = gradient_of(pair.visible());
    if (!gradient.defined() || !is_supported(gradient.scalar_type())) {
      return;
    }
    const auto values = values_of(gradient);
    const auto& dense = values.is_non_overlapping_and_dense()
        ? values
        : staging.readable(values, values.contiguous());
    auto& device_lists = lists(values.device());
    device_lists.gradients.push_back(
        {dense.const_data_ptr(),
         nullptr,
         dense.numel(),
         dense.scalar_type(),
         dense.scalar_type() == at::kDouble ? at::kDouble : at::kFloat,
         false});
    device_lists.gradient_positions.emplace_back(group, index);
    pair.measured_gradient.record(gradient);
  });
  const Factor one;
  for (auto& lists : devices) {
    lists.kernels->take_gradients(lists.gradients, &one);
  }
  staging.clear();
  measured = true;
}

double MasterWeights::gradient_norm(double norm_type) {
  auto& impl = *impl_;
  if (norm_type != 2.0 && norm_type != HUGE_VAL) {
    const at::NoGradGuard no_grad;
    std::vector<at::Tensor> norms;
    impl.for_each([&](Pair& pair, std::int64_t, std::int64_t) {
      const auto& gradient = gradient_of(pair.visible());
      if (gradient.defined()) {
        norms.push_back(at::linalg_vector_norm(
            values_of(gradient), norm_type, {}, false, at::kDouble));
      }
    });
    return norms.empty() ? 0.0
                         : at::linalg_vector_norm(at::stack(norms), norm_type)
                               .item<double>();
  }
  bool stale = !impl.measured;
  std::int64_t count = 0;
  impl.for_each([&](Pair& pair, std::int64_t, std::int64_t) {
    const auto& gradient = gradient_of(pair.visible());
    if (gradient.defined()) {
      ++count;
      stale |= !pair.measured_gradient.unchanged(gradient);
    }
  });
  std::int64_t measured_count = 0;
  for (const auto& lists : impl.devices) {
    measured_count += static_cast<std::int64_t>(lists.gradients.size());
  }
  if (stale || count != measured_count) {
    impl.measure();
  }
  double sum_of_squares = 0.0;
  double largest = 0.0;
  for (auto& lists : impl.devices) {
    for (const auto& found : lists.kernels->gradient_stats()) {
      sum_of_squares += found.sum_of_squares;
      if (std::isnan(found.largest) || found.largest > largest) {
        largest = found.largest;
      }
    }
  }
  return norm_type == 2.0 ? std::sqrt(sum_of_squares) : largest;
}

void MasterWeights::scale_gradients(double coefficient) {
  auto& impl = *impl_;
  const auto factor = Factor::of(coefficient);
  impl.for_each([&](Pair& pair, std::int64_t, std::int64_t) {
    const auto& gradient = gradient_of(pair.visible());
    if (!gradient.defined()) {
      return;
    }
    const bool taken = pair.taken_gradient.unchanged(gradient);
    impl.add_scale(gradient, coefficient);
    if (pair.native()) {
      pair.native_factor *= applied(factor, gradient.scalar_type());
      impl.natives_scaled = true;
    }
    if (taken) {
      pair.taken_gradient.record(gradient);
    }
  });
  impl.run_scales(coefficient);
  impl.measured = false;
}

ParamGroups MasterWeights::master_gradients() const {
  return impl_->collect([](const Pair& pair, std::vector<at::Tensor>& group) {
    group.push_back(gradient_of(pair.visible()));
  });
}

void MasterWeights::zero_grad(bool set_to_none) {
  auto& impl = *impl_;
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
    clear(pair.model);
    if (pair.master.defined()) {
      clear(pair.master);
    }
    pair.native_factor = 1.0;
  });
  for (auto& lists : impl.devices) {
    lists.kernels->zero_(lists.zeros);
    lists.zeros.clear();
  }
  impl.natives_scaled = false;
  impl.measured = false;
}

std::optional<TensorReport> MasterWeights::waiting_gradient(
    bool native) const {
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
      waiting = TensorReport{group, index, pair.model, 0, 0, 0.0, 0.0};
    }
  });
  return waiting;
}

// ---- weights ----

detail::MasterItem MasterWeights::Impl::master_item(
    const Pair& pair,
    const at::Tensor& model) const {
  return {
      static_cast<float*>(pair.master.data_ptr()),
      model.data_ptr(),
      model.numel(),
      model.scalar_type()};
}

// Fills the lists of masters with the pairs that `add` accepts.
template <typename Add>
void MasterWeights::Impl::fill_masters(const Add& add) {
  for (auto& lists : devices) {
    lists.masters.clear();
    lists.master_positions.clear();
  }
  for_each([&](Pair& pair, std::int64_t group, std::int64_t index) {
    if (!pair.master.defined() || !add(pair)) {
      return;
    }
    check_shape(pair, group, index);
    TORCH_CHECK(
        pair.master.scalar_type() == at::kFloat &&
            pair.master.is_non_overlapping_and_dense(),
        owner,
        ": a master must stay a dense float32 tensor, but got ",
        describe_parameter(group, index, pair.master));
    TORCH_CHECK_TYPE(
        is_supported(pair.model.scalar_type()) &&
            pair.model.device() == pair.master.device(),
        owner,
        ": a parameter must keep a floating dtype and the device of its "
        "master, but got ",
        describe_parameter(group, index, pair.model));
    lists(pair.master.device()).master_positions.emplace_back(group, index);
  });
}

void MasterWeights::adopt_model_writes() {
  auto& impl = *impl_;
  const bool all = impl.model_writes == ModelWrites::kValues;
  impl.fill_masters([&](const Pair& pair) {
    return all || pair.model_written_by_others();
  });
  for (auto& lists : impl.devices) {
    for (const auto& [group, index] : lists.master_positions) {
      const auto& pair = impl.groups[group][index];
      lists.masters.push_back(impl.master_item(
          pair, impl.staging.readable(pair.model, pair.master)));
    }
    lists.kernels->adopt_model(lists.masters);
    for (const auto& [group, index] : lists.master_positions) {
      auto& pair = impl.groups[group][index];
      bump_version(pair.master);
      pair.see_model();
    }
  }
  impl.staging.clear();
}

void MasterWeights::overwrite_masters() {
  const at::NoGradGuard no_grad;
  impl_->for_each([&](Pair& pair, std::int64_t group, std::int64_t index) {
    if (pair.master.defined()) {
      impl_->check_shape(pair, group, index);
      pair.master.copy_(pair.model);
      pair.see_model();
    }
  });
}

void MasterWeights::write_model() {
  auto& impl = *impl_;
  impl.fill_masters([](const Pair&) { return true; });
  for (auto& lists : impl.devices) {
    for (const auto& [group, index] : lists.master_positions) {
      const auto& pair = impl.groups[group][index];
      lists.masters.push_back(impl.master_item(
          pair, impl.staging.writable(pair.model, pair.master, false)));
    }
    lists.kernels->write_model(lists.masters);
  }
  impl.staging.write_back();
  impl.staging.clear();
  for (auto& lists : impl.devices) {
    const auto& saturated = lists.kernels->saturated();
    for (std::size_t i = 0; i < lists.master_positions.size(); ++i) {
      const auto& [group, index] = lists.master_positions[i];
      auto& pair = impl.groups[group][index];
      bump_version(pair.model);
      pair.see_model();
      if (saturated[i] != 0 && !pair.saturation_reported) {
        pair.saturation_reported = true;
        impl.new_saturations.push_back(
            {group, index, pair.model, 0, 0, 0.0, 0.0});
      }
    }
  }
}

std::vector<TensorReport> MasterWeights::take_new_saturations() {
  return std::exchange(impl_->new_saturations, {});
}

void MasterWeights::check_masters(const ParamGroups& masters) const {
  const auto own = master_params();
  TORCH_CHECK_VALUE(
      masters.size() == own.size(),
      impl_->owner,
      ".load_state_dict: there must be ",
      own.size(),
      " groups of masters, but got ",
      masters.size());
  for (std::size_t g = 0; g < own.size(); ++g) {
    TORCH_CHECK_VALUE(
        masters[g].size() == own[g].size(),
        impl_->owner,
        ".load_state_dict: group ",
        g,
        " must have ",
        own[g].size(),
        " masters, but got ",
        masters[g].size());
    for (std::size_t i = 0; i < own[g].size(); ++i) {
      TORCH_CHECK_VALUE(
          masters[g][i].sizes() == own[g][i].sizes() &&
              masters[g][i].is_floating_point(),
          impl_->owner,
          ".load_state_dict: master ",
          i,
          " of group ",
          g,
          " must be floating point with shape ",
          own[g][i].sizes(),
          ", but got ",
          detail::dtype_name(masters[g][i].scalar_type()),
          " with shape ",
          masters[g][i].sizes());
    }
  }
}

void MasterWeights::load_masters(const ParamGroups& masters) {
  check_masters(masters);
  const at::NoGradGuard no_grad;
  const auto own = master_params();
  for (std::size_t g = 0; g < own.size(); ++g) {
    for (std::size_t i = 0; i < own[g].size(); ++i) {
      own[g][i].copy_(masters[g][i]);
    }
  }
  write_model();
}

// ---- snapshots ----

void MasterWeights::take_snapshot() {
  const at::NoGradGuard no_grad;
  impl_->snapshot.assign(impl_->groups.size(), {});
  impl_->for_each([&](Pair& pair, std::int64_t group, std::int64_t) {
    const bool moves = pair.master.defined() || pair.native();
    impl_->snapshot[group].push_back(
        moves ? pair.visible().detach().clone() : at::Tensor());
  });
}

void MasterWeights::rollback() {
  const at::NoGradGuard no_grad;
  impl_->for_each([&](Pair& pair, std::int64_t group, std::int64_t index) {
    const auto& saved = impl_->snapshot[group][index];
    if (saved.defined()) {
      pair.visible().copy_(saved);
    }
  });
  drop_snapshot();
  write_model();
}

void MasterWeights::drop_snapshot() {
  impl_->snapshot.clear();
}

} // namespace fp16core
