// MasterWeights: what gets a master, gradients in and parameters out for every
// layout, and what is noticed of writes by others.

#include "oracle.h"

#include <fp16core/master_weights.h>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <doctest.h>

using namespace fp16core;
using fp16core::test::error_of;

namespace {

at::Tensor parameter(const at::Tensor& values, c10::ScalarType type) {
  return values.detach().to(type, false, true).set_requires_grad(true);
}

at::Tensor parameter(std::vector<double> values, c10::ScalarType type) {
  return parameter(at::tensor(values, at::kDouble), type);
}

void set_grad(const at::Tensor& parameter, const at::Tensor& gradient) {
  parameter.mutable_grad() = gradient;
}

void set_grad(const at::Tensor& parameter, std::vector<double> values) {
  set_grad(parameter, at::tensor(values, at::kDouble).to(parameter.dtype()));
}

// MasterWeights with an inner optimizer's groups.
struct Wrapped {
  MasterWeights weights;
  ParamGroups groups;

  explicit Wrapped(
      ParamGroups parameters,
      ModelWrites writes = ModelWrites::kVersion)
      : weights("Test", writes), groups(std::move(parameters)) {
    ingest();
  }

  std::vector<Adoption> ingest() {
    auto adoptions = weights.ingest(groups);
    for (const auto& a : adoptions) {
      groups[a.group][a.index] = a.master;
    }
    return adoptions;
  }

  const at::Tensor& visible(std::int64_t index) const {
    return groups[0][index];
  }
  const at::Tensor& gradient(std::int64_t index) const {
    return visible(index).mutable_grad();
  }
};

bool equals(const at::Tensor& tensor, std::vector<double> values) {
  return at::equal(
      tensor.detach().to(at::kDouble).flatten(),
      at::tensor(values, at::kDouble));
}

const std::vector<c10::ScalarType> kAllTypes{
    at::kHalf,
    at::kBFloat16,
    at::kFloat,
    at::kDouble};

} // namespace

// ---- ingestion ----

TEST_CASE("trainable half parameters get masters and nothing else does") {
  const auto half = parameter({1.0, 2.0}, at::kHalf);
  const auto bfloat = parameter({3.0}, at::kBFloat16);
  const auto native = parameter({4.0}, at::kFloat);
  const auto wide = parameter({5.0}, at::kDouble);
  const auto frozen = at::ones({2}, at::kHalf);
  MasterWeights weights("Test");
  const ParamGroups groups{{native, half}, {frozen, bfloat, wide}};
  const auto adoptions = weights.ingest(groups);
  REQUIRE(adoptions.size() == 2);
  CHECK(adoptions[0].group == 0);
  CHECK(adoptions[0].index == 1);
  CHECK(adoptions[0].model.is_same(half));
  CHECK(adoptions[1].group == 1);
  CHECK(adoptions[1].index == 1);
  for (const auto& a : adoptions) {
    CHECK((a.master.scalar_type() == at::kFloat));
    CHECK(a.master.is_leaf());
    CHECK(a.master.requires_grad());
    CHECK(at::equal(a.master, a.model.to(at::kFloat)));
  }
  CHECK(weights.model_params()[0][0].is_same(half));
  CHECK(weights.model_params()[1][0].is_same(bfloat));
  CHECK(weights.master_params()[1][0].is_same(adoptions[1].master));
  CHECK(weights.native_params()[0][0].is_same(native));
  CHECK(weights.native_params()[1].size() == 1);
  CHECK(weights.native_params()[1][0].is_same(wide));
  CHECK(
      weights.master_positions() ==
      std::vector<std::vector<std::int64_t>>{{1}, {1}});
}

TEST_CASE("a master lies in memory as its parameter does") {
  const auto base = at::arange(24, at::kHalf);
  const auto turned = base.view({4, 6}).t().detach().set_requires_grad(true);
  const auto last = base.view({1, 2, 3, 4})
                        .contiguous(at::MemoryFormat::ChannelsLast)
                        .set_requires_grad(true);
  const auto gapped =
      base.view({4, 6}).slice(1, 0, 6, 2).detach().set_requires_grad(true);
  const Wrapped wrapped({{turned, last, gapped}});
  CHECK(wrapped.visible(0).strides() == turned.strides());
  CHECK(wrapped.visible(1).strides() == last.strides());
  CHECK(wrapped.visible(2).is_contiguous());
  for (std::int64_t i = 0; i < 3; ++i) {
    CHECK(
        at::equal(
            wrapped.visible(i),
            wrapped.weights.model_params()[0][i].to(at::kFloat)));
  }
}

TEST_CASE("ingesting the same groups again changes nothing") {
  Wrapped wrapped(
      {{parameter({1.0}, at::kHalf), parameter({2.0}, at::kFloat)}});
  const auto master = wrapped.visible(0);
  CHECK(wrapped.ingest().empty());
  CHECK(wrapped.weights.master_params()[0][0].is_same(master));
}

