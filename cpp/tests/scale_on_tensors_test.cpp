// The scale's state machine on tensors, against the rule of apex' kernel
// written out in float32.

#include "oracle.h"

#include <fp16core/scale_on_tensors.h>

#include <ATen/ATen.h>

#include <doctest.h>

using namespace fp16core;
using fp16core::test::error_of;

namespace {

struct Tensors {
  at::Tensor scale = at::full({1}, 1024.0F);
  at::Tensor growth = at::zeros({1}, at::kInt);
  at::Tensor hysteresis = at::full({1}, 2, at::kInt);

  at::Tensor update(float found_inf, std::int64_t interval = 3) {
    return update_scale_hysteresis(
        scale,
        growth,
        hysteresis,
        at::full({1}, found_inf),
        2.0,
        0.5,
        interval,
        2);
  }
};

} // namespace

TEST_CASE("a scale in tensors moves by the kernel's rule") {
  Tensors tensors;
  float scale = 1024.0F;
  int growth = 0;
  int hysteresis = 2;
  std::mt19937 random(3);
  for (int i = 0; i < 500; ++i) {
    CAPTURE(i);
    const bool overflow = std::bernoulli_distribution(0.3)(random);
    CHECK(tensors.update(overflow ? 1.0F : 0.0F).is_same(tensors.scale));
    if (overflow) {
      --hysteresis;
      growth = 0;
      scale = hysteresis > 0 ? scale : std::max(scale * 0.5F, 0x1p-126F);
    } else {
      hysteresis = 2;
      if (++growth == 3) {
        growth = 0;
        scale *= std::isfinite(scale * 2.0F) ? 2.0F : 1.0F;
      }
    }
    REQUIRE(tensors.scale.item<float>() == scale);
    REQUIRE(tensors.growth.item<int>() == growth);
    REQUIRE(tensors.hysteresis.item<int>() == hysteresis);
  }
}

TEST_CASE("a growth beyond float32 is not stored and restarts the count") {
  Tensors tensors;
  tensors.scale.fill_(0x1p127);
  tensors.update(0.0F, 1);
  CHECK(tensors.scale.item<double>() == 0x1p127);
  CHECK(tensors.growth.item<int>() == 0);
}

TEST_CASE("tensors of another kind are refused, and nothing is changed") {
  Tensors tensors;
  tensors.growth = at::zeros({1}, at::kLong);
  CHECK(
      error_of<c10::TypeError>([&] { tensors.update(0.0F); }) ==
      "update_scale_hysteresis: growth_tracker must be int32, but got int64");
  tensors.growth = at::zeros({2}, at::kInt);
  CHECK(
      error_of<c10::ValueError>([&] { tensors.update(0.0F); }) ==
      "update_scale_hysteresis: growth_tracker must have one element, but got "
      "shape [2]");
  tensors.growth = at::zeros({1}, at::kInt);
  CHECK_THROWS_AS(tensors.update(0.0F, 0), std::invalid_argument);
  CHECK(tensors.scale.item<float>() == 1024.0F);
}
