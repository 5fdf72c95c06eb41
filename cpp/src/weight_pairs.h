// The pairs behind MasterWeights, and the lists that the kernels work on.

#pragma once

#include <fp16core/master_weights.h>

#include "kernels.h"
#include "layout.h"
#include "parameter_text.h"
#include "seen_tensor.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace fp16core {

namespace detail {

inline bool is_half(c10::ScalarType type) {
  return type == c10::ScalarType::Half || type == c10::ScalarType::BFloat16;
}

inline bool is_supported(c10::ScalarType type) {
  return is_half(type) || type == c10::ScalarType::Float ||
      type == c10::ScalarType::Double;
}

} // namespace detail

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
  detail::SeenTensor taken_gradient;
  // The gradient that the inner optimizer sees, as it was measured.
  detail::SeenTensor measured_gradient;
  // What the values in a native gradient have been multiplied by since the
  // last backward pass.
  double native_factor = 1.0;

  // Whether the last write stored a finite master as inf, and whether that was
  // told.
  bool saturated = false;
  bool saturation_reported = false;

  // The tensor that the inner optimizer holds.
  const at::Tensor& visible() const {
    return master.defined() ? master : model;
  }

  bool native() const {
    return !master.defined() &&
        (model.scalar_type() == at::kFloat ||
         model.scalar_type() == at::kDouble);
  }

  // A half parameter without a master that has a gradient all the same: it was
  // frozen, or not half, when it was ingested.
  bool late_half() const {
    return !master.defined() && detail::is_half(model.scalar_type()) &&
        detail::gradient_of(model).defined();
  }

  bool model_written_by_others() const {
    return model.const_data_ptr() != model_data ||
        detail::version_of(model) != model_version ||
        model.scalar_type() != model_type || model.device() != model_device;
  }

  // Remembers the gradients as an update leaves them.
  void see_gradients() {
    taken_gradient.record(detail::gradient_of(model));
    measured_gradient.record(detail::gradient_of(visible()));
  }

  void see_model() {
    model_data = model.const_data_ptr();
    model_version = detail::version_of(model);
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
  // For measuring between updates, whose findings stay as they are.
  std::vector<DeviceLists> measuring;
  // The measurements of the last update still hold for the gradients, apart
  // from changes by others.
  bool measured = false;
  bool natives_scaled = false;
  std::vector<TensorReport> new_saturations;
  std::vector<std::vector<at::Tensor>> snapshot;

  static DeviceLists& lists(std::vector<DeviceLists>& all, c10::Device device) {
    for (auto& lists : all) {
      if (lists.device == device) {
        return lists;
      }
    }
    return all.emplace_back(device);
  }

  DeviceLists& lists(c10::Device device) { return lists(devices, device); }

  template <typename Body>
  void for_each(const Body& body) {
    for (std::size_t g = 0; g < groups.size(); ++g) {
      for (std::size_t i = 0; i < groups[g].size(); ++i) {
        body(
            groups[g][i],
            static_cast<std::int64_t>(g),
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
  detail::GradientItem gradient_item(
      Pair& pair,
      const detail::Factor& factor,
      detail::Staging& staging);
  void add_scale(const at::Tensor& parameter, double factor);
  void clear_scales();
  void run_scales(double factor);
  void scale_natives_back(const detail::Factor* keep);
  void list_gradients(detail::Staging& staging);
  template <typename Add>
  void fill_masters(const Add& add);
  detail::MasterItem master_item(const Pair& pair, const at::Tensor& model)
      const;
  void adopt_across_types(const Pair& pair) const;
  void check_shape(const Pair& pair, std::int64_t group, std::int64_t index)
      const;
};

} // namespace fp16core
