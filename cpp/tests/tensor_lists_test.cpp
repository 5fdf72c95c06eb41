// Functions on lists of tensors, in every dtype and layout.

#include "oracle.h"

#include <fp16core/tensor_lists.h>

#include <ATen/ATen.h>

#include <doctest.h>

#include <functional>
#include <utility>

using namespace fp16core;
using fp16core::test::error_of;

namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

const std::vector<c10::ScalarType> kAllTypes{
    at::kHalf,
    at::kBFloat16,
    at::kFloat,
    at::kDouble};

at::Tensor tensor(std::vector<double> values, c10::ScalarType type) {
  return at::tensor(values, at::kDouble).to(type);
}

bool equals(const at::Tensor& tensor, std::vector<double> values) {
  return at::equal(
      tensor.detach().to(at::kDouble).flatten(),
      at::tensor(values, at::kDouble));
}

bool same(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && at::equal(a, b);
}

// Ways to lay 3 x 4 x 2 x 5 elements out in memory.
const std::vector<std::function<at::Tensor(const at::Tensor&)>> kLayouts{
    [](const at::Tensor& t) { return t.clone(); },
    [](const at::Tensor& t) { return t.clone(at::MemoryFormat::ChannelsLast); },
    [](const at::Tensor& t) {
      return t.transpose(0, 3).contiguous().transpose(0, 3);
    },
    // With gaps.
    [](const at::Tensor& t) {
      const auto wide = at::full({3, 4, 2, 11}, kNan, t.options());
      const auto inner = wide.slice(3, 1, 11, 2);
      inner.copy_(t);
      return inner;
    }};

at::Tensor counted(c10::ScalarType type) {
  return at::arange(-60, 60, at::kDouble).view({3, 4, 2, 5}).to(type);
}

const auto kRow = [](c10::ScalarType type) {
  return at::ones({1}, type).expand({3});
};

at::Tensor sparse(std::vector<double> values, c10::ScalarType type) {
  const auto count = static_cast<std::int64_t>(values.size());
  return at::sparse_coo_tensor(
      at::zeros({1, count}, at::kLong),
      tensor(std::move(values), type),
      {3});
}

} // namespace

TEST_CASE("a list of tensors is checked for inf and NaN") {
  CHECK_FALSE(has_overflow({}));
  CHECK_FALSE(has_overflow({at::Tensor()}));
  for (const auto type : kAllTypes) {
    CAPTURE(std::string(c10::toString(type)));
    const auto clean = at::full({1000}, 60000.0, type);
    CHECK_FALSE(has_overflow({clean, at::Tensor(), at::empty({0}, type)}));
    for (const double bad : {kInf, -kInf, kNan}) {
      CAPTURE(bad);
      for (const std::int64_t place : {0, 15, 16, 998, 999}) {
        CAPTURE(place);
        const auto dirty = clean.clone();
        dirty[place] = bad;
        CHECK(has_overflow({clean, dirty}));
        CHECK(has_overflow({dirty, clean}));
        CHECK(has_overflow({dirty.view({10, 100}).t()}));
        // A view that leaves the element out is clean.
        CHECK(has_overflow({dirty.slice(0, 0, 1000, 2)}) == (place % 2 == 0));
        CHECK(has_overflow({dirty.slice(0, place, place + 1).expand({7})}));
      }
    }
  }
}

TEST_CASE("the values of a sparse tensor are checked") {
  CHECK_FALSE(has_overflow({sparse({60000.0, 60000.0}, at::kHalf)}));
  CHECK(has_overflow({sparse({1.0, kInf}, at::kHalf)}));
}

TEST_CASE("a check of tensors that it does not know is refused") {
  CHECK(
      error_of<c10::TypeError>(
          [] { has_overflow({at::ones({2}, at::kInt)}); }) ==
      "has_overflow: tensors must be float16, bfloat16, float32 or float64, "
      "but got int32");
  CHECK(
      error_of<c10::TypeError>(
          [] { has_overflow({at::ones({2, 2}).to_sparse_csr()}); }) ==
      "has_overflow: tensors must be strided or sparse COO, but got SparseCsr");
}