TEST_CASE("groups may grow, shrink and be put in another order") {
  const auto a = parameter({1.0}, at::kHalf);
  const auto b = parameter({2.0}, at::kHalf);
  Wrapped wrapped({{a, b}});
  const auto masters = wrapped.groups[0];
  wrapped.groups = {{masters[1]}, {masters[0], parameter({3.0}, at::kHalf)}};
  const auto adoptions = wrapped.ingest();
  REQUIRE(adoptions.size() == 1);
  CHECK(adoptions[0].group == 1);
  CHECK(adoptions[0].index == 1);
  CHECK(wrapped.weights.model_params()[0][0].is_same(b));
  CHECK(wrapped.weights.model_params()[1][0].is_same(a));
  wrapped.groups = {{masters[0]}};
  CHECK(wrapped.ingest().empty());
  CHECK(wrapped.weights.model_params()[0][0].is_same(a));
}

TEST_CASE("a parameter that thaws gets its master with its first gradient") {
  const auto frozen = at::ones({2}, at::kHalf);
  Wrapped wrapped({{frozen}});
  frozen.set_requires_grad(true);
  CHECK(wrapped.ingest().empty());
  set_grad(frozen, {1.0, 2.0});
  const auto adoptions = wrapped.ingest();
  REQUIRE(adoptions.size() == 1);
  wrapped.weights.take_gradients(2.0);
  CHECK(equals(wrapped.gradient(0), {0.5, 1.0}));
}

TEST_CASE("what cannot be ingested is named, and nothing is changed") {
  MasterWeights weights("Test");
  const auto half = parameter({1.0}, at::kHalf);
  const auto odd = at::zeros({2, 3}, at::kComplexFloat).set_requires_grad(true);
  const ParamGroups groups{{half}, {half.detach(), odd}};
  const auto text = error_of<c10::TypeError>([&] { weights.check(groups, 4); });
  CHECK(
      text ==
      "Test: parameters must be plain strided tensors of float16, bfloat16, "
      "float32 or float64, but got group 5, index 1: shape [2, 3], "
      "complex64, "
      "cpu");
  CHECK_FALSE(
      error_of<c10::TypeError>([&] { weights.ingest(groups); }).empty());
  CHECK(weights.model_params().empty());

  const auto twice =
      error_of<c10::ValueError>([&] { weights.ingest({{half}, {half}}); });
  CHECK(
      twice ==
      "Test: a parameter must stand in the groups once, but got it again as "
      "group 1, index 0: shape [1], float16, cpu");
  CHECK(weights.model_params().empty());

  const auto meta =
      at::empty({2}, at::TensorOptions(at::kMeta).dtype(at::kHalf))
          .set_requires_grad(true);
  CHECK_FALSE(
      error_of<c10::TypeError>([&] { weights.check({{meta}}); }).empty());
  const auto sparse = at::eye(2).to_sparse().set_requires_grad(true);
  CHECK(error_of<c10::TypeError>([&] {
          weights.check({{sparse}});
        }).find("not strided") != std::string::npos);
}

TEST_CASE("state is widened from half and else left as it is") {
  const auto master = at::zeros({2});
  const auto half = at::ones({2}, at::kHalf);
  const auto widened = widen_state(half, master);
  CHECK((widened.scalar_type() == at::kFloat));
  CHECK(equals(widened, {1.0, 1.0}));
  CHECK(
      (widen_state(at::ones({2}, at::kBFloat16), master).scalar_type() ==
       at::kFloat));
  for (const auto type : {at::kFloat, at::kDouble, at::kLong}) {
    const auto state = at::ones({2}, type);
    CHECK(widen_state(state, master).is_same(state));
  }
}

// ---- gradients ----

TEST_CASE("gradients are divided by the scale, exactly for powers of two") {
  for (const auto type : kAllTypes) {
    CAPTURE(std::string(c10::toString(type)));
    const auto p = parameter({1.0, 1.0, 1.0}, type);
    Wrapped wrapped({{p}});
    set_grad(p, {8.0, -0.5, 0.0});
    wrapped.weights.take_gradients(4.0);
    CHECK(equals(wrapped.gradient(0), {2.0, -0.125, 0.0}));
    CHECK_FALSE(wrapped.weights.overflow());
    const bool half = type == at::kHalf || type == at::kBFloat16;
    CHECK((wrapped.gradient(0).scalar_type() == (half ? at::kFloat : type)));
    // The model's half gradient is only read.
    CHECK(equals(
        p.grad(),
        half ? std::vector<double>{8.0, -0.5, 0.0}
             : std::vector<double>{2.0, -0.125, 0.0}));
  }
}

