// What the binding files share.

#pragma once

#include "tensor_caster.h"

#include <fp16core/optimizer_core.h>

#include <nanobind/nanobind.h>

#include <memory>

namespace fp16core::bindings {

namespace nb = nanobind;

void bind_loss_scaler(nb::module_& m);
void bind_gradient_report(nb::module_& m);
void bind_optimizer_core(nb::module_& m);
void bind_tensor_lists(nb::module_& m);
void bind_update_rule(nb::module_& m);
void bind_build(nb::module_& m);

/// Returns the scaler behind a Python object: itself where it is one of ours
/// with nothing overridden, or else an adapter that calls the object's
/// `loss_scale` and `update_scale`. Throws TypeError without those two. The
/// result does not keep the object alive.
std::shared_ptr<LossScaler> scaler_from_python(nb::handle scaler);

} // namespace fp16core::bindings