TEST_CASE("gradients are collected in the order of their parameters") {
  const auto with = at::ones({2}).set_requires_grad(true);
  const auto without = at::ones({2}).set_requires_grad(true);
  with.mutable_grad() = at::ones({2});
  const auto gradients = gradients_of({without, with, at::ones({1})});
  REQUIRE(gradients.size() == 3);
  CHECK_FALSE(gradients[0].defined());
  CHECK(gradients[1].is_same(with.grad()));
  CHECK_FALSE(gradients[2].defined());
}

TEST_CASE("gradients are unscaled in every dtype and layout at once") {
  std::vector<at::Tensor> gradients{at::Tensor(), at::empty({0})};
  std::vector<at::Tensor> wanted{at::Tensor(), at::empty({0})};
  std::vector<std::int64_t> versions{0, 0};
  for (const auto type : kAllTypes) {
    for (const auto& lay : kLayouts) {
      gradients.push_back(lay(counted(type)));
      wanted.push_back(counted(type) / 8.0);
      versions.push_back(gradients.back()._version());
    }
  }
  CHECK_FALSE(unscale_(gradients, 8.0));
  for (std::size_t i = 2; i < gradients.size(); ++i) {
    CAPTURE(i);
    CHECK(same(gradients[i], wanted[i]));
    CHECK(gradients[i]._version() > versions[i]);
  }
}

TEST_CASE("unscaling leaves the gaps between elements alone") {
  const auto wide = at::arange(12, at::kFloat).view({3, 4});
  CHECK_FALSE(unscale_({wide.slice(1, 0, 4, 2)}, 2.0));
  CHECK(equals(wide, {0, 1, 1, 3, 2, 5, 3, 7, 4, 9, 5, 11}));
}

TEST_CASE("unscaling multiplies by the reciprocal, rounded for float32") {
  const double reciprocal = 1.0 / 3.0;
  const auto narrow = static_cast<double>(static_cast<float>(reciprocal));
  for (const auto type : kAllTypes) {
    CAPTURE(std::string(c10::toString(type)));
    const auto values = counted(type);
    // One rounding: of the exact product, which double holds for the others.
    const auto wanted =
        (values.to(at::kDouble) * (type == at::kDouble ? reciprocal : narrow))
            .to(at::kFloat)
            .to(type);
    const auto wide = values.to(at::kDouble) * reciprocal;
    CHECK_FALSE(unscale_({values}, 3.0));
    CHECK(same(values, type == at::kDouble ? wide : wanted));
  }
}

TEST_CASE("an overflow is told and the rest unscaled all the same") {
  for (const auto type : kAllTypes) {
    for (const double bad : {kInf, -kInf, kNan}) {
      for (const double scale : {1.0, 4.0}) {
        const auto dirty = tensor({8.0, bad}, type);
        const auto clean = tensor({12.0}, at::kFloat);
        CHECK(unscale_({dirty, clean}, scale));
        CHECK(dirty[0].item<double>() == 8.0 / scale);
        CHECK_FALSE(std::isfinite(dirty[1].item<double>()));
        CHECK(clean.item<double>() == 12.0 / scale);
      }
    }
  }
}

TEST_CASE("an overflow by a scale below 1 is told") {
  for (const auto type : {at::kHalf, at::kBFloat16, at::kFloat}) {
    CAPTURE(std::string(c10::toString(type)));
    CHECK(unscale_({tensor({60000.0}, type)}, 0x1p-124));
  }
  CHECK_FALSE(unscale_({tensor({60000.0}, at::kDouble)}, 0x1p-124));
}

TEST_CASE("what is listed twice is unscaled once") {
  const auto dense = tensor({8.0, 16.0}, at::kFloat);
  const auto gapped = at::full({4}, 8.0).slice(0, 0, 4, 2);
  CHECK_FALSE(unscale_({dense, gapped, dense, dense.detach(), gapped}, 2.0));
  CHECK(equals(dense, {4.0, 8.0}));
  CHECK(equals(gapped, {4.0, 4.0}));
  // Halves of one piece of memory are two.
  CHECK_FALSE(unscale_({dense.slice(0, 0, 1), dense.slice(0, 1)}, 2.0));
  CHECK(equals(dense, {2.0, 4.0}));
}

