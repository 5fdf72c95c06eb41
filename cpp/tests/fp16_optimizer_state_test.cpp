// FP16Optimizer's state: in Python's format, and in torch's archives.

#include <fp16core/fp16_optimizer.h>

#include "oracle.h"
#include "torch_optimizers.h"

#include <ATen/ATen.h>
#include <ATen/core/Dict.h>
#include <ATen/core/ivalue.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <doctest.h>

#include <sstream>

using namespace fp16core;
using fp16core::test::error_of;
using fp16core::test::ignore;
using fp16core::test::MakeOptimizer;
using fp16core::test::maker;
using namespace torch::optim;

namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

struct Known {
  const char* name;
  MakeOptimizer make;
};

std::vector<Known> known_optimizers() {
  return {
      {"SGD", maker<SGD>(SGDOptions(0.1).momentum(0.9))},
      {"plain SGD", maker<SGD>(SGDOptions(0.1))},
      {"Adam", maker<Adam>(AdamOptions(0.02).amsgrad(true))},
      {"AdamW", maker<AdamW>(AdamWOptions(0.02))},
      {"Adagrad", maker<Adagrad>(AdagradOptions(0.1))},
      {"RMSprop",
       maker<RMSprop>(RMSpropOptions(0.01).momentum(0.5).centered(true))},
      {"LBFGS", maker<LBFGS>(LBFGSOptions(0.5).max_iter(4).history_size(5))},
  };
}

FP16OptimizerOptions options() {
  return FP16OptimizerOptions()
      .dynamic_loss_scale(true)
      .init_scale(1024)
      .scale_window(3)
      .delayed_shift(2)
      .log(ignore);
}

// A model of a half and a native weight, with its optimizer.
struct Run {
  explicit Run(
      const MakeOptimizer& make,
      const FP16OptimizerOptions& given = options())
      : half(at::linspace(-1, 1, 6).view({2, 3}).to(at::kHalf)),
        single(at::linspace(0, 1, 3)),
        inner(make({half.requires_grad_(), single.requires_grad_()})),
        optimizer(*inner, given) {}

  void iterate(int number) {
    const auto x = at::sin(at::arange(3, at::kFloat).add(number));
    optimizer.step([&] {
      optimizer.zero_grad();
      auto loss = half.to(at::kFloat).mv(x).sub(single.sum()).square().sum();
      if (number == 4 && evaluations++ == 0) {
        loss = loss.mul(kInf);
      }
      optimizer.backward(loss);
      return loss;
    });
  }

  std::vector<at::Tensor> weights() {
    return {
        half.detach().clone(),
        optimizer.fp32_from_fp16_groups()[0][0].detach().clone(),
        single.detach().clone()};
  }

  at::Tensor half;
  at::Tensor single;
  std::unique_ptr<Optimizer> inner;
  FP16Optimizer optimizer;
  int evaluations = 0;
};

bool same(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  bool equal = a.size() == b.size();
  for (std::size_t i = 0; equal && i < a.size(); ++i) {
    equal = a[i].equal(b[i]);
  }
  return equal;
}

c10::impl::GenericDict dict(const c10::IValue& value) {
  return value.toGenericDict();
}

// Returns a copy of a state dict that may be edited, its tensors shared.
c10::IValue copy_of(const c10::IValue& value) {
  if (value.isGenericDict()) {
    auto copy = make_state_dict();
    for (const auto& entry : value.toGenericDict()) {
      copy.insert(entry.key(), copy_of(entry.value()));
    }
    return copy;
  }
  if (value.isList()) {
    c10::impl::GenericList copy(c10::AnyType::get());
    for (const c10::IValue& item : value.toListRef()) {
      copy.push_back(copy_of(item));
    }
    return copy;
  }
  return value;
}

std::string error_of_load(Run& run, const c10::IValue& state) {
  const auto before = run.weights();
  const auto scale = run.optimizer.loss_scale();
  const auto states = run.inner->state().size();
  auto text =
      error_of<c10::ValueError>([&] { run.optimizer.load_state_dict(state); });
  CHECK(same(run.weights(), before));
  CHECK(run.optimizer.loss_scale() == scale);
  CHECK(run.inner->state().size() == states);
  return text;
}

