// Pairing elements by index: which layouts count as equal, and the stand-ins
// for those that differ.

#include "layout.h"

#include <ATen/ATen.h>

#include <doctest.h>

using fp16core::detail::empty_dense_like;
using fp16core::detail::same_dense_layout;
using fp16core::detail::Staging;

namespace {

at::Tensor counted(at::IntArrayRef sizes) {
  std::int64_t numel = 1;
  for (const auto size : sizes) {
    numel *= size;
  }
  return at::arange(numel, at::kFloat).view(sizes);
}

} // namespace

TEST_CASE("dense tensors of the same order in memory are alike") {
  const auto a = counted({2, 3, 4, 5});
  CHECK(same_dense_layout(a, at::empty({2, 3, 4, 5}, at::kHalf)));
  CHECK(same_dense_layout(a, counted({240}).slice(0, 120).view({2, 3, 4, 5})));
  const auto last = a.contiguous(at::MemoryFormat::ChannelsLast);
  CHECK(same_dense_layout(last, at::empty_like(last)));
  CHECK(
      same_dense_layout(a.transpose(0, 2), at::empty_like(a).transpose(0, 2)));
  CHECK(same_dense_layout(counted({}), at::empty({}, at::kHalf)));
}

TEST_CASE("tensors of another shape or order are not") {
  const auto a = counted({4, 4});
  CHECK_FALSE(same_dense_layout(a, a.t()));
  CHECK_FALSE(same_dense_layout(a, counted({16})));
  CHECK_FALSE(same_dense_layout(a, counted({2, 8})));
  CHECK_FALSE(same_dense_layout(counted({}), counted({1})));
  const auto b = counted({2, 3, 4, 5});
  CHECK_FALSE(
      same_dense_layout(b, b.contiguous(at::MemoryFormat::ChannelsLast)));
}

TEST_CASE("tensors with gaps or shared elements are like nothing") {
  const auto gapped = counted({4, 8}).slice(1, 0, 8, 2);
  CHECK_FALSE(same_dense_layout(gapped, gapped));
  CHECK_FALSE(same_dense_layout(gapped, counted({4, 4})));
  const auto expanded = counted({1, 4}).expand({4, 4});
  CHECK_FALSE(same_dense_layout(expanded, expanded));
  const auto windows = counted({8}).as_strided({5, 4}, {1, 1});
  CHECK_FALSE(same_dense_layout(windows, windows));
}

TEST_CASE("strides of dimensions with one element do not matter") {
  const auto a = counted({3, 1, 5});
  CHECK(same_dense_layout(a, a.as_strided({3, 1, 5}, {5, 77, 1})));
  const auto turned = counted({5, 1, 3}).permute({2, 1, 0});
  CHECK(same_dense_layout(turned, turned.as_strided({3, 1, 5}, {1, 1000, 3})));
  CHECK_FALSE(same_dense_layout(a, turned));
}

TEST_CASE("tensors without elements are alike where their shapes are") {
  CHECK(same_dense_layout(counted({0}), counted({0})));
  CHECK(same_dense_layout(counted({0, 3}), at::empty({3, 0}).t()));
  CHECK_FALSE(same_dense_layout(counted({0, 3}), counted({3, 0})));
}

TEST_CASE("what is made like a tensor has its strides where they are dense") {
  const auto turned = counted({3, 4}).t();
  auto made = empty_dense_like(turned, at::kHalf);
  CHECK((made.scalar_type() == at::kHalf));
  CHECK(made.strides() == turned.strides());
  CHECK(same_dense_layout(made, turned));
  const auto gapped = counted({4, 8}).slice(1, 0, 8, 2);
  made = empty_dense_like(gapped, at::kDouble);
  CHECK(made.sizes() == gapped.sizes());
  CHECK(made.is_contiguous());
}

TEST_CASE("a tensor that lies right is staged as itself") {
  Staging staging;
  const auto a = counted({3, 4});
  const auto like = at::empty({3, 4}, at::kHalf);
  CHECK(staging.readable(a, like).is_same(a));
  CHECK(staging.writable(a, like, true).is_same(a));
}

TEST_CASE("stand-ins pair elements by index") {
  Staging staging;
  const auto a = counted({3, 4});
  const auto like = at::empty({4, 3}, at::kHalf).t();
  const auto& readable = staging.readable(a, like);
  CHECK_FALSE(readable.is_same(a));
  CHECK(same_dense_layout(readable, like));
  CHECK((readable.scalar_type() == at::kFloat));
  CHECK(at::equal(readable, a));
}

TEST_CASE("what was written to a stand-in comes back") {
  Staging staging;
  const auto base = counted({3, 8});
  const auto before = base.clone();
  const auto gapped = base.slice(1, 1, 8, 2);
  const auto like = at::empty({4, 3}).t();
  const auto stand_in = staging.writable(gapped, like, true);
  CHECK(at::equal(stand_in, gapped));
  stand_in.mul_(2);
  CHECK(at::equal(base, before));
  staging.write_back();
  CHECK(at::equal(gapped, before.slice(1, 1, 8, 2) * 2));
  CHECK(at::equal(base.slice(1, 0, 8, 2), before.slice(1, 0, 8, 2)));
}

TEST_CASE("stand-ins stay where they are while more are made") {
  Staging staging;
  const auto like = at::empty({2, 2}).t();
  const auto& first = staging.readable(counted({2, 2}), like);
  const auto* address = first.const_data_ptr();
  for (int i = 0; i < 100; ++i) {
    staging.readable(counted({2, 2}) + i, like);
  }
  CHECK(first.const_data_ptr() == address);
  CHECK(at::equal(first, counted({2, 2})));
}
