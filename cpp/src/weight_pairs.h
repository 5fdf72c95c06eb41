// The pairs behind MasterWeights, and the lists that the kernels work on.

#pragma once

#include <fp16core/master_weights.h>

#include "kernels.h"
#include "layout.h"
#include "parameter_text.h"
#include "seen_tensor.h"

#include <array>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace fp16core {

namespace detail {

/// Returns where kernels find a number. It must outlive their launch.
inline FactorSource source_of(const DeviceNumber& number) {
  return number.on_host()
      ? FactorSource{number.value(), nullptr}
      : FactorSource{1.0, number.memory().const_data_ptr<double>()};
}

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
  // Whether they have also been multiplied by Impl::native_on_device.
  bool scaled_on_device = false;

  // Whether the last write stored a finite master as inf, and whether that was
  // told.
  bool saturated = false;
  bool saturation_reported = false;

  // The version of the master as the model was written from it last.
  std::optional<std::uint32_t> written_version;
  // Whether `take_gradients` took one that no `zero_grad` has dropped since.
  bool has_taken = false;
  // Whether `zero_grad` has zeroed that one in place since.
  bool taken_is_zero = false;

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

  void see_model() {
    model_data = model.const_data_ptr();
    model_version = detail::version_of(model);
    model_type = model.scalar_type();
    model_device = model.device();
  }
};

struct MasterWeights::Impl {
  // Where an item of an update belongs.
  struct PreparedUpdate {
    std::int64_t group;
    std::int64_t index;
    // Counters that have to move from the host to the device of the weight.
    std::array<bool, UpdateRule::kMostCounters> moves;
  };

  // What a write of the model stored as inf, and where.
  struct PendingSaturation {
    std::unique_ptr<detail::LateSaturation> saturation;
    std::vector<std::pair<std::int64_t, std::int64_t>> positions;
  };

  // The lists of one device, kept between calls for their memory.
  struct DeviceLists {
    explicit DeviceLists(c10::Device where)
        : device(where), kernels(detail::make_kernels(where)) {}

    c10::Device device;
    std::unique_ptr<detail::ListKernels> kernels;
    // Whether the last `take_gradients` found any here.
    bool took = false;
    std::vector<detail::GradientItem> gradients;
    // The position of the parameter of each gradient.
    std::vector<std::pair<std::int64_t, std::int64_t>> gradient_positions;
    std::vector<detail::ScaleItem> scales;
    std::vector<detail::ZeroItem> zeros;
    std::vector<detail::MasterItem> masters;
    std::vector<std::pair<std::int64_t, std::int64_t>> master_positions;
    // Of the prepared update, and with each item its pair and what else it
    // needs.
    std::vector<detail::UpdateItem> updates;
    std::vector<PreparedUpdate> prepared;
  };

  std::string owner;
  ModelWrites model_writes;
  bool materialize_gradients;
  std::vector<std::vector<Pair>> groups;
  // By position; shorter where nobody has told.
  std::vector<std::vector<std::string>> names;
  std::vector<std::vector<bool>> counted;
  std::vector<DeviceLists> devices;
  // For measuring between updates, whose findings stay as they are.
  std::vector<DeviceLists> measuring;
  // The measurements of the last update still hold for the gradients, apart
  // from changes by others.
  bool measured = false;
  bool natives_scaled = false;
  // What float32 and float64 natives have been multiplied by on a device since
  // the last backward pass, those that are marked.
  DeviceNumber native_on_device = 1.0;
  DeviceNumber wide_native_on_device = 1.0;
  // An update rule has run since `write_model`.
  bool rule_ran = false;
  // What half gradients still have to be multiplied by, one after the other,
  // where master gradients are not materialized.
  std::vector<DeviceNumber> factors;
  // The rule of the prepared update, and the options of its groups.
  const UpdateRule* rule = nullptr;
  c10::ArrayRef<RuleOptions> rule_options;
  std::optional<detail::Staging> update_staging;
  // In the order of the writes.
  std::vector<PendingSaturation> pending_saturations;
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

  // Whether the gradient of the pair stays in the model until the step.
  bool lean(const Pair& pair) const {
    return !materialize_gradients && pair.master.defined();
  }

  // The gradient that the inner optimizer's step uses.
  const at::Tensor& inner_gradient(const Pair& pair) const {
    static const at::Tensor none;
    if (!lean(pair)) {
      return detail::gradient_of(pair.visible());
    }
    return pair.has_taken ? detail::gradient_of(pair.model) : none;
  }

  // Remembers the gradients as an update leaves them.
  void see_gradients(Pair& pair) const {
    pair.has_taken = true;
    pair.taken_is_zero = false;
    pair.taken_gradient.record(detail::gradient_of(pair.model));
    pair.measured_gradient.record(inner_gradient(pair));
  }

  // What was told of the parameter at a position, which need not be all.
  const std::string& name_of(std::int64_t group, std::int64_t index) const;
  bool counts(std::int64_t group, std::int64_t index) const;
  std::string describe(const Pair& pair, std::int64_t group, std::int64_t index)
      const {
    return detail::describe_parameter(
        group,
        index,
        pair.model,
        name_of(group, index));
  }
  TensorReport entry(const Pair& pair, std::int64_t group, std::int64_t index)
      const {
    return {
        group,
        index,
        pair.model,
        0,
        0,
        0.0,
        0.0,
        false,
        name_of(group, index)};
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
      const DeviceNumber& factor,
      detail::Staging& staging);
  void add_scale(const at::Tensor& parameter, const DeviceNumber& factor);
  void clear_scales();
  void run_scales(const DeviceNumber& factor);
  void scale_natives_back(bool at_update, const detail::Factor* keep);
  void scale_natives_back_on_device(bool at_update);
  DeviceNumber usable(const DeviceNumber& number) const;
  DeviceLists* only_lists();
  bool norm_is_measured() const;
  bool took_zeros(const Pair& pair, std::int64_t group, std::int64_t index)
      const;
  at::Tensor unscaled_gradient(const Pair& pair) const;
  template <typename Use>
  void measure(const Use& use);
  std::optional<std::string> obstacle(
      const DueParameter& due,
      const RuleState& state) const;
  std::optional<std::string> list_updates(FindRuleState find_state);
  void add_update(const DueParameter& due, const RuleState& state);
  NewRuleState make_state(
      detail::UpdateItem& item,
      const PreparedUpdate& prepared) const;
  NewRuleState move_counters(
      detail::UpdateItem& item,
      const PreparedUpdate& prepared) const;
  void see_written(Pair& pair) const;
  void expect_saturations(
      const DeviceLists& lists,
      std::unique_ptr<detail::LateSaturation> saturation,
      std::vector<std::pair<std::int64_t, std::int64_t>> positions);
  void note_saturations(bool wait);
  template <typename Add>
  void fill_masters(const Add& add);
  detail::MasterItem master_item(const Pair& pair, const at::Tensor& model)
      const;
  void adopt_across_types(const Pair& pair) const;
  void check_shape(const Pair& pair, std::int64_t group, std::int64_t index)
      const;
  void check_master(const Pair& pair, std::int64_t group, std::int64_t index)
      const;
};

} // namespace fp16core
