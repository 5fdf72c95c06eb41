// Pairs of a model parameter and its fp32 master, by param group: gradients
// go in, parameters come out.

#pragma once

#include <fp16core/api.h>
#include <fp16core/combine.h>
#include <fp16core/device_number.h>
#include <fp16core/gradient_report.h>
#include <fp16core/update_rule.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace fp16core {

namespace detail {
class ListKernels;
} // namespace detail

/// The param groups of an optimizer: a list of parameters for each.
using ParamGroups = std::vector<std::vector<at::Tensor>>;

/// A half parameter that has been given a master. Whoever owns the inner
/// optimizer must put `master` in the place of `model` at this position, and
/// move the optimizer's state from one to the other.
struct Adoption {
  std::int64_t group;
  std::int64_t index;
  at::Tensor model;
  at::Tensor master;
};

/// Returns a piece of optimizer state in the precision of the masters: half
/// tensors become float32 on the master's device, others are returned as they
/// are.
FP16CORE_API at::Tensor widen_state(
    const at::Tensor& state,
    const at::Tensor& master);

/// How writes to the model's weights by others are noticed.
enum class ModelWrites {
  /// By version counter, data pointer, dtype and device: free. Writes through
  /// `.data`, numpy or DLPack do not show.
  kVersion,
  /// By comparing every weight with its master before a step: one more read
  /// pass, and nothing escapes.
  kValues,
};

/// The master weights of an optimizer.
///
/// A trainable float16 or bfloat16 parameter has a master: a float32 leaf
/// that requires grad, with the parameter's shape and (if dense) strides. The
/// inner optimizer holds and updates the master. float32 and float64
/// parameters are native: the inner optimizer holds the parameter itself.
/// Frozen parameters are left as they are until a gradient arrives.
///
/// Nothing about a parameter is assumed from the last call: dtype, storage,
/// strides and gradient are read every time. All functions work on the
/// calling thread's current streams and use ATen's thread pool. Not safe for
/// concurrent calls. Errors name `owner`, so that they read as the facade's.
class FP16CORE_API MasterWeights {
 public:
  /// Without `materialize_gradients` masters have no gradients: a gradient is
  /// checked and measured where it is, what it is multiplied by is remembered,
  /// and `run_update` applies it.
  explicit MasterWeights(
      std::string owner,
      ModelWrites model_writes = ModelWrites::kVersion,
      bool materialize_gradients = true);
  ~MasterWeights();
  MasterWeights(const MasterWeights&) = delete;
  MasterWeights& operator=(const MasterWeights&) = delete;

  /// Throws TypeError if a parameter cannot be ingested, naming group, index,
  /// shape and dtype; ValueError if one stands in the groups twice; and
  /// NotImplementedError for a device without kernels. Changes nothing.
  /// `first_group` is added to the group numbers in messages.
  void check(const ParamGroups& groups, std::int64_t first_group = 0) const;

  /// Brings the pairs in line with the groups that the inner optimizer holds
  /// now, and makes masters for the half parameters among them that are
  /// trainable and new, or that hold a gradient. Returns the pairs just made.
  /// Costs a comparison of pointers where nothing changed. A new master takes
  /// 4 bytes an element; they are made one at a time. Checks first, like
  /// `check`, and changes nothing on error.
  std::vector<Adoption> ingest(const ParamGroups& groups);

  /// Returns whether `ingest` would change nothing for groups of parameters at
  /// these addresses. Takes a few nanoseconds a parameter.
  bool is_current(
      const std::vector<std::vector<const c10::TensorImpl*>>& groups) const;

  /// Tells the names of the parameters in their module, by group and position,
  /// for reports and messages. Empty names and positions that are left out have
  /// none.
  void set_names(std::vector<std::vector<std::string>> names);

  /// Tells, by group and position, which gradients this process counts in
  /// norms, where others have some of them too. What is left out counts.
  void set_counted(std::vector<std::vector<bool>> counted);

  /// Returns, by group, the parameters of the model, frozen ones included.
  ParamGroups parameters() const;

