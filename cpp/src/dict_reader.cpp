#include "dict_reader.h"

#include "number.h"
#include "parameter_text.h"

#include <c10/core/Layout.h>
#include <c10/util/Exception.h>

#include <sstream>
#include <utility>

namespace fp16core::detail {

namespace {

constexpr std::size_t kLongestText = 60;

std::string count(const char* kind, std::size_t size) {
  return std::string("a ") + kind + " of " + std::to_string(size);
}

std::string quoted(const std::string& text) {
  return text.size() <= kLongestText
      ? "'" + text + "'"
      : "'" + text.substr(0, kLongestText) + "...'";
}

std::string describe_defined(const at::Tensor& tensor) {
  std::ostringstream text;
  text << "a ";
  if (tensor.is_meta()) {
    text << "meta ";
  }
  if (tensor.layout() != at::kStrided) {
    text << tensor.layout() << " ";
  }
  text << dtype_name(tensor.scalar_type()) << " tensor of shape "
       << tensor.sizes();
  return text.str();
}

} // namespace

std::string describe(const c10::IValue& value) {
  if (value.isNone()) {
    return "None";
  }
  if (value.isBool()) {
    return value.toBool() ? "True" : "False";
  }
  if (value.isInt()) {
    return std::to_string(value.toInt());
  }
  if (value.isDouble()) {
    return number(value.toDouble());
  }
  if (value.isString()) {
    return quoted(value.toStringRef());
  }
  if (value.isTensor()) {
    return value.toTensor().defined() ? describe_defined(value.toTensor())
                                      : "an undefined tensor";
  }
  if (value.isList()) {
    return count("list", value.toListRef().size());
  }
  if (value.isTuple()) {
    return count("tuple", value.toTupleRef().size());
  }
  if (value.isGenericDict()) {
    return count("dict", value.toGenericDict().size());
  }
  return "a value of kind " + value.tagKind();
}

DictReader::DictReader(
    const c10::IValue& dict,
    std::string owner,
    std::string path)
    : dict_(c10::AnyType::get(), c10::AnyType::get()),
      owner_(std::move(owner)),
      path_(std::move(path)) {
  TORCH_CHECK_VALUE(
      dict.isGenericDict(),
      owner_,
      ": ",
      path_,
      " must be a dict, but got ",
      describe(dict));
  dict_ = dict.toGenericDict();
}

bool DictReader::has(std::string_view key) const {
  return dict_.contains(std::string(key));
}

c10::IValue DictReader::at(std::string_view key) const {
  const auto entry = dict_.find(std::string(key));
  if (entry == dict_.end()) {
    std::string keys;
    for (const auto& other : dict_) {
      keys += (keys.empty() ? "" : ", ") + describe(other.key());
    }
    TORCH_CHECK_VALUE(
        false,
        owner_,
        ": ",
        path_,
        " must have '",
        key,
        "', but got ",
        keys.empty() ? "an empty dict" : "only " + keys);
  }
  return entry->value();
}

bool DictReader::boolean(std::string_view key) const {
  const auto value = at(key);
  if (!value.isBool()) {
    refuse(key, "must be a bool", describe(value));
  }
  return value.toBool();
}

std::int64_t DictReader::integer(std::string_view key) const {
  const auto value = at(key);
  if (!value.isInt()) {
    refuse(key, "must be an integer", describe(value));
  }
  return value.toInt();
}

double DictReader::number(std::string_view key) const {
  const auto value = at(key);
  if (value.isDouble()) {
    return value.toDouble();
  }
  if (value.isInt()) {
    return static_cast<double>(value.toInt());
  }
  if (value.isTensor()) {
    const auto& tensor = value.toTensor();
    if (tensor.defined() && tensor.layout() == at::kStrided &&
        !tensor.is_meta() && !tensor.is_complex() && tensor.numel() == 1) {
      return tensor.item<double>();
    }
  }
  refuse(key, "must be a number", describe(value));
}

std::string DictReader::string(std::string_view key) const {
  const auto value = at(key);
  if (!value.isString()) {
    refuse(key, "must be a string", describe(value));
  }
  return value.toStringRef();
}

at::Tensor DictReader::tensor(std::string_view key) const {
  const auto value = at(key);
  if (!value.isTensor() || !value.toTensor().defined()) {
    refuse(key, "must be a tensor", describe(value));
  }
  return value.toTensor();
}

DictReader DictReader::dict(std::string_view key) const {
  return {at(key), owner_, path(key)};
}

std::vector<c10::IValue> DictReader::list(std::string_view key) const {
  const auto value = at(key);
  if (value.isTuple()) {
    const auto& items = value.toTupleRef().elements();
    return std::vector<c10::IValue>(items.begin(), items.end());
  }
  if (!value.isList()) {
    refuse(key, "must be a list", describe(value));
  }
  return value.toListRef().vec();
}

std::string DictReader::path(std::string_view key) const {
  return path_ + "." + std::string(key);
}

void DictReader::refuse(
    std::string_view key,
    std::string_view rule,
    const std::string& got) const {
  TORCH_CHECK_VALUE(
      false,
      owner_,
      ": ",
      path(key),
      " ",
      rule,
      ", but got ",
      got);
}

} // namespace fp16core::detail
