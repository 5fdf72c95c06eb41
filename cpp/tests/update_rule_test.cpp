// The update rules: their names, their formulas in double, and the loops of
// every instruction set against the same rule for one element.

#include "oracle.h"

#include "kernels.h"
#include "math/half_range.h"
#include "math/update_rules.h"

#include <ATen/Parallel.h>

#include <doctest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <map>
#include <string_view>

using namespace fp16core;
using namespace fp16core::detail;
using namespace fp16core::test;

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

using Options = std::map<std::string_view, double>;

const UpdateRule& rule_named(std::string_view name) {
  const auto rules = update_rules();
  const auto found =
      std::find_if(rules.begin(), rules.end(), [&](const UpdateRule& rule) {
        return rule.name == name;
      });
  REQUIRE(found != rules.end());
  return *found;
}

// Options for every rule; what a rule does not name is of no use to it.
const std::vector<Options>& all_options() {
  static const std::vector<Options> all{
      {{"lr", 0.1},
       {"betas[0]", 0.9},
       {"betas[1]", 0.99},
       {"eps", 1e-8},
       {"alpha", 0.99}},
      {{"lr", 0.1},
       {"betas[0]", 0.3},
       {"betas[1]", 0.999},
       {"eps", 1e-3},
       {"alpha", 0.9},
       {"weight_decay", 0.1},
       {"momentum", 0.9},
       {"dampening", 0.3},
       {"lr_decay", 0.01},
       {"momentum_decay", 0.004},
       {"amsgrad", 1},
       {"centered", 1},
       {"maximize", 1}},
      {{"lr", 0.01},
       {"betas[0]", 0.5},
       {"betas[1]", 0.9},
       {"eps", 1e-6},
       {"alpha", 0.5},
       {"weight_decay", 0.2},
       {"momentum", 0.5},
       {"nesterov", 1},
       {"decoupled_weight_decay", 1}},
  };
  return all;
}

std::vector<double> values_of(const UpdateRule& rule, const Options& options) {
  std::vector<double> values;
  for (const auto name : rule.options) {
    const auto found = options.find(name);
    values.push_back(found == options.end() ? 0.0 : found->second);
  }
  return values;
}

// One element, by the rule itself, without vectors.
using OneElement =
    void (*)(const void* step, bool remainder, double g, double& w, double* s);

template <typename Real>
struct MakeOneElement {
  template <typename Rule>
  OneElement operator()() const {
    return
        [](const void* step, bool remainder, double g, double& w, double* s) {
          constexpr auto count = Rule::kTensors.size();
          const auto& numbers =
              *static_cast<const typename Rule::template Step<Real>*>(step);
          const Real gradient = static_cast<Real>(g);
          Real weight = static_cast<Real>(w);
          Real state[count];
          std::copy_n(s, count, state);
          if (remainder) {
            Rule::template update<ScalarMath<Real>, true>(
                numbers,
                gradient,
                weight,
                state);
          } else {
            Rule::template update<ScalarMath<Real>, false>(
                numbers,
                gradient,
                weight,
                state);
          }
          w = weight;
          std::copy_n(state, count, s);
        };
  }
};

template <typename Real>
OneElement one_element(const UpdateRule& rule) {
  static const auto all = AllRules::map(MakeOneElement<Real>());
  return all[rule.index];
}

// Which kinds of memory an update goes between.
struct Kinds {
  c10::ScalarType gradient;
  c10::ScalarType weight;
  c10::ScalarType model; // Undefined: the weight is the parameter itself
  bool unscale;
};

const std::vector<Kinds>& all_kinds() {
  using enum c10::ScalarType;
  static const std::vector<Kinds> all{
      {Float, Float, Half, false},
      {Float, Float, BFloat16, false},
      {Float, Float, Undefined, false},
      {Double, Double, Undefined, false},
      {Half, Float, Half, true},
      {BFloat16, Float, BFloat16, true},
      {Float, Float, Half, true},
      // Through a stage:
      {Double, Float, Half, true},
      {Half, Float, BFloat16, true},
      {BFloat16, Float, Float, true},
      {Half, Float, Double, true},
  };
  return all;
}

std::size_t size_of(c10::ScalarType type) {
  return type == c10::ScalarType::Undefined ? 1 : c10::elementSize(type);
}

// Memory of any of the types, as numbers.
class Memory {
 public:
  Memory(c10::ScalarType type, std::int64_t n)
      : type_(type), bytes_(n * size_of(type)) {}

