// The rules of other projects: their constants, what is special in each, and
// names and numbers that are refused. Python's tests have recorded traces.

#include "oracle.h"

#include <fp16core/scale_policies.h>

#include <doctest.h>

using namespace fp16core;
using fp16core::test::error_of;

namespace {

// The scales after every update, '1' in `overflows` being an overflow.
std::vector<double> trace(
    const DynamicLossScalerOptions& options,
    const std::string& overflows) {
  DynamicLossScaler scaler(options);
  std::vector<double> scales;
  for (const char flag : overflows) {
    scaler.update_scale(flag == '1');
    scales.push_back(scaler.loss_scale());
  }
  return scales;
}

using Scales = std::vector<double>;

} // namespace

TEST_CASE("policies move the scale as their projects do") {
  const std::string flags = "000110000101000";
  const auto megatron = [](double shift, double consecutive) {
    return scale_policy(
        "megatron_v1",
        {{"init_scale", 16},
         {"scale_window", 3},
         {"delayed_shift", shift},
         {"consecutive_hysteresis", consecutive}});
  };
  const Scales plain{16, 16, 32, 16, 8, 8, 8, 16, 16, 8, 8, 4, 4, 4, 8};
  const Scales refilled_by_growth{
      16,
      16,
      32,
      32,
      16,
      16,
      16,
      32,
      32,
      32,
      32,
      16,
      16,
      16,
      32};
  const Scales refilled_by_any{
      16,
      16,
      32,
      32,
      16,
      16,
      16,
      32,
      32,
      32,
      32,
      32,
      32,
      32,
      64};
  CHECK(
      trace(
          scale_policy("apex", {{"init_scale", 16}, {"scale_window", 3}}),
          flags) == plain);
  CHECK(trace(megatron(1, 0), flags) == plain);
  CHECK(trace(megatron(2, 0), flags) == refilled_by_growth);
  CHECK(trace(megatron(2, 1), flags) == refilled_by_any);
  CHECK(
      trace(
          scale_policy("apex_amp", {{"init_scale", 16}, {"scale_window", 3}}),
          flags) == plain);
  CHECK(
      trace(
          scale_policy(
              "megatron_core",
              {{"initial_scale", 16},
               {"growth_interval", 3},
               {"hysteresis", 2}}),
          flags) == refilled_by_growth);
  CHECK(
      trace(
          scale_policy(
              "apex_hysteresis_kernel",
              {{"init_scale", 16}, {"growth_interval", 3}, {"hysteresis", 2}}),
          flags) == refilled_by_any);
  CHECK(
      trace(
          scale_policy(
              "deepspeed",
              {{"init_scale", 16}, {"scale_window", 3}, {"delayed_shift", 1}}),
          flags) == Scales{16, 16, 16, 8, 4, 4, 4, 4, 8, 4, 4, 2, 2, 2, 2});
}

TEST_CASE("policies that raise do so with nothing changed") {
  DynamicLossScaler deepspeed(scale_policy(
      "deepspeed",
      {{"init_scale", 2}, {"min_scale", 1}, {"delayed_shift", 1}}));
  deepspeed.update_scale(true);
  CHECK(deepspeed.at_floor());
  CHECK(
      error_of<LossScaleError>([&] { deepspeed.update_scale(true); }) ==
      "DynamicLossScaler.update_scale: an overflow must not lower the loss "
      "scale at its floor, but got one at 1");
  CHECK(deepspeed.state().cur_iter == 1);
  CHECK(deepspeed.loss_scale() == 1.0);
  deepspeed.update_scale(false);

  DynamicLossScaler fairseq(
      scale_policy("fairseq", {{"init_scale", 8}, {"min_loss_scale", 2}}));
  CHECK_FALSE(fairseq.at_floor());
  fairseq.update_scale(true);
  CHECK(fairseq.loss_scale() == 4.0);
  CHECK(fairseq.at_floor());
  CHECK(
      error_of<LossScaleError>([&] { fairseq.update_scale(true); }) ==
      "DynamicLossScaler.update_scale: an overflow must not lower the loss "
      "scale to 2 or below, but got one at 4");
  CHECK(fairseq.loss_scale() == 4.0);
}

