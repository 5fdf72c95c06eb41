"""The fused step has the numbers of torch's optimizers, and their manners.

The oracle is a torch optimizer over masters made by hand: `fused=True` where torch
has that kernel, its default loop elsewhere, and Lion's own step.
"""

import re
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fp16core import FP16_Optimizer
from fp16core.optim import Lion
from helpers import (
    HALF_DTYPES,
    INF,
    NAN,
    ExactRoots,
    assert_same,
    copy_of,
    half,
    masters,
    single,
)

CAPABILITY = torch.backends.cpu.get_cpu_capability()

needs_fma = pytest.mark.skipif(
    CAPABILITY == "DEFAULT",
    reason="torch has no fma without AVX2, and so other bits than the rules",
)


pytestmark = pytest.mark.usefixtures("one_thread")


# The rules with all their options.


@dataclass(frozen=True)
class Rule:
    """An optimizer that the core has a rule for."""

    name: str
    optimizer_class: type
    # What makes torch's own optimizer the oracle.
    oracle: dict[str, Any]
    # Strategies for the options, by name.
    options: dict[str, st.SearchStrategy[Any]]
    # An example for the tests that are not about numbers.
    example: dict[str, Any]
    # Whether half and float32 parameters have the oracle's bits.
    exact: bool = True
    # Whether the oracle's zeros have the signs of the rule's. torch.lerp computes the
    # last numel % 16 elements, ours the last numel % 8, in the other of two ways, and
    # where nothing is averaged they differ in the sign of a zero.
    signed_zeros: bool = True

    def __str__(self) -> str:
        return self.optimizer_class.__name__

    def make(self, params: Any, **kwargs: Any) -> Any:
        return self.optimizer_class(params, **{**self.example, **kwargs})


UNIT = st.one_of(st.sampled_from([0.0, 0.5, 0.9, 0.999]), st.floats(2**-10, 0.9999))
DECAY = st.one_of(st.just(0.0), st.floats(2**-20, 0.5))
EPS = st.sampled_from([0.0, 1e-30, 1e-8, 1e-3, 2.0])
RATE = st.one_of(st.sampled_from([0.0, 1e-3, 0.5]), st.floats(1e-6, 2.0))
FLAG = st.booleans()

COMMON = {"lr": RATE, "weight_decay": DECAY, "maximize": FLAG}
ADAM = {**COMMON, "betas": st.tuples(UNIT, UNIT), "eps": EPS}

RULES = [
    Rule(
        "SGD",
        torch.optim.SGD,
        {"fused": True},
        {**COMMON, "momentum": UNIT, "dampening": UNIT, "nesterov": FLAG},
        {"lr": 0.25, "momentum": 0.5},
    ),
    Rule(
        "Adam",
        torch.optim.Adam,
        {"fused": True},
        {**ADAM, "amsgrad": FLAG, "decoupled_weight_decay": FLAG},
        {"lr": 0.25},
    ),
    Rule(
        "Adam",
        torch.optim.AdamW,
        {"fused": True},
        {**ADAM, "amsgrad": FLAG},
        {"lr": 0.25},
    ),
    Rule(
        "Adagrad",
        torch.optim.Adagrad,
        {"fused": True},
        {
            **COMMON,
            "eps": EPS,
            "lr_decay": DECAY,
            # Exact in half precision, in which a half parameter gets it at first.
            "initial_accumulator_value": st.sampled_from([0.0, 0.125, 2.0]),
        },
        {"lr": 0.25},
    ),
    Rule(
        "RMSprop",
        torch.optim.RMSprop,
        {"foreach": False},
        {**COMMON, "eps": EPS, "alpha": UNIT, "momentum": UNIT, "centered": FLAG},
        {"lr": 0.25, "momentum": 0.5, "centered": True},
        exact=False,
    ),
    Rule(
        "NAdam",
        torch.optim.NAdam,
        {"foreach": False},
        {**ADAM, "momentum_decay": DECAY, "decoupled_weight_decay": FLAG},
        {"lr": 0.25},
        exact=False,
    ),
    Rule(
        "Adamax",
        torch.optim.Adamax,
        {"foreach": False},
        ADAM,
        {"lr": 0.25},
        exact=False,
    ),
    Rule(
        "Lion",
        Lion,
        {},
        {**COMMON, "betas": ADAM["betas"]},
        {"lr": 0.25},
        signed_zeros=False,
    ),
]

BY_NAME = {str(rule): rule for rule in RULES}

every_rule = pytest.mark.parametrize("rule", RULES, ids=str)

DTYPES = [*HALF_DTYPES, torch.float32, torch.float64]
SHAPES = [
    *[(), (0,), (2, 0, 3), (1,), (3, 5), (2, 3, 4), (1000,)],
    *[(n,) for n in (7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65)],
]


@dataclass(frozen=True)
class Param:
    """What is drawn for a parameter."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    transposed: bool

    def lay(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values in the layout of this parameter."""
        if not self.transposed or values.dim() < 2:
            return values
        return values.transpose(0, -1).contiguous().transpose(0, -1)


@st.composite
def groups_of(draw: st.DrawFn, rule: Rule) -> list[dict[str, Any]]:
    """Draw one to three param groups with options of their own."""
    groups = []
    for _ in range(draw(st.integers(1, 3))):
        group = {name: draw(option) for name, option in rule.options.items()}
        if group.get("nesterov"):
            group["momentum"] = max(group["momentum"], 0.125)
            group["dampening"] = 0.0
        kind = draw(st.sampled_from([None, None, torch.float32, torch.float64]))
        if kind is not None:
            group["lr"] = torch.tensor(group["lr"], dtype=kind)
        group["params"] = draw(
            st.lists(
                st.builds(
                    Param, st.sampled_from(SHAPES), st.sampled_from(DTYPES), FLAG
                ),
                min_size=1,
                max_size=4,
            )
        )
        groups.append(group)
    return groups


