// Bindings of the functions on lists of tensors.

#include "bindings.h"

#include <fp16core/scale_on_tensors.h>
#include <fp16core/tensor_lists.h>

#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

namespace fp16core::bindings {

void bind_tensor_lists(nb::module_& m) {
  using Released = nb::call_guard<nb::gil_scoped_release>;
  m.def(
      "has_overflow",
      &has_overflow,
      Released(),
      nb::arg("tensors"),
      "Returns whether any element of the tensors is infinite or NaN.");
  m.def(
      "cast",
      &cast,
      Released(),
      nb::arg("tensors"),
      nb::arg("dtype"),
      "Returns copies of the tensors in another floating point dtype, without "
      "a "
      "graph.");
  m.def(
      "copy_",
      &copy_,
      Released(),
      nb::arg("targets"),
      nb::arg("sources"),
      "Writes the sources to the targets, each in its target's dtype.");
  m.def(
      "scaled_copy_",
      &scaled_copy_,
      Released(),
      nb::arg("targets"),
      nb::arg("sources"),
      nb::arg("factor"),
      "Writes factor times the sources to the targets, and returns whether any "
      "element of the sources is infinite or NaN.");
  m.def(
      "axpby_",
      &axpby_,
      Released(),
      nb::arg("targets"),
      nb::arg("a"),
      nb::arg("x"),
      nb::arg("b"),
      nb::arg("y"),
      "Writes a * x + b * y to the targets.");
  m.def(
      "norms",
      [](const std::vector<at::Tensor>& tensors, double factor) {
        auto found = norms(tensors, factor);
        return std::pair(std::move(found.total), std::move(found.per_tensor));
      },
      Released(),
      nb::arg("tensors"),
      nb::arg("factor") = 1.0,
      "Returns the 2-norm of factor times all tensors, of shape [1], and of "
      "each, of shape [n].");
  m.def(
      "clip_grad_norm_",
      &clip_grad_norm_,
      Released(),
      nb::arg("gradients"),
      nb::arg("max_norm"),
      nb::arg("norm_type") = 2.0,
      "Clips the gradients in place and returns their norm before.");
  m.def(
      "update_scale_hysteresis",
      &update_scale_hysteresis,
      Released(),
      nb::arg("current_scale"),
      nb::arg("growth_tracker"),
      nb::arg("hysteresis_tracker"),
      nb::arg("found_inf"),
      nb::arg("growth_factor"),
      nb::arg("backoff_factor"),
      nb::arg("growth_interval"),
      nb::arg("hysteresis"),
      "Advances a scale that is kept in tensors by one iteration, in place.");
}

} // namespace fp16core::bindings
