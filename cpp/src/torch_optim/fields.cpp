#include "fields.h"

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <typeinfo>

namespace fp16core::detail {

namespace {

using namespace torch::optim;

void show(SGDOptions& options, FieldVisitor& visitor) {
  visitor.visit("lr", options.lr());
  visitor.visit("momentum", options.momentum());
  visitor.visit("dampening", options.dampening());
  visitor.visit("weight_decay", options.weight_decay());
  visitor.visit("nesterov", options.nesterov());
}

void show(SGDParamState& state, FieldVisitor& visitor) {
  visitor.visit("momentum_buffer", state.momentum_buffer());
}

template <typename Options>
void show_adam_options(Options& options, FieldVisitor& visitor) {
  visitor.visit("lr", options.lr());
  visitor.visit("betas", options.betas());
  visitor.visit("eps", options.eps());
  visitor.visit("weight_decay", options.weight_decay());
  visitor.visit("amsgrad", options.amsgrad());
}

template <typename State>
void show_adam_state(State& state, FieldVisitor& visitor) {
  visitor.visit("step", state.step());
  visitor.visit("exp_avg", state.exp_avg());
  visitor.visit("exp_avg_sq", state.exp_avg_sq());
  visitor.visit("max_exp_avg_sq", state.max_exp_avg_sq());
}

void show(AdamOptions& options, FieldVisitor& visitor) {
  show_adam_options(options, visitor);
}

void show(AdamParamState& state, FieldVisitor& visitor) {
  show_adam_state(state, visitor);
}

void show(AdamWOptions& options, FieldVisitor& visitor) {
  show_adam_options(options, visitor);
}

void show(AdamWParamState& state, FieldVisitor& visitor) {
  show_adam_state(state, visitor);
}

void show(AdagradOptions& options, FieldVisitor& visitor) {
  visitor.visit("lr", options.lr());
  visitor.visit("lr_decay", options.lr_decay());
  visitor.visit("eps", options.eps());
  visitor.visit("weight_decay", options.weight_decay());
  visitor.visit(
      "initial_accumulator_value",
      options.initial_accumulator_value());
}

void show(AdagradParamState& state, FieldVisitor& visitor) {
  visitor.visit("step", state.step());
  visitor.visit("sum", state.sum());
}

void show(RMSpropOptions& options, FieldVisitor& visitor) {
  visitor.visit("lr", options.lr());
  visitor.visit("momentum", options.momentum());
  visitor.visit("alpha", options.alpha());
  visitor.visit("eps", options.eps());
  visitor.visit("centered", options.centered());
  visitor.visit("weight_decay", options.weight_decay());
}

void show(RMSpropParamState& state, FieldVisitor& visitor) {
  visitor.visit("step", state.step());
  visitor.visit("square_avg", state.square_avg());
  visitor.visit("momentum_buffer", state.momentum_buffer());
  visitor.visit("grad_avg", state.grad_avg());
}

void show(LBFGSOptions& options, FieldVisitor& visitor) {
  visitor.visit("lr", options.lr());
  visitor.visit("max_iter", options.max_iter());
  visitor.visit("max_eval", options.max_eval());
  visitor.visit("tolerance_grad", options.tolerance_grad());
  visitor.visit("tolerance_change", options.tolerance_change());
  visitor.visit("history_size", options.history_size());
  visitor.visit("line_search_fn", options.line_search_fn());
}

void show(LBFGSParamState& state, FieldVisitor& visitor) {
  visitor.visit("func_evals", state.func_evals());
  visitor.visit("n_iter", state.n_iter());
  visitor.visit("t", state.t());
  visitor.visit("prev_loss", state.prev_loss());
  visitor.visit("d", state.d());
  visitor.visit("H_diag", state.H_diag());
  visitor.visit("prev_flat_grad", state.prev_flat_grad());
  visitor.visit("old_dirs", state.old_dirs());
  visitor.visit("old_stps", state.old_stps());
  visitor.visit("ro", state.ro());
  visitor.visit("al", state.al());
}

template <typename Known, typename Object>
bool show_as(Object& object, FieldVisitor& visitor) {
  if (typeid(object) != typeid(Known)) {
    return false;
  }
  show(static_cast<Known&>(object), visitor);
  return true;
}

} // namespace

bool visit_fields(OptimizerOptions& options, FieldVisitor& visitor) {
  return show_as<SGDOptions>(options, visitor) ||
      show_as<AdamOptions>(options, visitor) ||
      show_as<AdamWOptions>(options, visitor) ||
      show_as<AdagradOptions>(options, visitor) ||
      show_as<RMSpropOptions>(options, visitor) ||
      show_as<LBFGSOptions>(options, visitor);
}

bool visit_fields(OptimizerParamState& state, FieldVisitor& visitor) {
  return show_as<SGDParamState>(state, visitor) ||
      show_as<AdamParamState>(state, visitor) ||
      show_as<AdamWParamState>(state, visitor) ||
      show_as<AdagradParamState>(state, visitor) ||
      show_as<RMSpropParamState>(state, visitor) ||
      show_as<LBFGSParamState>(state, visitor);
}

} // namespace fp16core::detail
