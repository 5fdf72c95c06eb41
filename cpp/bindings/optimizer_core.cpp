// Bindings of the step logic, and the view of a Python optimizer's groups.

#include "bindings.h"
#include "rule_view.h"

#include <nanobind/stl/function.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>

namespace fp16core::bindings {

namespace {

using Released = nb::call_guard<nb::gil_scoped_release>;
using Positions = std::vector<std::vector<std::int64_t>>;
using AdoptionTuple =
    std::tuple<std::int64_t, std::int64_t, at::Tensor, at::Tensor>;

// Reads the parameters of a list of group dicts as addresses, without touching
// a reference count. Returns false for anything but lists of tensors.
bool read_addresses(
    nb::handle param_groups,
    std::vector<std::vector<const c10::TensorImpl*>>& groups) {
  static PyObject* const params = PyUnicode_InternFromString("params");
  if (!PyList_Check(param_groups.ptr())) {
    return false;
  }
  const Py_ssize_t group_count = PyList_GET_SIZE(param_groups.ptr());
  groups.resize(group_count);
  for (Py_ssize_t g = 0; g < group_count; ++g) {
    PyObject* group = PyList_GET_ITEM(param_groups.ptr(), g);
    PyObject* list =
        PyDict_Check(group) ? PyDict_GetItem(group, params) : nullptr;
    if (list == nullptr || !PyList_Check(list)) {
      return false;
    }
    const Py_ssize_t count = PyList_GET_SIZE(list);
    groups[g].resize(count);
    for (Py_ssize_t i = 0; i < count; ++i) {
      PyObject* parameter = PyList_GET_ITEM(list, i);
      const auto* tensor = tensor_in(parameter);
      if (tensor == nullptr) {
        return false;
      }
      groups[g][i] = tensor->unsafeGetTensorImpl();
    }
  }
  return true;
}

// Reads the parameters of a list of group dicts.
ParamGroups read_groups(nb::handle param_groups) {
  ParamGroups groups;
  for (const nb::handle group : param_groups) {
    auto& parameters = groups.emplace_back();
    for (const nb::handle parameter : group["params"]) {
      at::Tensor tensor;
      if (!nb::try_cast(parameter, tensor)) {
        const std::string text =
            std::string(
                "FP16_Optimizer: param groups must hold tensors, but got ") +
            nb::repr(parameter).c_str();
        throw nb::type_error(text.c_str());
      }
      parameters.push_back(std::move(tensor));
    }
  }
  return groups;
}

std::vector<AdoptionTuple> to_tuples(const std::vector<Adoption>& adoptions) {
  std::vector<AdoptionTuple> tuples;
  for (const auto& a : adoptions) {
    tuples.emplace_back(a.group, a.index, a.model, a.master);
  }
  return tuples;
}

// The core and the Python object of its scaler, which the garbage collector
// must see: a scaler's class leads to globals that may lead back to the
// optimizer. Tensors are not traversed, since torch's own collection of them
// does not stand being looked into.
class BoundCore : public OptimizerCore {
 public:
  BoundCore(OptimizerCoreOptions options, nb::handle scaler)
      : OptimizerCore(std::move(options), scaler_from_python(scaler)),
        scaler_(nb::borrow(scaler)) {}

  const nb::object& scaler() const { return scaler_; }
  RuleView& rule_view() { return rule_view_; }

  void set_scaler(nb::handle scaler) {
    set_loss_scaler(scaler_from_python(scaler));
    scaler_ = nb::borrow(scaler);
  }

  static int traverse(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    if (nb::inst_ready(self)) {
      Py_VISIT(nb::inst_ptr<BoundCore>(self)->scaler_.ptr());
    }
    return 0;
  }

  static int clear(PyObject* self) {
    if (nb::inst_ready(self)) {
      auto* core = nb::inst_ptr<BoundCore>(self);
      // Something to stand on for whoever still calls.
      core->set_loss_scaler(std::make_shared<LossScaler>());
      core->scaler_.reset();
    }
    return 0;
  }

