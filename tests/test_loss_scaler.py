"""The loss scalers: their rule, their arguments, and scalers of other kinds."""

import copy
import itertools
import json
import pathlib
import pickle
import random
import re
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from fp16core import (
    DynamicLossScaler,
    FP16_Optimizer,
    LossScaleError,
    LossScaler,
    _core,
)
from helpers import (
    HALF_DTYPES,
    INF,
    NAN,
    ScaleModel,
    copy_of,
    half,
    masters,
    single,
    train,
)

DATA = pathlib.Path(__file__).parent / "data"
POLICIES = json.loads((DATA / "scale_traces.json").read_text())["policies"]
SMALLEST = 2.0**-126


def expand(runs: list[tuple[Any, int]]) -> list[float | None]:
    return [None if v is None else float(v) for v, count in runs for _ in range(count)]


# The rule.


@pytest.mark.parametrize(
    ("policy", "case"),
    [
        pytest.param(name, case, id=f"{name}-{index}-{case['label']}".replace(" ", "_"))
        for name, policy in POLICIES.items()
        for index, case in enumerate(policy["cases"])
    ],
)
def test_moves_like_the_recorded_originals(policy: str, case: dict[str, Any]) -> None:
    scaler = DynamicLossScaler.preset(policy, **case["config"])
    wanted = expand(case["scale"])
    lost = False
    for step, (flag, want) in enumerate(zip(case["overflow"], wanted, strict=True)):
        overflow, before = flag == "1", scaler.loss_scale
        if want is None:
            with pytest.raises(LossScaleError):
                scaler.update_scale(overflow)
            assert scaler.loss_scale == before
            continue
        scaler.update_scale(overflow)
        # Some originals lose their scale for good: at inf, or at 0.
        lost = lost or want == INF or want < SMALLEST
        if not lost:
            assert scaler.loss_scale == want, f"after update {step}"
        elif overflow:
            assert scaler.loss_scale == max(before / 2, SMALLEST)
        else:
            assert scaler.loss_scale in (before, before * 2)
            assert scaler.loss_scale < 2.0**128
    assert lost == ("inf" in case["label"] or "zero" in case["label"])


def test_every_policy_has_traces() -> None:
    assert sorted(_core.scale_policy_names()) == sorted(POLICIES)
    for name, policy in POLICIES.items():
        assert _core.scale_policy_parameters(name) == policy["parameters"]


