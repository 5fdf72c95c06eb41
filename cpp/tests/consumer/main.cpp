// A C++ application of fp16core: fits a line with a float16 weight, whose fp32
// master a hand-written update rule moves.

#include <fp16core/fp16core.h>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <cmath>
#include <cstdint>
#include <iostream>
#include <memory>

int main() {
  at::manual_seed(0);
  const auto x = at::randn({64, 8});
  const auto wanted = at::linspace(-1, 1, 8);
  const auto y = x.mv(wanted);
  auto weight = at::zeros({8}, at::kHalf).requires_grad_();

  fp16core::OptimizerCore core(
      {}, std::make_shared<fp16core::DynamicLossScaler>());
  core.master_weights().ingest({{weight}});
  double first = NAN;
  double last = NAN;
  for (int step = 0; step < 200; ++step) {
    core.zero_grad(/*set_to_none=*/true);
    const auto loss = (x.mv(weight.to(at::kFloat)) - y).square().mean();
    last = loss.item<double>();
    first = step == 0 ? last : first;
    core.scale_loss(loss).backward();
    core.update_master_grads();
    if (core.begin_step()) {
      const c10::NoGradGuard no_grad;
      for (auto& master : core.master_weights().master_params().at(0)) {
        master.sub_(master.grad(), 0.1);
      }
      core.finish_step();
    }
  }

  const double error =
      (weight.to(at::kFloat) - wanted).abs().max().item<double>();
  std::cout << "loss " << first << " -> " << last << ", "
            << core.steps_applied() << " steps applied, "
            << core.steps_skipped() << " skipped, " << fp16core::cpu_capability()
            << "\n";
  // Half of the last bit of a float16 below 1 is 2^-12.
  const bool fits = error <= std::ldexp(1.0, -12);
  const bool counted = core.steps_applied() + core.steps_skipped() == 200 &&
      core.steps_skipped() > 0;
  if (!fits || !counted) {
    std::cerr << "consumer: wrong result, largest error " << error << "\n";
    return 1;
  }
  return 0;
}
