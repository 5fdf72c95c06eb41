// The command line.

#pragma once

#include <optional>
#include <string>

struct Options {
  int epochs = 10;
  int seed = 0;
  /// As many as torch takes by itself, without.
  std::optional<int> threads;
  std::string checkpoint = "digits.pt";
  std::string data;
  /// How many percentage points the test accuracy in fp16 may be below that in
  /// fp32. With 400 test images, of which one in thirty is told wrong, the
  /// accuracies of two runs differ by a point or so by chance.
  double allowed_gap = 2.0;
};

/// Returns nothing where help was asked for, and printed. Throws
/// std::invalid_argument for an argument that makes no sense.
std::optional<Options> parse_options(int count, const char* const* arguments);
