// Trains a small convolutional network on handwritten digits, once in fp32 and
// once in fp16 with FP16Optimizer, resumes the fp16 run from a checkpoint made
// in its middle, and compares.

#include "digits.h"
#include "network.h"
#include "options.h"
#include "report.h"

#include <fp16core/fp16core.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <iostream>
#include <numbers>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

constexpr std::int64_t kBatch = 32;
constexpr double kLearningRate = 2e-3;
constexpr double kMaxNorm = 1.0;

/// The same weights in every run of the same seed, rounded to `dtype`.
Network make_network(
    torch::ScalarType dtype,
    Arithmetic arithmetic,
    const Options& options) {
  torch::manual_seed(options.seed);
  Network network(arithmetic);
  network->to(dtype);
  return network;
}

std::int64_t bytes(const std::vector<torch::Tensor>& tensors) {
  std::int64_t sum = 0;
  for (const auto& tensor : tensors) {
    sum += static_cast<std::int64_t>(tensor.nbytes());
  }
  return sum;
}

/// A training run in fp32 or fp16. What fp16 changes stands under
/// `if (optimizer_)`.
class Training {
 public:
  Training(
      torch::ScalarType dtype,
      Arithmetic arithmetic,
      const Options& options)
      : dtype_(dtype),
        epochs_(options.epochs),
        network_(make_network(dtype, arithmetic, options)),
        adam_(network_->parameters(), kLearningRate),
        sampler_(torch::make_generator<torch::CPUGeneratorImpl>(options.seed)) {
    if (dtype == torch::kHalf) {
      // A short run: try a larger scale after 100 good steps, not after 1000.
      optimizer_.emplace(
          adam_,
          fp16core::FP16OptimizerOptions()
              .dynamic_loss_scale(true)
              .scale_window(100)
              .log([](const std::string&) {})); // the progress line has it
    }
  }

  /// Trains until `epochs` epochs are done in all.
  void train(const Digits& digits, std::int64_t epochs);

  /// Takes down how the network does on digits it has not seen.
  Run finish(const Digits& digits);

  void save(const std::string& path);
  void load(const std::string& path);

  /// Whether weights, masters and loss scale have the same bits.
  bool equals(Training& other);

 private:
  std::vector<torch::Tensor> weights_and_masters();
  double train_step(const torch::Tensor& images, const torch::Tensor& labels);
  void set_learning_rate();

  torch::ScalarType dtype_;
  std::int64_t epochs_;
  Network network_;
  torch::optim::AdamW adam_;
  std::optional<fp16core::FP16Optimizer> optimizer_;
  torch::Generator sampler_;
  std::int64_t epoch_ = 0;
  Run run_;
};

double Training::train_step(
    const torch::Tensor& images,
    const torch::Tensor& labels) {
  const auto scores = network_->forward(images).to(torch::kFloat);
  const auto loss = torch::cross_entropy_loss(scores, labels);
  if (optimizer_) {
    optimizer_->zero_grad();
    optimizer_->backward(loss);
    optimizer_->clip_master_grads(kMaxNorm);
    optimizer_->step();
  } else {
    adam_.zero_grad();
    loss.backward();
    torch::nn::utils::clip_grad_norm_(network_->parameters(), kMaxNorm);
    adam_.step();
  }
  return loss.item<double>();
}

/// A cosine down to a tenth. It sets the options of torch's optimizer, in fp16
/// too, as torch's own schedulers do.
void Training::set_learning_rate() {
  const double done = static_cast<double>(epoch_) / epochs_;
  const double factor = 0.55 + 0.45 * std::cos(std::numbers::pi * done);
  for (auto& group : adam_.param_groups()) {
    group.options().set_lr(kLearningRate * factor);
  }
}

void Training::train(const Digits& digits, std::int64_t epochs) {
  using Clock = std::chrono::steady_clock;
  const auto images = digits.images.to(dtype_);
  const auto count = images.size(0);
  const auto steps_per_epoch = (count + kBatch - 1) / kBatch;
  Progress progress(optimizer_ ? "fp16" : "fp32", epochs_ * steps_per_epoch);
  for (; epoch_ < epochs; ++epoch_) {
    set_learning_rate();
    auto step = epoch_ * steps_per_epoch;
    const auto order = torch::randperm(count, sampler_, torch::kLong);
    for (const auto& batch : order.split(kBatch)) {
      const auto start = Clock::now();
      const auto loss = train_step(
          images.index_select(0, batch),
          digits.labels.index_select(0, batch));
      const std::chrono::duration<double> taken = Clock::now() - start;
      run_.step_seconds.push_back(taken.count());
      progress.show(
          ++step,
          loss,
          optimizer_ ? std::optional(optimizer_->loss_scale()) : std::nullopt);
    }
  }
}