  void* data() { return bytes_.data(); }

  void set(std::int64_t i, double value) {
    switch (type_) {
      case c10::ScalarType::Half:
        put(i, bits_of(kHalf, value));
        break;
      case c10::ScalarType::BFloat16:
        put(i, bits_of(kBFloat16, value));
        break;
      case c10::ScalarType::Float:
        put(i, static_cast<float>(value));
        break;
      default:
        put(i, value);
    }
  }

  double get(std::int64_t i) const {
    switch (type_) {
      case c10::ScalarType::Half:
        return value_of(kHalf, at<std::uint16_t>(i));
      case c10::ScalarType::BFloat16:
        return value_of(kBFloat16, at<std::uint16_t>(i));
      case c10::ScalarType::Float:
        return at<float>(i);
      default:
        return at<double>(i);
    }
  }

 private:
  template <typename T>
  void put(std::int64_t i, T value) {
    std::memcpy(bytes_.data() + i * sizeof(T), &value, sizeof(T));
  }
  template <typename T>
  T at(std::int64_t i) const {
    T value;
    std::memcpy(&value, bytes_.data() + i * sizeof(T), sizeof(T));
    return value;
  }

  c10::ScalarType type_;
  Array<char> bytes_;
};

// The memory of one parameter, filled the same way for the same seed.
struct Parameter {
  Kinds kinds;
  std::int64_t n;
  Memory gradient;
  Memory weight;
  Memory model;
  std::vector<std::unique_ptr<Memory>> tensors;
  float counters[UpdateRule::kMostCounters] = {3.0F, 0.7F};

  Parameter(const Kinds& kinds_, std::int64_t n_, unsigned seed)
      : kinds(kinds_),
        n(n_),
        gradient(kinds.gradient, n),
        weight(kinds.weight, n),
        model(kinds.model, n) {
    std::mt19937 bits(seed);
    std::uniform_real_distribution<double> uniform(-1.0, 1.0);
    for (std::size_t t = 0; t < UpdateRule::kMostTensors; ++t) {
      tensors.push_back(std::make_unique<Memory>(kinds.weight, n));
    }
    for (std::int64_t i = 0; i < n; ++i) {
      gradient.set(i, uniform(bits));
      weight.set(i, uniform(bits));
      for (auto& tensor : tensors) {
        tensor->set(i, std::fabs(uniform(bits)));
      }
    }
  }

  UpdateItem item(
      const UpdateRule& rule,
      const std::vector<double>& options,
      const void* step) {
    UpdateItem result{};
    result.gradient = gradient.data();
    result.weight = weight.data();
    result.model =
        kinds.model == c10::ScalarType::Undefined ? nullptr : model.data();
    for (std::size_t t = 0; t < rule.tensors.size(); ++t) {
      result.tensors[t] =
          rule.uses(options.data(), t) ? tensors[t]->data() : nullptr;
    }
    for (std::size_t i = 0; i < rule.counters.size(); ++i) {
      result.counters[i] = {&counters[i], true};
    }
    result.step = step;
    result.numel = n;
    result.gradient_type = kinds.gradient;
    result.weight_type = kinds.weight;
    result.model_type = kinds.model;
    result.unscale = kinds.unscale;
    return result;
  }
};

struct PreparedStep {
  alignas(8) std::byte bytes[UpdateRule::kStepBytes];
};

PreparedStep prepare(
    const UpdateRule& rule,
    const std::vector<double>& options,
    c10::ScalarType type,
    bool fresh = false) {
  PreparedStep step;
  double counters[UpdateRule::kMostCounters] = {3.0, 0.7};
  rule.prepare(options.data(), counters, fresh, true, type, step.bytes);
  return step;
}

