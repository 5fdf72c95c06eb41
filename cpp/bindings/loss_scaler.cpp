// Bindings of the loss scalers, and the adapter for scalers written in Python.

#include "bindings.h"

#include <fp16core/scale_policies.h>

#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <type_traits>
#include <utility>

namespace fp16core::bindings {

namespace {

using Options = DynamicLossScalerOptions;
using State = DynamicLossScaleState;

// Drives any Python object that has `loss_scale` and `update_scale`.
class PythonLossScaler final : public LossScaler {
 public:
  explicit PythonLossScaler(nb::handle object) : object_(object) {
    if (nb::isinstance<DynamicLossScaler>(object)) {
      base_ = nb::inst_ptr<DynamicLossScaler>(object);
    }
  }

  double loss_scale() const override {
    const nb::gil_scoped_acquire gil;
    return nb::cast<double>(object_.attr("loss_scale"));
  }

  void set_loss_scale(double scale) override {
    const nb::gil_scoped_acquire gil;
    object_.attr("cur_scale") = scale;
  }

  void update_scale(bool overflow) override {
    const nb::gil_scoped_acquire gil;
    const double before = loss_scale();
    object_.attr("update_scale")(overflow);
    stuck_ = overflow && loss_scale() == before;
  }

  const void* identity() const override { return object_.ptr(); }

  // Whatever it is, it may move the scale.
  bool dynamic() const override { return true; }

  // Where the rule is unknown, what it did at the last overflow has to tell.
  bool at_floor() const override {
    return base_ != nullptr ? base_->at_floor() : stuck_;
  }

  std::int64_t overflows_tolerated() const override {
    return base_ != nullptr ? base_->overflows_tolerated() : 0;
  }