TEST_CASE("a share of overflows may be tolerated") {
  DynamicLossScaler scaler(
      scale_policy("fairseq", {{"init_scale", 64}, {"tolerance", 0.5}}));
  CHECK(scaler.overflows_tolerated() == -1);
  scaler.update_scale(false);
  scaler.update_scale(false);
  scaler.update_scale(true); // 1 of 3
  CHECK(scaler.loss_scale() == 64.0);
  CHECK(scaler.state().overflows_since_rescale == 1);
  scaler.update_scale(true); // 2 of 4
  CHECK(scaler.loss_scale() == 32.0);
  CHECK(scaler.state().last_rescale_iter == 3);
  CHECK(scaler.state().overflows_since_rescale == 0);
}

TEST_CASE("a scale without a floor stops where float32 has a reciprocal") {
  DynamicLossScaler scaler(scale_policy("torch", {{"init_scale", 0x1p-125}}));
  for (int i = 0; i < 4; ++i) {
    scaler.update_scale(true);
  }
  CHECK(scaler.loss_scale() == 0x1p-126);
  DynamicLossScaler high(scale_policy(
      "keras",
      {{"initial_scale", 0x1p127}, {"dynamic_growth_steps", 1}}));
  high.update_scale(false);
  CHECK(high.loss_scale() == 0x1p127);
}

TEST_CASE("float32 scales are rounded as the projects round them") {
  const float factor = 1.1F;
  // The factor is a double in torch and a float32 in Megatron-Core.
  DynamicLossScaler torch_scaler(scale_policy(
      "torch",
      {{"init_scale", 1000}, {"growth_factor", 1.1}, {"growth_interval", 1}}));
  DynamicLossScaler megatron(scale_policy(
      "megatron_core",
      {{"initial_scale", 1000},
       {"growth_factor", 1.1},
       {"growth_interval", 1}}));
  float by_double = 1000.0F;
  float by_float = 1000.0F;
  bool differ = false;
  for (int i = 0; i < 100; ++i) {
    torch_scaler.update_scale(false);
    megatron.update_scale(false);
    by_double = static_cast<float>(by_double * 1.1);
    by_float = by_float * factor;
    CHECK(torch_scaler.loss_scale() == by_double);
    CHECK(megatron.loss_scale() == by_float);
    differ = differ || by_double != by_float;
  }
  CHECK(differ);
}

TEST_CASE("policies and parameters that nobody knows are refused") {
  using Error = std::invalid_argument;
  CHECK(
      error_of<Error>([] { scale_policy("apax"); }) ==
      "scale_policy: name must be one of apex, megatron_v1, apex_amp, "
      "apex_hysteresis_kernel, megatron_core, deepspeed, "
      "deepspeed_fp16_optimizer, torch, colossalai, fairseq, keras, jmp, but "
      "got 'apax'");
  CHECK(
      error_of<Error>([] { scale_policy("keras", {{"init_scale", 2}}); }) ==
      "scale_policy: parameters of keras must be among initial_scale, "
      "dynamic_growth_steps, but got 'init_scale'");
  CHECK(
      error_of<Error>([] {
        scale_policy("torch", {{"init_scale", std::nullopt}});
      }) == "scale_policy: init_scale of torch must be a number, but got None");
  CHECK(scale_policy("colossalai").max_scale == HUGE_VAL);
  CHECK(scale_policy("colossalai", {{"max_scale", 0}}).max_scale == HUGE_VAL);
  CHECK(
      scale_policy_parameters("jmp") ==
      std::vector<std::string>{
          "loss_scale",
          "period",
          "factor",
          "min_loss_scale"});
  for (const auto& name : scale_policy_names()) {
    CAPTURE(name);
    CHECK_NOTHROW(DynamicLossScaler(scale_policy(name)));
  }
}
