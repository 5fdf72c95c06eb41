#include <fp16core/tensor_lists.h>

#include "number.h"
#include "weight_pairs.h"

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <stdexcept>
#include <tuple>
#include <utility>

namespace fp16core {

namespace {

constexpr const char* kTypes = "float16, bfloat16, float32 or float64";

void check_type(const char* function, const char* what, c10::ScalarType type) {
  TORCH_CHECK_TYPE(
      detail::is_supported(type),
      function,
      ": ",
      what,
      " must be ",
      kTypes,
      ", but got ",
      detail::dtype_name(type));
}

void check_tensor(
    const char* function,
    const char* what,
    const at::Tensor& tensor) {
  TORCH_CHECK_TYPE(
      tensor.layout() == at::kStrided,
      function,
      ": ",
      what,
      " must be strided, but got ",
      tensor.layout());
  check_type(function, what, tensor.scalar_type());
}

void check_target(
    const char* function,
    const char* what,
    const at::Tensor& tensor) {
  check_tensor(function, what, tensor);
  TORCH_CHECK_TYPE(
      at::has_internal_overlap(tensor) != at::MemOverlap::Yes,
      function,
      ": ",
      what,
      " must not share memory among their elements, but got shape ",
      tensor.sizes(),
      " with strides ",
      tensor.strides());
}

// What a call does on one device.
struct DeviceWork {
  explicit DeviceWork(c10::Device where)
      : device(where), kernels(detail::make_kernels(where)) {}

  c10::Device device;
  std::unique_ptr<detail::ListKernels> kernels;
  std::vector<detail::GradientItem> gradients;
  std::vector<detail::ScaleItem> scales;
  std::vector<detail::MasterItem> masters;
};

class Work {
 public:
  DeviceWork& on(c10::Device device) {
    for (auto& work : devices_) {
      if (work.device == device) {
        return work;
      }
    }
    return devices_.emplace_back(device);
  }

  auto begin() { return devices_.begin(); }
  auto end() { return devices_.end(); }

 private:
  std::vector<DeviceWork> devices_;
};

// Returns what a stand-in for a tensor that is not dense shall look like.
at::Tensor contiguous_like(const at::Tensor& tensor) {
  return at::empty(tensor.sizes(), tensor.options());
}

// An item that reads.
detail::GradientItem measured(const at::Tensor& dense) {
  const auto type = dense.scalar_type();
  return {
      dense.const_data_ptr(),
      nullptr,
      dense.numel(),
      type,
      type == at::kDouble ? at::kDouble : at::kFloat,
      false};
}

// The tensors of a call that may change them in place. Each is there once,
// however often it is listed: two threads must not write it.
class Gradients {
 public:
  // Throws before anything is changed.
  Gradients(const char* function, const std::vector<at::Tensor>& gradients) {
    for (const auto& gradient : gradients) {
      if (gradient.defined()) {
        check_target(function, "gradients", gradient);
      }
    }
    std::set<std::tuple<const void*, std::int64_t, bool>> seen;
    for (const auto& gradient : gradients) {
      if (!gradient.defined()) {
        continue;
      }
      const bool dense = gradient.is_non_overlapping_and_dense();
      const auto numel = gradient.numel();
      tensors_.push_back(gradient);
      auto& work = work_.on(gradient.device());
      // What is a lazy copy gets its own memory here.
      if (numel == 0 ||
          !seen.emplace(gradient.data_ptr(), numel, dense).second) {
        continue;
      }
      const auto& values = dense
          ? gradient
          : staging_.writable(gradient, contiguous_like(gradient), true);
      work.gradients.push_back(measured(values));
      work.scales.push_back({values.data_ptr(), numel, values.scalar_type()});
    }
  }

  Work& work() { return work_; }

  // On the device of the first tensor.
  at::TensorOptions options() const {
    return at::TensorOptions(at::kFloat)
        .device(tensors_.empty() ? at::Device(at::kCPU) : tensors_[0].device());
  }

  // Where kernels have written.
  void finish() {
    staging_.write_back();
    for (const auto& tensor : tensors_) {
      detail::bump_version(tensor);
    }
  }