// What `item` must become, element by element.
void expect(
    Parameter& p,
    const UpdateRule& rule,
    const PreparedStep& step,
    const std::vector<Factor>& factors) {
  const bool wide = p.kinds.weight == c10::ScalarType::Double;
  const auto update =
      wide ? one_element<double>(rule) : one_element<float>(rule);
  const std::int64_t remainder = p.n % (wide ? 4 : 8);
  for (std::int64_t i = 0; i < p.n; ++i) {
    double g = p.gradient.get(i);
    if (p.kinds.unscale) {
      for (std::size_t f = 0; f < factors.size(); ++f) {
        const bool once = f == 0 && p.kinds.gradient == c10::ScalarType::Double;
        g = static_cast<float>(
            g * (once ? factors[f].f64 : static_cast<double>(factors[f].f32)));
      }
      g = static_cast<float>(g);
    }
    double w = p.weight.get(i);
    double state[UpdateRule::kMostTensors];
    for (std::size_t t = 0; t < p.tensors.size(); ++t) {
      state[t] = p.tensors[t]->get(i);
    }
    update(step.bytes, i >= p.n - remainder, g, w, state);
    p.weight.set(i, w);
    for (std::size_t t = 0; t < p.tensors.size(); ++t) {
      p.tensors[t]->set(i, state[t]);
    }
    if (p.kinds.model != c10::ScalarType::Undefined) {
      p.model.set(i, w);
    }
  }
}

std::int64_t differences(const Parameter& got, const Parameter& want) {
  std::int64_t wrong = 0;
  for (std::int64_t i = 0; i < got.n; ++i) {
    wrong += !same_bits(got.weight.get(i), want.weight.get(i)) ||
        !same_bits(got.gradient.get(i), want.gradient.get(i)) ||
        (got.kinds.model != c10::ScalarType::Undefined &&
         !same_bits(got.model.get(i), want.model.get(i)));
    for (std::size_t t = 0; t < got.tensors.size(); ++t) {
      wrong += !same_bits(got.tensors[t]->get(i), want.tensors[t]->get(i));
    }
  }
  return wrong;
}

} // namespace

// ---- names ----

TEST_CASE("every rule has a name, a position and a class that follows it") {
  std::vector<std::string_view> names;
  for (const auto& rule : update_rules()) {
    CHECK(&update_rules()[rule.index] == &rule);
    names.push_back(rule.name);
    for (const auto optimizer : rule.optimizers) {
      CHECK(find_update_rule(optimizer) == &rule);
    }
  }
  CHECK(
      names ==
      std::vector<std::string_view>{
          "SGD",
          "Adam",
          "Adagrad",
          "RMSprop",
          "NAdam",
          "Adamax",
          "Lion"});
  CHECK(find_update_rule("torch.optim.adamw.AdamW")->name == "Adam");
  CHECK(find_update_rule("torch.optim.lbfgs.LBFGS") == nullptr);
  CHECK(find_update_rule("AdamW") == nullptr);
}

TEST_CASE("a rule says which state it uses") {
  const auto uses = [](std::string_view name, const Options& options) {
    const auto& rule = rule_named(name);
    const auto values = values_of(rule, options);
    std::vector<std::string_view> used;
    for (std::size_t i = 0; i < rule.tensors.size(); ++i) {
      if (rule.uses(values.data(), i)) {
        used.push_back(rule.tensors[i]);
      }
    }
    return used;
  };
  using Names = std::vector<std::string_view>;
  CHECK(uses("SGD", {}) == Names{});
  CHECK(uses("SGD", {{"momentum", 0.9}}) == Names{"momentum_buffer"});
  CHECK(uses("Adam", {}) == Names{"exp_avg", "exp_avg_sq"});
  CHECK(
      uses("Adam", {{"amsgrad", 1}}) ==
      Names{"exp_avg", "exp_avg_sq", "max_exp_avg_sq"});
  CHECK(uses("RMSprop", {}) == Names{"square_avg"});
  CHECK(
      uses("RMSprop", {{"momentum", 0.1}, {"centered", 1}}) ==
      Names{"square_avg", "momentum_buffer", "grad_avg"});
  const auto& adagrad = rule_named("Adagrad");
  const auto values = values_of(adagrad, {{"initial_accumulator_value", 0.25}});
  CHECK(adagrad.start(values.data()) == 0.25);
}

TEST_CASE("preparing a step advances its counters") {
  for (const auto& rule : update_rules()) {
    CAPTURE(rule.name);
    const auto options = values_of(rule, all_options()[0]);
    for (const bool single : {false, true}) {
      double counters[UpdateRule::kMostCounters] = {4.0, 0.3F};
      PreparedStep step;
      rule.prepare(
          options.data(),
          counters,
          false,
          single,
          c10::ScalarType::Float,
          step.bytes);
      if (!rule.counters.empty()) {
        CHECK(rule.counters[0].name == "step");
        CHECK(counters[0] == 5.0);
      }
      if (rule.counters.size() > 1) {
        CHECK(rule.counters[1].name == "mu_product");
        // Without momentum_decay the momentum is half of beta1.
        const double momentum = 0.9 * 0.5;
        CHECK(
            counters[1] ==
            (single ? 0.3F * static_cast<float>(momentum)
                    : static_cast<double>(0.3F) * momentum));
      }
    }
  }
}