Run Training::finish(const Digits& digits) {
  const torch::NoGradGuard no_grad;
  const auto scores =
      network_->forward(digits.images.to(dtype_)).to(torch::kFloat);
  const auto right = scores.argmax(1).eq(digits.labels);
  run_.test_accuracy = right.to(torch::kDouble).mean().item<double>();
  run_.test_loss =
      torch::cross_entropy_loss(scores, digits.labels).item<double>();
  run_.parameter_bytes = bytes(network_->parameters());
  run_.optimizer_bytes = 0;
  for (const auto& [key, state] : adam_.state()) {
    const auto& adam = static_cast<torch::optim::AdamWParamState&>(*state);
    run_.optimizer_bytes += bytes({adam.exp_avg(), adam.exp_avg_sq()});
  }
  if (optimizer_) {
    for (const auto& masters : optimizer_->fp32_from_fp16_groups()) {
      run_.optimizer_bytes += bytes(masters);
    }
    run_.skipped_steps = optimizer_->steps_skipped();
    run_.final_scale = optimizer_->loss_scale();
  }
  return run_;
}

void Training::save(const std::string& path) {
  fp16core::save_checkpoint(
      path,
      {{"model", fp16core::state_dict(*network_)},
       {"optimizer", optimizer_->state_dict()},
       {"epoch", epoch_},
       {"sampler", sampler_.get_state()}});
}

void Training::load(const std::string& path) {
  const auto checkpoint = fp16core::load_checkpoint(path);
  fp16core::load_state_dict(*network_, checkpoint.at("model"));
  optimizer_->load_state_dict(checkpoint.at("optimizer"));
  epoch_ = checkpoint.at("epoch").toInt();
  sampler_.set_state(checkpoint.at("sampler").toTensor());
}

std::vector<torch::Tensor> Training::weights_and_masters() {
  auto all = network_->parameters();
  for (const auto& masters : optimizer_->fp32_from_fp16_groups()) {
    all.insert(all.end(), masters.begin(), masters.end());
  }
  return all;
}

bool Training::equals(Training& other) {
  return optimizer_->loss_scale() == other.optimizer_->loss_scale() &&
      std::ranges::equal(
             weights_and_masters(),
             other.weights_and_masters(),
             torch::equal);
}

/// Measures how half convolutions do here, and says what follows.
Arithmetic choose_arithmetic() {
  const auto single = time_convolution(torch::kFloat);
  const auto half = time_convolution(torch::kHalf);
  const bool fast = half <= single;
  std::printf(
      "torch %s, %d threads, fp16core on %s. A convolution takes %.2f ms in "
      "fp32, %.2f ms in fp16.\n",
      TORCH_VERSION,
      torch::get_num_threads(),
      fp16core::cpu_capability(),
      1e3 * single,
      1e3 * half);
  std::printf(
      "fp16 convolutions are %s\n",
      fast ? "fast on this processor: the fp16 run uses them."
           : "slow on this processor: the fp16 run convolves in fp32 over fp16 "
             "tensors.");
  return fast ? Arithmetic::kNative : Arithmetic::kUpcast;
}

void train_all(const Options& options) {
  if (options.threads) {
    torch::set_num_threads(*options.threads);
  }
  const auto digits = read_digits(options.data);
  const auto arithmetic = choose_arithmetic();

  Training fp32(torch::kFloat, Arithmetic::kNative, options);
  fp32.train(digits.train, options.epochs);

  Training fp16(torch::kHalf, arithmetic, options);
  const auto middle = options.epochs / 2;
  fp16.train(digits.train, middle);
  fp16.save(options.checkpoint);
  fp16.train(digits.train, options.epochs);

  std::printf(
      "Resuming the fp16 run from %s, after epoch %d of %d.\n",
      options.checkpoint.c_str(),
      middle,
      options.epochs);
  Training resumed(torch::kHalf, arithmetic, options);
  resumed.load(options.checkpoint);
  resumed.train(digits.train, options.epochs);
  const bool exact = resumed.equals(fp16);

  const auto single = fp32.finish(digits.test);
  const auto half = fp16.finish(digits.test);
  print_table(single, half);
  if (!exact) {
    throw std::runtime_error(
        "the resumed run must end like the one that was not interrupted");
  }
  std::printf(
      "The resumed run ends with the same weights, masters and loss scale, bit "
      "for bit.\n");
  const double gap = 100 * (single.test_accuracy - half.test_accuracy);
  if (gap > options.allowed_gap) {
    char text[128];
    std::snprintf(
        text,
        sizeof(text),
        "the test accuracy in fp16 must be at most %g points below that in "
        "fp32, but is %.2f below",
        options.allowed_gap,
        gap);
    throw std::runtime_error(text);
  }
  std::printf(
      "The test accuracy in fp16 is %+.2f points from that in fp32; %g below "
      "are allowed.\n",
      -gap,
      options.allowed_gap);
}

} // namespace

int main(int argc, char** argv) {
  try {
    if (const auto options = parse_options(argc, argv)) {
      train_all(*options);
    }
    return 0;
  } catch (const c10::Error& error) {
    // what() would add a stack trace.
    std::cerr << "train_digits: " << error.what_without_backtrace() << "\n";
  } catch (const std::exception& error) {
    std::cerr << "train_digits: " << error.what() << "\n";
  }
  return 1;
}
