// Everything libfp16core offers, in one include.

#pragma once

#include <fp16core/build.h>
#include <fp16core/gradient_report.h>
#include <fp16core/loss_scaler.h>
#include <fp16core/master_weights.h>
#include <fp16core/optimizer_core.h>
#include <fp16core/update_rule.h>
