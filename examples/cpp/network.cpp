#include "network.h"

#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <limits>
#include <variant>

namespace {

using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// A convolution of stride 1 that computes in fp32 and rounds: what it takes,
/// keeps for the backward pass and returns are half tensors.
class UpcastConvolution : public torch::autograd::Function<UpcastConvolution> {
 public:
  static Tensor forward(
      AutogradContext* context,
      const Tensor& input,
      const Tensor& weight,
      const Tensor& bias,
      std::int64_t padding) {
    context->save_for_backward({input, weight});
    context->saved_data["padding"] = padding;
    const auto output = torch::conv2d(
        input.to(torch::kFloat),
        weight.to(torch::kFloat),
        bias.to(torch::kFloat),
        /*stride=*/1,
        padding);
    return output.to(input.scalar_type());
  }

  static variable_list backward(
      AutogradContext* context,
      const variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    const auto& input = saved[0];
    const auto& weight = saved[1];
    auto [input_gradient, weight_gradient, bias_gradient] =
        torch::convolution_backward(
            gradients[0].to(torch::kFloat),
            input.to(torch::kFloat),
            weight.to(torch::kFloat),
            /*bias_sizes=*/weight.size(0),
            /*stride=*/1,
            context->saved_data["padding"].toInt(),
            /*dilation=*/1,
            /*transposed=*/false,
            /*output_padding=*/0,
            /*groups=*/1,
            {context->needs_input_grad(0), true, true});
    const auto dtype = weight.scalar_type();
    if (input_gradient.defined()) {
      input_gradient = input_gradient.to(dtype);
    }
    return {
        input_gradient,
        weight_gradient.to(dtype),
        bias_gradient.to(dtype),
        Tensor()};
  }
};

torch::nn::Conv2d convolution(
    std::int64_t inputs,
    std::int64_t outputs,
    std::int64_t size,
    std::int64_t padding) {
  return torch::nn::Conv2d(
      torch::nn::Conv2dOptions(inputs, outputs, size).padding(padding));
}

} // namespace

NetworkImpl::NetworkImpl(Arithmetic arithmetic)
    : arithmetic_(arithmetic),
      edges_(register_module("edges", convolution(1, 16, 3, 1))),
      strokes_(register_module("strokes", convolution(16, 32, 3, 1))),
      shapes_(register_module("shapes", convolution(32, 64, 3, 1))),
      digits_(register_module("digits", convolution(64, 10, 4, 0))) {}

Tensor NetworkImpl::forward(const Tensor& images) {
  auto x = convolve(edges_, images).relu();
  x = torch::max_pool2d(convolve(strokes_, x).relu(), 2);
  x = convolve(shapes_, x).relu();
  return convolve(digits_, x).flatten(1);
}

Tensor NetworkImpl::convolve(torch::nn::Conv2d& layer, const Tensor& input) {
  if (arithmetic_ == Arithmetic::kNative) {
    return layer->forward(input);
  }
  const auto padding =
      std::get<torch::ExpandingArray<2>>(layer->options.padding());
  return UpcastConvolution::apply(
      input,
      layer->weight,
      layer->bias,
      padding->front());
}

double time_convolution(torch::ScalarType dtype) {
  using Clock = std::chrono::steady_clock;
  auto layer = convolution(16, 32, 3, 1);
  layer->to(dtype);
  const auto images = torch::randn({32, 16, 8, 8}).to(dtype).requires_grad_();
  auto best = std::numeric_limits<double>::infinity();
  for (int i = 0; i < 5; ++i) {
    const auto start = Clock::now();
    layer->forward(images).sum().backward();
    const std::chrono::duration<double> taken = Clock::now() - start;
    best = std::min(best, taken.count());
  }
  return best;
}
