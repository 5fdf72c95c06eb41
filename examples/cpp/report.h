// What is shown of the runs: their progress, and the table that compares them.

#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

/// What one training run left behind.
struct Run {
  /// Of the test set: the share that was told right, and the cross entropy.
  double test_accuracy = 0;
  double test_loss = 0;
  std::vector<double> step_seconds;
  std::int64_t parameter_bytes = 0;
  /// Of the optimizer's state and the master weights.
  std::int64_t optimizer_bytes = 0;
  /// Without a loss scale there are none.
  std::optional<std::int64_t> skipped_steps;
  std::optional<double> final_scale;
};

/// Shows how far a run has come: in one line that is written anew where a
/// person looks on, and in four lines where the output goes elsewhere.
class Progress {
 public:
  Progress(std::string name, std::int64_t steps);

  /// Tells of step `step`, counted from 1. Without a scale none is shown.
  void show(
      std::int64_t step,
      double loss,
      std::optional<double> scale = std::nullopt);

 private:
  std::string name_;
  std::int64_t steps_;
  bool terminal_;
};

void print_table(const Run& fp32, const Run& fp16);