template <typename Save>
void check_resume(const Save& resume) {
  for (const auto& known : known_optimizers()) {
    CAPTURE(known.name);
    Run whole(known.make);
    Run first(known.make);
    for (int i = 0; i < 7; ++i) {
      whole.iterate(i);
      first.iterate(i);
    }
    Run second(known.make);
    second.iterate(20); // state that has to go
    resume(first.optimizer, second.optimizer);
    {
      const at::NoGradGuard no_grad;
      second.single.copy_(first.single); // the model's own, as half would be
    }
    CHECK(second.optimizer.loss_scale() == whole.optimizer.loss_scale());
    CHECK(second.optimizer.steps_applied() == whole.optimizer.steps_applied());
    CHECK(second.optimizer.steps_skipped() == whole.optimizer.steps_skipped());
    CHECK(same(second.weights(), whole.weights()));
    for (int i = 7; i < 15; ++i) {
      whole.iterate(i);
      second.iterate(i);
    }
    CHECK(same(second.weights(), whole.weights()));
    CHECK(second.optimizer.loss_scale() == whole.optimizer.loss_scale());
  }
}

} // namespace

TEST_CASE("a run resumed from a state dict has the same bits") {
  check_resume([](FP16Optimizer& from, FP16Optimizer& to) {
    to.load_state_dict(from.state_dict());
  });
}

TEST_CASE("a run resumed from torch's archive has the same bits") {
  check_resume([](FP16Optimizer& from, FP16Optimizer& to) {
    std::stringstream stream;
    torch::save(from, stream);
    torch::load(to, stream);
  });
}

TEST_CASE("a state dict has the keys of the Python class in their order") {
  Run run(maker<AdamW>(AdamWOptions(0.02)));
  run.iterate(0);
  const auto state = run.optimizer.state_dict();
  std::vector<std::string> keys;
  for (const auto& entry : state) {
    keys.push_back(entry.key().toStringRef());
  }
  const std::vector<std::string> expected{
      "loss_scaler",
      "dynamic_loss_scale",
      "overflow",
      "first_closure_call_this_step",
      "optimizer_state_dict",
      "fp32_from_fp16",
      "format_version",
      "fp32_from_fp16_positions",
      "update_pending",
      "steps_applied",
      "steps_skipped",
      "optimizer_class"};
  CHECK(keys == expected);
  CHECK(state.at("optimizer_class").toStringRef() == "AdamW");
  const auto inner = dict(state.at("optimizer_state_dict"));
  const auto first = dict(dict(inner.at("state")).at(0));
  CHECK(first.at("step").toTensor().equal(at::scalar_tensor(1.0F)));
  CHECK(first.at("exp_avg").toTensor().sizes() == at::IntArrayRef{2, 3});
  CHECK_FALSE(first.contains("max_exp_avg_sq"));
  const auto group = dict(inner.at("param_groups").toListRef()[0]);
  CHECK(group.at("lr").toDouble() == 0.02);
  CHECK(group.at("betas").toTupleRef().elements()[1].toDouble() == 0.999);
  CHECK(group.at("decoupled_weight_decay").toBool());
  CHECK_FALSE(group.at("maximize").toBool());
  CHECK(group.at("fused").isNone());
  CHECK(group.at("params").toListRef().size() == 2);
  // The live masters.
  const auto master =
      state.at("fp32_from_fp16").toListRef()[0].toListRef()[0].toTensor();
  CHECK(
      master.data_ptr() == run.inner->param_groups()[0].params()[0].data_ptr());
}