  /// Returns, by group, the half parameters that have masters, the masters in
  /// the same order, and the native trainable parameters.
  ParamGroups model_params() const;
  ParamGroups master_params() const;
  ParamGroups native_params() const;

  /// Returns, by group, the position of each master within its group.
  std::vector<std::vector<std::int64_t>> master_positions() const;

  /// Returns lines that tell people what was ingested: one for each group from
  /// `first_group` on, and after it one for each of its parameters.
  std::vector<std::string> describe(std::int64_t first_group = 0) const;

  /// Makes masters for the frozen or native-turned-half parameters at
  /// `positions`, so that a checkpoint that has masters there fits. Throws
  /// ValueError if a position holds no half parameter.
  std::vector<Adoption> adopt_at(
      const std::vector<std::vector<std::int64_t>>& positions);

  /// Throws ValueError unless `masters` has the shapes of `master_params()`.
  void check_masters(const ParamGroups& masters) const;

  /// Copies `masters` into the masters (any floating dtype and device) and
  /// writes the rounded values to the model. Checks first.
  void load_masters(const ParamGroups& masters);

  /// Reads the model gradients once and writes unscaled fp32 master gradients:
  /// checks for inf and NaN, casts, multiplies by the fp32 rounding of the fp64
  /// reciprocal of `scale` (float64 parameters: the fp64 reciprocal), and
  /// measures. Native gradients are unscaled in place. A parameter without a
  /// gradient gets a master without one. Master gradients are allocated where
  /// they are missing. With an overflow the master gradients are written all
  /// the same and hold no meaning.
  void take_gradients(const DeviceNumber& scale);

  /// Returns the one CUDA device that all gradients of the last
  /// `take_gradients` are on, if there is one: what depends on them can then be
  /// decided there.
  std::optional<c10::Device> only_device() const;

  /// Returns the flag of the last `take_gradients` on that device, a float32
  /// tensor of no dimensions: 1 if it met inf or NaN, else 0.
  at::Tensor found_inf() const;

  /// Returns whether the last `take_gradients` met inf or NaN.
  /// On CUDA it synchronizes, once a device.
  bool overflow() const;

  /// Returns the 2-norm over all gradients that the last `take_gradients` took,
  /// unscaled. On CUDA it synchronizes, once a device.
  double taken_norm() const;

  /// Returns what the last `take_gradients` found. On CUDA it synchronizes.
  GradientReport report() const;

  /// Undoes on native gradients what was multiplied into them since the last
  /// backward pass (1/scale and clipping), so that the next one accumulates on
  /// scaled values, and multiplies all model gradients by `ratio` where the
  /// scale changed meanwhile. Exact for powers of two.
  void restore_scaled_gradients(const DeviceNumber& ratio);

  /// Takes native gradients for as scaled as a backward pass leaves them, where
  /// one ran that nobody could tell of, in a CUDA graph.
  void forget_native_factors();

  /// Returns the p-norm over all unscaled gradients in double; infinite for
  /// `norm_type` infinity means the largest magnitude. The 2-norm and the
  /// inf-norm were measured by `take_gradients` and cost nothing, unless a
  /// gradient was changed since, which is noticed. With several processes
  /// `combine` makes it the norm over what each of them counts, in one call; a
  /// NaN in a maximum is infinite then.
  double gradient_norm(double norm_type, const Combine& combine = nullptr);

  /// What clipping comes to on the device: the norm before as a 0-dim float32
  /// tensor, -1 after an overflow, and what to multiply the gradients by.
  struct DeviceClip {
    at::Tensor norm;
    DeviceNumber coefficient;
  };

  /// Decides on clipping on the only device, without waiting for it; nothing
  /// where there is none, or where the norm was not measured by
  /// `take_gradients` (see `gradient_norm`). `check_overflow` tells whether inf
  /// and NaN count as an overflow.
  std::optional<DeviceClip> clip_on_device(
      double max_norm,
      double norm_type,
      bool check_overflow) const;

