// Trains a small network as jobs in a file say, from weights and batches that
// Python made, and writes what came of it.
//
//     cross_language JOBS RESULTS
//
// Both are checkpoint files. A job is a dict; what it may hold is what Job
// reads. tests/test_cross_language.py does the same in Python.

#include <fp16core/fp16core.h>

#include <ATen/ATen.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <cmath>
#include <cstdint>
#include <exception>
#include <iostream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace {

using fp16core::StateDict;

struct NetImpl : torch::nn::Module {
  NetImpl()
      : hidden(register_module("hidden", torch::nn::Linear(6, 16))),
        out(register_module("out", torch::nn::Linear(16, 3))),
        scale(register_parameter("scale", torch::ones({3}))) {}

  at::Tensor loss(const at::Tensor& x, const at::Tensor& y) {
    const auto wide = [](const torch::nn::Linear& layer, const at::Tensor& x) {
      return x.mm(layer->weight.to(torch::kFloat).t())
          .add(layer->bias.to(torch::kFloat));
    };
    const auto z = wide(out, wide(hidden, x).relu()).mul(scale);
    return z.sub(y).square().mean();
  }

  torch::nn::Linear hidden;
  torch::nn::Linear out;
  at::Tensor scale;
};
TORCH_MODULE(Net);

std::unique_ptr<torch::optim::Optimizer> make_optimizer(
    const std::string& name,
    const std::vector<at::Tensor>& parameters) {
  using namespace torch::optim;
  if (name == "SGD") {
    return std::make_unique<SGD>(
        parameters,
        SGDOptions(0.05).momentum(0.9).nesterov(true).weight_decay(0.01));
  }
  if (name == "Adam") {
    return std::make_unique<Adam>(
        parameters,
        AdamOptions(0.01).amsgrad(true).weight_decay(0.01));
  }
  if (name == "AdamW") {
    return std::make_unique<AdamW>(parameters, AdamWOptions(0.01));
  }
  if (name == "Adagrad") {
    return std::make_unique<Adagrad>(
        parameters,
        AdagradOptions(0.05).lr_decay(0.01));
  }
  if (name == "RMSprop") {
    return std::make_unique<RMSprop>(
        parameters,
        RMSpropOptions(0.005).momentum(0.5));
  }
  if (name == "centered RMSprop") {
    return std::make_unique<RMSprop>(
        parameters,
        RMSpropOptions(0.005).centered(true));
  }
  if (name == "LBFGS") {
    return std::make_unique<LBFGS>(
        parameters,
        LBFGSOptions(0.1).max_iter(2).history_size(4));
  }
  throw std::invalid_argument("cross_language: no optimizer called " + name);
}

// Returns the value under `key`, or nothing.
c10::IValue get(const StateDict& dict, const char* key) {
  return dict.contains(key) ? dict.at(key) : c10::IValue();
}

StateDict run(const StateDict& job, const StateDict& data) {
  Net net;
  fp16core::load_state_dict(*net, data.at("model"));
  net->hidden->to(torch::kHalf);
  net->out->to(torch::kHalf);
  auto inner =
      make_optimizer(job.at("optimizer").toStringRef(), net->parameters());
  auto options = fp16core::FP16OptimizerOptions()
                     .dynamic_loss_scale(true)
                     .init_scale(0x1p20)
                     .scale_window(30)
                     .delayed_shift(2)
                     .materialize_master_grads(!get(job, "lean").isBool())
                     .log([](const std::string&) {});
  if (get(job, "generic").isBool()) {
    options.fused(false);
  }
  fp16core::FP16Optimizer optimizer(*inner, options);
  if (const auto from = get(job, "load"); from.isString()) {
    const auto checkpoint = fp16core::load_checkpoint(from.toStringRef());
    fp16core::load_state_dict(*net, checkpoint.at("model"));
    optimizer.load_state_dict(checkpoint.at("optimizer"));
  }

  c10::impl::GenericList losses(c10::AnyType::get());
  c10::impl::GenericList scales(c10::AnyType::get());
  const auto inputs = data.at("inputs").toTensor();
  const auto targets = data.at("targets").toTensor();
  for (auto step = job.at("first").toInt(); step < job.at("last").toInt();
       ++step) {
    c10::impl::GenericList evaluated(c10::AnyType::get());
    const auto evaluate = [&] {
      optimizer.zero_grad();
      const auto loss = net->loss(inputs[step], targets[step]);
      optimizer.backward(loss);
      optimizer.clip_master_grads(0.5);
      evaluated.push_back(loss.detach());
      return loss;
    };
    if (job.at("optimizer").toStringRef() == "LBFGS") {
      optimizer.step(evaluate);
    } else {
      evaluate();
      optimizer.step();
    }
    losses.push_back(evaluated);
    scales.push_back(optimizer.loss_scale());
  }
  if (const auto to = get(job, "save"); to.isString()) {
    fp16core::save_checkpoint(
        to.toStringRef(),
        {{"model", fp16core::state_dict(*net)},
         {"optimizer", optimizer.state_dict()}});
  }
  auto result = fp16core::make_state_dict();
  result.insert("losses", losses);
  result.insert("scales", scales);
  result.insert("model", fp16core::state_dict(*net));
  result.insert("optimizer", optimizer.state_dict());
  result.insert("mode", optimizer.step_mode());
  return result;
}

// Goes on with a scaler of Python's. A letter is an iteration, an x one that
// overflows.
StateDict run_scaler(const StateDict& job) {
  const auto weight = torch::zeros({2}).set_requires_grad(true);
  torch::optim::SGD sgd({weight}, 0.5);
  fp16core::GradScaler scaler;
  scaler.load_state_dict(job.at("state"));
  c10::impl::GenericList scales(c10::AnyType::get());
  for (const char iteration : job.at("iterations").toStringRef()) {
    sgd.zero_grad();
    const auto loss = weight.sum().mul(iteration == 'x' ? INFINITY : 1.0);
    scaler.scale(loss).backward();
    scaler.step(sgd);
    scaler.update();
    scales.push_back(scaler.get_scale());
  }
  auto result = fp16core::make_state_dict();
  result.insert("scales", scales);
  result.insert("state", scaler.state_dict());
  result.insert("weight", weight);
  return result;
}

} // namespace

int main(int argc, char** argv) {
  try {
    if (argc != 3) {
      throw std::invalid_argument("usage: cross_language JOBS RESULTS");
    }
    const auto data = fp16core::load_checkpoint(argv[1]);
    std::vector<std::pair<std::string, c10::IValue>> results;
    for (const auto& entry : data.at("jobs").toGenericDict()) {
      results.emplace_back(
          entry.key().toStringRef(),
          run(entry.value().toGenericDict(), data));
    }
    results.emplace_back(
        "grad_scaler",
        run_scaler(data.at("grad_scaler").toGenericDict()));
    fp16core::save_checkpoint(argv[2], results);
    return 0;
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
}
