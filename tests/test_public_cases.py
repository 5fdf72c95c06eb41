"""Faults of mixed-precision training that people report in public, one test a kind.

Each test is the situation of a user, with the value that a user expects.
"""

import logging
import warnings
from typing import Any

import pytest
import torch
from torch.nn import functional

from fp16core import FP16_Optimizer
from helpers import INF, NAN, assert_same, bits, half, masters, single, train


def sgd(*params: torch.Tensor, lr: float = 0.5, **kwargs: Any) -> FP16_Optimizer:
    return FP16_Optimizer(torch.optim.SGD(list(params), lr=lr), verbose=False, **kwargs)


def dynamic(*params: torch.Tensor, lr: float = 0.5, **scaler: Any) -> FP16_Optimizer:
    return sgd(*params, lr=lr, dynamic_loss_scale=True, dynamic_loss_args=scaler)


# The loss scale.


@pytest.mark.parametrize("floor", [1.0, 0.25, 2.0**-10])
def test_a_nan_region_does_not_drive_the_scale_to_zero(floor: float) -> None:
    weight = half(2.0)
    optimizer = dynamic(weight, init_scale=4.0, min_scale=floor)
    for _ in range(60):
        train(optimizer, (weight.float() * NAN).sum())
    assert optimizer.loss_scale == floor
    assert weight.item() == 2.0
    train(optimizer, weight.float().sum())
    assert weight.item() == 1.5


def test_the_floor_of_the_scale_does_not_end_the_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    weight = half(2.0)
    optimizer = dynamic(weight, init_scale=1.0)
    for _ in range(30):
        train(optimizer, (weight.float() * INF).sum())
    assert (optimizer.steps_skipped, weight.item()) == (30, 2.0)
    assert len([r for r in caplog.records if r.levelno == logging.WARNING]) == 1


def test_the_scale_is_part_of_the_checkpoint() -> None:
    weight = half(1.0)
    optimizer = dynamic(weight, lr=0.0, init_scale=2.0**18)
    while not optimizer.steps_applied:
        train(optimizer, weight.float().sum())
    # 2**15 is the largest power of two that float16 holds.
    assert optimizer.loss_scale == 2.0**15
    restarted = dynamic(half(1.0), lr=0.0, init_scale=2.0**18)
    restarted.load_state_dict(optimizer.state_dict())
    assert restarted.loss_scale == 2.0**15


def test_tolerated_overflows_do_not_make_the_log_lie(
    caplog: pytest.LogCaptureFixture,
) -> None:
    weight = half(1.0)
    optimizer = dynamic(weight, init_scale=32.0, delayed_shift=2)
    scales = []
    for _ in range(3):
        train(optimizer, (weight.float() * INF).sum())
        scales.append(optimizer.loss_scale)
    assert scales == [32.0, 16.0, 8.0]
    first, second, third = caplog.messages
    assert "tolerated" in first and "->" not in first
    assert "32 -> 16" in second
    assert "16 -> 8" in third


@pytest.mark.parametrize("value", [0.0, -4.0, INF, NAN])
@pytest.mark.parametrize("name", ["static_loss_scale", "init_scale", "min_scale"])
def test_senseless_scales_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name.removeprefix("static_loss_")):
        if name == "static_loss_scale":
            sgd(half(1.0), static_loss_scale=value)
        else:
            dynamic(half(1.0), **{name: value})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_nan_does_not_get_through_a_static_scale(dtype: torch.dtype) -> None:
    weight = half(2.0, dtype=dtype)
    optimizer = sgd(weight, static_loss_scale=4.0)
    train(optimizer, (weight.float() * NAN).sum())
    assert optimizer.overflow
    assert weight.item() == 2.0
    assert optimizer.loss_scale == 4.0
    train(optimizer, weight.float().sum())
    assert weight.item() == 1.5


def test_one_can_tell_whether_a_step_was_applied() -> None:
    weight = half(1.0)
    optimizer = dynamic(weight, init_scale=4.0, delayed_shift=5)
    told = []
    for bad in (False, True, True, False):
        train(optimizer, (weight.float() * (INF if bad else 0.125)).sum())
        told.append(optimizer.overflow)
    assert told == [False, True, True, False]
    # The scale alone would not have told: these overflows were tolerated.
    assert optimizer.loss_scale == 4.0
    assert (optimizer.steps_applied, optimizer.steps_skipped) == (2, 2)


def test_a_sum_that_overflows_is_no_overflow() -> None:
    native = torch.nn.Parameter(torch.zeros(100))
    optimizer = sgd(native, lr=2.0**-127)
    largest = torch.finfo(torch.float32).max
    train(optimizer, (native * (largest / 4)).sum())
    assert optimizer.overflow is False
    assert optimizer.steps_applied == 1