TEST_CASE("an odd scale is a product with its reciprocal") {
  const double scale = 3.0;
  const auto values = at::arange(1, 200, at::kDouble);
  for (const auto type : kAllTypes) {
    CAPTURE(std::string(c10::toString(type)));
    const auto p = parameter(values, type);
    Wrapped wrapped({{p}});
    set_grad(p, values.to(type));
    wrapped.weights.take_gradients(scale);
    std::int64_t wrong = 0;
    for (std::int64_t i = 0; i < values.numel(); ++i) {
      const auto value = static_cast<double>(i + 1);
      const auto got = wrapped.gradient(0)[i].item<double>();
      const double expected = type == at::kDouble
          ? value * (1.0 / scale)
          : static_cast<float>(value * static_cast<float>(1.0 / scale));
      wrong += got != expected;
    }
    CHECK(wrong == 0);
  }
}

namespace {

struct Layout {
  std::string name;
  // Returns a tensor of shape [4, 3, 2, 5] that holds the given values.
  at::Tensor (*lay)(const at::Tensor& values);
};

at::Tensor filled(at::Tensor target, const at::Tensor& values) {
  return target.copy_(values);
}

const std::vector<Layout> kLayouts{
    {"contiguous", [](const at::Tensor& v) { return v.clone(); }},
    {"channels last",
     [](const at::Tensor& v) {
       return v.contiguous(at::MemoryFormat::ChannelsLast);
     }},
    {"transposed",
     [](const at::Tensor& v) {
       return filled(at::zeros({5, 3, 2, 4}, v.dtype()).transpose(0, 3), v);
     }},
    {"with gaps",
     [](const at::Tensor& v) {
       return filled(at::zeros({4, 3, 2, 11}, v.dtype()).slice(3, 1, 11, 2), v);
     }},
    {"a view into a buffer",
     [](const at::Tensor& v) {
       return filled(
           at::zeros({123}, v.dtype()).slice(0, 3).view({4, 3, 2, 5}),
           v);
     }},
};

at::Tensor layout_values() {
  return at::arange(120, at::kFloat).view({4, 3, 2, 5}) - 60;
}

} // namespace

TEST_CASE("elements pair by index whatever the layouts") {
  const auto values = layout_values();
  for (const auto type : kAllTypes) {
    for (const auto& of_parameter : kLayouts) {
      for (const auto& of_gradient : kLayouts) {
        CAPTURE(std::string(c10::toString(type)));
        CAPTURE(of_parameter.name);
        CAPTURE(of_gradient.name);
        const auto p =
            of_parameter.lay(values.to(type)).set_requires_grad(true);
        Wrapped wrapped({{p}});
        set_grad(p, of_gradient.lay((values * 2).to(type)));
        wrapped.weights.take_gradients(4.0);
        CHECK(at::equal(wrapped.gradient(0).to(at::kFloat), values / 2));
        CHECK(
            wrapped.weights.gradient_norm(2.0) ==
            doctest::Approx(
                at::linalg_vector_norm(values.to(at::kDouble) / 2)
                    .item<double>())
                .epsilon(1e-12)); // 120 small integers: exact in fp32
        wrapped.weights.scale_gradients(0.5);
        CHECK(at::equal(wrapped.gradient(0).to(at::kFloat), values / 4));
        // One step of gradient descent, written back.
        {
          const c10::NoGradGuard no_grad;
          wrapped.visible(0).sub_(
              wrapped.gradient(0).to(wrapped.visible(0).scalar_type()),
              4);
        }
        wrapped.weights.write_model();
        CHECK(at::equal(p.detach().to(at::kFloat), at::zeros_like(values)));
      }
    }
  }
}

TEST_CASE("a gradient may be one element, expanded") {
  for (const auto type : kAllTypes) {
    CAPTURE(std::string(c10::toString(type)));
    const auto p = parameter({1.0, 2.0, 3.0}, type);
    Wrapped wrapped({{p}});
    set_grad(p, at::full({1}, 8.0, type).expand({3}));
    for (const double scale : {1.0, 4.0}) {
      wrapped.weights.take_gradients(scale);
      CHECK(
          equals(wrapped.gradient(0), {8.0 / scale, 8.0 / scale, 8.0 / scale}));
      wrapped.weights.scale_gradients(0.5);
      CHECK(
          equals(wrapped.gradient(0), {4.0 / scale, 4.0 / scale, 4.0 / scale}));
    }
    wrapped.weights.restore_scaled_gradients(1.0);
    wrapped.weights.write_model();
    CHECK(equals(p, {1.0, 2.0, 3.0}));
  }
}