class Pair:
    """A wrapped optimizer and the oracle, with equal parameters and gradients."""

    def __init__(
        self,
        rule: Rule,
        groups: list[dict[str, Any]],
        seed: int,
        scale: float = 8.0,
        **kwargs: Any,
    ) -> None:
        self.rule = rule
        self.scale = scale
        self.generator = torch.Generator().manual_seed(seed)
        self.specs: list[Param] = [p for group in groups for p in group["params"]]
        self.model = [
            torch.nn.Parameter(spec.lay(self.values(spec).to(spec.dtype)))
            for spec in self.specs
        ]
        self.oracle_params = [
            p.detach().float().requires_grad_()
            if p.dtype in HALF_DTYPES
            else p.detach().clone().requires_grad_()
            for p in self.model
        ]
        self.inner = self.build(groups, self.model, {})
        self.oracle = self.build(groups, self.oracle_params, rule.oracle)
        self.optimizer = FP16_Optimizer(
            self.inner,
            static_loss_scale=scale,
            verbose=False,
            **{"fused": True, **kwargs},
        )

    def build(
        self,
        groups: list[dict[str, Any]],
        params: list[torch.Tensor],
        kwargs: dict[str, Any],
    ) -> Any:
        given = iter(params)
        listed = [
            {
                **copy_of({k: v for k, v in group.items() if k != "params"}),
                "params": [next(given) for _ in group["params"]],
            }
            for group in groups
        ]
        # Adagrad takes the sum's first value from the constructor alone.
        names = ("lr", "initial_accumulator_value")
        first = {name: groups[0][name] for name in names if name in groups[0]}
        return self.rule.optimizer_class(listed, **copy_of(first), **kwargs)

    def values(self, spec: Param, spread: float = 1.0) -> torch.Tensor:
        values = torch.randn(spec.shape, generator=self.generator, dtype=torch.float64)
        zeros = torch.rand(spec.shape, generator=self.generator) < 0.1
        return (values * spread).masked_fill(zeros, 0.0)

    def chance(self, probability: float) -> bool:
        return torch.rand((), generator=self.generator).item() < probability

    def put_gradients(
        self,
        missing: float = 0.0,
        spread: float = 1.0,
        special: float | None = None,
        without: Container[int] = (),
    ) -> None:
        """Give scaled gradients to the model and unscaled ones to the oracle."""
        inverse = 1.0 / self.scale
        for index, (spec, param, master) in enumerate(
            zip(self.specs, self.model, self.oracle_params, strict=True)
        ):
            param.grad = master.grad = None
            if index in without or self.chance(missing):
                continue
            values = self.values(spec, spread * self.scale)
            grad = values.clamp(-6e4, 6e4).to(spec.dtype)  # finite in float16
            if special is not None:
                grad.view(-1)[::5] = special
            # torch's fused kernels pair by position in memory, the rules by index.
            master.grad = spec.lay(grad).to(master.dtype) * inverse
            param.grad = grad if self.chance(0.2) else spec.lay(grad)
        self.optimizer.update_master_grads()

    def step(self) -> None:
        with ExactRoots():
            self.optimizer.step()
            self.oracle.step()

    def pairs(self) -> Iterator[tuple[Param, Any, Any, Any]]:
        own = [p for group in self.inner.param_groups for p in group["params"]]
        return zip(self.specs, self.model, own, self.oracle_params, strict=True)

    def start_equal(self) -> None:
        """Give the oracle's weights and moments to the parameters that may differ."""
        for spec, _, own, oracle in self.pairs():
            if not self.rule.exact or spec.dtype == torch.float64:
                with torch.no_grad():
                    own.copy_(oracle)
                for name, value in self.oracle.state.get(oracle, {}).items():
                    self.inner.state[own][name].copy_(value)

    def check(self, before: list[torch.Tensor]) -> None:
        """Compare weights, moments and the model after a step."""
        for index, (spec, param, own, oracle) in enumerate(self.pairs()):
            where = f"{spec}, parameter {index}"
            exact = self.rule.exact and spec.dtype != torch.float64
            update = oracle.detach() - before[index]
            size = torch.maximum(oracle.detach().abs(), update.abs())
            assert_close(own, oracle, 0 if exact else 1, size, where)
            got, want = self.inner.state.get(own, {}), self.oracle.state.get(oracle, {})
            assert list(got) == list(want), where
            for name in want:
                ulps = 0 if exact or name in ("step", "mu_product") else 1
                assert got[name].dtype == want[name].dtype, where
                assert got[name].stride() == want[name].stride(), where
                a, b = got[name], want[name]
                if not self.rule.signed_zeros:
                    a, b = a + 0.0, b + 0.0  # makes +0 of -0
                assert_close(a, b, ulps, b.abs(), f"{where}: {name}")
            if spec.dtype in HALF_DTYPES:
                assert_close(param, own.to(spec.dtype), 0, None, f"{where}: model")