  double norm(double norm_type) {
    if (norm_type == -HUGE_VAL) {
      double smallest = HUGE_VAL;
      for (const auto& tensor : tensors_) {
        if (tensor.numel() > 0) {
          const auto least = tensor.abs().min().item<double>();
          smallest = least < smallest || std::isnan(least) ? least : smallest;
        }
      }
      return std::isinf(smallest) ? 0.0 : smallest;
    }
    if (norm_type != 2.0 && norm_type != HUGE_VAL) {
      double sum = 0.0;
      for (auto& work : work_) {
        sum += work.kernels->sum_of_powers(work.gradients, norm_type);
      }
      return norm_type == 0.0 ? sum : std::pow(sum, 1.0 / norm_type);
    }
    for (auto& work : work_) {
      work.kernels->take_gradients(work.gradients, {});
    }
    double sum_of_squares = 0.0;
    double largest = 0.0;
    for (auto& work : work_) {
      const auto found = work.kernels->read_totals();
      sum_of_squares += found.sum_of_squares;
      if (std::isnan(found.largest) || found.largest > largest) {
        largest = found.largest;
      }
    }
    return norm_type == 2.0 ? std::sqrt(sum_of_squares) : largest;
  }

 private:
  std::vector<at::Tensor> tensors_;
  detail::Staging staging_;
  Work work_;
};

// Adds a kernel's item for a pair of tensors. Returns false where no kernel
// fits: each is to or from float32, or copies float64, and pairs elements by
// their place in memory.
bool add_copy(Work& all, const at::Tensor& target, const at::Tensor& source) {
  const auto to = target.scalar_type();
  const auto from = source.scalar_type();
  const bool by_gradient =
      to == at::kFloat || (to == at::kDouble && from == at::kDouble);
  if (!(by_gradient || from == at::kFloat) ||
      source.device() != target.device() ||
      !detail::has_kernels(target.device().type()) ||
      !detail::same_dense_layout(target, source)) {
    return false;
  }
  auto& work = all.on(target.device());
  if (by_gradient) {
    auto item = measured(source);
    item.destination = target.data_ptr();
    item.destination_type = to;
    work.gradients.push_back(item);
  } else {
    work.masters.push_back(
        {// The kernel only reads it.
         const_cast<float*>(source.const_data_ptr<float>()),
         target.data_ptr(),
         target.numel(),
         to});
  }
  return true;
}

void write(
    const std::vector<at::Tensor>& targets,
    const std::vector<at::Tensor>& sources) {
  Work all;
  for (std::size_t i = 0; i < targets.size(); ++i) {
    const auto& target = targets[i];
    const auto& source = sources[i];
    if (!target.defined()) {
      continue;
    }
    if (source.is_neg() || target.is_neg()) {
      // In one dtype, since ATen's shortcut from float32 to half forgets that a
      // view negates.
      target.copy_(source.resolve_neg().to(target.scalar_type()));
    } else if (add_copy(all, target, source)) {
      detail::bump_version(target);
    } else {
      target.copy_(source);
    }
  }
  for (auto& work : all) {
    if (!work.gradients.empty()) {
      work.kernels->take_gradients(work.gradients, {});
    }
    if (!work.masters.empty()) {
      work.kernels->write_model(work.masters);
    }
  }
}

} // namespace

std::vector<at::Tensor> gradients_of(
    const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> gradients;
  gradients.reserve(parameters.size());
  for (const auto& parameter : parameters) {
    gradients.push_back(detail::gradient_of(parameter));
  }
  return gradients;
}

bool has_overflow(const std::vector<at::Tensor>& tensors) {
  const at::NoGradGuard no_grad;
  detail::Staging staging;
  Work all;
  for (const auto& tensor : tensors) {
    if (!tensor.defined()) {
      continue;
    }
    TORCH_CHECK_TYPE(
        tensor.layout() == at::kStrided || tensor.is_sparse(),
        "has_overflow: tensors must be strided or sparse COO, but got ",
        tensor.layout());
    const auto values = tensor.is_sparse() ? tensor._values() : tensor;
    check_type("has_overflow", "tensors", values.scalar_type());
    all.on(values.device())
        .gradients.push_back(measured(
            values.is_non_overlapping_and_dense()
                ? values
                : staging.readable(values, contiguous_like(values))));
  }
  for (auto& work : all) {
    work.kernels->take_gradients(work.gradients, {});
  }
  return std::any_of(all.begin(), all.end(), [](auto& work) {
    return work.kernels->read_totals().found_inf != 0.0F;
  });
}

bool unscale_(const std::vector<at::Tensor>& gradients, double scale) {
  const auto check_scale = [&](bool condition, const char* rule) {
    if (!condition) {
      throw std::invalid_argument(
          std::string("unscale_: scale must be ") + rule + ", but got " +
          detail::number(scale));
    }
  };
  check_scale(std::isfinite(scale) && scale > 0.0, "finite and greater than 0");
  check_scale(scale >= 0x1p-126, "at least 2^-126");
  const at::NoGradGuard no_grad;
  Gradients list("unscale_", gradients);
  const detail::FactorSource factor{1.0 / scale, nullptr};
  const bool write = scale != 1.0;
  for (auto& work : list.work()) {
    std::erase_if(work.scales, [&](const auto& item) {
      return !write || !detail::is_half(item.type);
    });
    for (auto& item : work.gradients) {
      if (write && !detail::is_half(item.source_type)) {
        item.destination = const_cast<void*>(item.source);
        item.unscale = true;
      }
    }
    work.kernels->scale_(work.scales, factor);
    work.kernels->take_gradients(work.gradients, factor);
  }
  bool overflow = false;
  for (auto& work : list.work()) {
    const auto found = work.kernels->read_totals();
    // A scale below 1 can make infinite what was not.
    overflow |= found.found_inf != 0.0F || !std::isfinite(found.largest);
  }
  if (write) {
    list.finish();
  }
  return overflow;
}

at::Tensor clip_grad_norm_(
    const std::vector<at::Tensor>& gradients,
    double max_norm,
    double norm_type) {
  TORCH_CHECK_VALUE(
      max_norm >= 0.0,
      "clip_grad_norm_: max_norm must be at least 0, but got ",
      detail::number(max_norm));
  TORCH_CHECK_VALUE(
      !std::isnan(norm_type),
      "clip_grad_norm_: norm_type must be a number, but got ",
      detail::number(norm_type));
  const at::NoGradGuard no_grad;
  Gradients list("clip_grad_norm_", gradients);
  const double norm = list.norm(norm_type);
  // As the caller sees it, who skips the step where it is not finite.
  const auto seen = static_cast<float>(norm);
  const double coefficient = detail::clip_coefficient(norm, max_norm);
  if (std::isfinite(seen) && coefficient < 1.0) {
    for (auto& work : list.work()) {
      work.kernels->scale_(work.scales, {coefficient, nullptr});
    }
    list.finish();
  }
  return at::scalar_tensor(seen, list.options());
}

std::vector<at::Tensor> cast(
    const std::vector<at::Tensor>& tensors,
    c10::ScalarType dtype) {
  check_type("cast", "dtype", dtype);
  const at::NoGradGuard no_grad;
  for (const auto& tensor : tensors) {
    if (tensor.defined()) {
      check_tensor("cast", "tensors", tensor);
    }
  }
  std::vector<at::Tensor> copies;
  copies.reserve(tensors.size());
  for (const auto& tensor : tensors) {
    copies.push_back(
        tensor.defined() ? detail::empty_dense_like(tensor, dtype)
                         : at::Tensor());
  }
  write(copies, tensors);
  return copies;
}

namespace {

// Throws unless every source can be written to its target.
void check_pairs(
    const char* function,
    const std::vector<at::Tensor>& targets,
    const std::vector<at::Tensor>& sources) {
  TORCH_CHECK_VALUE(
      targets.size() == sources.size(),
      function,
      ": targets and sources must be equally many, but got ",
      targets.size(),
      " and ",
      sources.size());
  for (std::size_t i = 0; i < targets.size(); ++i) {
    const auto& target = targets[i];
    const auto& source = sources[i];
    TORCH_CHECK_VALUE(
        target.defined() == source.defined(),
        function,
        ": targets and sources must be undefined at the same places, but got "
        "an undefined ",
        target.defined() ? "source" : "target",
        " at index ",
        i);
    if (!target.defined()) {
      continue;
    }
    check_target(function, "targets", target);
    check_tensor(function, "sources", source);
    TORCH_CHECK_VALUE(
        target.sizes() == source.sizes(),
        function,
        ": targets and sources must have the same shapes, but got ",
        target.sizes(),
        " and ",
        source.sizes(),
        " at index ",
        i);
    at::assert_no_partial_overlap(target, source);
  }
}

} // namespace

void copy_(
    const std::vector<at::Tensor>& targets,
    const std::vector<at::Tensor>& sources) {
  const at::NoGradGuard no_grad;
  check_pairs("copy_", targets, sources);
  write(targets, sources);
}

bool scaled_copy_(
    const std::vector<at::Tensor>& targets,
    const std::vector<at::Tensor>& sources,
    double factor) {
  if (std::isnan(factor)) {
    throw std::invalid_argument(
        "scaled_copy_: factor must be a number, but got nan");
  }
  const at::NoGradGuard no_grad;
  check_pairs("scaled_copy_", targets, sources);
  detail::Staging staging;
  Work all;
  // What the kernel cannot write in place is made beside it first.
  std::vector<at::Tensor> rounded;
  std::vector<at::Tensor> products;
  for (std::size_t i = 0; i < targets.size(); ++i) {
    const auto& target = targets[i];
    if (!target.defined()) {
      continue;
    }
    const bool wide = target.scalar_type() == at::kDouble &&
        sources[i].scalar_type() == at::kDouble;
    const auto type = wide ? at::kDouble : at::kFloat;
    at::Tensor product = target;
    if (target.scalar_type() != type ||
        !target.is_non_overlapping_and_dense() || target.is_neg()) {
      product = detail::empty_dense_like(target, type);
      rounded.push_back(target);
      products.push_back(product);
    } else {
      detail::bump_version(target);
    }
    auto item = measured(staging.readable(sources[i].resolve_neg(), product));
    item.destination = product.data_ptr();
    item.destination_type = type;
    item.unscale = true;
    all.on(product.device()).gradients.push_back(item);
  }
  bool overflow = false;
  for (auto& work : all) {
    work.kernels->take_gradients(work.gradients, {factor, nullptr});
  }
  for (auto& work : all) {
    overflow |= work.kernels->read_totals().found_inf != 0.0F;
  }
  write(rounded, products);
  return overflow;
}

void axpby_(
    const std::vector<at::Tensor>& targets,
    double a,
    const std::vector<at::Tensor>& x,
    double b,
    const std::vector<at::Tensor>& y) {
  const at::NoGradGuard no_grad;
  check_pairs("axpby_", targets, x);
  check_pairs("axpby_", targets, y);
  for (std::size_t i = 0; i < targets.size(); ++i) {
    if (targets[i].defined()) {
      const bool wide = x[i].scalar_type() == at::kDouble ||
          y[i].scalar_type() == at::kDouble;
      const auto type = wide ? at::kDouble : at::kFloat;
      targets[i].copy_(x[i].to(type) * a + y[i].to(type) * b);
    }
  }
}

TensorNorms norms(const std::vector<at::Tensor>& tensors, double factor) {
  const at::NoGradGuard no_grad;
  detail::Staging staging;
  Work all;
  // All devices first: more of them would move those that `places` points at.
  for (const auto& tensor : tensors) {
    if (tensor.defined()) {
      check_tensor("norms", "tensors", tensor);
      all.on(tensor.device());
    }
  }
  auto options = at::TensorOptions(at::kFloat);
  if (all.begin() != all.end()) {
    options = options.device(all.begin()->device);
  }
  std::vector<std::pair<DeviceWork*, std::size_t>> places;
  for (const auto& tensor : tensors) {
    if (!tensor.defined()) {
      places.emplace_back(nullptr, 0);
      continue;
    }
    auto& work = all.on(tensor.device());
    places.emplace_back(&work, work.gradients.size());
    auto item = measured(
        tensor.is_non_overlapping_and_dense()
            ? tensor
            : staging.readable(tensor, contiguous_like(tensor)));
    item.unscale = factor != 1.0;
    work.gradients.push_back(item);
  }
  for (auto& work : all) {
    work.kernels->take_gradients(work.gradients, {factor, nullptr});
  }
  std::vector<float> each;
  double sum_of_squares = 0.0;
  for (const auto& [work, index] : places) {
    const double sum = work == nullptr
        ? 0.0
        : work->kernels->gradient_stats()[index].sum_of_squares;
    sum_of_squares += sum;
    each.push_back(static_cast<float>(std::sqrt(sum)));
  }
  return {
      at::full({1}, static_cast<float>(std::sqrt(sum_of_squares)), options),
      at::tensor(each).to(options.device())};
}

} // namespace fp16core