// ---- formulas ----

// The formulas as the papers and torch's documents have them, in double. In the
// double version of a rule only roundings differ: a few of 2^-53 of what is
// added up, all of it below 4 here.
TEST_CASE("the rules follow their formulas") {
  constexpr double kTolerance = 1e-14;
  std::mt19937 bits(3);
  std::uniform_real_distribution<double> uniform(-1.0, 1.0);
  const auto decay = [](double g, double w, const Options& o) {
    return (o.count("maximize") != 0 ? -g : g) +
        (o.count("decoupled_weight_decay") != 0 || o.count("weight_decay") == 0
             ? 0.0
             : o.at("weight_decay") * w);
  };
  const auto get = [](const Options& o, std::string_view name) {
    const auto found = o.find(name);
    return found == o.end() ? 0.0 : found->second;
  };
  using Formula = std::function<
      void(const Options&, double g, double d, double& w, double* s)>;
  const double t = 4.0; // the step that `prepare` makes
  const std::map<std::string_view, Formula> formulas{
      {"SGD",
       [&](const Options& o, double, double d, double& w, double* s) {
         const double m = get(o, "momentum");
         if (m != 0) {
           s[0] = m * s[0] + (1 - get(o, "dampening")) * d;
           d = o.count("nesterov") != 0 ? d + m * s[0] : s[0];
         }
         w -= get(o, "lr") * d;
       }},
      {"Adam",
       [&](const Options& o, double, double d, double& w, double* s) {
         const double b1 = get(o, "betas[0]"), b2 = get(o, "betas[1]");
         if (o.count("decoupled_weight_decay") != 0) {
           w -= get(o, "lr") * get(o, "weight_decay") * w;
         }
         s[0] = b1 * s[0] + (1 - b1) * d;
         s[1] = b2 * s[1] + (1 - b2) * d * d;
         double v = s[1];
         if (o.count("amsgrad") != 0) {
           v = s[2] = std::max(s[2], s[1]);
         }
         w -= get(o, "lr") * (s[0] / (1 - std::pow(b1, t))) /
             (std::sqrt(v / (1 - std::pow(b2, t))) + get(o, "eps"));
       }},
      {"Adagrad",
       [&](const Options& o, double, double d, double& w, double* s) {
         s[0] += d * d;
         w -= get(o, "lr") / (1 + (t - 1) * get(o, "lr_decay")) * d /
             (std::sqrt(s[0]) + get(o, "eps"));
       }},
      {"RMSprop",
       [&](const Options& o, double, double d, double& w, double* s) {
         const double a = get(o, "alpha");
         s[0] = a * s[0] + (1 - a) * d * d;
         double v = s[0];
         if (o.count("centered") != 0) {
           s[2] = a * s[2] + (1 - a) * d;
           v -= s[2] * s[2];
         }
         const double u = d / (std::sqrt(v) + get(o, "eps"));
         if (get(o, "momentum") > 0) {
           s[1] = get(o, "momentum") * s[1] + u;
         }
         w -= get(o, "lr") * (get(o, "momentum") > 0 ? s[1] : u);
       }},
      {"NAdam",
       [&](const Options& o, double, double d, double& w, double* s) {
         const double b1 = get(o, "betas[0]"), b2 = get(o, "betas[1]");
         const auto mu = [&](double at) {
           return b1 *
               (1 - 0.5 * std::pow(0.96, at * get(o, "momentum_decay")));
         };
         if (o.count("decoupled_weight_decay") != 0) {
           w -= get(o, "lr") * get(o, "weight_decay") * w;
         }
         const double product = static_cast<float>(
             static_cast<float>(0.7) * static_cast<float>(mu(t)));
         s[0] = b1 * s[0] + (1 - b1) * d;
         s[1] = b2 * s[1] + (1 - b2) * d * d;
         const double m = mu(t + 1) * s[0] / (1 - product * mu(t + 1)) +
             (1 - mu(t)) * d / (1 - product);
         w -= get(o, "lr") * m /
             (std::sqrt(s[1] / (1 - std::pow(b2, t))) + get(o, "eps"));
       }},
      {"Adamax",
       [&](const Options& o, double, double d, double& w, double* s) {
         const double b1 = get(o, "betas[0]"), b2 = get(o, "betas[1]");
         s[0] = b1 * s[0] + (1 - b1) * d;
         s[1] = std::max(b2 * s[1], std::fabs(d) + get(o, "eps"));
         w -= get(o, "lr") / (1 - std::pow(b1, t)) * s[0] / s[1];
       }},
      {"Lion",
       [&](const Options& o, double g, double, double& w, double* s) {
         const double b1 = get(o, "betas[0]"), b2 = get(o, "betas[1]");
         const double d = o.count("maximize") != 0 ? -g : g;
         const double c = b1 * s[0] + (1 - b1) * d;
         w -= get(o, "lr") * get(o, "weight_decay") * w;
         w -= get(o, "lr") * ((c > 0) - (c < 0));
         s[0] = b2 * s[0] + (1 - b2) * d;
       }},
  };
  for (const auto& rule : update_rules()) {
    CAPTURE(rule.name);
    const auto update = one_element<double>(rule);
    for (const auto& given : all_options()) {
      Options options;
      for (const auto name : rule.options) {
        if (given.count(name) != 0) {
          options[name] = given.at(name);
        }
      }
      const auto values = values_of(rule, options);
      const auto step = prepare(rule, values, c10::ScalarType::Double);
      for (int trial = 0; trial < 200; ++trial) {
        const double g = uniform(bits);
        double w = uniform(bits);
        // A squared average that is not below the square of an average.
        double state[3] = {uniform(bits), 0.0, uniform(bits)};
        if (rule.name == "RMSprop") {
          state[0] = 1.0 + uniform(bits) / 2;
          state[1] = uniform(bits);
          state[2] = uniform(bits) / 4;
        } else {
          state[0] = rule.name == "Adagrad" ? std::fabs(state[0]) : state[0];
          state[1] = std::fabs(uniform(bits));
          state[2] = std::fabs(state[2]);
        }
        double want_w = w;
        double want[3] = {state[0], state[1], state[2]};
        formulas.at(rule.name)(options, g, decay(g, w, options), want_w, want);
        update(step.bytes, trial % 2 == 1, g, w, state);
        // A root near zero magnifies the roundings below it.
        const double near_zero = 100.0;
        REQUIRE(std::fabs(w - want_w) <= near_zero * kTolerance);
        for (std::size_t i = 0; i < rule.tensors.size(); ++i) {
          REQUIRE(std::fabs(state[i] - want[i]) <= near_zero * kTolerance);
        }
      }
    }
  }
}

