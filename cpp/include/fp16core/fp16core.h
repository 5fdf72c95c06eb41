// Everything libfp16core offers, in one include.

#pragma once

#include <fp16core/autocast.h>
#include <fp16core/build.h>
#include <fp16core/checkpoint.h>
#include <fp16core/combine.h>
#include <fp16core/fp16_optimizer.h>
#include <fp16core/grad_scaler.h>
#include <fp16core/gradient_report.h>
#include <fp16core/loss_scaler.h>
#include <fp16core/master_weights.h>
#include <fp16core/optimizer_core.h>
#include <fp16core/scale_on_tensors.h>
#include <fp16core/scale_policies.h>
#include <fp16core/state_dict.h>
#include <fp16core/step_record.h>
#include <fp16core/tensor_lists.h>
#include <fp16core/update_rule.h>