TEST_CASE("what only Python has in a group is kept for the next state dict") {
  Run run(maker<SGD>(SGDOptions(0.1)));
  const auto state = copy_of(run.optimizer.state_dict());
  auto group = dict(dict(dict(state).at("optimizer_state_dict"))
                        .at("param_groups")
                        .toListRef()[0]);
  group.insert("initial_lr", 0.5);
  group.insert_or_assign("lr", 0.25);
  group.insert_or_assign("foreach", true);
  run.optimizer.load_state_dict(state);
  CHECK(run.inner->param_groups()[0].options().get_lr() == 0.25);
  const auto again = run.optimizer.state_dict();
  const auto after = dict(
      dict(again.at("optimizer_state_dict")).at("param_groups").toListRef()[0]);
  CHECK(after.at("initial_lr").toDouble() == 0.5);
  CHECK(after.at("foreach").toBool());
  CHECK(after.at("lr").toDouble() == 0.25);
}

TEST_CASE("a state dict of a plain optimizer leaves masters and scale") {
  Run run(maker<Adam>(AdamOptions(0.02)));
  Run other(maker<Adam>(AdamOptions(0.5)));
  run.iterate(0);
  other.iterate(1);
  const auto masters = other.weights();
  other.optimizer.load_state_dict(
      run.optimizer.state_dict().at("optimizer_state_dict"));
  CHECK(same(other.weights(), masters));
  CHECK(other.inner->param_groups()[0].options().get_lr() == 0.02);
}

TEST_CASE("a half parameter that was frozen gets the master that was saved") {
  const auto make = maker<SGD>(SGDOptions(1.0));
  Run run(make);
  run.iterate(0);
  const auto state = run.optimizer.state_dict();
  const auto half = at::zeros({2, 3}, at::kHalf);
  auto sgd = make({half, at::zeros({3}).requires_grad_()});
  FP16Optimizer optimizer(*sgd);
  CHECK(sgd->param_groups()[0].params()[0].is_same(half));
  optimizer.load_state_dict(state);
  CHECK(sgd->param_groups()[0].params()[0].equal(run.weights()[1]));
  CHECK(half.equal(run.half.detach()));
}

TEST_CASE("a state dict that does not fit changes nothing") {
  const auto make = maker<AdamW>(AdamWOptions(0.02));
  Run run(make);
  run.iterate(0);
  const auto edited = [&](const auto& edit) {
    const auto state = copy_of(run.optimizer.state_dict());
    edit(dict(state));
    return error_of_load(run, state);
  };
  const auto in_group = [&](const auto& edit) {
    return edited([&](auto state) {
      edit(dict(dict(state.at("optimizer_state_dict"))
                    .at("param_groups")
                    .toListRef()[0]));
    });
  };
  const auto in_state = [&](const auto& edit) {
    return edited([&](auto state) {
      edit(
          dict(dict(dict(state.at("optimizer_state_dict")).at("state")).at(0)));
    });
  };
  const std::string owner = "FP16Optimizer.load_state_dict: ";
  CHECK(error_of_load(run, 3).starts_with(owner));
  CHECK(edited([](auto state) {
          state.insert_or_assign("format_version", 9);
        }) == owner + "the state dict.format_version must be 1, but got 9");
  CHECK_FALSE(
      edited([](auto state) { CHECK(state.erase("overflow") == 1); }).empty());
  CHECK_FALSE(edited([](auto state) {
                state.insert_or_assign("overflow", "no");
              }).empty());
  CHECK_FALSE(edited([](auto state) {
                state.insert_or_assign("steps_applied", -1);
              }).empty());
  CHECK_FALSE(edited([](auto state) {
                state.insert_or_assign("fp32_from_fp16", 1);
              }).empty());
  CHECK_FALSE(
      edited([](auto state) {
        dict(state.at("loss_scaler")).insert_or_assign("cur_scale", -1.0);
      }).empty());
  CHECK_FALSE(edited([](auto state) {
                dict(state.at("loss_scaler")).insert_or_assign("kind", "other");
              }).empty());
  CHECK_FALSE(edited([](auto state) {
                auto list = state.at("fp32_from_fp16").toList();
                list.get(0).toList().set(0, at::ones({3, 2}));
              }).empty());
  CHECK_FALSE(
      edited([](auto state) {
        state.at("fp32_from_fp16_positions").toList().get(0).toList().set(0, 7);
      }).empty());
  // A master for a native parameter.
  CHECK_FALSE(
      edited([](auto state) {
        state.at("fp32_from_fp16_positions").toList().get(0).toList().set(0, 1);
        state.at("fp32_from_fp16")
            .toList()
            .get(0)
            .toList()
            .set(0, at::ones({3}));
      }).empty());
  CHECK_FALSE(
      in_group([](auto group) { CHECK(group.erase("lr") == 1); }).empty());
  CHECK_FALSE(in_group([](auto group) {
                group.insert_or_assign("betas", 0.9);
              }).empty());
  CHECK(
      in_group([](auto group) { group.insert_or_assign("maximize", true); })
          .find(
              "maximize must be as torch::optim::AdamW has it (False), but "
              "got True") != std::string::npos);
  CHECK_FALSE(in_group([](auto group) {
                group.insert_or_assign("decoupled_weight_decay", false);
              }).empty());
  CHECK_FALSE(in_group([](auto group) {
                group.at("params").toList().push_back(2);
              }).empty());
  CHECK_FALSE(in_state([](auto state) {
                CHECK(state.erase("exp_avg_sq") == 1);
              }).empty());
  CHECK_FALSE(in_state([](auto state) {
                state.insert_or_assign("exp_avg", at::ones({7}));
              }).empty());
  CHECK_FALSE(in_state([](auto state) {
                state.insert_or_assign("step", 1.5);
              }).empty());
}