def assert_close(
    got: torch.Tensor,
    want: torch.Tensor,
    ulps: int,
    size: torch.Tensor | None,
    where: str,
) -> None:
    """Assert equal bits, or a distance of some ulps of numbers of this size.

    One NaN is as good as another.
    """
    got, want = got.detach(), want.detach()
    same_nan = got.isnan() & want.isnan()
    got, want = got.masked_fill(same_nan, 0.0), want.masked_fill(same_nan, 0.0)
    if ulps == 0:
        return assert_same(got, want, where)
    assert size is not None
    ulp = torch.nextafter(size, torch.full_like(size, INF)) - size
    near = (got == want) | ((got - want).abs() <= ulps * ulp)
    worst = ((got - want).abs() / ulp)[~near]
    assert near.all(), f"{where}: {worst} ulps, {got[~near]} is not {want[~near]}"
    return None


# Numbers.
#
# Bits are compared for half and float32 weights under the rules that follow torch's
# fused kernels, and under Lion. One ulp is left to RMSprop, NAdam and Adamax, whose
# oracle is a chain of torch operations, each compiled with fmas of its own, and to
# float64 weights, for which the compiler chose the fmas of torch's kernels anew.


@needs_fma
@every_rule
def test_every_option_gives_the_oracles_numbers(rule: Rule) -> None:
    @settings(max_examples=60, deadline=None)
    @given(
        groups=groups_of(rule),
        seed=st.integers(0, 2**32),
        scale=st.sampled_from([1.0, 3.0, 1024.0]),
        spreads=st.lists(st.sampled_from([1e-6, 1e-3, 1.0, 30.0]), max_size=4),
        factor=st.sampled_from([1.0, 0.5, 0.3]),
    )
    def check(
        groups: list[dict[str, Any]],
        seed: int,
        scale: float,
        spreads: list[float],
        factor: float,
    ) -> None:
        pair = Pair(rule, groups, seed, scale)
        for number, spread in enumerate(spreads):
            # torch's fused SGD wants all first gradients in one step.
            pair.put_gradients(missing=0.25 if number else 0.0, spread=spread)
            pair.start_equal()
            before = copy_of([p.detach() for p in pair.oracle_params])
            pair.step()
            pair.check(before)
            for optimizer in (pair.inner, pair.oracle):
                for group in optimizer.param_groups:
                    group["lr"] = group["lr"] * factor
                    group["weight_decay"] *= factor

    check()


def pair_of(rule: Rule, options: dict[str, Any] | None = None, **kwargs: Any) -> Pair:
    """Return a pair with parameters of all dtypes and the example's options."""
    shapes = [(4, 9), (3,), (17,), (6,)]
    params = [Param(*each, False) for each in zip(shapes, DTYPES, strict=True)]
    group = {**rule.example, **(options or {}), "params": params}
    return Pair(rule, [group], seed=5, **kwargs)


def step_and_check(pair: Pair, **kwargs: Any) -> None:
    pair.put_gradients(**kwargs)
    pair.start_equal()
    before = copy_of([p.detach() for p in pair.oracle_params])
    pair.step()
    pair.check(before)


@needs_fma
@pytest.mark.parametrize("name", ["RMSprop", "NAdam"])
def test_the_roots_of_torch_change_little(name: str) -> None:
    pair = pair_of(BY_NAME[name], {"weight_decay": 0.25})
    for _ in range(4):
        pair.put_gradients()
        pair.start_equal()
        before = copy_of([p.detach() for p in pair.oracle_params])
        pair.optimizer.step()
        pair.oracle.step()
        for (spec, _, own, oracle), old in zip(pair.pairs(), before, strict=True):
            # A root that is off by an ulp moves what is divided by it by as much, and
            # a step adds up one or two of these, which may cancel: hence the largest.
            size = torch.maximum(oracle.abs().max(), (oracle - old).abs().max())
            atol = 4 * torch.finfo(own.dtype).eps * size.item()
            torch.testing.assert_close(own, oracle, rtol=0, atol=atol, msg=str(spec))


@needs_fma
@every_rule
@pytest.mark.parametrize("special", [INF, -INF, NAN, -0.0, 2.0**-24, 65504.0])
def test_special_gradients_give_what_they_give_in_torch(
    rule: Rule, special: float
) -> None:
    pair = pair_of(rule, {"weight_decay": 0.25}, check_overflow=False)
    step_and_check(pair)
    step_and_check(pair, special=special)
    step_and_check(pair)


@needs_fma
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("name", ["Adam", "AdamW", "NAdam", "Adamax", "Lion"])
def test_zeros_have_the_oracles_signs_without_averaging(
    name: str, maximize: bool
) -> None:
    pair = pair_of(BY_NAME[name], {"betas": (0.0, 0.0), "maximize": maximize})
    for special in (0.0, -0.0, 0.0):
        step_and_check(pair, special=special)


@needs_fma
def test_decoupled_decay_of_float64_weights_has_torchs_fma() -> None:
    rule = BY_NAME["AdamW"]
    group = {"lr": 1.5721237239434847, "weight_decay": 0.375, "eps": 1e-3}
    params = [Param((1000,), torch.float64, False)]
    pair = Pair(rule, [{**group, "params": params}], seed=5)
    for _ in range(3):
        step_and_check(pair, spread=1e-3)


@needs_fma
@every_rule
def test_a_shared_tensor_lr_may_be_edited_in_place(rule: Rule) -> None:
    lr, lr_of_oracle = torch.tensor(0.5), torch.tensor(0.5)
    pair = pair_of(rule)
    pair.inner.param_groups[0]["lr"] = lr
    pair.oracle.param_groups[0]["lr"] = lr_of_oracle
    for _ in range(3):
        step_and_check(pair)
        lr.mul_(0.5)
        lr_of_oracle.mul_(0.5)
    assert pair.inner.param_groups[0]["lr"] is lr


