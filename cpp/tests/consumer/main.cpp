// A C++ application of fp16core: fits a line with a float16 weight, whose fp32
// master a hand-written update rule moves.

#include <fp16core/fp16core.h>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <cmath>
#include <iostream>
#include <memory>

int main() {
  at::manual_seed(0);
  const auto x = at::randn({64, 8});
  // Values that float16 holds, so that the fit ends without any error.
  const auto wanted = at::arange(-4, 4).div(4);
  const auto y = x.mv(wanted);
  auto weight = at::zeros({8}, at::kHalf).requires_grad_();

  fp16core::OptimizerCore core(
      {},
      std::make_shared<fp16core::DynamicLossScaler>());
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
      const auto masters = core.master_weights().master_params();
      masters[0][0].sub_(masters[0][0].grad(), 0.1);
      core.finish_step();
    }
  }

  std::cout << "loss " << first << " -> " << last << ", "
            << core.steps_applied() << " steps applied, "
            << core.steps_skipped() << " skipped, "
            << fp16core::cpu_capability() << "\n";
  const bool counted = core.steps_applied() + core.steps_skipped() == 200 &&
      core.steps_skipped() > 0;
  if (last != 0 || !counted) {
    std::cerr << "consumer: the loss must end at 0, and a step be skipped\n";
    return 1;
  }
  return 0;
}