TEST_CASE("scale 1 writes nothing") {
  const auto gradient = tensor({8.0}, at::kFloat);
  const auto version = gradient._version();
  CHECK_FALSE(unscale_({gradient}, 1.0));
  CHECK(gradient._version() == version);
  CHECK(equals(gradient, {8.0}));
}

TEST_CASE("leaves, gradients with a graph and views can be unscaled") {
  const auto leaf = at::full({2}, 8.0).set_requires_grad(true);
  const auto gapped =
      at::full({4}, 8.0).set_requires_grad(true).slice(0, 0, 4, 2);
  const auto product = leaf * 2.0;
  CHECK_FALSE(unscale_({leaf, gapped, product}, 2.0));
  CHECK(equals(leaf, {4.0, 4.0}));
  CHECK(equals(gapped, {4.0, 4.0}));
  CHECK(equals(product, {8.0, 8.0}));
  CHECK(leaf.is_leaf());
}

TEST_CASE("gradients that cannot be unscaled are refused, and none changed") {
  const auto first = tensor({8.0}, at::kFloat);
  const auto refused = [&](const at::Tensor& bad) {
    const auto text =
        error_of<c10::TypeError>([&] { unscale_({first, bad}, 2.0); });
    CHECK(equals(first, {8.0}));
    return text;
  };
  CHECK(
      refused(at::ones({2}, at::kLong)) ==
      "unscale_: gradients must be float16, bfloat16, float32 or float64, but "
      "got int64");
  CHECK(
      refused(sparse({1.0}, at::kFloat)) ==
      "unscale_: gradients must be strided, but got Sparse");
  CHECK(
      refused(kRow(at::kFloat)) ==
      "unscale_: gradients must not share memory among their elements, but got "
      "shape [3] with strides [0]");
  using Error = std::invalid_argument;
  for (const double bad : {0.0, -1.0, kInf, kNan}) {
    CHECK(
        error_of<Error>([&] { unscale_({first}, bad); })
            .find(
                "unscale_: scale must be finite and greater than 0, but "
                "got ") == 0);
  }
  CHECK(error_of<Error>([&] {
          unscale_({first}, -1.0);
        }) == "unscale_: scale must be finite and greater than 0, but got -1");
  CHECK(
      error_of<Error>([&] { unscale_({first}, 0x1p-127); }) ==
      "unscale_: scale must be at least 2^-126, but got 5.87747175411e-39");
  CHECK(equals(first, {8.0}));
}

TEST_CASE("gradients are clipped to a norm over all of them") {
  // 3, 4 and 12 in quadrature are 13.
  for (const auto& lay : kLayouts) {
    const auto zeros = at::zeros({3, 4, 2, 5}, at::kDouble);
    zeros[0][1][1][4] = 12.0;
    const auto a = tensor({3.0}, at::kHalf);
    const auto b = tensor({-4.0}, at::kFloat);
    const auto c = lay(zeros);
    const auto version = c._version();
    const auto norm = clip_grad_norm_({a, at::Tensor(), b, c}, 6.5);
    CHECK(norm.dim() == 0);
    CHECK((norm.scalar_type() == at::kFloat));
    CHECK(norm.item<double>() == 13.0);
    const double coefficient = 6.5 / (13.0 + 1e-6);
    const auto narrow = static_cast<float>(coefficient);
    CHECK(same(a, tensor({3.0F * narrow}, at::kHalf)));
    CHECK(b.item<float>() == -4.0F * narrow);
    CHECK(c.sum().item<double>() == 12.0 * coefficient);
    CHECK(c[0][1][1][4].item<double>() == 12.0 * coefficient);
    CHECK(c._version() > version);
  }
}

TEST_CASE("every norm is there") {
  const auto norm = [](double p) {
    return clip_grad_norm_(
               {tensor({3.0, 0.0}, at::kFloat), tensor({-4.0}, at::kBFloat16)},
               kInf,
               p)
        .item<double>();
  };
  CHECK(norm(2.0) == 5.0);
  CHECK(norm(1.0) == 7.0);
  CHECK(norm(kInf) == 4.0);
  CHECK(norm(-kInf) == 0.0);
  CHECK(norm(0.0) == 2.0);
  CHECK(norm(3.0) == static_cast<float>(std::cbrt(27.0 + 64.0)));
  CHECK(norm(-1.0) == 0.0);
  CHECK(clip_grad_norm_({}, 1.0).item<double>() == 0.0);
  CHECK(clip_grad_norm_({}, 1.0, -kInf).item<double>() == 0.0);
  CHECK(clip_grad_norm_({at::Tensor()}, 1.0, 3.0).item<double>() == 0.0);
}

