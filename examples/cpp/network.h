// A small convolutional network, and the arithmetic of its convolutions.

#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/conv.h>

enum class Arithmetic {
  /// What torch has for the dtype of the weights.
  kNative,
  /// fp32 in between half tensors, for processors whose half convolutions are
  /// slow: weights, activations and all gradients stay half.
  kUpcast,
};

/// Tells ten digits apart: three convolutions, and one over all that is left of
/// the image, as a linear layer would be.
class NetworkImpl : public torch::nn::Module {
 public:
  explicit NetworkImpl(Arithmetic arithmetic);

  /// Returns a score for each digit, in the dtype of weights and images.
  torch::Tensor forward(const torch::Tensor& images);

 private:
  torch::Tensor convolve(torch::nn::Conv2d& layer, const torch::Tensor& input);

  Arithmetic arithmetic_;
  torch::nn::Conv2d edges_;
  torch::nn::Conv2d strokes_;
  torch::nn::Conv2d shapes_;
  torch::nn::Conv2d digits_;
};
TORCH_MODULE(Network);

/// Returns the seconds that a convolution of the network takes in `dtype`,
/// forward and backward: the best of a few.
double time_convolution(torch::ScalarType dtype);