@needs_fma
@every_rule
def test_clipped_gradients_are_what_the_rule_reads(rule: Rule) -> None:
    pair = pair_of(rule)
    for _ in range(3):
        pair.put_gradients()
        pair.optimizer.clip_master_grads(0.25)
        inspected = pair.optimizer.inspect_master_grad_data()
        assert inspected is not None
        for oracle, grad in zip(pair.oracle_params, inspected[0], strict=True):
            oracle.grad = copy_of(grad)
        pair.start_equal()
        before = copy_of([p.detach() for p in pair.oracle_params])
        pair.step()
        pair.check(before)


@every_rule
def test_the_number_of_threads_changes_nothing(rule: Rule) -> None:
    def train(threads: int) -> list[torch.Tensor]:
        torch.set_num_threads(threads)
        generator = torch.Generator().manual_seed(1)
        params = [
            torch.nn.Parameter(torch.randn(size, generator=generator).half())
            for size in (100_003, 5, 70_001)
        ]
        inner = rule.make(params, weight_decay=0.25)
        optimizer = FP16_Optimizer(inner, verbose=False, fused=True)
        for _ in range(2):
            for param in params:
                param.grad = torch.randn(param.shape, generator=generator).half()
            optimizer.update_master_grads()
            optimizer.step()
        states = [inner.state[master] for master in masters(optimizer)]
        return [*masters(optimizer), *(t for s in states for t in s.values())]

    assert_same(train(4), train(1))


# When the rule is used.