# Gradients.


def test_accumulation_and_clipping_come_in_any_order() -> None:
    weight = half(1.0)
    optimizer = sgd(weight, static_loss_scale=32.0)
    optimizer.zero_grad()
    for _ in range(8):
        optimizer.backward((weight.float() / 8).sum(), update_master_grads=False)
    optimizer.update_master_grads()
    assert [optimizer.clip_master_grads(4.0).item() for _ in range(3)] == [1.0] * 3
    optimizer.step()
    assert weight.item() == 0.5


@pytest.mark.parametrize("scale", [1.0, 64.0, 4096.0])
def test_clipping_does_not_see_the_scale(scale: float) -> None:
    weight = half(0.0, 0.0)
    optimizer = sgd(weight, lr=1.0, static_loss_scale=scale)
    optimizer.zero_grad()
    optimizer.backward((weight.float() * torch.tensor([6.0, 8.0])).sum())
    assert optimizer.clip_master_grads(5.0).item() == 10.0
    optimizer.step()
    # The 1e-6 that torch adds to the norm is far below float16's precision.
    torch.testing.assert_close(
        weight.detach(), torch.tensor([-3.0, -4.0]).half(), rtol=2**-10, atol=0
    )


def test_strides_of_a_gradient_may_differ_from_those_of_its_weight() -> None:
    weight = torch.nn.Parameter(torch.zeros(3, 1, 50, dtype=torch.float16))
    optimizer = sgd(weight, lr=1.0, static_loss_scale=2.0)
    x = torch.arange(600.0).reshape(4, 3, 50).half() / 512
    y = torch.bmm(x.transpose(0, 1), weight.transpose(1, 2))
    train(optimizer, y.float().sum())
    assert weight.grad is not None and weight.grad.stride() != weight.stride()
    exact = -x.double().sum(0).view(3, 1, 50)
    # The gradient was rounded to float16 on its way.
    torch.testing.assert_close(weight.detach().double(), exact, rtol=2**-10, atol=0)


def test_sparse_gradients_of_an_embedding_stay_sparse() -> None:
    embedding = torch.nn.Embedding(5, 3, sparse=True).half()
    before = embedding.weight.detach().float().clone()
    optimizer = sgd(embedding.weight, static_loss_scale=8.0)
    rows = torch.tensor([4, 0, 4, 4])
    train(optimizer, embedding(rows).float().sum())
    grads = optimizer.inspect_master_grad_data()
    assert grads is not None
    grad = grads[0][0]
    assert grad is not None and grad.is_sparse and grad.dtype == torch.float32
    counts = torch.tensor([1.0, 0, 0, 0, 3]).view(5, 1)
    assert_same(grad.to_dense(), counts.expand(5, 3).contiguous())
    assert_same(masters(optimizer)[0].detach(), before - 0.5 * counts)
    assert_same(bits(embedding.weight)[1:4], bits(before.half())[1:4])


def test_sparse_rows_whose_sum_is_beyond_half_are_no_overflow() -> None:
    embedding = torch.nn.Embedding(2, 1, sparse=True).half()
    with torch.no_grad():
        embedding.weight.zero_()
    optimizer = sgd(embedding.weight, lr=2.0**-16)
    rows = torch.tensor([1, 1, 1, 1])
    train(optimizer, (embedding(rows).float() * 2.0**15).sum())
    assert optimizer.overflow is False
    assert_same(embedding.weight.detach(), torch.tensor([[0.0], [-2.0]]).half())


@pytest.mark.parametrize("drop", [{"set_to_none": True}, {"set_grads_to_None": True}])
def test_zero_grad_takes_the_keyword_of_torch_and_the_old_one(
    drop: dict[str, bool],
) -> None:
    weight, native = half(1.0), single(1.0)
    optimizer = sgd(weight, native)
    optimizer.backward(weight.float().sum() + native.sum())
    optimizer.zero_grad(**drop)
    tensors = [weight, native, *masters(optimizer)]
    assert [t.grad for t in tensors] == [None] * 3


# Parameters.


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_model_that_is_half_itself_can_be_trained(dtype: torch.dtype) -> None:
    model = torch.nn.Sequential(
        torch.nn.Linear(5, 3), torch.nn.LayerNorm(3), torch.nn.Linear(3, 1)
    ).to(dtype)
    model[1].float()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = FP16_Optimizer(
        torch.optim.AdamW(model.parameters(), lr=0.1), static_loss_scale=16.0
    )
    x = torch.randn(4, 5).to(dtype)
    hidden = model[1](model[0](x).float()).to(dtype)
    train(optimizer, model[2](hidden).float().pow(2).sum())
    for param, old in zip(model.parameters(), before, strict=True):
        assert param.dtype == old.dtype
        assert not torch.equal(param, old)
    grads = optimizer.inspect_master_grad_data()
    assert grads is not None
    assert {g.dtype for g in grads[0] if g is not None} == {torch.float32}