TEST_CASE("a norm below the limit changes nothing") {
  const auto gradient = tensor({3.0, 4.0}, at::kFloat);
  const auto version = gradient._version();
  for (const double limit : {5.1, 100.0, kInf}) {
    CHECK(clip_grad_norm_({gradient}, limit).item<double>() == 5.0);
  }
  CHECK(equals(gradient, {3.0, 4.0}));
  CHECK(gradient._version() == version);
}

TEST_CASE("a norm that is not finite changes nothing") {
  for (const double bad : {kInf, -kInf, kNan}) {
    for (const double p : {2.0, kInf, 3.0}) {
      const auto gradient = tensor({3.0, bad}, at::kFloat);
      const auto version = gradient._version();
      const auto norm = clip_grad_norm_({gradient}, 1.0, p).item<double>();
      CHECK_FALSE(std::isfinite(norm));
      CHECK(gradient[0].item<double>() == 3.0);
      CHECK(gradient._version() == version);
    }
  }
  // Beyond float32, in which the caller sees it.
  const auto large = at::full({16}, 3e38);
  CHECK(clip_grad_norm_({large}, 1.0).item<double>() == kInf);
  CHECK(large[0].item<float>() == 3e38F);
}

TEST_CASE("what is listed twice counts and is clipped once") {
  const auto gradient = tensor({3.0, 4.0}, at::kDouble);
  CHECK(clip_grad_norm_({gradient, gradient}, 2.5).item<double>() == 5.0);
  const double coefficient = 2.5 / (5.0 + 1e-6);
  CHECK(equals(gradient, {3.0 * coefficient, 4.0 * coefficient}));
}

TEST_CASE("limits and norms that make no sense are refused") {
  const auto gradient = tensor({3.0}, at::kFloat);
  CHECK(error_of<c10::ValueError>([&] {
          clip_grad_norm_({gradient}, -1.0);
        }) == "clip_grad_norm_: max_norm must be at least 0, but got -1");
  CHECK(error_of<c10::ValueError>([&] {
          clip_grad_norm_({gradient}, kNan);
        }) == "clip_grad_norm_: max_norm must be at least 0, but got nan");
  CHECK(error_of<c10::ValueError>([&] {
          clip_grad_norm_({gradient}, 1.0, kNan);
        }) == "clip_grad_norm_: norm_type must be a number, but got nan");
  CHECK(error_of<c10::TypeError>([&] {
          clip_grad_norm_({gradient, sparse({1.0}, at::kFloat)}, 1.0);
        }) == "clip_grad_norm_: gradients must be strided, but got Sparse");
  CHECK(
      error_of<c10::TypeError>(
          [&] { clip_grad_norm_({gradient, at::ones({2}, at::kInt)}, 1.0); }) ==
      "clip_grad_norm_: gradients must be float16, bfloat16, float32 or "
      "float64, but got int32");
  CHECK(
      error_of<c10::TypeError>(
          [&] { clip_grad_norm_({gradient, kRow(at::kHalf)}, 1.0); }) ==
      "clip_grad_norm_: gradients must not share memory among their elements, "
      "but got shape [3] with strides [0]");
  CHECK(equals(gradient, {3.0}));
}

TEST_CASE("tensors are cast from every dtype and layout to every dtype") {
  for (const auto to : kAllTypes) {
    std::vector<at::Tensor> sources{at::Tensor(), at::empty({0})};
    for (const auto from : kAllTypes) {
      for (const auto& lay : kLayouts) {
        sources.push_back(lay(counted(from)));
      }
      sources.push_back(kRow(from));
    }
    const auto copies = cast(sources, to);
    REQUIRE(copies.size() == sources.size());
    CHECK_FALSE(copies[0].defined());
    CHECK(copies[1].numel() == 0);
    for (std::size_t i = 2; i < copies.size(); ++i) {
      CAPTURE(i);
      // Whole numbers up to 60 are the same in all of them.
      CHECK(same(copies[i], sources[i].to(to)));
      CHECK_FALSE(copies[i].is_alias_of(sources[i]));
      CHECK(copies[i].is_non_overlapping_and_dense());
      if (sources[i].is_non_overlapping_and_dense()) {
        CHECK(copies[i].strides() == sources[i].strides());
      }
    }
  }
}

