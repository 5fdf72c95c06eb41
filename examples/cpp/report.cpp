#include "report.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <string_view>
#include <utility>

namespace {

// Returns `value` with `digits` digits after the point.
std::string decimal(double value, int digits) {
  char text[64];
  std::snprintf(text, sizeof(text), "%.*f", digits, value);
  return text;
}

std::string power_of_two(double scale) {
  return "2^" + decimal(std::log2(scale), 0);
}

double median(std::vector<double> values) {
  const auto middle = values.begin() + std::ssize(values) / 2;
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

} // namespace

Progress::Progress(std::string name, std::int64_t steps)
    : name_(std::move(name)),
      steps_(steps),
      terminal_(isatty(STDOUT_FILENO) != 0) {}

void Progress::show(
    std::int64_t step,
    double loss,
    std::optional<double> scale) {
  const std::int64_t parts = terminal_ ? 100 : 4;
  if (step * parts / steps_ == (step - 1) * parts / steps_) {
    return;
  }
  auto line = name_ + ": step " + std::to_string(step) + " of " +
      std::to_string(steps_) + ", loss " + decimal(loss, 4);
  if (scale) {
    line += ", scale " + power_of_two(*scale);
  }
  // Spaces cover what a longer line left behind.
  std::printf(
      terminal_ ? "\r%-72s%s" : "%s%s",
      line.c_str(),
      terminal_ && step < steps_ ? "" : "\n");
  std::fflush(stdout);
}

void print_table(const Run& fp32, const Run& fp16) {
  using Cell = std::function<std::string(const Run&)>;
  const std::vector<std::pair<std::string_view, Cell>> rows{
      {"test accuracy, %",
       [](const Run& run) { return decimal(100 * run.test_accuracy, 2); }},
      {"test loss", [](const Run& run) { return decimal(run.test_loss, 4); }},
      {"time per step, ms",
       [](const Run& run) {
         return decimal(1e3 * median(run.step_seconds), 2);
       }},
      {"parameters, bytes",
       [](const Run& run) { return std::to_string(run.parameter_bytes); }},
      {"optimizer state with masters, bytes",
       [](const Run& run) { return std::to_string(run.optimizer_bytes); }},
      {"skipped steps",
       [](const Run& run) {
         return run.skipped_steps ? std::to_string(*run.skipped_steps) : "-";
       }},
      {"final loss scale", [](const Run& run) {
         return run.final_scale ? power_of_two(*run.final_scale) : "-";
       }}};
  std::printf("\n%-36s%14s%14s\n", "", "fp32", "fp16");
  for (const auto& [label, cell] : rows) {
    std::printf(
        "%-36s%14s%14s\n",
        label.data(),
        cell(fp32).c_str(),
        cell(fp16).c_str());
  }
  std::printf("\n");
}