TEST_CASE("scalars and empty tensors take part") {
  for (const auto type : kAllTypes) {
    CAPTURE(std::string(c10::toString(type)));
    const auto scalar = parameter(at::scalar_tensor(3.0, at::kDouble), type);
    const auto empty = parameter(at::empty({0, 3}, at::kDouble), type);
    Wrapped wrapped({{empty, scalar}});
    set_grad(scalar, at::scalar_tensor(8.0, type));
    set_grad(empty, at::empty({0, 3}, type));
    wrapped.weights.take_gradients(4.0);
    CHECK(wrapped.gradient(1).item<double>() == 2.0);
    CHECK(wrapped.gradient(1).dim() == 0);
    CHECK(wrapped.gradient(0).sizes() == at::IntArrayRef({0, 3}));
    CHECK(wrapped.weights.gradient_norm(2.0) == 2.0);
    wrapped.weights.write_model();
    CHECK(scalar.item<double>() == 3.0);
  }
}

TEST_CASE("views of one buffer do not disturb their neighbours") {
  for (const auto type : kAllTypes) {
    CAPTURE(std::string(c10::toString(type)));
    const auto buffer = at::full({64}, 7.0, type);
    const auto gradients = at::full({64}, 8.0, type);
    std::vector<at::Tensor> parameters;
    // Every second stretch of three elements belongs to a parameter.
    for (std::int64_t begin = 1; begin + 3 < 64; begin += 6) {
      parameters.push_back(
          buffer.slice(0, begin, begin + 3).detach().set_requires_grad(true));
      set_grad(parameters.back(), gradients.slice(0, begin, begin + 3));
    }
    Wrapped wrapped({parameters});
    wrapped.weights.take_gradients(4.0);
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      CHECK(equals(wrapped.gradient(static_cast<std::int64_t>(i)), {2, 2, 2}));
      const c10::NoGradGuard no_grad;
      wrapped.visible(static_cast<std::int64_t>(i)).fill_(5.0);
    }
    wrapped.weights.write_model();
    const auto count = [&](const at::Tensor& tensor, double value) {
      return tensor.eq(value).sum().item<std::int64_t>();
    };
    const auto inside = static_cast<std::int64_t>(3 * parameters.size());
    CHECK(count(buffer, 5.0) == inside);
    CHECK(count(buffer, 7.0) == 64 - inside);
    const bool half = type == at::kHalf || type == at::kBFloat16;
    CHECK(count(gradients, 8.0) == (half ? 64 : 64 - inside));
  }
}

TEST_CASE("a parameter without a gradient has a master without one") {
  const auto a = parameter({1.0}, at::kHalf);
  const auto b = parameter({1.0}, at::kHalf);
  Wrapped wrapped({{a, b}});
  set_grad(a, {1.0});
  set_grad(b, {1.0});
  wrapped.weights.take_gradients(1.0);
  a.mutable_grad().reset();
  wrapped.weights.take_gradients(1.0);
  CHECK_FALSE(wrapped.gradient(0).defined());
  CHECK(wrapped.gradient(1).defined());
  CHECK(wrapped.weights.report().tensors.size() == 1);
  CHECK(wrapped.weights.gradient_norm(2.0) == 1.0);
}

TEST_CASE("native gradients are rebuilt from what was accumulated") {
  for (const auto type : {at::kFloat, at::kDouble}) {
    CAPTURE(std::string(c10::toString(type)));
    const auto p = parameter({1.0}, type);
    Wrapped wrapped({{p}});
    set_grad(p, {8.0});
    wrapped.weights.take_gradients(4.0);
    wrapped.weights.take_gradients(4.0);
    CHECK(equals(p.grad(), {2.0}));
    wrapped.weights.scale_gradients(0.25);
    CHECK(equals(p.grad(), {0.5}));
    wrapped.weights.take_gradients(4.0);
    CHECK(equals(p.grad(), {2.0})); // the clip is undone
    wrapped.weights.take_gradients(8.0);
    CHECK(equals(p.grad(), {1.0}));
    wrapped.weights.scale_gradients(0.25);
    wrapped.weights.restore_scaled_gradients(1.0);
    CHECK(equals(p.grad(), {8.0}));
    p.mutable_grad().add_(4.0); // as a further backward pass does
    wrapped.weights.take_gradients(4.0);
    CHECK(equals(p.grad(), {3.0}));
    set_grad(p, {16.0}); // another gradient owes nothing to the last
    wrapped.weights.take_gradients(4.0);
    CHECK(equals(p.grad(), {4.0}));
  }
}

TEST_CASE("gradients are brought to another scale") {
  for (const auto type : kAllTypes) {
    CAPTURE(std::string(c10::toString(type)));
    const auto p = parameter({1.0}, type);
    Wrapped wrapped({{p}});
    set_grad(p, {8.0});
    wrapped.weights.take_gradients(4.0);
    wrapped.weights.restore_scaled_gradients(0.5);
    CHECK(equals(p.grad(), {4.0}));
    wrapped.weights.take_gradients(2.0);
    CHECK(equals(wrapped.gradient(0), {2.0}));
  }
}