TEST_CASE("casts between float32 and half round to nearest even") {
  using fp16core::test::bits_of;
  using fp16core::test::value_of;
  std::mt19937 random(7);
  std::vector<double> values;
  for (int i = 0; i < 4096; ++i) {
    values.push_back(
        std::bit_cast<float>(static_cast<std::uint32_t>(random())));
  }
  const auto wide = tensor(values, at::kFloat);
  for (const auto& [type, format] :
       {std::pair(at::kHalf, test::kHalf),
        std::pair(at::kBFloat16, test::kBFloat16)}) {
    const auto narrow = cast({wide}, type)[0];
    const auto back = cast({narrow}, at::kFloat)[0];
    const auto bits = narrow.view(at::kShort);
    for (std::int64_t i = 0; i < wide.numel(); ++i) {
      const auto stored = static_cast<std::uint16_t>(bits[i].item<short>());
      const auto wanted = bits_of(format, values[i]);
      REQUIRE(test::same_bits(format, stored, wanted));
      REQUIRE(
          test::same_bits(
              back[i].item<float>(),
              static_cast<float>(value_of(format, wanted))));
    }
  }
}

TEST_CASE("a cast has no graph, and is a copy where the dtype stays") {
  const auto leaf = at::ones({2}).set_requires_grad(true);
  const auto version = leaf._version();
  const auto copy = cast({leaf}, at::kFloat)[0];
  CHECK_FALSE(copy.requires_grad());
  CHECK_FALSE(copy.is_alias_of(leaf));
  CHECK(leaf._version() == version);
}

TEST_CASE("a view that negates is read and written as its values read") {
  const auto negated = at::complex(at::ones({2}), at::ones({2})).conj();
  const auto view = at::imag(negated);
  REQUIRE(view.is_neg());
  CHECK(equals(cast({view}, at::kDouble)[0], {-1.0, -1.0}));
  const auto dense = view.as_strided({1}, {1}, 1);
  REQUIRE(dense.is_neg());
  CHECK(equals(cast({dense}, at::kHalf)[0], {-1.0}));
  copy_({dense}, {at::full({1}, 3.0, at::kHalf)});
  CHECK(equals(view, {3.0, -1.0}));
  CHECK_FALSE(unscale_({view}, 2.0));
  CHECK(equals(view, {1.5, -0.5}));
}

TEST_CASE("casts to and from other dtypes are refused") {
  const auto good = at::ones({2});
  CHECK(
      error_of<c10::TypeError>([&] { cast({good}, at::kLong); }) ==
      "cast: dtype must be float16, bfloat16, float32 or float64, but got "
      "int64");
  CHECK(
      error_of<c10::TypeError>(
          [&] { cast({good, at::ones({2}, at::kInt)}, at::kHalf); }) ==
      "cast: tensors must be float16, bfloat16, float32 or float64, but got "
      "int32");
  CHECK(error_of<c10::TypeError>([&] {
          cast({sparse({1.0}, at::kFloat)}, at::kHalf);
        }) == "cast: tensors must be strided, but got Sparse");
}

TEST_CASE("tensors are copied between every two dtypes and layouts") {
  for (const auto from : kAllTypes) {
    for (const auto to : kAllTypes) {
      std::vector<at::Tensor> targets{at::Tensor(), at::empty({0}, to)};
      std::vector<at::Tensor> sources{at::Tensor(), at::empty({0}, from)};
      std::vector<std::int64_t> versions{0, 0};
      for (const auto& lay_target : kLayouts) {
        for (const auto& lay_source : kLayouts) {
          targets.push_back(lay_target(at::zeros({3, 4, 2, 5}, to)));
          sources.push_back(lay_source(counted(from)));
          versions.push_back(targets.back()._version());
        }
      }
      copy_(targets, sources);
      for (std::size_t i = 2; i < targets.size(); ++i) {
        CAPTURE(i);
        CHECK(same(targets[i], sources[i].to(to)));
        CHECK(targets[i]._version() > versions[i]);
      }
    }
  }
}