 private:
  nb::object scaler_;
  RuleView rule_view_;
};

PyType_Slot core_slots[] = {
    {Py_tp_traverse, reinterpret_cast<void*>(&BoundCore::traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(&BoundCore::clear)},
    {0, nullptr},
};

MasterWeights& weights(OptimizerCore& core) {
  return core.master_weights();
}

} // namespace

void bind_optimizer_core(nb::module_& m) {
  nb::enum_<OnMinScale>(
      m,
      "OnMinScale",
      "What a skipped step at the scale's floor leads to.")
      .value("CONTINUE", OnMinScale::kContinue)
      .value("WARN", OnMinScale::kWarn)
      .value("RAISE", OnMinScale::kRaise);
  nb::enum_<ModelWrites>(
      m,
      "ModelWrites",
      "How writes to the model by others are noticed.")
      .value("VERSION", ModelWrites::kVersion)
      .value("VALUES", ModelWrites::kValues);
  nb::enum_<Evaluation>(
      m,
      "Evaluation",
      "What to do after an evaluation of a closure.")
      .value("ACCEPT", Evaluation::kAccept)
      .value("REPEAT", Evaluation::kRepeat)
      .value("SKIP", Evaluation::kSkip);
  nb::enum_<Reduction>(
      m,
      "Reduction",
      "What is made of the numbers of all processes.")
      .value("SUM", Reduction::kSum)
      .value("MAX", Reduction::kMax);
  m.def(
      "widen_state",
      &widen_state,
      Released(),
      nb::arg("state"),
      nb::arg("master"),
      "Returns a piece of optimizer state in the precision of the masters.");

  nb::class_<OptimizerCore>(m, "_OptimizerCoreBase");
  nb::class_<BoundCore, OptimizerCore>(
      m,
      "OptimizerCore",
      nb::type_slots(core_slots),
      "Loss scaling, overflow handling and master weights, as the phases of a "
      "step.")
      .def(
          "__init__",
          [](BoundCore* self,
             std::string owner,
             nb::handle loss_scaler,
             bool check_overflow,
             OnMinScale on_min_scale,
             ModelWrites model_writes,
             bool materialize_gradients,
             const Combine& combine,
             std::int64_t history_size) {
            new (self) BoundCore(
                {std::move(owner),
                 check_overflow,
                 on_min_scale,
                 model_writes,
                 materialize_gradients,
                 combine,
                 history_size},
                loss_scaler);
          },
          nb::arg("owner"),
          nb::arg("loss_scaler"),
          nb::arg("check_overflow"),
          nb::arg("on_min_scale"),
          nb::arg("model_writes"),
          nb::arg("materialize_gradients"),
          nb::arg("combine").none() = nb::none(),
          nb::arg("history_size") = OptimizerCoreOptions{}.history_size)
      .def_prop_rw(
          "loss_scaler",
          &BoundCore::scaler,
          &BoundCore::set_scaler,
          nb::for_setter(nb::arg("scaler").none()))
      .def_prop_rw(
          "loss_scale",
          [](const OptimizerCore& self) {
            return self.loss_scaler()->loss_scale();
          },
          [](OptimizerCore& self, double scale) {
            self.loss_scaler()->set_loss_scale(scale);
          })
      .def_prop_ro(
          "dynamic",
          [](const OptimizerCore& self) {
            return self.loss_scaler()->dynamic();
          })
      .def_prop_ro(
          "materialize_gradients",
          [](const OptimizerCore& self) {
            return self.options().materialize_gradients;
          })

      // Parameters.
      .def(
          "check",
          [](OptimizerCore& self, nb::handle groups, std::int64_t first_group) {
            weights(self).check(read_groups(groups), first_group);
          },
          nb::arg("param_groups"),
          nb::arg("first_group") = 0)
      .def(
          "is_current",
          [](OptimizerCore& self, nb::handle param_groups) {
            // Kept for its memory: this runs several times an iteration.
            thread_local std::vector<std::vector<const c10::TensorImpl*>>
                addresses;
            return read_addresses(param_groups, addresses) &&
                weights(self).is_current(addresses);
          },
          nb::arg("param_groups"))
      .def(
          "ingest",
          [](OptimizerCore& self, nb::handle param_groups) {
            const auto groups = read_groups(param_groups);
            const nb::gil_scoped_release release;
            return to_tuples(weights(self).ingest(groups));
          },
          nb::arg("param_groups"))
      .def(
          "adopt_at",
          [](OptimizerCore& self, const Positions& positions) {
            return to_tuples(weights(self).adopt_at(positions));
          },
          nb::arg("positions"))
      .def(
          "set_names",
          [](OptimizerCore& self, std::vector<std::vector<std::string>> names) {
            weights(self).set_names(std::move(names));
          },
          nb::arg("names"))
      .def(
          "set_counted",
          [](OptimizerCore& self, std::vector<std::vector<bool>> counted) {
            weights(self).set_counted(std::move(counted));
          },
          nb::arg("counted"))
      .def(
          "parameters",
          [](OptimizerCore& self) { return weights(self).parameters(); })
      .def(
          "model_params",
          [](OptimizerCore& self) { return weights(self).model_params(); })
      .def(
          "master_params",
          [](OptimizerCore& self) { return weights(self).master_params(); })
      .def(
          "native_params",
          [](OptimizerCore& self) { return weights(self).native_params(); })
      .def(
          "master_positions",
          [](OptimizerCore& self) { return weights(self).master_positions(); })
      .def(
          "describe",
          [](OptimizerCore& self, std::int64_t first_group) {
            return weights(self).describe(first_group);
          },
          nb::arg("first_group"))
      .def(
          "load_masters",
          [](OptimizerCore& self, const ParamGroups& masters) {
            weights(self).load_masters(masters);
          },
          Released(),
          nb::arg("masters"))

      // Gradients.
      .def(
          "scale_loss",
          &OptimizerCore::scale_loss,
          Released(),
          nb::arg("loss"))
      .def(
          "update_master_grads",
          &OptimizerCore::update_master_grads,
          Released())
      .def("fail_update", &OptimizerCore::fail_update, Released())
      .def("copy_gradients", &OptimizerCore::copy_gradients, Released())
      .def(
          "downscale_gradients",
          &OptimizerCore::downscale_gradients,
          Released())
      .def(
          "clip_master_grads",
          &OptimizerCore::clip_master_grads,
          Released(),
          nb::arg("max_norm"),
          nb::arg("norm_type"))
      .def(
          "master_gradients",
          [](OptimizerCore& self) { return weights(self).master_gradients(); })
      .def(
          "gradient_report",
          [](OptimizerCore& self) { return weights(self).report(); },
          Released())
      .def(
          "zero_grad",
          &OptimizerCore::zero_grad,
          Released(),
          nb::arg("set_to_none"))

      // Weights.
      .def(
          "adopt_model_writes",
          [](OptimizerCore& self) { weights(self).adopt_model_writes(); },
          Released())
      .def(
          "overwrite_masters",
          [](OptimizerCore& self) { weights(self).overwrite_masters(); },
          Released())
      .def(
          "write_model",
          [](OptimizerCore& self) { weights(self).write_model(); },
          Released())

      // The step.
      .def(
          "begin_step",
          &OptimizerCore::begin_step,
          Released(),
          nb::arg("may_defer") = false)
      .def_prop_ro("deferred", &OptimizerCore::deferred)
      .def_prop_ro("decided_on_device", &OptimizerCore::decided_on_device)
      .def("settle", &OptimizerCore::settle, Released())
      .def(
          "found_inf",
          [](OptimizerCore& self) { return weights(self).found_inf(); })
      .def(
          "update",
          [](BoundCore& self,
             const UpdateRule& rule,
             nb::handle param_groups,
             nb::handle state) {
            return self.rule_view().update(self, rule, param_groups, state);
          },
          nb::arg("rule"),
          nb::arg("param_groups"),
          nb::arg("state"))
      .def(
          "finish_step",
          &OptimizerCore::finish_step,
          Released(),
          nb::arg("rewrite"))
      .def("begin_closure_step", &OptimizerCore::begin_closure_step, Released())
      .def("begin_evaluation", &OptimizerCore::begin_evaluation, Released())
      .def("end_evaluation", &OptimizerCore::end_evaluation, Released())
      .def(
          "abandon_step",
          &OptimizerCore::abandon_step,
          Released(),
          nb::arg("skipped"))

      // State.
      .def_prop_rw(
          "overflow",
          [](const OptimizerCore& self) {
            const nb::gil_scoped_release release; // it may wait for a device
            return self.overflow();
          },
          &OptimizerCore::set_overflow)
      .def_prop_rw(
          "update_pending",
          &OptimizerCore::update_pending,
          &OptimizerCore::set_update_pending)
      .def_prop_rw(
          "first_evaluation",
          &OptimizerCore::first_evaluation,
          &OptimizerCore::set_first_evaluation)
      .def_prop_ro(
          "steps_applied",
          [](const OptimizerCore& self) {
            const nb::gil_scoped_release release;
            return self.steps_applied();
          })
      .def_prop_ro(
          "steps_skipped",
          [](const OptimizerCore& self) {
            const nb::gil_scoped_release release;
            return self.steps_skipped();
          })
      .def(
          "set_step_counts",
          &OptimizerCore::set_step_counts,
          nb::arg("applied"),
          nb::arg("skipped"))
      .def("take_messages", &OptimizerCore::take_messages)
      .def("take_skips", &OptimizerCore::take_skips)
      .def("history", [](const OptimizerCore& self) {
        return std::vector<StepRecord>(
            self.history().begin(),
            self.history().end());
      });
}

} // namespace fp16core::bindings
