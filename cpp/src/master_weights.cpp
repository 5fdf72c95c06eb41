#include "number.h"
#include "weight_pairs.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstddef>
#include <sstream>
#include <unordered_map>
#include <unordered_set>

namespace fp16core {

namespace {

using detail::bump_version;
using detail::describe_parameter;
using detail::gradient_of;
using detail::is_half;
using detail::is_supported;

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

at::Tensor widen_state(const at::Tensor& state, const at::Tensor& master) {
  return is_half(state.scalar_type())
      ? state.detach().to(master.device(), at::kFloat)
      : state;
}

MasterWeights::MasterWeights(
    std::string owner,
    ModelWrites model_writes,
    bool materialize_gradients)
    : impl_(std::make_unique<Impl>()) {
  impl_->owner = std::move(owner);
  impl_->model_writes = model_writes;
  impl_->materialize_gradients = materialize_gradients;
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
      describe_parameter(group, index, parameter, name_of(group, index)),
      parameter.layout() == at::kStrided ? "" : ", not strided",
      impl->is_python_dispatch() ? ", a subclass with its own dispatch" : "");
  TORCH_CHECK_NOT_IMPLEMENTED(
      detail::has_kernels(parameter.device().type()),
      owner,
      ": parameters must be on a device that this build of fp16core has "
      "kernels for (",
      detail::built_with_cuda() ? "the CPU, or CUDA" : "the CPU",
      "), but got ",
      describe_parameter(group, index, parameter, name_of(group, index)));
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
  pair.written_version = detail::version_of(pair.master);
  // A gradient that was taken before was unscaled in place.
  pair.taken_gradient.forget();
  pair.has_taken = false;
  return {group, index, pair.model, pair.master};
}

std::vector<Adoption> MasterWeights::ingest(const ParamGroups& groups) {
  auto& known = impl_->groups;
  impl_->for_each(
      [&](const Pair& pair, std::int64_t group, std::int64_t index) {
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
    std::unordered_map<const c10::TensorImpl*, Pair*> by_model;
    std::unordered_set<const c10::TensorImpl*> models;
    impl_->for_each([&](Pair& pair, std::int64_t, std::int64_t) {
      by_visible.emplace(pair.visible().unsafeGetTensorImpl(), &pair);
      by_model.emplace(pair.model.unsafeGetTensorImpl(), &pair);
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
        const auto returned = by_model.find(parameter.unsafeGetTensorImpl());
        if (found != by_visible.end()) {
          pair = *found->second;
        } else if (returned != by_model.end()) {
          // Someone put the model's parameter back: its master is still good.
          pair = *returned->second;
          adoptions.push_back({group, index, pair.model, pair.master});
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
    // What was found before speaks of positions that are no more.
    for (auto& lists : impl_->devices) {
      lists.gradients.clear();
      lists.gradient_positions.clear();
    }
    impl_->pending_saturations.clear();
    impl_->measured = false;
    impl_->snapshot.clear();
  }
  impl_->for_each([&](Pair& pair, std::int64_t group, std::int64_t index) {
    if (pair.late_half()) {
      adoptions.push_back(impl_->adopt(pair, group, index));
    }
  });
  return adoptions;
}

bool MasterWeights::is_current(
    const std::vector<std::vector<const c10::TensorImpl*>>& groups) const {
  return std::equal(
      groups.begin(),
      groups.end(),
      impl_->groups.begin(),
      impl_->groups.end(),
      [](const auto& addresses, const auto& pairs) {
        return std::equal(
            addresses.begin(),
            addresses.end(),
            pairs.begin(),
            pairs.end(),
            [](const c10::TensorImpl* address, const Pair& pair) {
              return address == pair.visible().unsafeGetTensorImpl() &&
                  !pair.late_half();
            });
      });
}

const std::string& MasterWeights::Impl::name_of(
    std::int64_t group,
    std::int64_t index) const {
  static const std::string unknown;
  const auto g = static_cast<std::size_t>(group);
  const auto i = static_cast<std::size_t>(index);
  return g < names.size() && i < names[g].size() ? names[g][i] : unknown;
}

bool MasterWeights::Impl::counts(std::int64_t group, std::int64_t index) const {
  const auto g = static_cast<std::size_t>(group);
  const auto i = static_cast<std::size_t>(index);
  return g >= counted.size() || i >= counted[g].size() || counted[g][i];
}

void MasterWeights::set_names(std::vector<std::vector<std::string>> names) {
  impl_->names = std::move(names);
}

void MasterWeights::set_counted(std::vector<std::vector<bool>> counted) {
  impl_->counted = std::move(counted);
}

ParamGroups MasterWeights::parameters() const {
  return impl_->collect([](const Pair& pair, std::vector<at::Tensor>& group) {
    group.push_back(pair.model);
  });
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

std::vector<std::vector<std::int64_t>> MasterWeights::master_positions() const {
  std::vector<std::vector<std::int64_t>> positions(impl_->groups.size());
  impl_->for_each(
      [&](const Pair& pair, std::int64_t group, std::int64_t index) {
        if (pair.master.defined()) {
          positions[group].push_back(index);
        }
      });
  return positions;
}

std::vector<std::string> MasterWeights::describe(
    std::int64_t first_group) const {
  std::vector<std::string> lines;
  for (auto g = static_cast<std::size_t>(first_group); g < impl_->groups.size();
       ++g) {
    std::int64_t masters = 0;
    std::int64_t elements = 0;
    std::int64_t native = 0;
    std::vector<std::string> parameters;
    for (const auto& pair : impl_->groups[g]) {
      const bool half = pair.master.defined();
      const bool trained = half || pair.model.requires_grad();
      masters += half ? 1 : 0;
      elements += half ? pair.model.numel() : 0;
      native += !half && trained ? 1 : 0;
      std::ostringstream line;
      const auto& name = impl_->name_of(
          static_cast<std::int64_t>(g),
          static_cast<std::int64_t>(parameters.size()));
      line << "  " << parameters.size() << ": " << name
           << (name.empty() ? "" : " ") << pair.model.sizes() << " "
           << detail::dtype_name(pair.model.scalar_type())
           << (half          ? ", master float32"
                   : trained ? ", native"
                             : ", frozen");
      parameters.push_back(line.str());
    }
    const auto others = static_cast<std::int64_t>(parameters.size()) - masters;
    lines.push_back(
        impl_->owner + ": group " + std::to_string(g) + ": " +
        std::to_string(masters) + " half parameters (" +
        detail::grouped(elements) + " elements, " +
        detail::grouped(4 * elements) + " bytes of masters), " +
        std::to_string(native) + " native, " + std::to_string(others - native) +
        " frozen");
    lines.insert(lines.end(), parameters.begin(), parameters.end());
  }
  return lines;
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

// What the kernels rely on for a pair.
void MasterWeights::Impl::check_master(
    const Pair& pair,
    std::int64_t group,
    std::int64_t index) const {
  check_shape(pair, group, index);
  TORCH_CHECK(
      pair.master.scalar_type() == at::kFloat &&
          pair.master.is_non_overlapping_and_dense(),
      owner,
      ": a master must stay a dense float32 tensor, but got ",
      describe_parameter(group, index, pair.master, name_of(group, index)));
  TORCH_CHECK_TYPE(
      is_supported(pair.model.scalar_type()) &&
          pair.model.device() == pair.master.device(),
      owner,
      ": a parameter must keep a floating dtype and the device of its "
      "master, but got ",
      describe(pair, group, index));
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
    check_master(pair, group, index);
    lists(pair.master.device()).master_positions.emplace_back(group, index);
  });
}

// `model.float()` and the like write every weight without changing any: a
// master is kept where the model holds what it was rounded to, cast to the new
// dtype.
void MasterWeights::Impl::adopt_across_types(const Pair& pair) const {
  const at::NoGradGuard no_grad;
  const auto type = pair.model.scalar_type();
  const auto cast = pair.master.to(pair.model_type).to(type);
  const auto same =
      cast.eq(pair.model)
          .logical_or_(cast.isnan().logical_and_(pair.model.isnan()));
  pair.master.copy_(at::where(same, pair.master, pair.model.to(at::kFloat)));
}

void MasterWeights::adopt_model_writes() {
  auto& impl = *impl_;
  const bool all = impl.model_writes == ModelWrites::kValues;
  detail::Staging staging;
  impl.fill_masters(
      [&](const Pair& pair) { return all || pair.model_written_by_others(); });
  for (auto& lists : impl.devices) {
    for (const auto& [group, index] : lists.master_positions) {
      const auto& pair = impl.groups[group][index];
      if (pair.model.scalar_type() != pair.model_type) {
        impl.adopt_across_types(pair);
        continue;
      }
      lists.masters.push_back(
          impl.master_item(pair, staging.readable(pair.model, pair.master)));
    }
    lists.kernels->adopt_model(lists.masters);
    for (const auto& [group, index] : lists.master_positions) {
      auto& pair = impl.groups[group][index];
      bump_version(pair.master);
      pair.see_model();
      pair.written_version = detail::version_of(pair.master);
    }
  }
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

// Remembers what was just written to the model.
void MasterWeights::Impl::see_written(Pair& pair) const {
  bump_version(pair.model);
  pair.see_model();
  pair.written_version = detail::version_of(pair.master);
}

// Remembers to ask what a write of the model stored as inf. A graph that runs
// tells nothing.
void MasterWeights::Impl::expect_saturations(
    const DeviceLists& lists,
    std::unique_ptr<detail::LateSaturation> saturation,
    std::vector<std::pair<std::int64_t, std::int64_t>> positions) {
  if (!lists.kernels->recording()) {
    pending_saturations.push_back(
        {std::move(saturation), std::move(positions)});
  }
}

// Looks at what is known about writes of the model, in their order; with `wait`
// at all of them.
void MasterWeights::Impl::note_saturations(bool wait) {
  const bool recording =
      std::any_of(devices.begin(), devices.end(), [](const auto& lists) {
        return lists.kernels->recording();
      });
  if (recording && !wait) {
    return; // nobody may ask the device for anything
  }
  std::size_t known = 0;
  for (auto& pending : pending_saturations) {
    if (!wait && !pending.saturation->ready()) {
      break;
    }
    const auto& saturated = pending.saturation->wait();
    for (std::size_t i = 0; i < pending.positions.size(); ++i) {
      const auto& [group, index] = pending.positions[i];
      auto& pair = groups[group][index];
      if (!pair.master.defined()) {
        continue;
      }
      pair.saturated = saturated[i] != 0;
      if (pair.saturated && !pair.saturation_reported) {
        pair.saturation_reported = true;
        new_saturations.push_back(entry(pair, group, index));
        new_saturations.back().saturated = true;
      }
    }
    ++known;
  }
  pending_saturations.erase(
      pending_saturations.begin(),
      pending_saturations.begin() + static_cast<std::ptrdiff_t>(known));
}

void MasterWeights::write_model(bool only_stale) {
  auto& impl = *impl_;
  detail::Staging staging;
  const bool all = !std::exchange(impl.rule_ran, false) || !only_stale;
  impl.fill_masters([&](const Pair& pair) {
    return all || pair.written_version != detail::version_of(pair.master);
  });
  for (auto& lists : impl.devices) {
    for (const auto& [group, index] : lists.master_positions) {
      const auto& pair = impl.groups[group][index];
      lists.masters.push_back(impl.master_item(
          pair,
          staging.writable(pair.model, pair.master, false)));
    }
    if (lists.masters.empty()) {
      continue;
    }
    impl.expect_saturations(
        lists,
        lists.kernels->write_model(lists.masters),
        lists.master_positions);
  }
  staging.write_back();
  for (auto& lists : impl.devices) {
    for (const auto& [group, index] : lists.master_positions) {
      impl.see_written(impl.groups[group][index]);
    }
  }
  impl.note_saturations(/*wait=*/false);
}

std::vector<TensorReport> MasterWeights::take_new_saturations() {
  impl_->note_saturations(/*wait=*/false);
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
    if (impl_->snapshot.empty()) {
      return;
    }
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