TEST_CASE("overflow is a non-finite element of any gradient") {
  const double inf = std::numeric_limits<double>::infinity();
  for (const auto type : kAllTypes) {
    for (const double bad : {inf, -inf, std::nan("")}) {
      for (std::size_t place = 0; place < 3; ++place) {
        CAPTURE(std::string(c10::toString(type)));
        CAPTURE(bad);
        CAPTURE(place);
        const auto clean = parameter({1.0}, at::kHalf);
        const auto p = parameter({1.0, 1.0, 1.0}, type);
        Wrapped wrapped({{clean, p}});
        set_grad(clean, {1.0});
        std::vector<double> values{1.0, 2.0, 3.0};
        values[place] = bad;
        set_grad(p, values);
        wrapped.weights.take_gradients(2.0);
        CHECK(wrapped.weights.overflow());
        const auto report = wrapped.weights.report();
        REQUIRE(report.first_offender() != nullptr);
        CHECK(report.first_offender()->index == 1);
        CHECK(report.overflow);
        CHECK_FALSE(std::isfinite(report.norm));
        set_grad(p, {1.0, 2.0, 3.0});
        wrapped.weights.take_gradients(2.0);
        CHECK_FALSE(wrapped.weights.overflow());
        CHECK(wrapped.weights.report().first_offender() == nullptr);
      }
    }
  }
}

TEST_CASE("norms of every kind agree with double") {
  std::vector<at::Tensor> parameters;
  std::vector<at::Tensor> exact;
  for (const auto type : kAllTypes) {
    const auto gradient =
        at::arange(1, 400, at::kDouble).mul(0.37).sin().to(type);
    parameters.push_back(parameter(gradient, type));
    set_grad(parameters.back(), gradient.clone());
    exact.push_back(gradient.to(at::kDouble) / 8);
  }
  Wrapped wrapped({parameters});
  wrapped.weights.take_gradients(8.0);
  const auto all = at::cat(exact);
  for (const double p : {2.0, 1.0, 3.0, 0.5, HUGE_VAL}) {
    CAPTURE(p);
    // The 2-norm is summed in fp32 over at most 256 squares a lane.
    CHECK(
        wrapped.weights.gradient_norm(p) ==
        doctest::Approx(at::linalg_vector_norm(all, p).item<double>())
            .epsilon(p == 2.0 ? 257 * 0x1p-24 : 1e-12));
  }
}

TEST_CASE("a norm sees edits since it was measured") {
  const auto half = parameter({1.0, 1.0}, at::kHalf);
  const auto native = parameter({1.0, 1.0}, at::kFloat);
  Wrapped wrapped({{half, native}});
  set_grad(half, {3.0, 0.0});
  set_grad(native, {0.0, 4.0});
  wrapped.weights.take_gradients(1.0);
  CHECK(wrapped.weights.gradient_norm(2.0) == 5.0);
  CHECK(wrapped.weights.gradient_norm(HUGE_VAL) == 4.0);
  wrapped.gradient(0).mul_(0); // by version
  CHECK(wrapped.weights.gradient_norm(2.0) == 4.0);
  wrapped.visible(0).mutable_grad() = at::full({2}, 6.0); // by identity
  native.mutable_grad().reset();
  CHECK(wrapped.weights.gradient_norm(HUGE_VAL) == 6.0);
  wrapped.weights.scale_gradients(0.5);
  CHECK(wrapped.weights.gradient_norm(HUGE_VAL) == 3.0);
}

TEST_CASE("norms survive values that no float32 square can hold") {
  const auto large = parameter(at::zeros({4096}), at::kFloat);
  const auto small = parameter({0.0}, at::kFloat);
  Wrapped wrapped({{large, small}});
  set_grad(large, at::full({4096}, 1e30F));
  set_grad(small, {1e-30});
  wrapped.weights.take_gradients(1.0);
  CHECK(
      wrapped.weights.gradient_norm(2.0) ==
      doctest::Approx(64 * static_cast<double>(1e30F)).epsilon(1e-12));
  large.mutable_grad().reset();
  wrapped.weights.take_gradients(1.0);
  CHECK(
      wrapped.weights.gradient_norm(2.0) ==
      doctest::Approx(static_cast<double>(1e-30F)).epsilon(1e-12));
}

