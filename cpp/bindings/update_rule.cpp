// Bindings of the update rules, and the view of a Python optimizer's options
// and state.

#include "bindings.h"

#include "rule_view.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <limits>

namespace fp16core::bindings {

namespace {

// A name in a group or in a state, with what UpdateRule::options may ask of it.
struct Key {
  PyObject* name;
  // Of the value, or -1.
  Py_ssize_t item;
  bool is_float32;

  static std::string name_of(std::string_view text) {
    const auto is = text.find('(');
    return std::string(
        is == std::string_view::npos
            ? text.substr(0, text.find('['))
            : text.substr(is + 1, text.size() - is - 2));
  }

  static Key of(std::string_view text) {
    const auto bracket = text.find('[');
    return {
        PyUnicode_InternFromString(name_of(text).c_str()),
        bracket == std::string_view::npos ? -1 : text[bracket + 1] - '0',
        text.find('(') != std::string_view::npos};
  }
};

// The names of a rule as Python objects.
struct Keys {
  std::vector<Key> options;
  std::vector<PyObject*> counters;
  std::vector<PyObject*> tensors;

  explicit Keys(const UpdateRule& rule) {
    for (const auto name : rule.options) {
      options.push_back(Key::of(name));
    }
    for (const auto& counter : rule.counters) {
      counters.push_back(Key::of(counter.name).name);
    }
    for (const auto name : rule.tensors) {
      tensors.push_back(Key::of(name).name);
    }
  }

