// Bindings of the gradient report.

#include "bindings.h"

#include <fp16core/step_record.h>

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <sstream>

namespace fp16core::bindings {

void bind_gradient_report(nb::module_& m) {
  nb::class_<TensorReport>(
      m,
      "TensorReport",
      "The findings for one parameter's gradient.")
      .def_ro("group", &TensorReport::group, "Number of the param group.")
      .def_ro("index", &TensorReport::index, "Position within the group.")
      .def_ro("parameter", &TensorReport::parameter, "The model's parameter.")
      .def_ro("inf_count", &TensorReport::inf_count, "Infinite elements.")
      .def_ro("nan_count", &TensorReport::nan_count, "NaN elements.")
      .def_ro("norm", &TensorReport::norm, "2-norm, unscaled.")
      .def_ro("largest", &TensorReport::largest, "Largest magnitude, unscaled.")
      .def_ro(
          "saturated",
          &TensorReport::saturated,
          "Whether the last write of the model stored a finite master as inf.")
      .def_ro(
          "name",
          &TensorReport::name,
          "The parameter's name in the module; empty where nobody has told.")
      .def("__repr__", &GradientReport::describe);
  nb::class_<GradientReport>(
      m,
      "GradientReport",
      "What the last update found in the gradients, in the order of the param "
      "groups. Parameters without a gradient have no entry.")
      .def_ro("tensors", &GradientReport::tensors, "One entry a gradient.")
      .def_ro(
          "overflow",
          &GradientReport::overflow,
          "Whether any element is infinite or NaN.")
      .def_ro("norm", &GradientReport::norm, "2-norm over all, unscaled.")
      .def_ro(
          "largest",
          &GradientReport::largest,
          "Largest magnitude over all, unscaled.")
      .def(
          "first_offender",
          &GradientReport::first_offender,
          nb::rv_policy::reference_internal,
          "Returns the first entry with a non-finite element, or None.")
      .def(
          "culprits",
          &GradientReport::culprits,
          "Returns the entries with a non-finite element. Infinite elements "
          "mean "
          "that the scale is too high, or the gradient too large at any scale; "
          "NaN means that something went wrong before: no scale cures it.");
  nb::class_<StepRecord>(
      m,
      "StepRecord",
      "What one step came to; a step with a closure has one an evaluation.")
      .def_ro(
          "step",
          &StepRecord::step,
          "Its number among the steps, applied or skipped; the first is 1.")
      .def_ro(
          "scale",
          &StepRecord::scale,
          "The scale that the gradients were made with.")
      .def_ro(
          "overflow",
          &StepRecord::overflow,
          "Whether a gradient was infinite or NaN.")
      .def_ro(
          "skipped",
          &StepRecord::skipped,
          "Whether the step was skipped for it; an evaluation that is repeated "
          "at "
          "a lower scale skips nothing.")
      .def_ro(
          "skipped_in_a_row",
          &StepRecord::skipped_in_a_row,
          "How many skipped steps in a row it ended, itself counted; 0 if it "
          "was "
          "applied.")
      .def_ro(
          "norm",
          &StepRecord::norm,
          "2-norm of all unscaled gradients, before clipping.")
      .def_ro(
          "culprits",
          &StepRecord::culprits,
          "The gradients with an infinite or NaN element; of a step that a "
          "device decided on the first of them.")
      .def("__repr__", [](const StepRecord& self) {
        std::ostringstream text;
        text << "StepRecord(step=" << self.step << ", scale=" << self.scale
             << ", overflow=" << (self.overflow ? "True" : "False")
             << ", norm=" << self.norm;
        for (const auto& culprit : self.culprits) {
          text << ", culprit " << GradientReport::describe(culprit);
        }
        text << ")";
        return text.str();
      });
}

} // namespace fp16core::bindings
