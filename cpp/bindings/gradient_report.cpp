// Bindings of the gradient report.

#include "bindings.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

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
          "Returns the first entry with a non-finite element, or None.");
}

} // namespace fp16core::bindings