TEST_CASE("sparse gradients add up duplicates in float32") {
  for (const auto type : {at::kHalf, at::kBFloat16}) {
    CAPTURE(std::string(c10::toString(type)));
    const auto p = parameter(at::zeros({4, 2}), type);
    Wrapped wrapped({{p}});
    // 40000 + 40000 is beyond half.
    const auto indices = at::tensor({2, 0, 2}, at::kLong).view({1, 3});
    const auto values =
        at::tensor({40000.0, 1.0, 2.0, 3.0, 40000.0, 5.0}).view({3, 2});
    set_grad(p, at::sparse_coo_tensor(indices, values.to(type), p.sizes()));
    wrapped.weights.take_gradients(2.0);
    CHECK_FALSE(wrapped.weights.overflow());
    const auto twice = 2 * at::scalar_tensor(40000.0, type).item<double>();
    CHECK(wrapped.gradient(0).is_sparse());
    CHECK(equals(
        wrapped.gradient(0).to_dense(),
        {1.0, 1.5, 0, 0, twice / 2, 3.0, 0, 0}));
    CHECK(wrapped.weights.gradient_norm(HUGE_VAL) == twice / 2);
    wrapped.weights.scale_gradients(0.5);
    CHECK(
        wrapped.gradient(0).to_dense().sum().item<float>() ==
        doctest::Approx(twice / 4 + 2.75).epsilon(1e-7));
  }
}

TEST_CASE("sparse gradients of native parameters are unscaled in place") {
  for (const auto type : {at::kFloat, at::kDouble}) {
    CAPTURE(std::string(c10::toString(type)));
    const auto p = parameter(at::zeros({3}), type);
    Wrapped wrapped({{p}});
    const auto indices = at::tensor({2, 0, 2}, at::kLong).view({1, 3});
    set_grad(
        p,
        at::sparse_coo_tensor(
            indices,
            at::tensor({4.0, 8.0, 12.0}).to(type),
            {3}));
    wrapped.weights.take_gradients(4.0);
    wrapped.weights.take_gradients(4.0);
    CHECK(equals(p.grad().to_dense(), {2.0, 0.0, 4.0}));
    CHECK(wrapped.weights.gradient_norm(1.0) == 6.0);
  }
}

TEST_CASE("an inf in a sparse gradient is an overflow, an empty one is none") {
  const auto p = parameter(at::zeros({3}), at::kHalf);
  Wrapped wrapped({{p}});
  const auto indices = at::tensor({1}, at::kLong).view({1, 1});
  set_grad(
      p,
      at::sparse_coo_tensor(indices, at::full({1}, HUGE_VAL, at::kHalf), {3}));
  wrapped.weights.take_gradients(2.0);
  CHECK(wrapped.weights.overflow());
  set_grad(
      p,
      at::sparse_coo_tensor(
          at::empty({1, 0}, at::kLong),
          at::empty({0}, at::kHalf),
          {3}));
  wrapped.weights.take_gradients(2.0);
  CHECK_FALSE(wrapped.weights.overflow());
  CHECK(wrapped.weights.gradient_norm(2.0) == 0.0);
}

TEST_CASE("gradients are cleared to None or to zero") {
  for (const bool to_none : {true, false}) {
    CAPTURE(to_none);
    const auto half = parameter({1.0, 2.0}, at::kHalf);
    const auto native = parameter({1.0}, at::kDouble);
    const auto frozen = at::ones({1}, at::kFloat);
    const auto gapped = at::ones({4}).slice(0, 0, 4, 2);
    Wrapped wrapped({{half, native, frozen}});
    set_grad(half, gapped.to(at::kHalf));
    set_grad(native, {8.0});
    set_grad(frozen, {1.0});
    wrapped.weights.take_gradients(2.0);
    wrapped.weights.zero_grad(to_none);
    for (const auto& p : {half, native, frozen, wrapped.visible(0)}) {
      REQUIRE(p.mutable_grad().defined() == !to_none);
      CHECK((to_none || p.grad().count_nonzero().item<std::int64_t>() == 0));
    }
    // And what was multiplied in is forgotten.
    set_grad(native, {8.0});
    wrapped.weights.take_gradients(2.0);
    CHECK(equals(native.grad(), {4.0}));
  }
}

TEST_CASE("a gradient that nothing has taken is seen") {
  const auto half = parameter({1.0}, at::kHalf);
  const auto native = parameter({1.0}, at::kFloat);
  Wrapped wrapped({{native, half}});
  CHECK_FALSE(wrapped.weights.waiting_gradient(true).has_value());
  set_grad(half, {0.0});
  CHECK_FALSE(wrapped.weights.waiting_gradient(true).has_value());
  set_grad(half, {2.0});
  REQUIRE(wrapped.weights.waiting_gradient(false).has_value());
  CHECK(wrapped.weights.waiting_gradient(false)->index == 1);
  wrapped.weights.take_gradients(1.0);
  CHECK_FALSE(wrapped.weights.waiting_gradient(true).has_value());
  half.mutable_grad().add_(1.0);
  CHECK(wrapped.weights.waiting_gradient(false).has_value());
  half.mutable_grad().reset();
  set_grad(native, {1.0});
  CHECK_FALSE(wrapped.weights.waiting_gradient(false).has_value());
  REQUIRE(wrapped.weights.waiting_gradient(true).has_value());
  CHECK(wrapped.weights.waiting_gradient(true)->index == 0);
}

