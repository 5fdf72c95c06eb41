// DictReader: every kind of value that it reads, and what it says of the rest.

#include "dict_reader.h"
#include "oracle.h"

#include <fp16core/state_dict.h>

#include <ATen/ATen.h>

#include <doctest.h>

using namespace fp16core;
using fp16core::detail::describe;
using fp16core::detail::DictReader;
using fp16core::test::error_of;

namespace {

c10::IValue values() {
  auto inner = make_state_dict();
  inner.insert("steps", 7);
  auto dict = make_state_dict();
  dict.insert("bool", true);
  dict.insert("integer", std::int64_t{1} << 40);
  dict.insert("double", 0.5);
  dict.insert("string", "text");
  dict.insert("tensor", at::ones({2, 3}));
  dict.insert("one", at::full({1}, 2.5, at::kHalf));
  dict.insert("ints", c10::List<std::int64_t>({1, 2, 3}));
  dict.insert("tuple", c10::ivalue::Tuple::create({c10::IValue(), "a"}));
  dict.insert("dict", inner);
  dict.insert(3, "under an integer");
  return dict;
}

template <typename Read>
std::string refused(const Read& read) {
  const DictReader reader(values(), "Owner.load", "state");
  return error_of<c10::ValueError>([&] { read(reader); });
}

} // namespace

TEST_CASE("a dict reader returns the values of every kind") {
  const DictReader reader(values(), "Owner.load", "state");
  CHECK(reader.boolean("bool"));
  CHECK(reader.integer("integer") == std::int64_t{1} << 40);
  CHECK(reader.number("integer") == 1099511627776.0);
  CHECK(reader.number("double") == 0.5);
  CHECK(reader.number("one") == 2.5);
  CHECK(reader.string("string") == "text");
  CHECK(reader.tensor("tensor").equal(at::ones({2, 3})));
  CHECK(reader.list("ints").at(2).toInt() == 3);
  CHECK(reader.list("tuple").at(1).toStringRef() == "a");
  CHECK(reader.dict("dict").integer("steps") == 7);
  CHECK(reader.dict("dict").path("steps") == "state.dict.steps");
  CHECK(reader.at("bool").isBool());
  CHECK(reader.has("bool"));
  CHECK_FALSE(reader.has("3"));
  CHECK(reader.owner() == "Owner.load");
  CHECK(reader.values().size() == 10);
}

TEST_CASE("a dict reader reads typed dicts") {
  c10::Dict<std::string, at::Tensor> dict;
  dict.insert("a", at::ones({1}));
  const DictReader reader(dict, "Owner.load", "state");
  CHECK(reader.number("a") == 1.0);
  CHECK_FALSE(reader.has("b"));
}

TEST_CASE("tensors that a dict reader returns are those of the dict") {
  const auto tensor = at::zeros({2});
  auto dict = make_state_dict();
  dict.insert("a", tensor);
  CHECK(DictReader(dict, "Owner.load", "state").tensor("a").is_same(tensor));
}

TEST_CASE("a dict reader says what a value must be and what it is") {
  CHECK(error_of<c10::ValueError>([] {
          DictReader(c10::List<std::int64_t>({1, 2, 3}), "Owner.load", "state");
        }) == "Owner.load: state must be a dict, but got a list of 3");
  CHECK(
      refused([](const auto& r) { r.boolean("integer"); }) ==
      "Owner.load: state.integer must be a bool, but got 1099511627776");
  CHECK(refused([](const auto& r) {
          r.integer("double");
        }) == "Owner.load: state.double must be an integer, but got 0.5");
  CHECK(refused([](const auto& r) {
          r.integer("bool");
        }) == "Owner.load: state.bool must be an integer, but got True");
  CHECK(refused([](const auto& r) {
          r.number("bool");
        }) == "Owner.load: state.bool must be a number, but got True");
  CHECK(
      refused([](const auto& r) { r.number("tensor"); }) ==
      "Owner.load: state.tensor must be a number, but got a float32 tensor of "
      "shape [2, 3]");
  CHECK(refused([](const auto& r) {
          r.string("tuple");
        }) == "Owner.load: state.tuple must be a string, but got a tuple of 2");
  CHECK(refused([](const auto& r) {
          r.tensor("string");
        }) == "Owner.load: state.string must be a tensor, but got 'text'");
  CHECK(refused([](const auto& r) {
          r.list("dict");
        }) == "Owner.load: state.dict must be a list, but got a dict of 1");
  CHECK(refused([](const auto& r) {
          r.dict("dict").boolean("steps");
        }) == "Owner.load: state.dict.steps must be a bool, but got 7");
  CHECK(refused([](const auto& r) {
          r.dict("dict").at("other");
        }) == "Owner.load: state.dict must have 'other', but got only 'steps'");
  CHECK(error_of<c10::ValueError>([] {
          DictReader(make_state_dict(), "Owner.load", "state").integer("a");
        }) == "Owner.load: state must have 'a', but got an empty dict");
  CHECK(refused([](const auto& r) {
          r.refuse("a", "must be 1", "2");
        }) == "Owner.load: state.a must be 1, but got 2");
}

TEST_CASE("a dict reader refuses tensors that hold no single real number") {
  auto dict = make_state_dict();
  dict.insert("undefined", at::Tensor());
  dict.insert("complex", at::ones({1}, at::kComplexFloat));
  dict.insert("sparse", at::ones({1}).to_sparse());
  dict.insert("meta", at::empty({1}, at::device(at::kMeta)));
  const DictReader reader(dict, "Owner.load", "state");
  const auto error = [&](const char* key) {
    return error_of<c10::ValueError>([&] { reader.number(key); });
  };
  CHECK(
      error("undefined") ==
      "Owner.load: state.undefined must be a number, but got an undefined "
      "tensor");
  CHECK(
      error("complex") ==
      "Owner.load: state.complex must be a number, but got a complex64 tensor "
      "of shape [1]");
  CHECK(
      error("sparse") ==
      "Owner.load: state.sparse must be a number, but got a Sparse float32 "
      "tensor of shape [1]");
  CHECK(
      error("meta") ==
      "Owner.load: state.meta must be a number, but got a meta float32 tensor "
      "of shape [1]");
  CHECK(
      error_of<c10::ValueError>([&] { reader.tensor("undefined"); }) ==
      "Owner.load: state.undefined must be a tensor, but got an undefined "
      "tensor");
}

TEST_CASE("values are described as Python shows them") {
  CHECK(describe({}) == "None");
  CHECK(describe(false) == "False");
  CHECK(describe(-3) == "-3");
  CHECK(describe(1e-3) == "0.001");
  CHECK(describe(std::string(61, 'x')) == "'" + std::string(60, 'x') + "...'");
  CHECK(
      describe(std::string(59, 'x') + "\u00e9") ==
      "'" + std::string(59, 'x') + "...'");
  CHECK(describe("a\n\x1b[1m") == "'a??[1m'");
  CHECK(describe(c10::Device("cpu")) == "a value of kind Device");
}