TEST_CASE("copies may come from expanded tensors and go to leaves and views") {
  const auto leaf = at::zeros({3}).set_requires_grad(true);
  const auto wide = at::zeros({6}, at::kHalf).set_requires_grad(true);
  const auto self = tensor({1.0, 2.0}, at::kFloat);
  copy_(
      {leaf, wide.slice(0, 0, 6, 2), self},
      {kRow(at::kHalf), kRow(at::kFloat), self});
  CHECK(equals(leaf, {1.0, 1.0, 1.0}));
  CHECK(equals(wide, {1.0, 0.0, 1.0, 0.0, 1.0, 0.0}));
  CHECK(equals(self, {1.0, 2.0}));
}

TEST_CASE("copies that do not pair are refused, and nothing changed") {
  const auto target = at::zeros({2});
  const auto source = at::ones({2});
  CHECK(
      error_of<c10::ValueError>([&] { copy_({target, target}, {source}); }) ==
      "copy_: targets and sources must be equally many, but got 2 and 1");
  const auto value = [&](const at::Tensor& to, const at::Tensor& from) {
    return error_of<c10::ValueError>(
        [&] { copy_({target, to}, {source, from}); });
  };
  const auto type = [&](const at::Tensor& to, const at::Tensor& from) {
    return error_of<c10::TypeError>(
        [&] { copy_({target, to}, {source, from}); });
  };
  CHECK(
      value(at::zeros({2}), at::ones({1})) ==
      "copy_: targets and sources must have the same shapes, but got [2] and "
      "[1] at index 1");
  CHECK(
      value(at::zeros({2}), at::Tensor()) ==
      "copy_: targets and sources must be undefined at the same places, but "
      "got an undefined source at index 1");
  CHECK(
      value(at::Tensor(), at::zeros({2})) ==
      "copy_: targets and sources must be undefined at the same places, but "
      "got an undefined target at index 1");
  CHECK(
      type(at::zeros({2}, at::kInt), at::ones({2})) ==
      "copy_: targets must be float16, bfloat16, float32 or float64, but got "
      "int32");
  CHECK(
      type(at::zeros({2}), at::ones({2}, at::kInt)) ==
      "copy_: sources must be float16, bfloat16, float32 or float64, but got "
      "int32");
  CHECK(
      type(kRow(at::kFloat), at::ones({3})) ==
      "copy_: targets must not share memory among their elements, but got "
      "shape [3] with strides [0]");
  CHECK(
      type(at::zeros({3}), sparse({1.0}, at::kFloat)) ==
      "copy_: sources must be strided, but got Sparse");
  const auto memory = at::arange(3, at::kFloat);
  CHECK(
      error_of<c10::Error>([&] {
        copy_({target, memory.slice(0, 0, 2)}, {source, memory.slice(0, 1, 3)});
      }).find("unsupported operation") == 0);
  CHECK(equals(target, {0.0, 0.0}));
  CHECK(equals(memory, {0.0, 1.0, 2.0}));
}

TEST_CASE("tensors are copied with a factor between every two dtypes") {
  for (const auto from : kAllTypes) {
    for (const auto to : kAllTypes) {
      CAPTURE(std::string(c10::toString(from)));
      CAPTURE(std::string(c10::toString(to)));
      for (const auto& layout : kLayouts) {
        for (const auto& other : kLayouts) {
          const auto source = layout(counted(from));
          const auto target = other(at::zeros({3, 4, 2, 5}, to));
          CHECK_FALSE(scaled_copy_({target}, {source}, 0.375));
          // Exact in all of them.
          CHECK(same(target, (counted(at::kDouble) * 0.375).to(to)));
        }
      }
    }
  }
}