 private:
  nb::handle object_;
  const DynamicLossScaler* base_ = nullptr;
  bool stuck_ = false;
};

bool overrides(nb::handle object, const char* name) {
  return !object.type().attr(name).is(nb::type<LossScaler>().attr(name));
}

template <auto Member>
auto state_getter() {
  return [](const DynamicLossScaler& self) { return self.state().*Member; };
}

template <auto Member>
auto state_setter() {
  return
      [](DynamicLossScaler& self,
         std::remove_cvref_t<decltype(std::declval<State>().*Member)> value) {
        auto state = self.state();
        state.*Member = value;
        self.set_state(state);
      };
}

template <auto Member>
auto option_getter() {
  return [](const DynamicLossScaler& self) { return self.options().*Member; };
}

template <auto Member>
auto option_setter() {
  return
      [](DynamicLossScaler& self,
         std::remove_cvref_t<decltype(std::declval<Options>().*Member)> value) {
        auto options = self.options();
        options.*Member = value;
        self.set_options(options);
      };
}

} // namespace

std::shared_ptr<LossScaler> scaler_from_python(nb::handle scaler) {
  if (nb::isinstance<LossScaler>(scaler) && !overrides(scaler, "loss_scale") &&
      !overrides(scaler, "update_scale")) {
    return {nb::inst_ptr<LossScaler>(scaler), [](LossScaler*) {}};
  }
  if (!nb::hasattr(scaler, "loss_scale") ||
      !nb::hasattr(scaler, "update_scale")) {
    const std::string text = std::string(
                                 "FP16_Optimizer.loss_scaler: must have "
                                 "loss_scale and update_scale, but got ") +
        nb::repr(scaler).c_str();
    throw nb::type_error(text.c_str());
  }
  return std::make_shared<PythonLossScaler>(scaler);
}

void bind_loss_scaler(nb::module_& m) {
  nb::class_<LossScaler>(
      m,
      "LossScaler",
      "A loss scale that stays where it is put.")
      .def(nb::init<double>(), nb::arg("scale") = 1.0)
      .def_prop_ro(
          "loss_scale",
          &LossScaler::loss_scale,
          "The factor that the next backward pass uses.")
      .def_prop_rw(
          "cur_scale",
          &LossScaler::loss_scale,
          &LossScaler::set_loss_scale,
          "The loss scale, to read and to set by hand.")
      .def(
          "update_scale",
          &LossScaler::update_scale,
          nb::arg("overflow"),
          "Tells the scaler whether an iteration overflowed.")
      .def_prop_ro(
          "dynamic",
          &LossScaler::dynamic,
          "Whether update_scale may move the scale.");
  nb::class_<DynamicLossScaler, LossScaler>(
      m,
      "DynamicLossScaler",
      "A loss scale that backs off after an overflow and grows after a run of "
      "clean iterations.")
      .def(
          "__init__",
          [](DynamicLossScaler* self,
             double init_scale,
             double scale_factor,
             double scale_window,
             double min_scale,
             std::int64_t delayed_shift,
             bool consecutive_hysteresis,
             double backoff_factor,
             double max_scale,
             std::int64_t window_lag,
             double tolerance,
             bool raise_at_floor,
             double error_scale,
             bool float32_scale,
             bool float32_factors) {
            new (self) DynamicLossScaler(
                Options{
                    init_scale,
                    scale_factor,
                    scale_window,
                    min_scale,
                    delayed_shift,
                    consecutive_hysteresis,
                    backoff_factor,
                    max_scale,
                    window_lag,
                    tolerance,
                    raise_at_floor,
                    error_scale,
                    float32_scale,
                    float32_factors});
          },
          nb::arg("init_scale") = Options{}.init_scale,
          nb::arg("scale_factor") = Options{}.scale_factor,
          nb::arg("scale_window") = Options{}.scale_window,
          nb::arg("min_scale") = Options{}.min_scale,
          nb::arg("delayed_shift") = Options{}.delayed_shift,
          nb::arg("consecutive_hysteresis") = Options{}.consecutive_hysteresis,
          nb::arg("backoff_factor") = Options{}.backoff_factor,
          nb::arg("max_scale") = Options{}.max_scale,
          nb::arg("window_lag") = Options{}.window_lag,
          nb::arg("tolerance") = Options{}.tolerance,
          nb::arg("raise_at_floor") = Options{}.raise_at_floor,
          nb::arg("error_scale") = Options{}.error_scale,
          nb::arg("float32_scale") = Options{}.float32_scale,
          nb::arg("float32_factors") = Options{}.float32_factors)
      .def_prop_rw(
          "cur_iter",
          state_getter<&State::cur_iter>(),
          state_setter<&State::cur_iter>(),
          "Iterations so far, clean or not.")
      .def_prop_rw(
          "last_overflow_iter",
          state_getter<&State::last_overflow_iter>(),
          state_setter<&State::last_overflow_iter>(),
          "The iteration of the last overflow; -1 before the first.")
      .def_prop_rw(
          "cur_hysteresis",
          state_getter<&State::cur_hysteresis>(),
          state_setter<&State::cur_hysteresis>(),
          "Overflows until the next backoff, 1 being the next one.")
      .def_prop_rw(
          "last_rescale_iter",
          state_getter<&State::last_rescale_iter>(),
          state_setter<&State::last_rescale_iter>(),
          "The iteration in which the scale was moved last; -1 before the "
          "first.")
      .def_prop_rw(
          "overflows_since_rescale",
          state_getter<&State::overflows_since_rescale>(),
          state_setter<&State::overflows_since_rescale>(),
          "Overflows since the scale was lowered last.")
      .def_prop_rw(
          "scale_factor",
          option_getter<&Options::scale_factor>(),
          option_setter<&Options::scale_factor>(),
          "Growth multiplies by it; backoff divides by it, or see "
          "backoff_factor.")
      .def_prop_rw(
          "scale_window",
          option_getter<&Options::scale_window>(),
          option_setter<&Options::scale_window>(),
          "Clean iterations until the scale grows.")
      .def_prop_rw(
          "min_scale",
          option_getter<&Options::min_scale>(),
          option_setter<&Options::min_scale>(),
          "Backoff never goes below it.")
      .def_prop_rw(
          "delayed_shift",
          option_getter<&Options::delayed_shift>(),
          option_setter<&Options::delayed_shift>(),
          "Overflows until the scale is lowered.")
      .def_prop_rw(
          "consecutive_hysteresis",
          option_getter<&Options::consecutive_hysteresis>(),
          option_setter<&Options::consecutive_hysteresis>(),
          "Whether every clean iteration restores the tolerance.")
      .def_prop_rw(
          "backoff_factor",
          option_getter<&Options::backoff_factor>(),
          option_setter<&Options::backoff_factor>(),
          "What backoff multiplies by; 0 to divide by scale_factor.")
      .def_prop_rw(
          "max_scale",
          option_getter<&Options::max_scale>(),
          option_setter<&Options::max_scale>(),
          "Growth never goes beyond it.")
      .def_prop_rw(
          "window_lag",
          option_getter<&Options::window_lag>(),
          option_setter<&Options::window_lag>(),
          "Clean iterations by which a growth comes later.")
      .def_prop_rw(
          "tolerance",
          option_getter<&Options::tolerance>(),
          option_setter<&Options::tolerance>(),
          "The share of overflows below which the scale is not lowered.")
      .def_prop_rw(
          "raise_at_floor",
          option_getter<&Options::raise_at_floor>(),
          option_setter<&Options::raise_at_floor>(),
          "Whether an overflow at min_scale is a LossScaleError.")
      .def_prop_rw(
          "error_scale",
          option_getter<&Options::error_scale>(),
          option_setter<&Options::error_scale>(),
          "To lower the scale to it or below is a LossScaleError; 0 for none.")
      .def_prop_ro(
          "float32_scale",
          option_getter<&Options::float32_scale>(),
          "Whether the scale is rounded to float32.")
      .def_prop_ro(
          "float32_factors",
          option_getter<&Options::float32_factors>(),
          "Whether the factors are rounded to float32.")
      .def_static(
          "_names",
          [] {
            std::vector<std::string> options;
            std::vector<std::string> counters;
            const Options rule;
            const State state{rule.init_scale, 0, -1, 1};
            for_each_option(rule, [&](const char* name, const auto&) {
              options.emplace_back(name);
            });
            for_each_counter(state, [&](const char* name, const auto&) {
              counters.emplace_back(name);
            });
            return std::pair(options, counters);
          },
          "Returns the names of the rule's numbers and of the counters.");
  m.def(
      "scale_policy",
      [](const std::string& name, const ScalePolicyParameters& parameters) {
        const auto rule = scale_policy(name, parameters);
        nb::typed<nb::dict, nb::str, nb::any> options;
        options["init_scale"] = rule.init_scale;
        for_each_option(rule, [&](const char* option, const auto& value) {
          options[option] = value;
        });
        return options;
      },
      nb::arg("name"),
      nb::arg("parameters"),
      "Returns the arguments of DynamicLossScaler that make it follow the rule "
      "of another project.");
  m.def(
      "scale_policy_names",
      &scale_policy_names,
      "Returns the names of the policies.");
  m.def(
      "scale_policy_parameters",
      &scale_policy_parameters,
      nb::arg("name"),
      "Returns the names of a policy's parameters.");
}

} // namespace fp16core::bindings
