#include "options.h"

#include <charconv>
#include <iostream>
#include <stdexcept>
#include <string_view>
#include <system_error>

namespace {

constexpr std::string_view kHelp =
    "usage: train_digits [options]\n"
    "\n"
    "Trains a small network on handwritten digits, in fp32 and in fp16.\n"
    "\n"
    "  --epochs N         of each run; 10 by default\n"
    "  --seed N           of weights and batches; 0 by default\n"
    "  --threads N        that torch computes on\n"
    "  --checkpoint PATH  where the fp16 run is saved in its middle;\n"
    "                     digits.pt by default\n"
    "  --data PATH        the digits; by default the file beside the sources\n"
    "  --allowed-gap N    how many percentage points of test accuracy fp16 "
    "may\n"
    "                     be below fp32; 2 by default\n"
    "  --help             this\n";

// Returns nothing unless `text` is a number and nothing else.
template <class Number>
std::optional<Number> parse_number(const std::string& text) {
  Number number{};
  const auto* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, number);
  return error == std::errc() && rest == end ? std::optional(number)
                                             : std::nullopt;
}

int parse_count(const std::string& name, const std::string& text, int least) {
  const auto number = parse_number<int>(text);
  if (!number || *number < least) {
    throw std::invalid_argument(
        name + " must be a whole number of at least " + std::to_string(least) +
        ", but got '" + text + "'");
  }
  return *number;
}

double parse_share(const std::string& name, const std::string& text) {
  const auto number = parse_number<double>(text);
  if (!number || !(*number >= 0 && *number <= 100)) {
    throw std::invalid_argument(
        name + " must be a number from 0 to 100, but got '" + text + "'");
  }
  return *number;
}

} // namespace

std::optional<Options> parse_options(int count, const char* const* arguments) {
  Options options;
  options.data = DIGITS_FILE;
  for (int i = 1; i < count; ++i) {
    const std::string name = arguments[i];
    const auto value = [&]() -> std::string {
      if (i + 1 == count) {
        throw std::invalid_argument(name + " needs a value");
      }
      return arguments[++i];
    };
    if (name == "--epochs") {
      // Two at least, to have a middle to resume from.
      options.epochs = parse_count(name, value(), 2);
    } else if (name == "--seed") {
      options.seed = parse_count(name, value(), 0);
    } else if (name == "--threads") {
      options.threads = parse_count(name, value(), 1);
    } else if (name == "--checkpoint") {
      options.checkpoint = value();
    } else if (name == "--data") {
      options.data = value();
    } else if (name == "--allowed-gap") {
      options.allowed_gap = parse_share(name, value());
    } else if (name == "--help") {
      std::cout << kHelp;
      return std::nullopt;
    } else {
      throw std::invalid_argument(
          "unknown option '" + name + "'; --help lists them");
    }
  }
  return options;
}
