// Reads the values of a state dict, with errors that say what was expected.

#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace fp16core::detail {

/// A view of a dict. Every function throws ValueError, naming the owner and the
/// path to the value, if there is no value of the kind: "FP16Optimizer.
/// load_state_dict: optimizer_state_dict.state must be a dict, but got a list
/// of 3".
class DictReader {
 public:
  /// `owner` begins the messages; `path` names the dict itself in them.
  DictReader(const c10::IValue& dict, std::string owner, std::string path);

  bool has(std::string_view key) const;
  /// Returns the value, of any kind.
  c10::IValue at(std::string_view key) const;

  bool boolean(std::string_view key) const;
  std::int64_t integer(std::string_view key) const;
  /// An integer, a double or a tensor of one element.
  double number(std::string_view key) const;
  std::string string(std::string_view key) const;
  at::Tensor tensor(std::string_view key) const;
  DictReader dict(std::string_view key) const;
  /// The items of a list or a tuple.
  std::vector<c10::IValue> list(std::string_view key) const;

  const c10::impl::GenericDict& values() const { return dict_; }
  const std::string& owner() const { return owner_; }
  /// Returns the path of a value of this dict.
  std::string path(std::string_view key) const;
  /// Throws ValueError: "<owner>: <path of key> <rule>, but got <what>".
  [[noreturn]] void refuse(
      std::string_view key,
      std::string_view rule,
      const std::string& got) const;

 private:
  c10::impl::GenericDict dict_;
  std::string owner_;
  std::string path_;
};

/// Returns what a value is, for a message: "None", "True", "3", "0.5",
/// "'text'", "a list of 3", "a float32 tensor of shape [2, 3]".
std::string describe(const c10::IValue& value);

} // namespace fp16core::detail