TEST_CASE("gradients of the wrong kind are refused with nothing changed") {
  const auto half = parameter({1.0, 2.0}, at::kHalf);
  Wrapped wrapped({{half}});
  set_grad(half, at::ones({2}, at::kInt));
  CHECK(
      error_of<c10::TypeError>([&] { wrapped.weights.take_gradients(1.0); }) ==
      "Test.update_master_grads: gradients must be floating point, and of the "
      "parameter's dtype where it has no master, but got int32 for group 0, "
      "index 0: shape [2], float16, cpu");
  set_grad(half, at::eye(2).to_sparse_csr());
  CHECK(
      error_of<c10::NotImplementedError>([&] {
        wrapped.weights.take_gradients(1.0);
      }).find("gradients must be strided or sparse COO, but got SparseCsr") !=
      std::string::npos);
  CHECK_FALSE(wrapped.gradient(0).defined());
}

TEST_CASE("a half parameter may have a gradient of another float type") {
  for (const auto type : kAllTypes) {
    CAPTURE(std::string(c10::toString(type)));
    const auto p = parameter(at::zeros({3001}), at::kHalf);
    Wrapped wrapped({{p}});
    const auto values = at::arange(3001, at::kDouble).remainder(97);
    set_grad(p, values.to(type));
    wrapped.weights.take_gradients(4.0);
    CHECK((wrapped.gradient(0).scalar_type() == at::kFloat));
    CHECK(at::equal(wrapped.gradient(0).to(at::kDouble), values / 4));
    CHECK_FALSE(wrapped.weights.overflow());
  }
}

// ---- weights ----

TEST_CASE("writes by others reach the master where they differ") {
  const auto p = parameter({1.0, 2.0, 3.0}, at::kHalf);
  Wrapped wrapped({{p}});
  const auto master = wrapped.visible(0);
  const c10::NoGradGuard no_grad;
  master.add_(0x1p-13); // below what half resolves at 1
  wrapped.weights.write_model();
  CHECK(equals(p, {1.0, 2.0, 3.0}));
  p.copy_(at::tensor({1.0, 2.0, 7.0}));
  wrapped.weights.adopt_model_writes();
  CHECK(equals(master, {1.0 + 0x1p-13, 2.0 + 0x1p-13, 7.0}));
  p.set_data(at::tensor({5.0, 2.0, 7.0}).to(at::kHalf));
  wrapped.weights.adopt_model_writes();
  CHECK(equals(master, {5.0, 2.0 + 0x1p-13, 7.0}));
  wrapped.weights.overwrite_masters();
  CHECK(equals(master, {5.0, 2.0, 7.0}));
}

TEST_CASE("writes past the version counter show where values are compared") {
  for (const auto writes : {ModelWrites::kVersion, ModelWrites::kValues}) {
    const auto p = parameter({1.0, 2.0}, at::kHalf);
    Wrapped wrapped({{p}}, writes);
    p.mutable_data_ptr<c10::Half>()[1] = 9.0F;
    wrapped.weights.adopt_model_writes();
    CHECK(equals(
        wrapped.visible(0),
        {1.0, writes == ModelWrites::kValues ? 9.0 : 2.0}));
  }
}

TEST_CASE("the model's own write is not taken for another's") {
  const auto p = parameter({1.0}, at::kHalf);
  Wrapped wrapped({{p}});
  const auto version = p._version();
  {
    const c10::NoGradGuard no_grad;
    wrapped.visible(0).fill_(1.0 + 0x1p-12);
  }
  wrapped.weights.write_model();
  CHECK(p._version() > version);
  const auto master_version = wrapped.visible(0)._version();
  wrapped.weights.adopt_model_writes();
  CHECK(wrapped.visible(0)._version() == master_version);
  CHECK(equals(wrapped.visible(0), {1.0 + 0x1p-12}));
}

TEST_CASE("a parameter that turned wide is written and read as it is now") {
  for (const auto type : {at::kFloat, at::kDouble}) {
    CAPTURE(std::string(c10::toString(type)));
    const auto p = parameter(at::ones({1000}), at::kHalf);
    Wrapped wrapped({{p}});
    p.set_data(p.detach().to(type));
    set_grad(p, at::full({1000}, 8.0, type));
    wrapped.weights.take_gradients(4.0);
    CHECK((wrapped.gradient(0).scalar_type() == at::kFloat));
    CHECK(at::equal(wrapped.gradient(0), at::full({1000}, 2.0)));
    {
      const c10::NoGradGuard no_grad;
      wrapped.visible(0).fill_(0.1F);
    }
    wrapped.weights.write_model();
    CHECK(at::equal(p.detach(), at::full({1000}, 0.1F).to(type)));
  }
}