class Task:
    """Two half parameters and a native one under an optimizer that a rule covers."""

    def __init__(
        self, rule: Rule, options: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        generator = torch.Generator().manual_seed(9)
        self.params = [
            torch.nn.Parameter(torch.randn(size, generator=generator).to(dtype))
            for size, dtype in [(36, torch.float16), (3, torch.bfloat16)]
        ]
        self.params.append(torch.nn.Parameter(torch.randn(5, generator=generator)))
        self.generator = generator
        self.inner = rule.make(self.params, **(options or {}))
        self.optimizer = FP16_Optimizer(
            self.inner, static_loss_scale=8.0, verbose=False, **kwargs
        )

    @property
    def own(self) -> list[torch.Tensor]:
        return [p for group in self.inner.param_groups for p in group["params"]]

    def put_gradients(self, special: float | None = None) -> None:
        for param in self.params:
            values = torch.randn(param.shape, generator=self.generator)
            if special is not None:
                values[-1] = special
            param.grad = (8.0 * values).to(param.dtype)
        self.optimizer.update_master_grads()

    def step(self, special: float | None = None) -> Any:
        self.put_gradients(special)
        return self.optimizer.step()

    def evaluate(self, special: float | None = None) -> float:
        self.put_gradients(special)
        return 1.5

    def everything(self) -> Any:
        return copy_of([self.params, self.own, self.inner.state_dict()])


@every_rule
def test_the_mode_is_told(rule: Rule) -> None:
    fused = f"fused {rule.name}"
    for asked in (None, True):
        task = Task(rule, fused=asked)
        assert task.optimizer.step_mode == fused
        assert fused in repr(task.optimizer)
        task.step()
        assert task.optimizer.step_mode == fused
    task = Task(rule, fused=False)
    assert task.optimizer.step_mode == "generic (fused=False)"
    assert task.optimizer.step_mode in repr(task.optimizer)


@pytest.mark.parametrize("wrong", ["yes", 0, 1, 2, []])
def test_fused_is_none_or_a_bool(wrong: Any) -> None:
    inner = BY_NAME["SGD"].make([half(1.0)])
    message = f"fused must be None, True or False, but got {wrong!r}"
    with pytest.raises(ValueError, match=f"^FP16_Optimizer: {re.escape(message)}$"):
        FP16_Optimizer(inner, verbose=False, fused=wrong)
    assert inner.param_groups[0]["params"][0].dtype == torch.float16


def counted_step(inner: Any) -> list[int]:
    """Override the step of an instance; return a list that grows with its calls."""
    calls: list[int] = []

    def step(self: Any, closure: Any = None) -> Any:
        calls.append(1)
        return type(self).step(self, closure)

    inner.step = MethodType(step, inner)
    return calls


class OwnAdamW(torch.optim.AdamW):
    """A subclass that changes nothing."""


class OwnStep(torch.optim.SGD):
    """A subclass with a step of its own."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def with_own_step(inner: Any) -> Any:
    counted_step(inner)
    return inner


# What stands in the way from the start, and how it is told.
OBSTACLES: list[tuple[Callable[[list[Any]], Any], str]] = [
    (
        lambda p: torch.optim.Adadelta(p),
        "Adadelta, for which the core has no update rule",
    ),
    (lambda p: OwnAdamW(p), "OwnAdamW, for which the core has no update rule"),
    (lambda p: OwnStep(p), "OwnStep, for which the core has no update rule"),
    (lambda p: torch.optim.Adam(p, capturable=True), "capturable=True in group 0"),
    (
        lambda p: with_own_step(torch.optim.SGD(p)),
        "SGD with another step than its class came with",
    ),
]

DEMANDED = "fused=True needs a step by an update rule, but got "


@pytest.mark.parametrize("make, reason", OBSTACLES, ids=[r for _, r in OBSTACLES])
def test_what_no_rule_covers_is_generic_and_cannot_be_demanded(
    make: Callable[[list[Any]], Any], reason: str
) -> None:
    optimizer = FP16_Optimizer(make([half(1.0)]), verbose=False)
    assert optimizer.step_mode == f"generic ({reason})"
    assert optimizer.step_mode in repr(optimizer)

    inner = make([half(1.0)])
    message = re.escape(f"FP16_Optimizer: {DEMANDED}{reason}")
    with pytest.raises(ValueError, match=f"^{message}$"):
        FP16_Optimizer(inner, verbose=False, fused=True)
    assert inner.param_groups[0]["params"][0].dtype == torch.float16
    FP16_Optimizer(inner, verbose=False)


@pytest.mark.parametrize("make", [OwnAdamW, OwnStep])
def test_a_subclass_runs_its_own_step(make: Any) -> None:
    param, plain = half(1.0), single(1.0)
    optimizer = FP16_Optimizer(make([param], lr=0.25), verbose=False)
    param.grad = torch.ones(1).half()
    optimizer.update_master_grads()
    optimizer.step()
    base = make.__mro__[1]([plain], lr=0.25)
    plain.grad = torch.ones(1)
    base.step()
    assert_same(masters(optimizer)[0].data, plain.data)


@every_rule
def test_a_step_put_on_the_instance_is_called_until_it_is_taken_off(
    rule: Rule,
) -> None:
    task = Task(rule)
    task.step()
    calls = counted_step(task.inner)
    assert task.optimizer.step_mode.startswith("generic (")
    task.step()
    task.step()
    assert len(calls) == 2
    del task.inner.step
    assert task.optimizer.step_mode == f"fused {rule.name}"
    task.step()
    assert len(calls) == 2
    assert task.optimizer.steps_applied == 4


def test_a_step_put_on_the_class_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    task = Task(BY_NAME["SGD"])
    calls: list[int] = []
    own = torch.optim.SGD.step

    def step(self: Any, closure: Any = None) -> Any:
        calls.append(1)
        return own(self, closure)

    monkeypatch.setattr(torch.optim.SGD, "step", step)
    task.step()
    assert calls == [1]
    monkeypatch.undo()
    task.step()
    assert calls == [1]
    assert task.optimizer.step_mode == "fused SGD"


@every_rule
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_the_counter_of_a_scheduler_is_no_override(
    rule: Rule, before: bool, recwarn: pytest.WarningsRecorder
) -> None:
    param = half(1.0)
    inner = rule.make([param])
    optimizer: Any = None
    if not before:
        optimizer = FP16_Optimizer(inner, verbose=False, fused=True)
    schedulers = [
        torch.optim.lr_scheduler.StepLR(inner, step_size=1, gamma=0.5),
        torch.optim.lr_scheduler.StepLR(inner, step_size=2, gamma=0.5),
    ]
    optimizer = optimizer or FP16_Optimizer(inner, verbose=False, fused=True)
    for _ in range(2):
        param.grad = torch.ones(1).half()
        optimizer.update_master_grads()
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    assert optimizer.step_mode == f"fused {rule.name}"
    assert inner.param_groups[0]["lr"] == 0.25 / 8
    assert not recwarn.list  # not "lr_scheduler.step() before optimizer.step()"


def test_an_override_beneath_a_schedulers_counter_is_one() -> None:
    inner = BY_NAME["SGD"].make([half(1.0)])
    counted_step(inner)
    torch.optim.lr_scheduler.StepLR(inner, step_size=1)
    optimizer = FP16_Optimizer(inner, verbose=False)
    assert optimizer.step_mode.startswith("generic (")


@every_rule
def test_demanding_a_rule_that_falls_away_is_an_error_at_the_step(rule: Rule) -> None:
    task = Task(rule, fused=True)
    task.step()
    counted_step(task.inner)
    task.put_gradients()
    before = task.everything()
    message = f"FP16_Optimizer.step: {DEMANDED}{rule} with another step than its"
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)} class came with$"):
        task.optimizer.step()
    assert_same(task.everything(), before)
    assert task.optimizer.steps_applied == 1
    del task.inner.step
    task.optimizer.step()
    assert task.optimizer.steps_applied == 2


# State.


@pytest.mark.parametrize("default_dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "rule, kernel",
    [
        pytest.param(rule, kernel, id=f"{rule} {kernel}")
        for rule in RULES
        for kernel in ([{}, rule.oracle] if rule.oracle else [{}])
    ],
)
def test_state_is_torchs_whichever_step_made_it(
    rule: Rule, kernel: dict[str, Any], default_dtype: torch.dtype
) -> None:
    torch.set_default_dtype(default_dtype)
    try:
        fused, own = Task(rule, kernel, fused=True), Task(rule, kernel, fused=False)
        for _ in range(2):
            fused.step()
            own.step()
    finally:
        torch.set_default_dtype(torch.float32)
    got, want = fused.inner.state_dict(), own.inner.state_dict()
    assert got["param_groups"] == want["param_groups"]
    assert set(got["state"]) == set(want["state"]) == {0, 1, 2}
    for index, entry in want["state"].items():
        assert list(got["state"][index]) == list(entry)
        for name, value in entry.items():
            made = got["state"][index][name]
            assert (made.dtype, made.shape) == (value.dtype, value.shape)
            assert made.requires_grad is False
            if name == "step":
                assert made == value == 2


@every_rule
def test_state_is_updated_in_place(rule: Rule) -> None:
    task = Task(rule, fused=True)
    task.step()
    before = {p: dict(entry) for p, entry in task.inner.state.items()}
    old = copy_of(list(before.values()))
    task.step()
    for (param, entry), values in zip(before.items(), old, strict=True):
        assert list(task.inner.state[param]) == list(entry)
        for name, tensor in entry.items():
            assert task.inner.state[param][name] is tensor
            assert not torch.equal(tensor, values[name])


@needs_fma
@every_rule
def test_replaced_state_tensors_are_used(rule: Rule) -> None:
    pair = pair_of(rule)
    for _ in range(3):
        step_and_check(pair)
        for optimizer in (pair.inner, pair.oracle):
            for entry in optimizer.state.values():
                for name, value in entry.items():
                    if name != "step":
                        entry[name] = value * 0.5


@every_rule
def test_a_state_tensor_in_another_layout_pairs_by_index(rule: Rule) -> None:
    twins = [pair_of(rule, fused=None) for _ in range(2)]
    for twin in twins:
        twin.put_gradients()
        twin.optimizer.step()
    for entry in twins[0].inner.state.values():
        for name, value in entry.items():
            if value.dim() == 2:
                entry[name] = value.t().contiguous().t()
    for twin in twins:
        twin.put_gradients()
        twin.optimizer.step()
    # The rule and the own step may round differently.
    for got, want in zip(*(masters(twin.optimizer) for twin in twins), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@needs_fma
@every_rule
def test_switching_to_the_own_step_and_back(rule: Rule) -> None:
    pair = pair_of(rule, {"weight_decay": 0.25}, fused=None)
    for number in range(6):
        own_step = number in (0, 3, 4)
        if own_step:
            counted_step(pair.inner)
        for group in pair.oracle.param_groups:
            if "fused" in group:
                group["fused"] = not own_step
        step_and_check(pair)
        if own_step:
            del pair.inner.step


@needs_fma
@every_rule
def test_rule_and_plain_optimizer_load_each_others_state(rule: Rule) -> None:
    pair = pair_of(rule, {"weight_decay": 0.25})
    step_and_check(pair)
    step_and_check(pair)
    fused, plain = map(copy_of, (pair.inner.state_dict(), pair.oracle.state_dict()))
    pair.oracle.load_state_dict(fused)
    pair.optimizer.load_state_dict(plain)
    for group in pair.oracle.param_groups:
        group.update(rule.oracle)
    assert pair.optimizer.step_mode == f"fused {rule.name}"
    step_and_check(pair)
    step_and_check(pair)


@needs_fma
@every_rule
def test_a_first_gradient_may_come_late(rule: Rule) -> None:
    pair = pair_of(rule, {"weight_decay": 0.25})
    # One group each: torch's fused SGD wants all first gradients in one step.
    pair.oracle = rule.optimizer_class(
        [{"params": [p]} for p in pair.oracle_params],
        **{**rule.example, **rule.oracle, "weight_decay": 0.25},
    )
    for without in [{1, 3}, {1, 3}, {0}, set(), {1, 2}, set()]:
        step_and_check(pair, without=without)


@every_rule
def test_parameters_without_gradient_are_untouched(rule: Rule) -> None:
    task = Task(rule, {"weight_decay": 0.25}, fused=True)
    task.step()
    idle = [0, 2]
    for _ in range(2):
        before = task.everything()
        versions = [p._version for p in task.params]
        task.put_gradients()
        for index in idle:
            task.params[index].grad = None
        task.optimizer.update_master_grads()
        task.optimizer.step()
        after = task.everything()
        for index in idle:
            assert_same(after[0][index], before[0][index])
            assert_same(after[1][index], before[1][index])
            assert_same(after[2]["state"][index], before[2]["state"][index])
            assert task.params[index]._version == versions[index]
        assert not torch.equal(after[1][1], before[1][1])


@every_rule
def test_a_skipped_first_step_leaves_no_trace(rule: Rule) -> None:
    task, twin = Task(rule, fused=True), Task(rule, fused=True)
    before = task.everything()
    assert task.step(special=INF) is None
    assert task.optimizer.overflow
    assert_same(task.everything(), before)
    twin.put_gradients()  # to be where the random numbers are
    twin.optimizer.zero_grad()
    for _ in range(2):
        task.step()
        twin.step()
    assert_same(task.everything(), twin.everything())


def test_momentum_after_a_skipped_first_step_is_right() -> None:
    param = half(1.0)
    inner = torch.optim.SGD([param], lr=0.5, momentum=0.5, dampening=0.5)
    optimizer = FP16_Optimizer(inner, verbose=False, fused=True)
    (master,) = masters(optimizer)
    for gradient, buffer, weight in [
        (INF, None, 1.0),
        (1.0, 1.0, 0.5),  # the first buffer is the gradient, undampened
        (NAN, 1.0, 0.5),
        (1.0, 1.0, 0.0),
        (3.0, 2.0, -1.0),
    ]:
        param.grad = torch.tensor([gradient]).half()
        optimizer.update_master_grads()
        optimizer.step()
        kept = inner.state[master].get("momentum_buffer")
        assert (None if kept is None else kept.item()) == buffer
        assert master.item() == param.item() == weight


@needs_fma
@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_amsgrad_may_end_but_not_begin_later(name: str) -> None:
    rule = BY_NAME[name]
    pair = pair_of(rule, {"amsgrad": True}, fused=None)
    step_and_check(pair)
    for optimizer in (pair.inner, pair.oracle):
        optimizer.param_groups[0]["amsgrad"] = False
    step_and_check(pair)

    pair = pair_of(rule, fused=None)
    step_and_check(pair)
    pair.inner.param_groups[0]["amsgrad"] = True
    pair.put_gradients()
    with pytest.raises(KeyError, match="max_exp_avg_sq"):  # torch's own
        pair.optimizer.step()
    assert re.fullmatch(r"generic \(.*max_exp_avg_sq.*\)", pair.optimizer.step_mode)
    pair.inner.param_groups[0]["amsgrad"] = False
    pair.optimizer.step()
    assert pair.optimizer.step_mode == "fused Adam"


@pytest.mark.parametrize(
    "spoil, told",
    [
        (lambda moment: moment.half(), "exp_avg of shape [5], float16, cpu"),
        (lambda moment: moment.double(), "exp_avg of shape [5], float64, cpu"),
        (
            lambda moment: moment[:1].clone(),
            "exp_avg of shape [1], float32, cpu",
        ),
        (
            lambda moment: moment.to_sparse(),
            "exp_avg of shape [5], float32, cpu",
        ),
        (
            lambda moment: moment.mean().item(),
            "no exp_avg",
        ),
        (lambda moment: None, "no exp_avg"),
    ],
    ids=["half", "double", "shape", "sparse", "number", "None"],
)
def test_state_that_no_rule_takes_is_named(
    spoil: Callable[[Any], Any], told: str
) -> None:
    task = Task(BY_NAME["Adam"], fused=True)
    task.step()
    # The last one: the others must not have moved when it is met.
    state = task.inner.state[task.own[-1]]
    good = state["exp_avg"]
    state["exp_avg"] = spoil(good)
    task.put_gradients()
    weights = copy_of([task.params, task.own])
    where = "group 0, index 2: shape [5], float32, cpu"
    message = re.escape(f"FP16_Optimizer.step: {DEMANDED}{told} for {where}")
    with pytest.raises(RuntimeError, match=f"^{message}$"):
        task.optimizer.step()
    assert_same([task.params, task.own], weights)
    state["exp_avg"] = good
    task.optimizer.step()
    assert [int(task.inner.state[p]["step"]) for p in task.own] == [2, 2, 2]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("name", ["SGD", "Adagrad"])
def test_sparse_gradients_take_the_own_step(name: str) -> None:
    def task(fused: bool | None) -> Any:
        params = [half(1.0, 2.0, 3.0), half(1.0)]
        inner = BY_NAME[name].optimizer_class(params, lr=0.5)
        optimizer = FP16_Optimizer(
            inner, static_loss_scale=8.0, verbose=False, fused=fused
        )
        return params, optimizer

    def put_gradients(params: Any, optimizer: Any, sparse: bool) -> None:
        grad = torch.tensor([0.0, 8.0, 4.0]).half()
        params[0].grad = grad.to_sparse() if sparse else grad
        params[1].grad = torch.tensor([2.0]).half()
        optimizer.update_master_grads()

    (params, optimizer), (own_params, own) = task(None), task(False)
    for _ in range(2):
        put_gradients(params, optimizer, sparse=True)
        put_gradients(own_params, own, sparse=True)
        optimizer.step()
        own.step()
        assert re.fullmatch(r"generic \(.*sparse.*\)", optimizer.step_mode)
        assert_same(masters(optimizer), masters(own))
        assert_same(params, own_params)
        put_gradients(params, optimizer, sparse=False)
        put_gradients(own_params, own, sparse=False)
        optimizer.step()
        own.step()
        assert optimizer.step_mode == f"fused {name}"
        # The rule and the own step may round differently.
        for got, want in zip(masters(optimizer), masters(own), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
            with torch.no_grad():
                got.copy_(want)
        optimizer._master_params_to_model_params()
        own._master_params_to_model_params()

    params, optimizer = task(True)
    put_gradients(params, optimizer, sparse=True)
    before = copy_of([params, masters(optimizer)])
    reason = "a sparse gradient for group 0, index 0: shape [3], float16, cpu"
    message = re.escape(f"FP16_Optimizer.step: {DEMANDED}{reason}")
    with pytest.raises(RuntimeError, match=f"^{message}$"):
        optimizer.step()
    assert_same([params, masters(optimizer)], before)


# Hooks and closures.


def test_a_pre_hook_that_edits_the_groups_and_goes_is_seen() -> None:
    first, second = half(1.0), half(2.0)
    inner = torch.optim.SGD([first, second], lr=0.5)
    optimizer = FP16_Optimizer(inner, verbose=False, fused=True)

    def drop_the_last(*_: Any) -> None:
        handle.remove()
        del inner.param_groups[0]["params"][1]

    handle = inner.register_step_pre_hook(drop_the_last)
    optimizer.backward((first + second).sum().float())
    optimizer.step()
    assert (first.item(), second.item()) == (0.5, 2.0)


@pytest.mark.parametrize("closure", [False, True], ids=["", "closure"])
@every_rule
def test_hooks_run_as_they_do_around_the_own_step(rule: Rule, closure: bool) -> None:
    def log_of(fused: bool) -> list[Any]:
        log: list[Any] = []
        task = Task(rule, fused=fused)

        def note(event: str) -> Callable[..., None]:
            def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
                assert optimizer is task.inner
                moved = not torch.equal(task.own[0], start)
                kinds = [type(a).__name__ for a in args]
                log.append((event, moved, kinds, kwargs, torch.is_grad_enabled()))

            return hook

        handles = [
            register_optimizer_step_pre_hook(note("global pre")),
            register_optimizer_step_post_hook(note("global post")),
            task.inner.register_step_pre_hook(note("first pre")),
            task.inner.register_step_pre_hook(note("second pre")),
            task.inner.register_step_post_hook(note("post")),
        ]
        try:
            for special in (None, NAN, None):
                start = copy_of(task.own[0])
                log.append(f"step with {special}")
                if closure:
                    log.append(task.optimizer.step(lambda s=special: task.evaluate(s)))
                else:
                    task.step(special)
        finally:
            for handle in handles:
                handle.remove()
        return log

    assert log_of(fused=True) == log_of(fused=False)


@every_rule
def test_a_pre_hook_may_edit_options_and_gradients(rule: Rule) -> None:
    task = Task(rule, fused=True)
    task.step()
    before = copy_of(task.own)

    def no_rate(optimizer: Any, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.0

    handle = task.inner.register_step_pre_hook(no_rate)
    task.step()
    assert_same(copy_of(task.own), before)
    handle.remove()

    rule = BY_NAME["SGD"]
    task = Task(rule, {"momentum": 0.0}, fused=True)
    before = copy_of(task.own)

    def one_gradient(optimizer: Any, args: Any, kwargs: Any) -> None:
        task.own[0].grad.zero_()
        task.own[1].grad = torch.zeros(3)

    task.inner.register_step_pre_hook(one_gradient)
    task.step()
    assert_same(copy_of(task.own[:2]), before[:2])
    assert not torch.equal(task.own[2], before[2])


@pytest.mark.parametrize("through_data", [False, True])
@every_rule
def test_what_a_post_hook_does_to_masters_reaches_the_model(
    rule: Rule, through_data: bool
) -> None:
    task = Task(rule, fused=True)

    def clamp(optimizer: Any, args: Any, kwargs: Any) -> None:
        for param in task.own:
            if through_data:
                param.data.fill_(0.75)
            else:
                with torch.no_grad():
                    param.fill_(0.75)

    task.inner.register_step_post_hook(clamp)
    for _ in range(2):
        task.step()
        for param in task.params:
            assert_same(param.data, torch.full_like(param, 0.75))


@every_rule
def test_a_closure_is_evaluated_and_its_loss_returned(rule: Rule) -> None:
    def task(scale: float) -> tuple[Any, Any]:
        param = half(0.5, -0.25, 2.0)
        return param, FP16_Optimizer(
            rule.make([param]),
            dynamic_loss_scale=True,
            dynamic_loss_args={"init_scale": scale},
            verbose=False,
            fused=True,
        )

    param, optimizer = task(2.0**20)  # overflows, and is lowered
    twin, plain = task(2.0**10)
    evaluations = 0

    def closure() -> torch.Tensor:
        nonlocal evaluations
        evaluations += 1
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = param.float().square().sum()
        optimizer.backward(loss)
        return loss

    for _ in range(2):
        with torch.no_grad():
            loss = optimizer.step(closure)
        plain.zero_grad()
        want = twin.float().square().sum()
        plain.backward(want)
        plain.step()
        assert_same(loss.detach(), want.detach())
        assert_same(masters(optimizer)[0].data, masters(plain)[0].data)
        assert_same(param.data, twin.data)
    assert evaluations > 2
    assert optimizer.steps_applied == 2


# The model.


@every_rule
def test_versions_of_what_is_written_grow(rule: Rule) -> None:
    task = Task(rule, fused=True)
    for _ in range(2):
        versions = [p._version for p in [*task.params, *task.own]]
        task.step()
        assert all(
            p._version > version
            for p, version in zip([*task.params, *task.own], versions, strict=True)
        )


def test_a_graph_over_weights_that_were_stepped_is_refused() -> None:
    param = half(1.0)
    inner = torch.optim.SGD([param], lr=0.5)
    optimizer = FP16_Optimizer(inner, verbose=False, fused=True)
    loss = param.float().square().sum()
    stale = (param * param).sum()
    optimizer.backward(loss)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.backward()


@every_rule
def test_writes_to_the_model_are_adopted_before_the_rule_runs(rule: Rule) -> None:
    task = Task(rule, {"lr": 0.0}, fused=True)
    task.step()
    with torch.no_grad():
        task.params[0][3] = 1.5
    kept = copy_of(task.own[0])
    kept[3] = 1.5
    task.step()
    assert_same(task.own[0].data, kept)
    assert task.params[0][3] == 1.5


@pytest.mark.parametrize("fused", [True, False])
def test_a_master_beyond_the_half_range_is_told(
    fused: bool, caplog: pytest.LogCaptureFixture
) -> None:
    param = half(1.0)
    inner = torch.optim.SGD([param], lr=65536.0)
    optimizer = FP16_Optimizer(inner, verbose=False, fused=fused)
    for _ in range(2):
        param.grad = torch.tensor([-2.0]).half()
        optimizer.update_master_grads()
        optimizer.step()
        assert param.item() == INF
    assert [record.getMessage() for record in caplog.records] == [
        "FP16_Optimizer.step: a master weight is beyond the range of the model's "
        "dtype and was stored as inf, in group 0, index 0: shape [1], float16, cpu"
    ]


def test_info_lists_the_rules() -> None:
    from fp16core.__main__ import info

    for rule in RULES:
        assert re.search(rf"\b{rule.name}\b", info())