  /// Multiplies all master and native gradients by `coefficient`, in place
  /// where they are materialized.
  void scale_gradients(const DeviceNumber& coefficient);

  /// Returns the gradients that the inner optimizer sees, by group; undefined
  /// where there is none. They alias the real ones; where master gradients are
  /// not materialized, those of masters are made for the caller, and undefined
  /// if the model's gradient changed since it was taken.
  ParamGroups master_gradients() const;

  /// Returns the position of a half parameter whose gradient is no longer what
  /// `take_gradients` has seen, where master gradients are not materialized and
  /// it is still needed.
  std::optional<TensorReport> lost_gradient() const;

  /// Clears the gradients of masters, native, frozen and half parameters.
  /// Sets them to None, or detaches and zeroes them.
  void zero_grad(bool set_to_none);

  /// Returns the position of a half parameter whose gradient has changed since
  /// the last `take_gradients` and is not all zeros; with `native`, the first
  /// native parameter with a non-zero gradient counts too.
  std::optional<TensorReport> waiting_gradient(bool native) const;

  /// Prepares an update by a rule, in the place of the inner optimizer's step,
  /// of every parameter that has a gradient: asks `find_state` for the state of
  /// each. `options` has an entry for each group, resolved for the rule.
  ///
  /// Returns nothing, and `run_update` may follow at once, with options, state
  /// tensors and gradients as they are; or what stands in the way: state that
  /// is missing in part, or of another dtype, layout or device than the
  /// weight's; a sparse gradient, or one of another kind than the weight; a
  /// native weight with gaps in its memory; and a gradient set on a master that
  /// should have none. Throws like `write_model` for a master or model that
  /// changed its kind. Changes nothing.
  std::optional<std::string> prepare_update(
      const UpdateRule& rule,
      c10::ArrayRef<RuleOptions> options,
      FindRuleState find_state);

  /// Returns whether a prepared update has to make state for a parameter.
  bool makes_state() const;

  /// Runs the prepared update: one pass that reads gradients, weights and
  /// state, and writes weights, state and the rounded weights to the model,
  /// bumping the versions of weights and model. Returns the state that was made
  /// for parameters without. A parameter without a gradient is untouched. With
  /// `unless_overflow` the only device decides by its flag whether anything is
  /// touched. On a device, counters that were on the host move there, and are
  /// returned like new state. Throws RuntimeError if no update is prepared.
  std::vector<NewRuleState> run_update(bool unless_overflow = false);

  /// Finds half parameters that were written by others since the core last
  /// saw them, and lets their masters take over the elements that differ from
  /// the rounded master. Equal elements keep all their bits.
  void adopt_model_writes();

  /// Overwrites all masters with the model's values.
  void overwrite_masters();

  /// Writes the masters to the half parameters, rounding to nearest even, and
  /// bumps their versions. A master beyond the half range becomes inf. With
  /// `only_stale`, after a `run_update`, those are left out whose masters did
  /// not change since they were written, by their version.
  void write_model(bool only_stale = false);

  /// Returns the pairs whose master was finite and beyond the half range when
  /// it was last written, each pair once in its life. On CUDA it is told late:
  /// when the device has got there, without waiting for it.
  std::vector<TensorReport> take_new_saturations();

  /// Copies every trainable master and native parameter, so that `rollback`
  /// can put them back and write the model. 4 bytes an element.
  void take_snapshot();
  void rollback();
  void drop_snapshot();

 private:
  friend class OptimizerCore;
  // The kernels of the only device, or null, and the positions of the gradients
  // that they took.
  detail::ListKernels* only_kernels() const;
  std::vector<std::pair<std::int64_t, std::int64_t>> taken_positions() const;
  // What a report says of a parameter, without findings.
  std::optional<TensorReport> entry(std::int64_t group, std::int64_t index)
      const;

  struct FP16CORE_LOCAL Pair;
  struct FP16CORE_LOCAL Impl;
  std::unique_ptr<Impl> impl_;
};

} // namespace fp16core
