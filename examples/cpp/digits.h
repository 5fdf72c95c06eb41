// Images of handwritten digits, and the file that they are read from.

#pragma once

#include <ATen/core/Tensor.h>

#include <string>

struct Digits {
  /// float32, one channel of 8 x 8 pixels from 0 (white) to 1 (black).
  at::Tensor images;
  /// The digits that were written, int64.
  at::Tensor labels;
};

struct DigitSets {
  Digits train;
  Digits test;
};

/// Reads a file that export_digits.py wrote. Its last 400 images are the test
/// set. Throws std::runtime_error, naming the line, where it is none.
DigitSets read_digits(const std::string& path);