def test_small_updates_of_bfloat16_add_up() -> None:
    weight = half(1.0, dtype=torch.bfloat16)
    optimizer = sgd(weight, lr=2.0**-10)
    for _ in range(32):
        train(optimizer, weight.float().sum())
    # Each alone is below the spacing of bfloat16 at 1, which is 2**-8 downwards.
    assert masters(optimizer)[0].item() == weight.item() == 1.0 - 2.0**-5


def test_bfloat16_at_its_defaults_is_nothing_to_warn_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    weight = half(1.0, dtype=torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = sgd(weight)
        train(optimizer, weight.float().sum())
    assert optimizer.loss_scale == 1.0
    assert caplog.messages == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("empty_at", [0, 20, 35, 40])
def test_an_empty_parameter_may_stand_anywhere_in_a_long_list(
    empty_at: int, dtype: torch.dtype
) -> None:
    params = [half(1.0, dtype=dtype) for _ in range(40)]
    empty = torch.nn.Parameter(torch.empty(0, 8, dtype=dtype))
    params.insert(empty_at, empty)
    optimizer = sgd(*params, static_loss_scale=8.0)
    optimizer.backward(torch.stack([p.float().sum() for p in params]).sum())
    torch.testing.assert_close(
        optimizer.clip_master_grads(1000.0).item(), 40**0.5, rtol=2**-24, atol=0
    )
    optimizer.step()
    assert (tuple(empty.shape), empty.dtype) == ((0, 8), dtype)
    assert [p.item() for p in params if p.numel()] == [0.5] * 40


def test_a_frozen_backbone_costs_no_masters_and_no_state() -> None:
    backbone = torch.nn.Linear(30, 30).half().requires_grad_(False)
    adapter = torch.nn.Linear(30, 1, bias=False).half()
    inner = torch.optim.Adam([*backbone.parameters(), *adapter.parameters()], lr=0.1)
    optimizer = FP16_Optimizer(inner, verbose=False)
    frozen = [p.detach().clone() for p in backbone.parameters()]
    train(optimizer, adapter(backbone(torch.ones(1, 30).half())).float().sum())
    params = optimizer.param_groups[0]["params"]
    assert [p.dtype for p in params] == [torch.float16] * 2 + [torch.float32]
    assert params[0] is backbone.weight
    assert list(optimizer.state) == [params[2]]
    assert_same(list(backbone.parameters()), frozen)


def test_a_group_added_later_trains_with_masters() -> None:
    first, second = half(2.0), half(2.0)
    inner = torch.optim.SGD([first], lr=0.5, momentum=0.5)
    optimizer = FP16_Optimizer(inner, static_loss_scale=4.0, verbose=False)
    train(optimizer, first.float().sum())
    optimizer.add_param_group({"params": [second], "lr": 0.125})
    train(optimizer, first.float().sum() + second.float().sum())
    assert (first.item(), second.item()) == (2.0 - 0.5 - 0.75, 1.875)
    assert optimizer.param_groups[1]["params"][0].dtype == torch.float32


def test_empty_parameters_keep_their_shape_and_disturb_nobody() -> None:
    shapes = [(0,), (3,), (0, 4), (2,), (5, 0)]
    params = [torch.nn.Parameter(torch.ones(shape).half()) for shape in shapes]
    optimizer = sgd(*params, static_loss_scale=2.0)
    train(optimizer, torch.stack([p.float().sum() for p in params]).sum())
    assert [tuple(p.shape) for p in params] == shapes
    assert all((p == 0.5).all() for p in params)
    assert optimizer.overflow is False
    # Five elements have the gradient 1.
    assert optimizer.clip_master_grads(100.0, 1).item() == 5.0


def test_skipping_a_step_does_not_touch_buffers_of_the_model() -> None:
    norm = torch.nn.BatchNorm1d(2)
    weight = half(1.0, 1.0)
    optimizer = sgd(weight, *norm.parameters(), lr=0.1)
    batch = torch.full((3, 2), 40000.0).half()
    train(optimizer, norm((weight * batch * 2).float()).sum())
    assert optimizer.overflow
    assert weight.tolist() == [1.0, 1.0]
    # The forward pass wrote them, and an optimizer does not know of them.
    assert not norm.running_mean.isfinite().any()


# The ecosystem.


def test_a_skipped_first_step_does_not_make_schedulers_complain() -> None:
    weight = half(1.0)
    optimizer = dynamic(weight, init_scale=4.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(optimizer, (weight.float() * INF).sum())
        scheduler.step()
    assert optimizer.overflow
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_schedulers_accept_it_and_reach_the_inner_optimizer() -> None:
    weight = half(2.0)
    optimizer = sgd(weight)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for _ in range(3):
        train(optimizer, weight.float().sum())
        scheduler.step()
    assert weight.item() == 2.0 - 0.5 - 0.25 - 0.125


def test_cyclic_schedulers_find_momentum_in_the_defaults() -> None:
    inner = torch.optim.SGD([half(1.0)], lr=0.1, momentum=0.9)
    optimizer = FP16_Optimizer(inner, verbose=False)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=4)
    assert optimizer.param_groups[0]["momentum"] == 0.95


class SignDescent(torch.optim.Optimizer):
    """An optimizer with an argument of its own and a step without a closure."""

    def __init__(self, params: Any, *, size: float) -> None:
        super().__init__(params, {"size": size})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param -= group["size"] * param.grad.sign()


def test_any_optimizer_can_be_wrapped() -> None:
    weight = half(1.0, 1.0)
    inner = SignDescent([weight], size=0.25)
    optimizer = FP16_Optimizer(inner, static_loss_scale=4.0, verbose=False)
    train(optimizer, (weight.float() * torch.tensor([3.0, -7.0])).sum())
    assert weight.tolist() == [0.75, 1.25]


class Averaging(torch.optim.SGD):
    """Shows other weights for evaluation, as schedule-free optimizers do."""

    def train(self) -> None:
        self._scale(2.0)

    def eval(self) -> None:
        self._scale(0.5)

    @torch.no_grad()
    def _scale(self, factor: float) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.mul_(factor)


def test_train_and_eval_of_the_inner_optimizer_reach_the_model() -> None:
    weight = half(1.0)
    optimizer = FP16_Optimizer(Averaging([weight], lr=2.0**-20), verbose=False)
    train(optimizer, weight.float().sum())
    optimizer.eval()
    assert weight.item() == 0.5
    optimizer.train()
    assert weight.item() == 1.0
    # Nothing of the master's precision was lost on the way.
    assert masters(optimizer)[0].item() == 1.0 - 2.0**-20


def test_lbfgs_runs_with_dynamic_scaling() -> None:
    weight = half(4.0)
    inner = torch.optim.LBFGS([weight], lr=0.5, max_iter=5)
    params = inner.param_groups[0]["params"]
    optimizer = FP16_Optimizer(inner, dynamic_loss_scale=True, verbose=False)
    # LBFGS holds on to this list.
    assert inner.param_groups[0]["params"] is params
    assert params[0].dtype == torch.float32

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = functional.mse_loss(weight.float(), torch.tensor([1.0]))
        optimizer.backward(loss)
        return loss

    for _ in range(6):
        optimizer.step(closure)
    torch.testing.assert_close(
        weight.detach().float(), torch.tensor([1.0]), rtol=2**-10, atol=0
    )


# Checkpoints.


def test_weights_loaded_after_wrapping_survive_the_first_step() -> None:
    model = torch.nn.Linear(4, 2).half()
    optimizer = sgd(*model.parameters(), lr=0.0, static_loss_scale=8.0)
    pretrained = {k: torch.randn(v.shape).half() for k, v in model.state_dict().items()}
    model.load_state_dict(pretrained)
    train(optimizer, model(torch.ones(1, 4).half()).float().sum())
    assert_same(dict(model.state_dict()), pretrained)


def test_state_of_a_plain_fp32_run_is_taken_over() -> None:
    full = single(1.0, 2.0)
    plain = torch.optim.SGD([full], lr=0.5, momentum=0.5)
    full.grad = torch.tensor([2.0, 2.0**-20])
    plain.step()
    weight = torch.nn.Parameter(full.detach().half())
    inner = torch.optim.SGD([weight], lr=0.5, momentum=0.5)
    optimizer = FP16_Optimizer(inner, static_loss_scale=4.0, verbose=False)
    optimizer.load_state_dict(plain.state_dict())
    [state] = optimizer.state.values()
    assert_same(state["momentum_buffer"], torch.tensor([2.0, 2.0**-20]))


def test_a_dict_of_another_kind_is_a_value_error() -> None:
    for wrong in ({"epoch": 1}, {}, {"state": {}}, {"param_groups": []}):
        with pytest.raises(ValueError, match="FP16_Optimizer .* or of torch.optim"):
            sgd(half(1.0)).load_state_dict(wrong)