  static const Keys& of(const UpdateRule& rule) {
    static const std::vector<Keys> all = [] {
      std::vector<Keys> keys;
      for (const auto& each : update_rules()) {
        keys.emplace_back(each);
      }
      return keys;
    }();
    return all[rule.index];
  }
};

// Reads a number: a float, an int, a bool or a tensor of one element.
std::optional<double> read_number(PyObject* value) {
  if (PyFloat_CheckExact(value)) {
    return PyFloat_AS_DOUBLE(value);
  }
  if (const auto* tensor = tensor_in(value)) {
    if (tensor->numel() != 1 || tensor->is_complex()) {
      return std::nullopt;
    }
    return tensor->item().toDouble();
  }
  const double number = PyFloat_AsDouble(value);
  if (number == -1.0 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    return std::nullopt;
  }
  return number;
}

std::optional<double> read_option(nb::handle group, const Key& key) {
  PyObject* value = PyDict_GetItem(group.ptr(), key.name);
  if (value != nullptr && key.is_float32) {
    const auto* tensor = tensor_in(value);
    return tensor != nullptr && tensor->scalar_type() == at::kFloat;
  }
  if (value == nullptr || key.item < 0) {
    return value == nullptr ? std::nullopt : read_number(value);
  }
  nb::object item = nb::steal(PySequence_GetItem(value, key.item));
  if (!item.is_valid()) {
    PyErr_Clear();
    return std::nullopt;
  }
  return read_number(item.ptr());
}

std::string in_group(std::string_view name, nb::handle group, std::size_t g) {
  const std::string text = Key::name_of(name);
  PyObject* value = PyDict_GetItemString(group.ptr(), text.c_str());
  return text + "=" +
      (value == nullptr ? "nothing" : nb::repr(nb::handle(value)).c_str()) +
      " in group " + std::to_string(g);
}

// Returns the learning rate of a group if it is a tensor on `device`, or null.
const at::Tensor* rate_on_device(
    nb::handle group,
    const Key& key,
    std::optional<c10::Device> device) {
  static PyObject* const lr = PyUnicode_InternFromString("lr");
  PyObject* value = key.name == lr && !key.is_float32 && device
      ? PyDict_GetItem(group.ptr(), lr)
      : nullptr;
  const auto* tensor = value == nullptr ? nullptr : tensor_in(value);
  return tensor != nullptr && tensor->device() == *device &&
          tensor->numel() == 1 && at::isFloatingType(tensor->scalar_type())
      ? tensor
      : nullptr;
}

// Reads the options of all groups, or returns what is there instead. A learning
// rate on `device` is left there.
std::optional<std::string> read_options(
    const UpdateRule& rule,
    nb::handle param_groups,
    std::optional<c10::Device> device,
    std::vector<RuleOptions>& options) {
  static const Key fused = Key::of("fused");
  const auto& keys = Keys::of(rule);
  const std::size_t count = nb::len(param_groups);
  options.resize(count);
  for (std::size_t g = 0; g < count; ++g) {
    const nb::object group = param_groups[g];
    if (!PyDict_Check(group.ptr())) {
      return "group " + std::to_string(g) + " that is no dict";
    }
    PyObject* params = PyDict_GetItemString(group.ptr(), "params");
    if (params == nullptr || !PyList_Check(params)) {
      return "params that are no list in group " + std::to_string(g);
    }
    for (const auto name : kOptionsWithoutRule) {
      PyObject* value =
          PyDict_GetItemString(group.ptr(), std::string(name).c_str());
      const int set = value == nullptr ? 0 : PyObject_IsTrue(value);
      if (set < 0) {
        PyErr_Clear(); // whatever it is, no rule has it
      }
      if (set != 0) {
        return in_group(name, group, g);
      }
    }
    options[g].values.resize(keys.options.size());
    options[g].on_device.clear();
    for (std::size_t i = 0; i < keys.options.size(); ++i) {
      if (const auto* rate = rate_on_device(group, keys.options[i], device)) {
        options[g].on_device.emplace_back(i, *rate);
        // No rate that a float may be, so that one is sent when it comes.
        options[g].values[i] = std::numeric_limits<double>::quiet_NaN();
        continue;
      }
      const auto number = read_option(group, keys.options[i]);
      if (!number.has_value()) {
        return in_group(rule.options[i], group, g);
      }
      options[g].values[i] = *number;
    }
    // torch keeps the counters of its fused steps in float32, others in the
    // default dtype if that is float64.
    const bool wide = !read_option(group, fused).value_or(0.0) &&
        at::get_default_dtype_as_scalartype() == at::kDouble;
    options[g].counter_type = wide ? at::kDouble : at::kFloat;
    options[g].resolve(rule);
  }
  return std::nullopt;
}

// Returns the tensor under a name, or null.
const at::Tensor* read_tensor(PyObject* entry, PyObject* name) {
  PyObject* value = PyDict_GetItem(entry, name);
  return value == nullptr ? nullptr : tensor_in(value);
}

RuleState read_state(
    const UpdateRule& rule,
    const RuleOptions& options,
    PyObject* entry) {
  RuleState state;
  if (entry == nullptr || !PyDict_Check(entry)) {
    return state;
  }
  const auto& keys = Keys::of(rule);
  for (std::size_t i = 0; i < keys.counters.size(); ++i) {
    state.counters[i] = read_tensor(entry, keys.counters[i]);
    state.fresh &= state.counters[i] == nullptr;
  }
  for (std::size_t i = 0; i < keys.tensors.size(); ++i) {
    if (options.uses[i]) {
      state.tensors[i] = read_tensor(entry, keys.tensors[i]);
      state.fresh &= state.tensors[i] == nullptr;
    }
  }
  return state;
}

void put(PyObject* entry, PyObject* name, const at::Tensor& tensor) {
  if (tensor.defined()) {
    const nb::object value = nb::steal(object_of(tensor));
    if (!value.is_valid() || PyDict_SetItem(entry, name, value.ptr()) != 0) {
      nb::raise_python_error();
    }
  }
}

// Puts state that the core made under its names.
void put_state(
    const UpdateRule& rule,
    const NewRuleState& made,
    nb::handle state,
    nb::handle parameter) {
  PyObject* found = PyDict_GetItemWithError(state.ptr(), parameter.ptr());
  const nb::object entry =
      found != nullptr ? nb::borrow(found) : nb::object(nb::dict());
  const auto& keys = Keys::of(rule);
  for (std::size_t i = 0; i < keys.counters.size(); ++i) {
    put(entry.ptr(), keys.counters[i], made.counters[i]);
  }
  for (std::size_t i = 0; i < keys.tensors.size(); ++i) {
    put(entry.ptr(), keys.tensors[i], made.tensors[i]);
  }
  if (found == nullptr &&
      PyDict_SetItem(state.ptr(), parameter.ptr(), entry.ptr()) != 0) {
    nb::raise_python_error();
  }
}

nb::handle parameter_at(
    nb::handle param_groups,
    std::int64_t group,
    std::int64_t index) {
  static PyObject* const params = PyUnicode_InternFromString("params");
  PyObject* list =
      PyDict_GetItem(PyList_GET_ITEM(param_groups.ptr(), group), params);
  return PyList_GET_ITEM(list, index);
}

} // namespace

std::optional<std::string> RuleView::update(
    OptimizerCore& core,
    const UpdateRule& rule,
    nb::handle param_groups,
    nb::handle state) {
  auto& weights = core.master_weights();
  if (!PyList_Check(param_groups.ptr()) || !PyDict_Check(state.ptr())) {
    return "an optimizer whose groups or state are of another kind";
  }
  if (auto obstacle =
          read_options(rule, param_groups, weights.only_device(), options_)) {
    return obstacle;
  }
  auto obstacle =
      weights.prepare_update(rule, options_, [&](const DueParameter& due) {
        const auto& options = options_[due.group];
        if (!options.has_state) {
          return RuleState();
        }
        const auto parameter = parameter_at(param_groups, due.group, due.index);
        PyObject* entry = PyDict_GetItemWithError(state.ptr(), parameter.ptr());
        if (entry == nullptr && PyErr_Occurred() != nullptr) {
          nb::raise_python_error();
        }
        return read_state(rule, options, entry);
      });
  if (obstacle) {
    return obstacle;
  }
  std::vector<NewRuleState> made;
  {
    const nb::gil_scoped_release release;
    if (weights.makes_state() && !core.settle()) {
      return std::nullopt;
    }
    made = weights.run_update(core.deferred());
  }
  for (const auto& each : made) {
    put_state(
        rule,
        each,
        state,
        parameter_at(param_groups, each.group, each.index));
  }
  return std::nullopt;
}

void bind_update_rule(nb::module_& m) {
  nb::class_<UpdateRule>(
      m,
      "UpdateRule",
      "An update rule that the core can run in the place of an optimizer's "
      "step.")
      .def_prop_ro(
          "name",
          [](const UpdateRule& self) { return std::string(self.name); })
      .def_prop_ro(
          "optimizers",
          [](const UpdateRule& self) {
            return std::vector<std::string>(
                self.optimizers.begin(),
                self.optimizers.end());
          },
          "The classes whose step it is, with their modules.")
      .def(
          "obstacle",
          [](const UpdateRule& self, nb::handle param_groups) {
            std::vector<RuleOptions> options;
            return read_options(self, param_groups, std::nullopt, options);
          },
          nb::arg("param_groups"),
          "Returns which option it does not cover, or None.");
  m.def(
      "update_rules",
      [] {
        std::vector<std::string> names;
        for (const auto& rule : update_rules()) {
          names.emplace_back(rule.name);
        }
        return names;
      },
      "Returns the names of all update rules.");
  m.def(
      "find_update_rule",
      &find_update_rule,
      nb::arg("optimizer"),
      nb::rv_policy::reference,
      "Returns the rule of a class, by its module and name, or None.");
}

} // namespace fp16core::bindings