@pytest.mark.parametrize(
    ("policy", "hysteresis"),
    [
        ("apex_amp", 1),
        *(
            (name, h)
            for name in ("megatron_core", "apex_hysteresis_kernel")
            for h in (1, 2, 3)
        ),
    ],
)
def test_policies_that_are_one_in_other_words_move_alike(
    policy: str, hysteresis: int
) -> None:
    init, window = 2.0**40, 7
    common = {"init_scale": init, "scale_window": window, "delayed_shift": hysteresis}
    if policy == "megatron_core":
        left = DynamicLossScaler.preset("megatron_v1", **common, min_scale=4.0)
        right = DynamicLossScaler.preset(
            policy,
            initial_scale=init,
            min_scale=4.0,
            growth_interval=window,
            hysteresis=hysteresis,
        )
    elif policy == "apex_hysteresis_kernel":
        left = DynamicLossScaler.preset(
            "megatron_v1", **common, min_scale=SMALLEST, consecutive_hysteresis=True
        )
        right = DynamicLossScaler.preset(
            policy, init_scale=init, growth_interval=window, hysteresis=hysteresis
        )
    else:
        left = DynamicLossScaler.preset("megatron_v1", **common, min_scale=SMALLEST)
        right = DynamicLossScaler.preset(
            policy, init_scale=init, scale_window=window, max_loss_scale=INF
        )
    # Few overflows for a while, then many, so that both ends are reached.
    rng = random.Random(hysteresis)
    seen = set()
    for update in range(10_000):
        share = (0.02, 0.1, 0.4)[update // 100 % 3]
        overflow = rng.random() < share
        for scaler in (left, right):
            scaler.update_scale(overflow)
        seen.add(left.loss_scale)
        # A float32 scale cannot follow beyond its range.
        if left.loss_scale >= 2.0**127:
            for scaler in (left, right):
                scaler.cur_scale = init
        assert left.loss_scale == right.loss_scale, f"after update {update}"
    assert len(seen) > 30


@settings(deadline=None)  # a busy machine pauses any example
@given(
    overflows=st.lists(st.booleans(), max_size=60),
    scale=st.floats(1e-3, 1e30),
    factor=st.floats(1.001, 16.0),
    window=st.integers(1, 6) | st.sampled_from([1.5, 2.5]),
    floor=st.floats(1e-6, 1e6),
    shift=st.integers(1, 4),
    consecutive=st.booleans(),
)
def test_moves_like_its_model(
    overflows: list[bool],
    scale: float,
    factor: float,
    window: float,
    floor: float,
    shift: int,
    consecutive: bool,
) -> None:
    scaler = DynamicLossScaler(scale, factor, window, floor, shift, consecutive)
    model = ScaleModel(scale, factor, window, floor, shift, consecutive)
    for count, overflow in enumerate(overflows, start=1):
        scaler.update_scale(overflow)
        assert scaler.loss_scale == model.update(overflow)
        assert scaler.cur_iter == count
        assert scaler.cur_hysteresis == model.tolerance + 1
    last = max((i for i, bad in enumerate(overflows) if bad), default=-1)
    assert scaler.last_overflow_iter == last


def test_defaults_are_the_originals() -> None:
    scaler = DynamicLossScaler()
    assert scaler.loss_scale == scaler.cur_scale == 2.0**32
    assert (scaler.scale_factor, scaler.scale_window, scaler.min_scale) == (2, 1000, 1)
    assert (scaler.delayed_shift, scaler.consecutive_hysteresis) == (1, False)
    assert (scaler.cur_iter, scaler.last_overflow_iter) == (0, -1)
    assert scaler.cur_hysteresis == 1
    assert scaler.backoff_factor == 0
    assert LossScaler().loss_scale == 1.0


def test_backoff_may_have_a_factor_of_its_own() -> None:
    scaler = DynamicLossScaler(64.0, scale_window=1, min_scale=2.0, backoff_factor=0.25)
    scales = []
    for overflow in (True, False, True, True):
        scaler.update_scale(overflow)
        scales.append(scaler.loss_scale)
    assert scales == [16.0, 32.0, 8.0, 2.0]
    with pytest.raises(TypeError):
        DynamicLossScaler(64.0, 2.0, 1, 2.0, 1, False, 0.25)  # type: ignore[call-arg]


def test_a_growth_beyond_float64_is_not_stored() -> None:
    scaler = DynamicLossScaler(2.0**1023, scale_window=1)
    scaler.update_scale(False)
    assert scaler.loss_scale == 2.0**1023
    scaler.update_scale(True)
    assert scaler.loss_scale == 2.0**1022


def test_a_static_scaler_stays_where_it_is() -> None:
    scaler = LossScaler(8.0)
    scaler.update_scale(True)
    scaler.update_scale(False)
    assert scaler.loss_scale == 8.0
    assert scaler.dynamic is False
    assert DynamicLossScaler().dynamic is True


# Arguments and attributes.

# The reciprocal of a scale has to be finite in float32.
A_SCALE = "finite and greater than 0"

BAD_ARGUMENTS = [
    *[("init_scale", v, A_SCALE) for v in (0, -2.0, INF, NAN)],
    *[("min_scale", v, A_SCALE) for v in (0, -2.0, INF, NAN)],
    *[(name, 2.0**-127, "at least 2^-126") for name in ("init_scale", "min_scale")],
    *[("scale_factor", v, "finite and greater than 1") for v in (1, 0.5, INF, NAN)],
    *[("scale_window", v, "finite and at least 1") for v in (0, -1, INF, NAN)],
    *[("delayed_shift", v, "at least 1") for v in (0, -1)],
    *[("backoff_factor", v, "between 0 and 1") for v in (1, -0.5, INF, NAN)],
]


@pytest.mark.parametrize("name, value, rule", BAD_ARGUMENTS)
def test_arguments_without_sense_are_named(name: str, value: float, rule: str) -> None:
    message = f"DynamicLossScaler: {name} must be {rule}, but got {value:.12g}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        DynamicLossScaler(**{name: value})
    if name == "init_scale":
        return
    scaler = DynamicLossScaler()
    before = getattr(scaler, name)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        setattr(scaler, name, value)
    assert getattr(scaler, name) == before


@pytest.mark.parametrize(
    "value, good",
    [(v, A_SCALE) for v in (0, -1.0, INF, NAN)]
    + [(v, "at least 2^-126") for v in (2.0**-127, 1e-320)],
)
def test_static_scales_without_sense_are_refused(value: float, good: str) -> None:
    rule = re.escape(f"must be {good}, but got {value:.12g}")
    with pytest.raises(ValueError, match=f"^LossScaler: scale {rule}$"):
        LossScaler(value)
    for scaler in (LossScaler(4.0), DynamicLossScaler(4.0)):
        name = type(scaler).__name__
        with pytest.raises(ValueError, match=f"^{name}.loss_scale: {rule}$"):
            scaler.cur_scale = value
        assert scaler.loss_scale == 4.0


def test_the_smallest_scale_is_good() -> None:
    native = single(1.0)
    optimizer = FP16_Optimizer(
        torch.optim.SGD([native], lr=0.5), static_loss_scale=2.0**-126, verbose=False
    )
    train(optimizer, native.sum())
    assert native.item() == 0.5


def test_a_tolerance_below_one_is_refused() -> None:
    scaler = DynamicLossScaler(delayed_shift=3)
    with pytest.raises(
        ValueError,
        match="^DynamicLossScaler.cur_hysteresis: must be at least 1, but got 0$",
    ):
        scaler.cur_hysteresis = 0
    assert scaler.cur_hysteresis == 3


@pytest.mark.parametrize("kwargs", [{"init_scale": "8"}, {"scale_windw": 4}])
def test_arguments_of_another_type_are_a_type_error(kwargs: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        DynamicLossScaler(**kwargs)


ATTRIBUTES = {
    "cur_scale": 64.0,
    "cur_iter": 7,
    "last_overflow_iter": 5,
    "cur_hysteresis": 2,
    "scale_factor": 4.0,
    "scale_window": 3,
    "min_scale": 2.0,
    "delayed_shift": 3,
    "consecutive_hysteresis": True,
    "backoff_factor": 0.25,
}


@pytest.mark.parametrize("name, value", ATTRIBUTES.items())
def test_attributes_can_be_read_and_set(name: str, value: float) -> None:
    scaler = DynamicLossScaler()
    assert getattr(scaler, name) != value
    setattr(scaler, name, value)
    assert getattr(scaler, name) == value


def test_attributes_that_are_set_take_part_in_the_rule() -> None:
    scaler = DynamicLossScaler()
    for name, value in ATTRIBUTES.items():
        setattr(scaler, name, value)
    # Iteration 8 is the third after the overflow at 5: it grows by 4.
    scaler.cur_iter = 8
    scaler.update_scale(False)
    assert scaler.loss_scale == 256.0
    assert scaler.cur_hysteresis == 3


def test_there_is_one_copy_of_the_state_inside_an_optimizer() -> None:
    param = half(1.0)
    optimizer = FP16_Optimizer(
        torch.optim.SGD([param], lr=0.5),
        dynamic_loss_scale=True,
        dynamic_loss_args={"init_scale": 16.0},
        verbose=False,
    )
    scaler = optimizer.loss_scaler
    assert optimizer.loss_scaler is scaler
    train(optimizer, param.float().sum() * INF)
    assert (scaler.cur_scale, scaler.cur_iter, scaler.last_overflow_iter) == (8, 1, 0)
    scaler.cur_scale = 4.0
    scaler.scale_factor = 4.0
    train(optimizer, param.float().sum() * INF)
    assert optimizer.loss_scale == 1.0


@pytest.mark.parametrize(
    "again",
    [copy.copy, copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_scalers_can_be_copied_with_all_they_know(again: Any) -> None:
    scaler = DynamicLossScaler()
    for name, value in ATTRIBUTES.items():
        setattr(scaler, name, value)
    twin = again(scaler)
    assert type(twin) is DynamicLossScaler
    assert {name: getattr(twin, name) for name in ATTRIBUTES} == ATTRIBUTES
    twin.update_scale(True)
    assert scaler.cur_iter == ATTRIBUTES["cur_iter"]
    assert again(LossScaler(8.0)).loss_scale == 8.0


class Patient(DynamicLossScaler):
    """A subclass that tells how often it was asked."""

    calls = 0

    def update_scale(self, overflow: bool) -> None:
        self.calls += 1
        super().update_scale(overflow)


def test_a_subclass_is_copied_as_itself() -> None:
    scaler = Patient(16.0)
    scaler.calls = 3
    twin = copy.deepcopy(scaler)
    assert type(twin) is Patient
    assert twin.loss_scale == 16.0
    assert twin.calls == 3


def test_reprs_say_what_matters() -> None:
    assert repr(LossScaler(8)) == "LossScaler(scale=8)"
    assert repr(DynamicLossScaler(8)) == (
        "DynamicLossScaler(cur_scale=8, scale_factor=2, scale_window=1000, "
        "min_scale=1, delayed_shift=1, consecutive_hysteresis=False)"
    )
    assert repr(DynamicLossScaler(8, backoff_factor=0.25)) == (
        "DynamicLossScaler(cur_scale=8, scale_factor=2, scale_window=1000, "
        "min_scale=1, delayed_shift=1, consecutive_hysteresis=False, "
        "backoff_factor=0.25)"
    )


def wrap_dynamic(param: torch.Tensor, **args: float) -> FP16_Optimizer:
    return FP16_Optimizer(
        torch.optim.SGD([param], lr=0.5),
        dynamic_loss_scale=True,
        dynamic_loss_args={"init_scale": 16.0, **args},
        verbose=False,
    )


def test_checkpoints_have_the_backoff_factor() -> None:
    state = wrap_dynamic(half(1.0), backoff_factor=0.25).state_dict()
    param = half(1.0)
    optimizer = wrap_dynamic(param)
    optimizer.load_state_dict(state)
    assert optimizer.loss_scaler.backoff_factor == 0.25
    train(optimizer, param.float().sum() * INF)
    assert optimizer.loss_scale == 4.0


def test_checkpoints_without_a_backoff_factor_divide() -> None:
    state = wrap_dynamic(half(1.0)).state_dict()
    del state["loss_scaler"]["backoff_factor"]
    param = half(1.0)
    optimizer = wrap_dynamic(param, backoff_factor=0.25)
    optimizer.load_state_dict(state)
    assert optimizer.loss_scaler.backoff_factor == 0
    train(optimizer, param.float().sum() * INF)
    assert optimizer.loss_scale == 8.0


# Methods on tensors.


@pytest.mark.parametrize("dtype", [*HALF_DTYPES, torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_has_overflow_looks_at_gradients(dtype: torch.dtype, bad: float) -> None:
    fine, without, broken = (half(1.0, 2.0, dtype=dtype) for _ in range(3))
    fine.grad = torch.tensor([1.0, -2.0], dtype=dtype)
    broken.grad = torch.tensor([1.0, bad], dtype=dtype)
    scaler = DynamicLossScaler()
    assert scaler.has_overflow([fine, without]) is False
    assert scaler.has_overflow(iter([fine, without, broken])) is True
    assert scaler.has_overflow([]) is False
    assert LossScaler().has_overflow([broken]) is False
    assert DynamicLossScaler._has_inf_or_nan(broken.grad) is True
    assert scaler._has_inf_or_nan(fine.grad) is False
    assert LossScaler._has_inf_or_nan(broken.grad) is False


def test_large_finite_gradients_are_no_overflow() -> None:
    largest = torch.full((1000,), torch.finfo(torch.float32).max)
    assert DynamicLossScaler._has_inf_or_nan(largest) is False
    assert DynamicLossScaler._has_inf_or_nan(torch.empty(0)) is False


@pytest.mark.parametrize("kind", [LossScaler, DynamicLossScaler])
def test_backward_and_scale_gradient_scale(kind: Any) -> None:
    scaler = kind(8.0)
    param = single(1.0)
    loss = (param * 2).sum()
    scaler.backward(loss, retain_graph=True)
    scaler.backward(loss)
    assert param.grad is not None
    assert param.grad.item() == 32.0
    scaled = scaler.scale_gradient(None, (torch.ones(1), None), None)
    assert scaled[0].item() == 8.0
    assert scaled[1] is None


# Scalers of other kinds in an optimizer.


class Foreign:
    """Anything with a loss_scale and update_scale."""

    def __init__(self, scale: float) -> None:
        self.cur_scale = scale
        self.flags: list[bool] = []

    @property
    def loss_scale(self) -> float:
        return self.cur_scale

    def update_scale(self, overflow: bool) -> None:
        self.flags.append(overflow)
        self.cur_scale *= 0.25 if overflow else 2.0


def wrap(*params: torch.Tensor) -> FP16_Optimizer:
    return FP16_Optimizer(torch.optim.SGD(list(params), lr=0.5), verbose=False)


def test_a_foreign_scaler_drives_the_scale() -> None:
    param = half(1.0)
    optimizer = wrap(param)
    scaler = Foreign(16.0)
    optimizer.loss_scaler = scaler
    assert optimizer.loss_scaler is scaler
    assert optimizer.dynamic_loss_scale is True
    optimizer.backward(param.float().sum())
    assert param.grad is not None and param.grad.item() == 16.0
    assert masters(optimizer)[0].grad.item() == 1.0
    optimizer.step()
    assert optimizer.loss_scale == 32.0
    train(optimizer, param.float().sum() * NAN)
    assert optimizer.loss_scale == 8.0
    assert scaler.flags == [False, True]
    assert all(type(flag) is bool for flag in scaler.flags)
    optimizer.loss_scale = 2.0
    assert scaler.cur_scale == 2.0


def test_a_subclass_that_overrides_the_rule_is_obeyed() -> None:
    param = half(1.0)
    optimizer = wrap(param)
    optimizer.loss_scaler = scaler = Patient(16.0)
    train(optimizer, param.float().sum() * INF)
    train(optimizer, param.float().sum())
    assert optimizer.loss_scaler is scaler
    assert scaler.calls == 2
    assert optimizer.loss_scale == 8.0


def test_a_subclass_that_overrides_the_scale_is_obeyed() -> None:
    class Halved(DynamicLossScaler):
        @property
        def loss_scale(self) -> float:
            return self.cur_scale / 2

    param = half(1.0)
    optimizer = wrap(param)
    optimizer.loss_scaler = Halved(16.0)
    assert optimizer.loss_scale == 8.0
    optimizer.backward(param.float().sum())
    assert param.grad is not None and param.grad.item() == 8.0


def test_a_scaler_may_be_shared_by_two_optimizers() -> None:
    first, second = half(1.0), half(1.0)
    one, two = wrap(first), wrap(second)
    one.loss_scaler = two.loss_scaler = DynamicLossScaler(16.0)
    train(one, first.float().sum() * INF)
    assert two.loss_scale == 8.0


def sharing(
    scaler: Any, count: int = 2
) -> tuple[list[torch.nn.Parameter], list[FP16_Optimizer]]:
    """Return parameters at 1 and an optimizer for each, with one scaler."""
    params = [half(1.0) for _ in range(count)]
    optimizers = [
        FP16_Optimizer(
            torch.optim.SGD([param], lr=0.5), verbose=False, loss_scaler=scaler
        )
        for param in params
    ]
    assert all(optimizer.loss_scaler is scaler for optimizer in optimizers)
    return params, optimizers


def test_every_step_of_those_that_share_a_scaler_is_an_iteration() -> None:
    scaler = DynamicLossScaler(16.0, scale_window=3)
    model = ScaleModel(16.0, window=3)
    params, optimizers = sharing(scaler)
    rng = random.Random(0)
    applied = [0, 0]
    for step in range(100):
        # Of a GAN: the one steps twice as often as the other.
        which = 1 if step % 3 else 0
        overflow = rng.random() < 0.15
        before = scaler.loss_scale
        # No scale lifts these gradients out of the range.
        loss = params[which].float().sum() * (INF if overflow else 0.0)
        train(optimizers[which], loss)
        applied[which] += not overflow
        assert optimizers[which].history[-1].scale == before
        model.update(overflow)
        assert [o.loss_scale for o in optimizers] == [model.scale] * 2
    assert scaler.cur_iter == 100
    assert [o.steps_applied for o in optimizers] == applied
    assert [o.steps_applied + o.steps_skipped for o in optimizers] == [34, 66]


@pytest.mark.parametrize("factor", [1.0, INF])
def test_a_step_of_one_leaves_the_latched_scale_of_another(factor: float) -> None:
    scaler = DynamicLossScaler(16.0, scale_window=1)
    (one, two), (first, second) = sharing(scaler)
    first.backward(one.float().sum() * 0.25, update_master_grads=False)
    train(second, two.float().sum() * factor)
    assert scaler.loss_scale == (32.0 if factor == 1.0 else 8.0)
    # With what is now another scale, and with that of the first pass.
    first.backward(one.float().sum() * 0.5, update_master_grads=False)
    first.update_master_grads()
    assert masters(first)[0].grad.item() == 0.75
    first.step()
    assert one.item() == 1 - 0.375
    assert first.history[-1].scale == 16.0


ORDERS = [
    order
    for order in itertools.permutations(["0 update", "0 step", "1 update", "1 step"])
    if order.index("0 update") < order.index("0 step")
    and order.index("1 update") < order.index("1 step")
]


@pytest.mark.parametrize("order", ORDERS, ids=" ".join)
@pytest.mark.parametrize("bad", [None, 0, 1])
def test_one_pass_may_be_for_two_optimizers(
    order: tuple[str, ...], bad: int | None
) -> None:
    scaler = DynamicLossScaler(8.0, scale_window=1)
    params, optimizers = sharing(scaler)
    for _ in range(2):  # the second with the parameters' old gradients behind it
        before = [param.item() for param in params]
        scaler.cur_scale = 8.0
        for optimizer in optimizers:
            optimizer.zero_grad()
        factors = [INF if bad == i else 0.25 for i in range(2)]
        loss = sum(p.float().sum() * f for p, f in zip(params, factors, strict=True))
        optimizers[0].backward(loss, update_master_grads=False)  # type: ignore[arg-type]
        for word in order:
            optimizer = optimizers[int(word[0])]
            if word.endswith("update"):
                optimizer.update_master_grads()
            else:
                optimizer.step()
        for i, (param, value) in enumerate(zip(params, before, strict=True)):
            assert param.item() == value - (0.0 if bad == i else 0.125)
            assert optimizers[i].history[-1].scale == 8.0
            assert optimizers[i].overflow is (bad == i)
        assert scaler.loss_scale == (32.0 if bad is None else 8.0)


def test_a_foreign_scaler_may_be_shared() -> None:
    scaler = Foreign(16.0)
    (one, two), (first, second) = sharing(scaler)
    train(first, one.float().sum() * 0.5)
    train(second, two.float().sum() * INF)
    assert scaler.flags == [False, True]
    assert first.loss_scale == second.loss_scale == 16.0 * 2 / 4
    assert (one.item(), two.item()) == (0.75, 1.0)


def test_those_that_share_a_scaler_share_the_restored_one_again() -> None:
    scaler = DynamicLossScaler(16.0, scale_window=2)
    params, optimizers = sharing(scaler)
    for factor in (1.0, INF, 1.0):
        for param, optimizer in zip(params, optimizers, strict=True):
            train(optimizer, param.float().sum() * factor * 2.0**-10)
    states = [copy_of(optimizer.state_dict()) for optimizer in optimizers]
    assert states[0]["loss_scaler"] == states[1]["loss_scaler"]
    again = [half(1.0), half(1.0)]
    loaded = [wrap(param) for param in again]
    for optimizer, state in zip(loaded, states, strict=True):
        optimizer.load_state_dict(state)
    # Each has one of its own after a load.
    loaded[1].loss_scaler = loaded[0].loss_scaler
    for optimizer, old in ((loaded[0], optimizers[0]), (loaded[1], optimizers[1])):
        assert optimizer.loss_scale == old.loss_scale
        assert masters(optimizer)[0].item() == masters(old)[0].item()
    for factor in (1.0, 1.0, INF, 1.0):
        for i in range(2):
            train(optimizers[i], params[i].float().sum() * factor * 2.0**-10)
            train(loaded[i], again[i].float().sum() * factor * 2.0**-10)
            assert loaded[i].loss_scale == optimizers[i].loss_scale
            assert again[i].item() == params[i].item()
    assert loaded[0].loss_scaler.cur_iter == scaler.cur_iter


def test_a_new_scaler_takes_effect_with_the_next_backward() -> None:
    param, native = half(1.0), single(1.0)
    optimizer = FP16_Optimizer(
        torch.optim.SGD([param, native], lr=0.5), static_loss_scale=8.0, verbose=False
    )
    loss = param.float().sum() + native.sum()
    optimizer.backward(loss, update_master_grads=False)
    optimizer.loss_scaler = LossScaler(2.0)
    optimizer.update_master_grads()
    assert masters(optimizer)[0].grad.item() == 1.0
    optimizer.step()
    train(optimizer, param.float().sum())
    assert param.grad is not None and param.grad.item() == 2.0


@pytest.mark.parametrize("thing", [None, 8.0, object()])
def test_refuses_what_is_no_scaler(thing: Any) -> None:
    optimizer = wrap(half(1.0))
    before = optimizer.loss_scaler
    with pytest.raises(
        TypeError,
        match="^FP16_Optimizer.loss_scaler: must have loss_scale and update_scale, "
        "but got",
    ):
        optimizer.loss_scaler = thing
    assert optimizer.loss_scaler is before


def test_an_error_in_a_foreign_scaler_comes_out() -> None:
    class Failing(Foreign):
        def update_scale(self, overflow: bool) -> None:
            raise KeyError("of the scaler")

    param = half(1.0)
    optimizer = wrap(param)
    optimizer.loss_scaler = Failing(2.0)
    with pytest.raises(KeyError, match="of the scaler"):
        train(optimizer, param.float().sum())
    assert param.item() == 1.0


def test_a_foreign_scaler_that_never_moves_ends_a_closure() -> None:
    class Stubborn(Foreign):
        def update_scale(self, overflow: bool) -> None:
            self.flags.append(overflow)

    param = half(1.0)
    optimizer = wrap(param)
    optimizer.loss_scaler = Stubborn(2.0)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (param.float() * NAN).sum()
        optimizer.backward(loss)
        return loss

    assert optimizer.step(closure) is None
    assert optimizer.steps_skipped == 1
    assert param.item() == 1.0