TEST_CASE("state of another class of optimizer is refused or warned of") {
  Run adam(maker<Adam>(AdamOptions(0.02)));
  adam.iterate(0);
  Run sgd(maker<SGD>(SGDOptions(0.1)));
  CHECK_FALSE(error_of_load(sgd, adam.optimizer.state_dict()).empty());

  class Derived : public Adam {
   public:
    using Adam::Adam;
  };
  std::vector<std::string> lines;
  Run derived(
      maker<Derived>(AdamOptions(0.5)),
      options().log([&](const std::string& line) { lines.push_back(line); }));
  derived.optimizer.load_state_dict(adam.optimizer.state_dict());
  REQUIRE(lines.size() == 1);
  CHECK(
      lines[0] ==
      "FP16Optimizer.load_state_dict: state of Adam is loaded into Derived");
  CHECK(derived.inner->param_groups()[0].options().get_lr() == 0.02);
}

TEST_CASE("options of a class of one's own have no place in a state dict") {
  struct OwnOptions : OptimizerCloneableOptions<OwnOptions> {};
  class Own : public Optimizer {
   public:
    explicit Own(std::vector<at::Tensor> parameters)
        : Optimizer(std::move(parameters), std::make_unique<OwnOptions>()) {}
    at::Tensor step(LossClosure) override { return {}; }
  };
  Run run([](std::vector<at::Tensor> parameters) {
    return std::make_unique<Own>(std::move(parameters));
  });
  CHECK(
      error_of<c10::TypeError>([&] { run.optimizer.state_dict(); }) ==
      "FP16Optimizer.state_dict: the wrapped optimizer must have options and "
      "state of torch::optim's own classes (save() and load() take any), but "
      "got OwnOptions in Own");
}

TEST_CASE(
    "a dynamic scale needs the check for overflow when it is loaded too") {
  const auto make = maker<SGD>(SGDOptions(0.1).momentum(0.5));
  Run run(make);
  run.iterate(0);
  Run unchecked(make, FP16OptimizerOptions().check_overflow(false));
  CHECK(
      error_of_load(unchecked, run.optimizer.state_dict()) ==
      "FP16Optimizer.load_state_dict: the state dict.loss_scaler.kind must be "
      "'static' with check_overflow off, but got 'dynamic'");
}

TEST_CASE("a scaler of one's own keeps its class and gets the scale") {
  class Own : public LossScaler {
   public:
    using LossScaler::LossScaler;
  };
  const auto make = maker<SGD>(SGDOptions(0.1));
  Run run(make, options().loss_scaler(std::make_shared<Own>(64)));
  Run other(make, options().loss_scaler(std::make_shared<Own>(2)));
  const auto scaler = other.optimizer.loss_scaler();
  const auto state = copy_of(run.optimizer.state_dict());
  other.optimizer.load_state_dict(state);
  CHECK(other.optimizer.loss_scaler() == scaler);
  CHECK(other.optimizer.loss_scale() == 64);
  dict(dict(state).at("loss_scaler")).insert_or_assign("cur_scale", 0.0);
  CHECK_FALSE(error_of_load(other, state).empty());
}

