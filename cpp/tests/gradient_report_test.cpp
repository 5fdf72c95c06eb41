// The gradient report: counts, order and text.

#include <fp16core/gradient_report.h>
#include <fp16core/master_weights.h>

#include <ATen/ATen.h>

#include <doctest.h>

#include <cmath>
#include <limits>

using namespace fp16core;

namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

at::Tensor tensor(std::vector<double> values, c10::ScalarType type) {
  return at::tensor(values, at::kDouble).to(type);
}

} // namespace

TEST_CASE("the report lists what each gradient holds, in order") {
  MasterWeights weights("Test");
  const auto make = [](std::vector<double> gradient, c10::ScalarType type) {
    auto p = at::ones({static_cast<std::int64_t>(gradient.size())}, type)
                 .set_requires_grad(true);
    p.mutable_grad() = tensor(gradient, type);
    return p;
  };
  const auto without = at::ones({1}, at::kHalf).set_requires_grad(true);
  const auto a = make({6.0, -8.0}, at::kHalf);
  const auto b = make({kInf, -kInf, kNan, 2.0}, at::kFloat);
  const auto c = make({-24.0}, at::kDouble);
  const auto d = make({kNan}, at::kBFloat16);
  weights.ingest({{without, a}, {b, c, d}});
  weights.take_gradients(2.0);
  const auto report = weights.report();
  REQUIRE(report.tensors.size() == 4);
  const auto& [of_a, of_b, of_c, of_d] = std::tie(
      report.tensors[0],
      report.tensors[1],
      report.tensors[2],
      report.tensors[3]);
  CHECK(of_a.group == 0);
  CHECK(of_a.index == 1);
  CHECK(of_a.parameter.is_same(a));
  CHECK(of_a.inf_count == 0);
  CHECK(of_a.nan_count == 0);
  CHECK(of_a.norm == 5.0);
  CHECK(of_a.largest == 4.0);
  CHECK(of_b.group == 1);
  CHECK(of_b.index == 0);
  CHECK(of_b.inf_count == 2);
  CHECK(of_b.nan_count == 1);
  CHECK_FALSE(std::isfinite(of_b.norm));
  CHECK(std::isnan(of_b.largest));
  CHECK(of_c.norm == 12.0);
  CHECK(of_c.largest == 12.0);
  CHECK(of_d.nan_count == 1);
  CHECK(report.overflow);
  CHECK(std::isnan(report.largest));
  CHECK(report.first_offender() == &report.tensors[1]);
  CHECK(
      GradientReport::describe(of_b) ==
      "group 1, index 0: shape [4], float32, cpu, with 2 inf and 1 NaN");
}

TEST_CASE("a clean report has the norm and the largest over all") {
  MasterWeights weights("Test");
  const auto a = at::ones({2}, at::kHalf).set_requires_grad(true);
  const auto b = at::ones({1}, at::kDouble).set_requires_grad(true);
  a.mutable_grad() = tensor({6.0, -8.0}, at::kHalf);
  b.mutable_grad() = tensor({24.0}, at::kDouble);
  weights.ingest({{a, b}});
  weights.take_gradients(2.0);
  const auto report = weights.report();
  CHECK(report.norm == 13.0);
  CHECK(report.largest == 12.0);
  CHECK_FALSE(report.overflow);
  CHECK(report.first_offender() == nullptr);
}

TEST_CASE("a report of nothing is clean") {
  MasterWeights weights("Test");
  weights.ingest({{at::ones({2}, at::kHalf).set_requires_grad(true)}});
  weights.take_gradients(2.0);
  const auto report = weights.report();
  CHECK(report.tensors.empty());
  CHECK(report.norm == 0.0);
  CHECK(report.largest == 0.0);
  CHECK_FALSE(report.overflow);
  CHECK_FALSE(weights.overflow());
}
