// The scope of mixed precision: what runs in it, and that it leaves nothing.

#include "oracle.h"

#include <fp16core/autocast.h>

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>

#include <doctest.h>

#include <stdexcept>
#include <thread>

using namespace fp16core;
using fp16core::test::error_of;

namespace {

namespace autocast = at::autocast;

// What a product of float32 matrices comes out as.
c10::ScalarType product_type() {
  return at::ones({2, 2}).mm(at::ones({2, 2})).scalar_type();
}

bool is(c10::ScalarType a, c10::ScalarType b) {
  return a == b;
}

} // namespace

TEST_CASE("a scope runs on the CPU in the dtype that torch has for it") {
  CHECK(is(product_type(), at::kFloat));
  {
    const AutocastGuard guard(at::kCPU);
    CHECK(is(product_type(), at::kBFloat16));
  }
  CHECK(is(product_type(), at::kFloat));
}

TEST_CASE("a scope runs in the dtype that it was given") {
  for (const auto type : {at::kHalf, at::kBFloat16}) {
    const AutocastGuard guard(at::kCPU, type);
    CHECK(is(product_type(), type));
  }
  CHECK(is(autocast::get_autocast_dtype(at::kCPU), at::kBFloat16));
}

TEST_CASE("scopes nest, with and without mixed precision") {
  const AutocastGuard outer(at::kCPU, at::kHalf);
  {
    const AutocastGuard off(at::kCPU, std::nullopt, false);
    CHECK(is(product_type(), at::kFloat));
    {
      // The dtype is inherited.
      const AutocastGuard on(at::kCPU);
      CHECK(is(product_type(), at::kHalf));
    }
    CHECK(is(product_type(), at::kFloat));
  }
  {
    const AutocastGuard other(at::kCPU, at::kBFloat16);
    CHECK(is(product_type(), at::kBFloat16));
  }
  CHECK(is(product_type(), at::kHalf));
}

TEST_CASE("devices have scopes of their own") {
  const AutocastGuard cuda(at::kCUDA);
  CHECK(autocast::is_autocast_enabled(at::kCUDA));
  CHECK(is(autocast::get_autocast_dtype(at::kCUDA), at::kHalf));
  CHECK_FALSE(autocast::is_autocast_enabled(at::kCPU));
  CHECK(is(product_type(), at::kFloat));
  {
    const AutocastGuard cpu(at::kCPU);
    CHECK(is(product_type(), at::kBFloat16));
    CHECK(autocast::is_autocast_enabled(at::kCUDA));
  }
  CHECK_FALSE(autocast::is_autocast_enabled(at::kCPU));
}

TEST_CASE("an exception leaves no scope behind") {
  const auto fail = [] {
    const AutocastGuard outer(at::kCPU, at::kHalf, true, false);
    const AutocastGuard inner(at::kCPU, at::kBFloat16, false, true);
    throw std::runtime_error("of the model");
  };
  CHECK_THROWS_AS(fail(), std::runtime_error);
  CHECK_FALSE(autocast::is_autocast_enabled(at::kCPU));
  CHECK(is(autocast::get_autocast_dtype(at::kCPU), at::kBFloat16));
  CHECK(autocast::is_autocast_cache_enabled());
  CHECK(is(product_type(), at::kFloat));
  // The depth is back at 0.
  CHECK(autocast::increment_nesting() == 1);
  CHECK(autocast::decrement_nesting() == 0);
}

TEST_CASE("another thread runs on as it did") {
  const AutocastGuard guard(at::kCPU);
  bool enabled = true;
  auto type = at::kHalf;
  std::thread([&] {
    enabled = autocast::is_autocast_enabled(at::kCPU);
    type = product_type();
  }).join();
  CHECK_FALSE(enabled);
  CHECK(is(type, at::kFloat));
}

namespace {

// The product of a vector of ones with a weight, whose cast may be kept.
at::Tensor through(const at::Tensor& weight) {
  return at::ones({1, 2}).mm(weight);
}

// Changes the weight as no optimizer does, so that a cast that was kept shows.
void fill(const at::Tensor& weight, double value) {
  weight.detach().fill_(value);
}

} // namespace

TEST_CASE("a weight is cast once in a scope, and dropped after the outermost") {
  const auto weight = at::ones({2, 1}).set_requires_grad(true);
  {
    const AutocastGuard outer(at::kCPU);
    CHECK(through(weight).item<double>() == 2.0);
    fill(weight, 4.0);
    CHECK(through(weight).item<double>() == 2.0);
    {
      const AutocastGuard inner(at::kCPU);
      CHECK(through(weight).item<double>() == 2.0);
    }
    CHECK(through(weight).item<double>() == 2.0);
  }
  const AutocastGuard again(at::kCPU);
  CHECK(through(weight).item<double>() == 8.0);
}

TEST_CASE("no weight is kept where the cache is off") {
  const auto weight = at::ones({2, 1}).set_requires_grad(true);
  const AutocastGuard guard(at::kCPU, std::nullopt, true, false);
  CHECK(through(weight).item<double>() == 2.0);
  fill(weight, 4.0);
  CHECK(through(weight).item<double>() == 8.0);
}

TEST_CASE("a weight is cast anew where the dtype changes") {
  const auto weight = at::ones({2, 1}).set_requires_grad(true);
  const AutocastGuard outer(at::kCPU, at::kHalf);
  CHECK(is(through(weight).scalar_type(), at::kHalf));
  {
    const AutocastGuard inner(at::kCPU, at::kBFloat16);
    CHECK(is(through(weight).scalar_type(), at::kBFloat16));
  }
  CHECK(is(through(weight).scalar_type(), at::kHalf));
}

TEST_CASE("devices and dtypes without autocast are refused") {
  CHECK(
      error_of<c10::ValueError>([] { AutocastGuard{at::kMeta}; }) ==
      "AutocastGuard: device must be one that has autocast, but got meta");
  CHECK(
      error_of<c10::ValueError>([] { AutocastGuard(at::kCPU, at::kFloat); }) ==
      "AutocastGuard: dtype must be float16 or bfloat16, but got float32");
  CHECK_FALSE(autocast::is_autocast_enabled(at::kCPU));
  CHECK(is(product_type(), at::kFloat));
  CHECK(autocast::increment_nesting() == 1);
  CHECK(autocast::decrement_nesting() == 0);
}