TEST_CASE("a first step of SGD starts the momentum from its gradient") {
  const auto& rule = rule_named("SGD");
  const auto options =
      values_of(rule, {{"lr", 0.5}, {"momentum", 0.5}, {"dampening", 0.75}});
  const auto step = prepare(rule, options, c10::ScalarType::Float, true);
  double weight = 1.0;
  double state[3] = {std::nan(""), 0.0, 0.0};
  one_element<float>(rule)(step.bytes, false, 2.0, weight, state);
  CHECK(state[0] == 2.0);
  CHECK(weight == 0.0);
}

// ---- loops ----

TEST_CASE("every loop gives the bits of the rule for one element") {
  const std::vector<Factor> factors{
      Factor::of(1.0 / 3.0),
      Factor::of(0.7),
      Factor::of(3.0)};
  std::vector<std::int64_t> lengths{0,  1,  3,   4,    7,    8,   9,
                                    15, 16, 17,  31,   32,   33,  63,
                                    64, 65, 100, 4095, 4096, 4103};
  for (const auto& rule : update_rules()) {
    for (const auto& options : all_options()) {
      const auto values = values_of(rule, options);
      for (const auto& kinds : all_kinds()) {
        const auto step = prepare(rule, values, kinds.weight);
        for (const auto n : lengths) {
          const std::size_t count = n % (factors.size() + 1);
          const std::vector<Factor> some(
              factors.begin(),
              factors.begin() + static_cast<std::ptrdiff_t>(count));
          Parameter want(kinds, n, 5);
          expect(want, rule, step, some);
          for (const auto& variant : variants()) {
            CAPTURE(rule.name);
            CAPTURE(variant.name);
            CAPTURE(n);
            CAPTURE(static_cast<int>(kinds.gradient));
            CAPTURE(static_cast<int>(kinds.model));
            Parameter got(kinds, n, 5);
            variant.blocks->update_kernel(rule.index)(
                got.item(rule, values, step.bytes),
                0,
                n,
                some,
                n % 2 == 1);
            REQUIRE(differences(got, want) == 0);
          }
        }
      }
    }
  }
}

