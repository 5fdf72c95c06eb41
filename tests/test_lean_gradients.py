"""materialize_master_grads=False: the same bits without master gradients."""

import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from fp16core import FP16_Optimizer
from fp16core.optim import Lion
from helpers import HALF_DTYPES, INF, NAN, assert_same, copy_of, half, masters, single

INNERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.25, momentum=0.5, weight_decay=0.1),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True, maximize=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1, weight_decay=0.1),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "Lion": lambda p: Lion(p, lr=0.1, weight_decay=0.1),
}

every_inner = pytest.mark.parametrize("name", INNERS)


pytestmark = pytest.mark.usefixtures("one_thread")


def lean(*params: torch.Tensor, name: str = "SGD", **kwargs: Any) -> FP16_Optimizer:
    return FP16_Optimizer(
        INNERS[name](list(params)),
        verbose=False,
        **{"static_loss_scale": 8.0, "materialize_master_grads": False, **kwargs},
    )


# The same bits.


class Training:
    """Parameters of many kinds, trained by an optimizer in one of the modes."""

    def __init__(self, name: str, materialize: bool, **kwargs: Any) -> None:
        generator = torch.Generator().manual_seed(11)

        def values(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        self.params = [
            torch.nn.Parameter(data)
            for data in (
                values(5, 9).half(),
                values(7, 4).half().t(),
                values().bfloat16(),
                values(2, 3, 4, 5).half().to(memory_format=torch.channels_last),
                values(6, 3),
                values(3, 0).half(),
                values(70).bfloat16(),
                values(5).double(),
            )
        ]
        first, second = self.params[:4], self.params[4:]
        self.inner = INNERS[name]([{"params": first}, {"params": second}])
        self.inner.param_groups[1]["lr"] *= 0.5
        self.optimizer = FP16_Optimizer(
            self.inner,
            verbose=False,
            fused=True,
            materialize_master_grads=materialize,
            **kwargs,
        )
        # Whether a gradient changed since the last update. Until the next one, only
        # the materialized mode has the old gradients.
        self.waits = False

    def loss(self, seed: int, magnitude: float) -> torch.Tensor:
        """Return a loss that leaves out some of the parameters."""
        generator = torch.Generator().manual_seed(seed)
        total = torch.zeros(())
        for param in self.params:
            weights = torch.randn(param.shape, generator=generator) * magnitude
            used = torch.rand((), generator=generator) < 0.8
            if used and param.requires_grad:
                total = total + (param.float() * weights).sum()
        return total

    # What a script may do, one method each.

    def backward(self, seed: int, magnitude: float, update: bool) -> None:
        loss = self.loss(seed, magnitude)
        if loss.requires_grad:
            self.optimizer.backward(loss, update_master_grads=update)
            self.waits = not update

    def update(self) -> None:
        self.optimizer.update_master_grads()
        self.waits = False

    def clip(self, max_norm: float, norm_type: float) -> torch.Tensor | None:
        if self.waits:
            return None
        return self.optimizer.clip_master_grads(max_norm, norm_type)

    def step(self) -> Any:
        return self.optimizer.step()

    def zero_grad(self, drop: bool) -> None:
        self.optimizer.zero_grad(set_to_none=drop)
        self.waits = False

    def plant(self, index: int, value: float) -> None:
        grad = self.params[index].grad
        if grad is not None and grad.numel():
            grad.view(-1)[-1:] = value
            self.waits = True

    def edit(self, index: int, factor: float) -> None:
        grad = self.params[index].grad
        if grad is not None:
            grad.mul_(factor)
            self.waits = True

    def freeze(self, index: int) -> None:
        self.params[index].requires_grad_(not self.params[index].requires_grad)

    def set_scale(self, scale: float) -> None:
        self.optimizer.loss_scale = scale

    def set_rate(self, factor: float) -> None:
        for group in self.inner.param_groups:
            group["lr"] *= factor

    # What it sees.

    def seen(self) -> dict[str, Any]:
        optimizer = self.optimizer
        report = optimizer.gradient_report()
        overflow = optimizer.overflow
        inspects = not (overflow or self.waits)
        return {
            "model": [p.detach() for p in self.params],
            "weights": [
                p.detach() for g in self.inner.param_groups for p in g["params"]
            ],
            "model gradients": [p.grad for p in self.params],
            "gradients": optimizer.inspect_master_grad_data() if inspects else None,
            "state": self.inner.state_dict(),
            "overflow": overflow,
            "loss scale": optimizer.loss_scale,
            "steps": (optimizer.steps_applied, optimizer.steps_skipped),
            "report": [repr(entry) for entry in report.tensors],
            "total": (repr(report.norm), repr(report.largest), report.overflow),
        }


def same_nan(value: Any) -> Any:
    """Return plain data with every NaN made the same."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return torch.where(value.isnan(), torch.full_like(value, NAN), value)
    if isinstance(value, dict):
        return {key: same_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [same_nan(item) for item in value]
    return value


def assert_same_run(trainings: list[Training], actions: list[tuple[Any, ...]]) -> None:
    """Do the same with both; assert that both see the same after each action."""
    for number, (action, *args) in enumerate(actions):
        results = []
        for training in trainings:
            try:
                results.append(getattr(training, action)(*args))
            except (RuntimeError, ValueError) as error:
                results.append(repr(error))
        where = f"action {number}, {action}{tuple(args)}"
        assert_same(results[1], results[0], f"{where}: result")
        want, got = (same_nan(training.seen()) for training in trainings)
        for key in want:
            assert_same(got[key], want[key], f"{where}: {key}")
        own = masters(trainings[1].optimizer)
        assert all(master.grad is None for master in own), where


INDICES = st.integers(0, 7)

ACTIONS = st.one_of(
    st.tuples(
        st.just("backward"),
        st.integers(0, 1000),
        st.sampled_from([1e-3, 1.0, 20.0]),
        st.sampled_from([True, True, False]),
    ),
    st.tuples(st.just("step")),
    st.tuples(st.just("step")),
    st.tuples(
        st.just("clip"),
        st.sampled_from([0.0, 1e-3, 0.7, 3.0, 1e6]),
        st.sampled_from([2.0, 1.0, 3.0, 0.5, INF]),
    ),
    st.tuples(st.just("update")),
    st.tuples(st.just("zero_grad"), st.booleans()),
    st.tuples(st.just("plant"), INDICES, st.sampled_from([INF, NAN, 2.0])),
    st.tuples(st.just("edit"), INDICES, st.sampled_from([2.0, 0.3, -1.0])),
    st.tuples(st.just("freeze"), INDICES),
    st.tuples(st.just("set_scale"), st.sampled_from([1.0, 3.0, 1024.0, 2.0**20])),
    st.tuples(st.just("set_rate"), st.sampled_from([0.0, 0.5, 1.5])),
)


@settings(max_examples=60, deadline=None)
@example(  # zeros that are edited stay zeros
    name="Adagrad",
    scale=1.0,
    dynamic=False,
    track="version",
    actions=[
        ("backward", 0, 1e-3, True),
        ("zero_grad", False),
        ("edit", 0, 2.0),
        ("step",),
    ],
)
@example(  # taken as zeros
    name="Adagrad",
    scale=1.0,
    dynamic=False,
    track="version",
    actions=[
        ("backward", 0, 1e-3, True),
        ("zero_grad", False),
        ("backward", 1, 1e-3, True),
        ("edit", 0, 2.0),
        ("step",),
    ],
)
@given(
    name=st.sampled_from(sorted(INNERS)),
    scale=st.sampled_from([1.0, 8.0, 3.0, 2.0**14]),
    dynamic=st.booleans(),
    track=st.sampled_from(["version", "values"]),
    actions=st.lists(ACTIONS, max_size=30),
)
def test_any_order_of_calls_gives_the_same_bits(
    name: str, scale: float, dynamic: bool, track: str, actions: list[tuple[Any, ...]]
) -> None:
    kwargs: dict[str, Any] = {
        "static_loss_scale": scale,
        "dynamic_loss_scale": dynamic,
        "dynamic_loss_args": {"init_scale": scale, "scale_window": 2},
        "on_min_scale": "continue",
        "track_model_writes": track,
    }
    trainings = [Training(name, mode, **kwargs) for mode in (True, False)]
    assert_same_run(trainings, actions)


@every_inner
@pytest.mark.parametrize("drop", [False, True])
def test_gradients_that_were_never_taken_move_nothing(name: str, drop: bool) -> None:
    trainings = [Training(name, mode, static_loss_scale=8.0) for mode in (True, False)]
    cleared = [("backward", 1, 1.0, False), ("zero_grad", drop), ("step",)]
    taken = [("backward", 2, 1.0, True), ("step",), ("zero_grad", drop), ("step",)]
    assert_same_run(trainings, [*cleared, *taken, *cleared])


def usual_actions(iterations: int) -> list[tuple[Any, ...]]:
    """Return the calls of an ordinary script: accumulation, clipping, overflows."""
    actions: list[tuple[Any, ...]] = []
    for i in range(iterations):
        actions += [
            ("zero_grad", i % 2 == 0),
            ("backward", 2 * i, 1.0, False),
            ("backward", 2 * i + 1, 1.0, True),
            *([("plant", 0, INF), ("update",)] if i % 7 == 3 else []),
            ("clip", 0.5, 2.0),
            *([("clip", 0.25, INF)] if i % 3 == 0 else []),
            ("step",),
        ]
    return actions


@every_inner
def test_a_long_run_gives_the_same_bits(name: str) -> None:
    kwargs = {
        "dynamic_loss_scale": True,
        "dynamic_loss_args": {"init_scale": 2.0**18, "scale_window": 4},
    }
    trainings = [Training(name, mode, **kwargs) for mode in (True, False)]
    assert_same_run(trainings, usual_actions(30))
    assert trainings[0].optimizer.steps_applied > 15
    assert trainings[0].optimizer.steps_skipped > 4


@every_inner
def test_without_overflow_checks_the_bits_are_the_same_too(name: str) -> None:
    kwargs = {"static_loss_scale": 8.0, "check_overflow": False}
    trainings = [Training(name, mode, **kwargs) for mode in (True, False)]
    assert_same_run(trainings, usual_actions(5))


def relaid(grad: torch.Tensor) -> torch.Tensor:
    return grad.transpose(0, -1).contiguous().transpose(0, -1)


def channels_last(grad: torch.Tensor) -> torch.Tensor:
    return grad.contiguous(memory_format=torch.channels_last)


def strided(grad: torch.Tensor) -> torch.Tensor:
    return torch.stack([grad, grad], dim=-1)[..., 0]


def expanded(grad: torch.Tensor) -> torch.Tensor:
    return grad[:1, :1, :1, :1].expand(grad.shape)


@every_inner
@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
@pytest.mark.parametrize("lay", [relaid, channels_last, strided, expanded])
def test_gradients_in_another_layout_pair_by_index(
    name: str, dtype: torch.dtype, lay: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    def trained(in_layout: bool, **kwargs: Any) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(2)
        shape = (3, 4, 5, 6)
        param = torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        optimizer = lean(param, name=name, **kwargs)
        for _ in range(2):
            grad = torch.randn(shape, generator=generator).to(dtype)
            param.grad = lay(grad) if in_layout else lay(grad).contiguous()
            optimizer.update_master_grads()
            optimizer.clip_master_grads(2.0)
            optimizer.step()
        return [param.data, masters(optimizer)[0].data]

    want = trained(in_layout=False, materialize_master_grads=True)
    assert_same(trained(in_layout=True), want)
    assert_same(trained(in_layout=True, materialize_master_grads=True), want)


@every_inner
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_wide_gradients_of_half_parameters_keep_their_bits(
    name: str, dtype: torch.dtype
) -> None:
    def trained(materialize: bool) -> list[Any]:
        generator = torch.Generator().manual_seed(2)
        param = torch.nn.Parameter(torch.randn(37, generator=generator).half())
        other = torch.nn.Parameter(torch.randn(5, generator=generator).half())
        param.grad_dtype = dtype
        optimizer = lean(param, other, name=name, materialize_master_grads=materialize)
        inspected = []
        for _ in range(3):
            # Beyond the range and precision of float16.
            param.grad = torch.randn(37, generator=generator).to(dtype) * 1e6
            other.grad = torch.randn(5, generator=generator).half()
            optimizer.update_master_grads()
            optimizer.clip_master_grads(2.0)
            inspected.append(copy_of(optimizer.inspect_master_grad_data()))
            optimizer.step()
        return [param.data, masters(optimizer), inspected]

    assert_same(trained(materialize=False), trained(materialize=True))


def test_a_closure_gives_the_same_bits() -> None:
    def trained(materialize: bool) -> Any:
        param, native = half(0.5, -0.25, 2.0), single(0.5)
        optimizer = lean(
            param,
            native,
            name="AdamW",
            dynamic_loss_scale=True,
            dynamic_loss_args={"init_scale": 2.0**20, "scale_window": 2},
            materialize_master_grads=materialize,
        )

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = param.float().square().sum() + native.square().sum()
            optimizer.backward(loss)
            optimizer.clip_master_grads(0.5)
            return loss

        losses = [optimizer.step(closure).detach() for _ in range(6)]
        return [losses, param.data, native.data, optimizer.optimizer.state_dict()]

    assert_same(trained(materialize=False), trained(materialize=True))


# What is there to see.


def test_inspected_gradients_are_fresh_and_unscaled_and_clipped() -> None:
    param, native, idle = half(1.0, 1.0), single(1.0), half(1.0)
    optimizer = lean(param, native, idle)
    param.grad = torch.tensor([24.0, 32.0]).half()
    native.grad = torch.tensor([0.0])
    optimizer.update_master_grads()
    groups = optimizer.inspect_master_grad_data()
    assert groups is not None
    assert_same(groups, [[torch.tensor([3.0, 4.0]), torch.tensor([0.0]), None]])
    assert groups[0][1] is native.grad
    groups[0][0].zero_()  # type: ignore[union-attr]
    assert optimizer.clip_master_grads(2.5) == 5.0
    groups = optimizer.inspect_master_grad_data()
    assert groups is not None
    clipped = torch.tensor([1.5, 2.0])
    # torch's coefficient has 1e-6 in its denominator.
    torch.testing.assert_close(groups[0][0], clipped, rtol=1e-6, atol=0)
    optimizer.step()
    (master, untouched) = masters(optimizer)
    # lr 0.25, and a decay of 0.1.
    torch.testing.assert_close(master.data, 1 - 0.25 * (clipped + 0.1))
    assert untouched.item() == 1.0
    assert [p.grad for p in (master, untouched)] == [None, None]


def test_inspecting_after_an_overflow_gives_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    param = half(1.0)
    optimizer = lean(param)
    param.grad = torch.tensor([INF]).half()
    optimizer.update_master_grads()
    assert optimizer.inspect_master_grad_data() is None
    assert "after an overflow" in capsys.readouterr().out
    assert optimizer.clip_master_grads(1.0) == -1
    assert optimizer.step() is None
    assert optimizer.steps_skipped == 1


def test_the_half_gradient_is_left_as_it_is() -> None:
    param = half(1.0, 2.0)
    optimizer = lean(param)
    grad = torch.tensor([24.0, 32.0]).half()
    param.grad = grad
    optimizer.update_master_grads()
    optimizer.clip_master_grads(1.0)
    optimizer.step()
    assert param.grad is grad
    assert grad.tolist() == [24.0, 32.0]


@every_inner
def test_training_goes_on_from_a_checkpoint_of_either_mode(name: str) -> None:
    actions = usual_actions(8)
    whole = Training(name, False, static_loss_scale=8.0)
    for action, *args in actions:
        getattr(whole, action)(*args)
    for mode_before, mode_after in [(False, False), (False, True), (True, False)]:
        first = Training(name, mode_before, static_loss_scale=8.0)
        half_way = len(usual_actions(4))
        for action, *args in actions[:half_way]:
            getattr(first, action)(*args)
        resumed = Training(name, mode_after, static_loss_scale=8.0)
        with torch.no_grad():
            for new, old in zip(resumed.params, first.params, strict=True):
                new.copy_(old)
        resumed.optimizer.load_state_dict(copy_of(first.optimizer.state_dict()))
        for action, *args in actions[half_way:]:
            getattr(resumed, action)(*args)
        # torch's NAdam loads a float64 parameter's product of momenta as float64, and
        # has other bits from there on.
        kept = slice(0, 7) if name == "NAdam" else slice(0, 8)
        assert_same(resumed.params[kept], whole.params[kept])
        for index in range(kept.start, kept.stop):
            got, want = (t.inner.state_dict()["state"] for t in (resumed, whole))
            assert_same(got[index], want[index], f"state of {index}")


# Errors.


class OwnSGD(torch.optim.SGD):
    """A subclass, which has no rule."""


DEMANDED = "materialize_master_grads=False needs a step by an update rule, but got "


@pytest.mark.parametrize(
    "make, reason",
    [
        (
            lambda p: torch.optim.Adadelta(p),
            "Adadelta, for which the core has no update rule",
        ),
        (lambda p: OwnSGD(p), "OwnSGD, for which the core has no update rule"),
        (lambda p: torch.optim.AdamW(p, capturable=True), "capturable=True in group 0"),
    ],
)
def test_an_optimizer_without_a_rule_is_refused(
    make: Callable[[Any], Any], reason: str
) -> None:
    inner = make([half(1.0)])
    message = re.escape(f"FP16_Optimizer: {DEMANDED}{reason}")
    with pytest.raises(ValueError, match=f"^{message}$"):
        FP16_Optimizer(inner, verbose=False, materialize_master_grads=False)
    assert inner.param_groups[0]["params"][0].dtype == torch.float16
    FP16_Optimizer(inner, verbose=False)


def test_the_own_step_is_refused() -> None:
    message = re.escape(f"FP16_Optimizer: {DEMANDED}fused=False")
    with pytest.raises(ValueError, match=f"^{message}$"):
        lean(half(1.0), fused=False)


@pytest.mark.parametrize("fused", [None, True])
def test_a_rule_that_falls_away_is_an_error_at_the_step(fused: bool | None) -> None:
    param = half(1.0)
    optimizer = lean(param, fused=fused)
    inner = optimizer.optimizer
    param.grad = torch.tensor([8.0]).half()
    optimizer.update_master_grads()
    inner.step = MethodType(lambda self: None, inner)
    reason = "SGD with another step than its class came with"
    message = re.escape(f"FP16_Optimizer.step: {DEMANDED}{reason}")
    with pytest.raises(RuntimeError, match=f"^{message}$"):
        optimizer.step()
    assert (param.item(), optimizer.steps_applied) == (1.0, 0)
    del inner.step
    optimizer.step()
    assert param.item() == pytest.approx(1 - 0.25 * 1.1, rel=1e-3)


@pytest.mark.parametrize("taken", [True, False], ids=["taken", "none"])
def test_a_gradient_put_on_a_master_is_an_error_at_the_step(taken: bool) -> None:
    param = half(1.0)
    optimizer = lean(param)
    if taken:
        param.grad = torch.tensor([8.0]).half()
        optimizer.update_master_grads()
    (master,) = masters(optimizer)
    master.grad = torch.tensor([1.0])
    reason = "a gradient set on the master of group 0, index 0: shape [1], float16, cpu"
    message = re.escape(f"FP16_Optimizer.step: {DEMANDED}{reason}")
    with pytest.raises(RuntimeError, match=f"^{message}$"):
        optimizer.step()
    assert param.item() == 1.0
    optimizer.zero_grad(set_to_none=True)
    assert master.grad is None


def test_sparse_gradients_are_refused() -> None:
    param, native = half(1.0, 2.0), single(1.0, 2.0)
    optimizer = lean(param, native)
    param.grad = torch.tensor([8.0, 0.0]).half().to_sparse()
    message = (
        "FP16_Optimizer.update_master_grads: gradients must be strided with "
        "materialize_master_grads=False, but got Sparse for group 0, index 0: "
        "shape [2], float16, cpu"
    )
    with pytest.raises(NotImplementedError, match=f"^{re.escape(message)}$"):
        optimizer.update_master_grads()
    param.grad = None
    native.grad = torch.tensor([8.0, 0.0]).to_sparse()
    optimizer.update_master_grads()
    reason = "a sparse gradient for group 0, index 1: shape [2], float32, cpu"
    message = re.escape(f"FP16_Optimizer.step: {DEMANDED}{reason}")
    with pytest.raises(RuntimeError, match=f"^{message}$"):
        optimizer.step()
    assert param.tolist() == native.tolist() == [1.0, 2.0]


def test_a_clip_function_of_ones_own_is_refused() -> None:
    param = half(1.0)
    optimizer = lean(param)
    param.grad = torch.tensor([8.0]).half()
    optimizer.update_master_grads()
    optimizer.clip_grad_norm = lambda *args: torch.tensor(0.0)
    message = re.escape(
        "FP16_Optimizer.clip_master_grads: clip_grad_norm must be left as it is with "
        "materialize_master_grads=False, since masters have no gradients, but got <"
    )
    with pytest.raises(RuntimeError, match=f"^{message}"):
        optimizer.clip_master_grads(1.0)
    optimizer.clip_grad_norm = torch.nn.utils.clip_grad_norm_
    assert optimizer.clip_master_grads(1.0) == 1.0


def test_gradients_that_were_not_taken_are_an_error() -> None:
    param = half(1.0)
    optimizer = lean(param)
    optimizer.scale_loss(param.float().sum()).backward()  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match="update_master_grads"):
        optimizer.step()
    assert param.item() == 1.0


@pytest.mark.parametrize("drop", [False, True], ids=["zeroed", "dropped"])
def test_gradients_that_went_before_the_step_are_an_error(drop: bool) -> None:
    model = torch.nn.Linear(2, 1).half()
    optimizer = lean(*model.parameters())
    before = copy_of(list(model.parameters()))
    optimizer.backward(model(torch.ones(1, 2).half()).float().sum())
    model.zero_grad(set_to_none=drop)
    # A step would be one without gradients, and nobody would know.
    with pytest.raises(RuntimeError, match=r"^FP16_Optimizer\.step: "):
        optimizer.step()
    assert_same(list(model.parameters()), before)


# Memory.


def allocations(run: Callable[[], object]) -> list[int]:
    """Return the sizes of what torch's allocators gave out."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    sizes = [event.nbytes() for event in events if event.name() == "[memory]"]
    return [size for size in sizes if size > 0]


@pytest.mark.parametrize("materialize", [True, False])
@every_inner
def test_the_steady_state_allocates_no_tensor(name: str, materialize: bool) -> None:
    params = [torch.nn.Parameter(torch.ones(1000).half()) for _ in range(20)]
    params += [torch.nn.Parameter(torch.ones(9, 30).bfloat16().t())]
    params += [torch.nn.Parameter(torch.ones(1000))]
    optimizer = lean(*params, name=name, materialize_master_grads=materialize)

    def iteration() -> None:
        optimizer.update_master_grads()
        optimizer.clip_master_grads(0.5)
        optimizer.step()
        optimizer.zero_grad()

    def fill() -> None:
        for param in params:
            assert param.grad is not None
            param.grad.fill_(1.0)

    for param in params:
        param.grad = torch.ones_like(param)
    for _ in range(2):
        iteration()
        fill()
    assert optimizer.steps_applied == 2
    # The norm that clipping returns is a new tensor of four bytes.
    assert sum(allocations(iteration)) <= 64
    # The probe sees what is there to see.
    assert sum(allocations(lambda: torch.ones(1000))) == 4000


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="reads /proc, which Linux has"
)
@pytest.mark.parametrize("materialize, bytes_each", [(False, 16), (True, 20)])
def test_adam_takes_16_bytes_a_parameter(materialize: bool, bytes_each: int) -> None:
    count, elements = 8, 1_000_000
    script = f"""
        import re
        from pathlib import Path
        import torch
        from fp16core import FP16_Optimizer

        torch.set_num_threads(1)

        def resident(what):
            # Not getrusage: its peak is inherited from the parent process.
            status = Path("/proc/self/status").read_text()
            return int(re.search(what + r":\\s+(\\d+) kB", status)[1]) * 1024

        def train(count, elements):
            params = [
                torch.nn.Parameter(torch.ones(elements, dtype=torch.float16))
                for _ in range(count)
            ]
            optimizer = FP16_Optimizer(
                torch.optim.Adam(params),
                verbose=False,
                materialize_master_grads={materialize},
            )
            for _ in range(3):
                for param in params:
                    if param.grad is None:
                        param.grad = torch.ones_like(param)
                    param.grad.fill_(1.0)
                optimizer.update_master_grads()
                optimizer.clip_master_grads(1.0)
                optimizer.step()
                optimizer.zero_grad()
            assert optimizer.steps_applied == 3

        train(2, 100)  # loads what is loaded at first use
        before = resident("VmRSS")
        train({count}, {elements})
        print(resident("VmHWM") - before)
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    each = int(result.stdout) / (count * elements)
    # A twentieth of a byte, 400 kB in all, is for pages and for code that is loaded.
    assert bytes_each - 0.05 <= each <= bytes_each + 0.05
