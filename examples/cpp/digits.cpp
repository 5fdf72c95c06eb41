#include "digits.h"

#include <ATen/ATen.h>

#include <cstddef>
#include <cstdint>
#include <fstream>
#include <stdexcept>
#include <string_view>
#include <vector>

namespace {

constexpr std::string_view kPixels = "0123456789abcdefg";
constexpr float kBlack = 16;
constexpr std::int64_t kSide = 8;
constexpr std::size_t kLineLength = 2 + kSide * kSide;
constexpr std::int64_t kTestImages = 400;

Digits slice(const Digits& digits, std::int64_t start, std::int64_t end) {
  return {
      .images = digits.images.slice(0, start, end),
      .labels = digits.labels.slice(0, start, end)};
}

} // namespace

DigitSets read_digits(const std::string& path) {
  std::ifstream file(path);
  if (!file) {
    throw std::runtime_error("cannot read the digits in " + path);
  }
  std::vector<float> pixels;
  std::vector<std::int64_t> labels;
  for (std::string line; std::getline(file, line);) {
    bool good = line.size() == kLineLength && line[1] == ' ' &&
        line[0] >= '0' && line[0] <= '9';
    for (std::size_t i = 2; good && i < line.size(); ++i) {
      const auto pixel = kPixels.find(line[i]);
      good = pixel != std::string_view::npos;
      pixels.push_back(static_cast<float>(pixel) / kBlack);
    }
    if (!good) {
      throw std::runtime_error(
          path + ", line " + std::to_string(labels.size() + 1) +
          ": must be a digit, a space and 64 pixels from 0 to g");
    }
    labels.push_back(line[0] - '0');
  }
  const auto count = static_cast<std::int64_t>(labels.size());
  if (count <= kTestImages) {
    throw std::runtime_error(
        path + " must hold more than " + std::to_string(kTestImages) +
        " digits, but holds " + std::to_string(count));
  }
  const Digits all{
      .images = at::tensor(pixels).view({count, 1, kSide, kSide}),
      .labels = at::tensor(labels)};
  return {
      .train = slice(all, 0, count - kTestImages),
      .test = slice(all, count - kTestImages, count)};
}