TEST_CASE("a parameter may be cut into chunks") {
  const auto& rule = rule_named("Adam");
  const auto values = values_of(rule, all_options()[1]);
  const Kinds kinds{
      c10::ScalarType::Float,
      c10::ScalarType::Float,
      c10::ScalarType::Half,
      false};
  const auto step = prepare(rule, values, kinds.weight);
  const std::int64_t n = 1003;
  Parameter want(kinds, n, 6);
  expect(want, rule, step, {});
  for (const auto& variant : variants()) {
    CAPTURE(variant.name);
    // Chunks begin at multiples of a register of halves; the last ones hold
    // nothing but what is left at the end.
    for (const std::int64_t cut : {32, 512, 992, 1000}) {
      Parameter got(kinds, n, 6);
      const auto item = got.item(rule, values, step.bytes);
      const auto update = variant.blocks->update_kernel(rule.index);
      update(item, 0, cut, {}, false);
      update(item, cut, n - cut, {}, false);
      CAPTURE(cut);
      CHECK(differences(got, want) == 0);
    }
  }
}

TEST_CASE("a list of any size gives the same bits on any number of threads") {
  const auto& rule = rule_named("Adam");
  const auto values = values_of(rule, all_options()[0]);
  const Kinds kinds{
      c10::ScalarType::Half,
      c10::ScalarType::Float,
      c10::ScalarType::Half,
      true};
  const auto step = prepare(rule, values, kinds.weight);
  RuleOptions options;
  options.values = values;
  const std::vector<Factor> factors{Factor::of(0x1p-3)};
  const int threads = at::get_num_threads();
  const std::vector<std::int64_t> sizes{3, 0, 65536, 1, 70001, 131075, 0};
  const auto kernels = make_cpu_kernels();
  for (const int count : {1, 2, 3}) {
    at::set_num_threads(count);
    std::vector<std::unique_ptr<Parameter>> all;
    std::vector<UpdateItem> items;
    for (const auto size : sizes) {
      all.push_back(std::make_unique<Parameter>(kinds, size, 9));
      items.push_back(all.back()->item(rule, values, step.bytes));
    }
    const auto saturated =
        kernels->update(rule, items, options, FactorSource{0x1p-3}, nullptr);
    CHECK(saturated->wait() == std::vector<std::uint8_t>(sizes.size(), 0));
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      Parameter want(kinds, sizes[i], 9);
      expect(want, rule, step, factors);
      CAPTURE(count);
      CHECK(differences(*all[i], want) == 0);
    }
  }
  at::set_num_threads(threads);
}

TEST_CASE("a finite master beyond the half range is reported") {
  const auto& rule = rule_named("SGD");
  const auto values = values_of(rule, {{"lr", 1.0}});
  const auto step = prepare(rule, values, c10::ScalarType::Float);
  struct Probe {
    float weight;
    bool half;
    bool bfloat16;
  };
  for (const auto& [weight, half, bfloat16] : std::vector<Probe>{
           {65519.0F, false, false},
           {65520.0F, true, false},
           {-65520.0F, true, false},
           {3.4e38F, true, true},
           {kInf, false, false},
           {std::nanf(""), false, false}}) {
    for (const auto model :
         {c10::ScalarType::Half, c10::ScalarType::BFloat16}) {
      for (const std::int64_t n : {1, 8, 16, 33}) {
        for (const bool hidden : {false, true}) {
          const Kinds kinds{
              c10::ScalarType::Float,
              c10::ScalarType::Float,
              model,
              false};
          for (const auto& variant : variants()) {
            Parameter p(kinds, n, 1);
            for (std::int64_t i = 0; i < n; ++i) {
              p.gradient.set(i, 0.0);
              // An inf beside it must not hide it.
              p.weight.set(i, hidden ? kInf : 1.0);
            }
            p.weight.set(n - 1, weight);
            CAPTURE(variant.name);
            CAPTURE(weight);
            CAPTURE(n);
            CHECK(
                variant.blocks->update_kernel(rule.index)(
                    p.item(rule, values, step.bytes),
                    0,
                    n,
                    {},
                    false) ==
                (model == c10::ScalarType::Half ? half : bfloat16));
          }
        }
      }
    }
  }
}