TEST_CASE("a weight beyond the half range is told once") {
  const auto half = parameter({1.0}, at::kHalf);
  const auto bfloat = parameter({1.0}, at::kBFloat16);
  Wrapped wrapped({{bfloat, half}});
  const c10::NoGradGuard no_grad;
  wrapped.visible(0).fill_(1e30);
  wrapped.visible(1).fill_(1e5);
  wrapped.weights.write_model();
  CHECK(std::isinf(half.item<float>()));
  const auto told = wrapped.weights.take_new_saturations();
  REQUIRE(told.size() == 1);
  CHECK(told[0].index == 1);
  CHECK(told[0].parameter.is_same(half));
  wrapped.weights.write_model();
  CHECK(wrapped.weights.take_new_saturations().empty());
}

TEST_CASE("a snapshot puts masters, natives and the model back") {
  const auto half = parameter({1.0, 2.0}, at::kHalf);
  const auto native = parameter({3.0}, at::kDouble);
  Wrapped wrapped({{half, native}});
  const c10::NoGradGuard no_grad;
  wrapped.visible(0).add_(0x1p-14);
  wrapped.weights.take_snapshot();
  wrapped.visible(0).fill_(9.0);
  native.fill_(9.0);
  wrapped.weights.write_model();
  CHECK(equals(half, {9.0, 9.0}));
  wrapped.weights.rollback();
  CHECK(equals(half, {1.0, 2.0}));
  CHECK(equals(wrapped.visible(0), {1.0 + 0x1p-14, 2.0 + 0x1p-14}));
  CHECK(equals(native, {3.0}));
}

TEST_CASE("masters are loaded, rounded into the model, or refused") {
  const auto p = parameter({1.0, 2.0}, at::kHalf);
  Wrapped wrapped({{p}});
  const auto master = wrapped.visible(0);
  wrapped.weights.load_masters(
      {{at::tensor({1.0 + 0x1p-20, 5.0}, at::kDouble)}});
  CHECK(wrapped.weights.master_params()[0][0].is_same(master));
  CHECK(equals(master, {1.0 + 0x1p-20, 5.0}));
  CHECK(equals(p, {1.0, 5.0}));
  CHECK(
      error_of<c10::ValueError>([&] { wrapped.weights.load_masters({}); }) ==
      "Test.load_state_dict: there must be 1 groups of masters, but got 0");
  CHECK(error_of<c10::ValueError>([&] {
          wrapped.weights.load_masters({{}});
        }) == "Test.load_state_dict: group 0 must have 1 masters, but got 0");
  CHECK(
      error_of<c10::ValueError>(
          [&] { wrapped.weights.load_masters({{at::ones({3})}}); }) ==
      "Test.load_state_dict: master 0 of group 0 must be floating point with "
      "shape [2], but got float32 with shape [3]");
  CHECK(equals(master, {1.0 + 0x1p-20, 5.0}));
}

TEST_CASE("a frozen half parameter is adopted where a checkpoint has it") {
  const auto frozen = at::ones({2}, at::kHalf);
  const auto native = parameter({1.0}, at::kFloat);
  Wrapped wrapped({{frozen, native}});
  const auto adoptions = wrapped.weights.adopt_at({{0}});
  REQUIRE(adoptions.size() == 1);
  CHECK(adoptions[0].model.is_same(frozen));
  CHECK(wrapped.weights.adopt_at({{0}}).empty());
  for (const std::int64_t bad : {1, 2, -1}) {
    CAPTURE(bad);
    CHECK_FALSE(error_of<c10::ValueError>([&] {
                  wrapped.weights.adopt_at({{bad}});
                }).empty());
  }
  CHECK_FALSE(
      error_of<c10::ValueError>([&] { wrapped.weights.adopt_at({}); }).empty());
}

TEST_CASE("a parameter must keep its shape") {
  const auto p = parameter({1.0, 2.0}, at::kHalf);
  Wrapped wrapped({{p}});
  p.set_data(at::ones({3}, at::kHalf));
  const std::string text =
      "Test: a parameter must keep its shape [2], but got group 0, index 0: "
      "shape [3], float16, cpu";
  CHECK(error_of<c10::Error>([&] {
          wrapped.weights.take_gradients(1.0);
        }) == text);
  CHECK(error_of<c10::Error>([&] { wrapped.weights.write_model(); }) == text);
  CHECK(error_of<c10::Error>([&] {
          wrapped.weights.adopt_model_writes();
        }) == text);
}