TEST_CASE("a factor is rounded to float32, and the product to the target") {
  const auto source = tensor({3.0, -7.0, 1e-3}, at::kFloat);
  const auto target = at::zeros({3}, at::kHalf);
  scaled_copy_({target}, {source}, 0.1);
  CHECK(same(target, (source * 0.1F).to(at::kHalf)));
  const auto wide = at::zeros({3}, at::kDouble);
  scaled_copy_({wide}, {source.to(at::kDouble)}, 0.1);
  CHECK(same(wide, source.to(at::kDouble) * 0.1));
}

TEST_CASE("a scaled copy tells of inf and NaN in its sources alone") {
  for (const auto type : kAllTypes) {
    const auto target = at::zeros({2}, at::kHalf);
    CHECK(scaled_copy_({target}, {tensor({1.0, kNan}, type)}, 1.0));
    CHECK(scaled_copy_({target}, {tensor({kInf, 2.0}, type)}, 0.5));
    CHECK(equals(target, {kInf, 1.0}));
  }
  const auto target = at::zeros({2}, at::kHalf);
  CHECK_FALSE(scaled_copy_({target}, {tensor({1.0, 2.0}, at::kFloat)}, 1e30));
  CHECK(equals(target, {kInf, kInf}));
  CHECK_FALSE(scaled_copy_({}, {}, 2.0));
  CHECK_FALSE(scaled_copy_({at::Tensor()}, {at::Tensor()}, 2.0));
}

TEST_CASE("a scaled copy may be in place") {
  for (const auto type : kAllTypes) {
    const auto values = tensor({1.0, 2.0, -4.0}, type);
    scaled_copy_({values}, {values}, 0.5);
    CHECK(equals(values, {0.5, 1.0, -2.0}));
  }
}

TEST_CASE("scaled copies that do not pair are refused") {
  const auto target = at::ones({2});
  CHECK(
      error_of<c10::ValueError>(
          [&] { scaled_copy_({target}, {at::ones({3})}, 1.0); }) ==
      "scaled_copy_: targets and sources must have the same shapes, but got "
      "[2] and [3] at index 0");
  CHECK(error_of<std::invalid_argument>([&] {
          scaled_copy_({target}, {target}, kNan);
        }) == "scaled_copy_: factor must be a number, but got nan");
  CHECK(equals(target, {1.0, 1.0}));
}

TEST_CASE("two lists are added with factors") {
  for (const auto type : kAllTypes) {
    for (const auto to : kAllTypes) {
      const auto x = tensor({1.0, 2.0, kInf}, type);
      const auto y = tensor({4.0, -8.0, 1.0}, at::kFloat);
      const auto target = at::zeros({3}, to);
      axpby_(
          {target, at::Tensor()},
          2.0,
          {x, at::Tensor()},
          0.5,
          {y, at::Tensor()});
      CHECK(equals(target, {4.0, 0.0, kInf}));
    }
  }
  CHECK_THROWS_AS(
      axpby_({at::zeros({2})}, 1.0, {at::zeros({2})}, 1.0, {at::zeros({3})}),
      c10::ValueError);
}

TEST_CASE("norms are those of each tensor and of all") {
  for (const auto type : kAllTypes) {
    for (const auto& layout : kLayouts) {
      const auto values = layout(counted(type));
      const auto found =
          norms({tensor({3.0, 4.0}, type), at::Tensor(), values}, 0.5);
      const double large =
          counted(at::kDouble).square().sum().sqrt().item<double>() / 2;
      CHECK(found.total.sizes() == at::IntArrayRef({1}));
      CHECK((found.total.scalar_type() == at::kFloat));
      CHECK(found.per_tensor[0].item<float>() == 2.5F);
      CHECK(found.per_tensor[1].item<float>() == 0.0F);
      CHECK(found.per_tensor[2].item<float>() == static_cast<float>(large));
      CHECK(
          found.total.item<float>() ==
          static_cast<float>(std::hypot(2.5, large)));
    }
  }
  // Squares beyond float32 do not hurt.
  CHECK(norms({at::full({4}, 1e30F)}).total.item<float>() == 2e30F);
  CHECK(norms({}).total.item<float>() == 0.0F);
  CHECK(norms({}).per_tensor.numel() == 0);
  CHECK_THROWS_AS(norms({at::ones({2}, at::kInt)}), c10::TypeError);
}