TEST_CASE("state without a tensor is no state") {
  // As LBFGS leaves it in Python where the first gradient is small enough.
  Run run(maker<LBFGS>(LBFGSOptions(0.5)));
  run.iterate(0);
  const auto state = copy_of(run.optimizer.state_dict());
  auto counts = make_state_dict();
  counts.insert("func_evals", 1);
  counts.insert("n_iter", 0);
  dict(dict(dict(state).at("optimizer_state_dict")).at("state"))
      .insert_or_assign(0, counts);
  run.optimizer.load_state_dict(state);
  CHECK(run.inner->state().empty());
  run.iterate(1);
}

TEST_CASE("state of one's own class is not replaced by torch's") {
  struct OwnState : OptimizerCloneableParamState<OwnState> {};
  Run adam(maker<Adam>(AdamOptions(0.02)));
  adam.iterate(0);
  Run run(maker<Adam>(AdamOptions(0.02)));
  const auto key = run.single.unsafeGetTensorImpl();
  run.inner->state()[key] = std::make_unique<OwnState>();
  CHECK(
      error_of<c10::TypeError>([&] {
        run.optimizer.load_state_dict(adam.optimizer.state_dict());
      }) ==
      "FP16Optimizer.load_state_dict: the wrapped optimizer must have options "
      "and state of torch::optim's own classes (save() and load() take any), "
      "but got OwnState in Adam");
  CHECK(run.inner->state().size() == 1);
}

TEST_CASE("an archive with state of another shape changes nothing") {
  const auto make = maker<Adam>(AdamOptions(0.02));
  Run run(make);
  run.iterate(0);
  const auto before = run.weights();
  const auto half = at::zeros({2, 3}, at::kHalf).requires_grad_();
  auto adam = make({half, at::zeros({7}).requires_grad_()});
  FP16Optimizer wider(*adam);
  wider.backward(
      half.to(at::kFloat).sum() + adam->param_groups()[0].params()[1].sum());
  wider.step();
  std::stringstream stream;
  torch::save(wider, stream);
  CHECK(error_of<c10::ValueError>([&] {
          torch::load(run.optimizer, stream);
        }) == "FP16Optimizer.load: exp_avg must have shape [3], but got [7]");
  CHECK(same(run.weights(), before));
  run.iterate(1);
}

TEST_CASE("an archive that does not fit changes nothing") {
  Run sgd(maker<SGD>(SGDOptions(0.1).momentum(0.5)));
  Run adam(maker<Adam>(AdamOptions(0.02)));
  sgd.iterate(0);
  adam.iterate(0);
  const auto check = [&](const std::string& archive) {
    const auto before = adam.weights();
    const auto scale = adam.optimizer.loss_scale();
    std::stringstream stream(archive);
    CHECK_THROWS_AS(torch::load(adam.optimizer, stream), c10::Error);
    CHECK(same(adam.weights(), before));
    CHECK(adam.optimizer.loss_scale() == scale);
    CHECK(adam.inner->state().size() == 2);
    CHECK(adam.inner->param_groups()[0].options().get_lr() == 0.02);
    adam.iterate(1);
  };
  std::stringstream other;
  torch::save(sgd.optimizer, other);
  check(other.str());
  std::stringstream plain;
  torch::save(*adam.inner, plain);
  check(plain.str());
  Run wider(maker<Adam>(AdamOptions(0.02)));
  wider.optimizer.add_param_group(OptimizerParamGroup(
      std::vector<at::Tensor>{at::zeros({2}, at::kHalf).requires_grad_()}));
  std::stringstream two_groups;
  torch::save(wider.optimizer, two_groups);
  check(two_groups.str());
}
