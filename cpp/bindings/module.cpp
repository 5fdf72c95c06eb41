// The extension module: exceptions, and the list of what is bound.

#include "bindings.h"

#include <c10/util/Exception.h>

#include <exception>

NB_MODULE(_core, m) {
  using namespace fp16core::bindings;
  m.doc() = "The C++ core of fp16core.";
  // torch's errors keep their Python class and lose their C++ backtrace.
  nb::register_exception_translator([](const std::exception_ptr& error, void*) {
    try {
      std::rethrow_exception(error);
    } catch (const c10::Error&) {
      set_python_error(error);
    }
  });
  nb::exception<fp16core::LossScaleError>(
      m,
      "LossScaleError",
      PyExc_RuntimeError)
      .attr("__doc__") =
      "An overflow that lowering the loss scale cannot cure.";
  bind_loss_scaler(m);
  bind_gradient_report(m);
  bind_tensor_lists(m);
  bind_update_rule(m);
  bind_optimizer_core(m);
  bind_build(m);
}
