"""FP16_Optimizer where the device decides on the steps, and the host waits for none.

Without a GPU the CUDA backend's code runs on an emulated device: a test build's
libfp16core.so serves the tensors of the host with it::

    LD_LIBRARY_PATH=build/dev/on_host PYTHONPATH=build/site pytest tests/test_device.py

What is expected comes from the core's CPU kernels, from torch's optimizers in double,
from formulas, or from steps outside of a graph.
"""

import ctypes
import io
import logging
import math
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import StepLR

from fp16core import (
    DynamicLossScaler,
    FP16_Optimizer,
    LossScaleError,
    LossScaler,
    _core,
)
from fp16core.optim import Lion
from helpers import INF, NAN, ScaleModel, assert_same, copy_of, masters

Log = pytest.LogCaptureFixture


def find_emulation() -> Any:
    """Return the library with the emulated device, if it is the one that is loaded."""
    try:
        library = ctypes.CDLL("libfp16core.so")
        library.fp16core_on_host_reads.restype = ctypes.c_int64
    except (OSError, AttributeError):
        return None
    return library


EMULATION = find_emulation()
CUDA = torch.cuda.is_available() and _core.built_with_cuda()

needs_cuda = pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
needs_emulation = pytest.mark.skipif(
    CUDA or EMULATION is None, reason="needs the emulated device"
)


@pytest.fixture
def device() -> str:
    """The device whose kernels are the CUDA backend's."""
    if CUDA:
        return "cuda"
    if os.environ.get("FP16CORE_REQUIRE_CUDA") == "1":
        pytest.fail(
            "FP16CORE_REQUIRE_CUDA=1, but "
            + (
                "this build of fp16core has no CUDA backend"
                if torch.cuda.is_available()
                else "torch finds no CUDA device"
            )
        )
    if EMULATION is None:
        pytest.skip("no CUDA device, and libfp16core.so has no emulated one")
    return "cpu"


pytestmark = pytest.mark.usefixtures("one_thread", "device")


# How often the host waits.


@contextmanager
def waits(device: str, times: int) -> Iterator[None]:
    """Assert that the host waits for the device so many times."""
    if device == "cpu":
        before = EMULATION.fp16core_on_host_reads()
        yield
        assert EMULATION.fp16core_on_host_reads() - before == times
        return
    torch.cuda.synchronize()
    counted = nullcontext([times]) if times == 0 else synchronizations()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode")
        torch.cuda.set_sync_debug_mode("error" if times == 0 else "warn")
    try:
        with counted as count:
            yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sum(count) == times


@contextmanager
def synchronizations() -> Iterator[list[int]]:
    """Count what torch warns of: in Python, or on stderr where C++ is called without
    torch's own bindings."""
    text = "called a synchronizing CUDA operation"
    count: list[int] = []
    with tempfile.TemporaryFile() as file:
        sys.stderr.flush()
        saved = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                yield count
        finally:
            os.dup2(saved, 2)
            os.close(saved)
        file.seek(0)
        count.append(file.read().decode().count(text))
        count.append(sum(text in str(warning.message) for warning in caught))


# Parameters, gradients and runs.


@dataclass(frozen=True)
class Rule:
    """An optimizer that the core has an update rule for."""

    optimizer_class: type
    options: dict[str, Any]
    # By how much a GPU may differ from the CPU. In the bias correction pow() of a GPU
    # may differ from the host's in the last bit of a double. That survives the rounding
    # of the step size to float32 about once in 2^20 steps, and then moves an update by
    # an ulp, and its sum with the weight by another one.
    ulps: int = 0
    has_state: bool = True

    def __call__(self, params: Any, **kwargs: Any) -> Any:
        return self.optimizer_class(params, **{**self.options, **kwargs})


RULES = {
    "plain_SGD": Rule(torch.optim.SGD, {"lr": 0.25}, has_state=False),
    "SGD": Rule(
        torch.optim.SGD,
        {"lr": 0.25, "momentum": 0.5, "nesterov": True, "weight_decay": 0.125},
    ),
    "Adagrad": Rule(torch.optim.Adagrad, {"lr": 0.25, "lr_decay": 0.125}),
    "RMSprop": Rule(
        torch.optim.RMSprop, {"lr": 0.25, "momentum": 0.5, "centered": True}
    ),
    "Lion": Rule(Lion, {"lr": 0.25, "weight_decay": 0.125}),
    "Adam": Rule(torch.optim.Adam, {"lr": 0.25, "amsgrad": True}, ulps=2),
    "AdamW": Rule(torch.optim.AdamW, {"lr": 0.25}, ulps=2),
    "NAdam": Rule(torch.optim.NAdam, {"lr": 0.25, "weight_decay": 0.125}, ulps=2),
    "Adamax": Rule(torch.optim.Adamax, {"lr": 0.25}, ulps=2),
}

every_rule = pytest.mark.parametrize("name", RULES)
some_rules = pytest.mark.parametrize("name", ["plain_SGD", "SGD", "AdamW"])
both_modes = pytest.mark.parametrize("lean", [False, True], ids=["default", "lean"])

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]

INIT_SCALE = 2.0**10
WINDOW = 3
ITERATIONS = 10
# What breaks which parameter when: the first step, two in a row, and each dtype.
PLANTED = {0: (0, INF), 3: (1, NAN), 4: (4, -INF), 8: (5, NAN)}


def parameters(device: str) -> list[torch.nn.Parameter]:
    """Return parameters of all dtypes, transposed, of several chunks, and empty."""
    generator = torch.Generator().manual_seed(7)

    def parameter(dtype: torch.dtype, *shape: int) -> torch.nn.Parameter:
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        return torch.nn.Parameter(values.to(dtype).to(device))

    half, bfloat, single, double = DTYPES
    transposed = torch.nn.Parameter(parameter(half, 9, 5).detach().t())
    return [
        transposed,
        parameter(bfloat, 5_003),
        parameter(half),
        parameter(half, 33),
        parameter(single, 17),
        parameter(double, 6),
        parameter(half, 2, 0, 3),
    ]


def wide(param: torch.Tensor) -> torch.Tensor:
    return param if param.dtype == torch.float64 else param.float()


def slopes(
    params: list[Any], seed: int, planted: tuple[int, float] | None = None
) -> list[torch.Tensor]:
    """Return the gradients of an iteration, one of them broken in its last element."""
    generator = torch.Generator().manual_seed(seed)
    result = []
    for param in params:
        slope = torch.randn(param.shape, generator=generator, dtype=torch.float64)
        result.append(slope.to(wide(param).dtype))
    if planted:
        index, value = planted
        result[index].view(-1)[-1] = value
    return [s.to(p.device) for s, p in zip(result, params, strict=True)]


def loss_of(params: list[Any], slopes: list[torch.Tensor]) -> torch.Tensor:
    """Return a loss whose gradients are the slopes, whatever the weights are."""
    parts = [(wide(p) * s).sum() for p, s in zip(params, slopes, strict=True)]
    return torch.stack([part.to(parts[0]) for part in parts]).sum()


def wrap(inner: Any, **kwargs: Any) -> Any:
    scaler = {"init_scale": INIT_SCALE, "scale_window": WINDOW}
    scaler.update(kwargs.pop("dynamic_loss_args", {}))
    options = {"dynamic_loss_scale": True, "verbose": False, **kwargs}
    return FP16_Optimizer(inner, dynamic_loss_args=scaler, **options)


def iterate(
    optimizer: Any,
    params: list[Any],
    seed: int,
    planted: tuple[int, float] | None = None,
    max_norm: float | None = None,
) -> None:
    """Run one ordinary iteration, in which nothing is asked for."""
    optimizer.zero_grad(set_to_none=seed % 2 == 0)
    optimizer.backward(loss_of(params, slopes(params, seed, planted)))
    if max_norm is not None:
        optimizer.clip_master_grads(max_norm)
    optimizer.step()


@dataclass
class Run:
    """Some iterations under one rule, overflows among them."""

    name: str
    device: str
    lean: bool = False
    params: list[Any] = field(init=False)
    optimizer: Any = field(init=False)

    def __post_init__(self) -> None:
        self.params = parameters(self.device)
        inner = RULES[self.name](self.params)
        self.optimizer = wrap(inner, materialize_master_grads=not self.lean)

    def go(self, start: int = 0, stop: int = ITERATIONS) -> "Run":
        for i in range(start, stop):
            iterate(self.optimizer, self.params, i, PLANTED.get(i))
        return self

    def weights(self) -> list[torch.Tensor]:
        """Return the masters, or what needs none, in the order of the parameters."""
        (group,) = self.optimizer.param_groups
        return [p.detach().cpu() for p in group["params"]]

    def result(self) -> dict[str, Any]:
        """Return all that the run came to, on the host."""
        optimizer = self.optimizer
        assert optimizer.step_mode.startswith("fused ")
        (group,) = optimizer.param_groups
        return {
            "weights": self.weights(),
            "model": [p.detach().cpu() for p in self.params],
            "state": [
                {k: v.cpu() for k, v in optimizer.state.get(p, {}).items()}
                for p in group["params"]
            ],
            "scale": optimizer.loss_scale,
            "overflow": optimizer.overflow,
            "applied": optimizer.steps_applied,
            "skipped": optimizer.steps_skipped,
        }

    def checkpoint(self) -> dict[str, Any]:
        return {
            "model": copy_of(self.params),
            "optimizer": copy_of(self.optimizer.state_dict()),
        }

    def load(self, checkpoint: dict[str, Any]) -> "Run":
        with torch.no_grad():
            for param, values in zip(self.params, checkpoint["model"], strict=True):
                param.copy_(values)
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        return self


CHECKPOINTED = ["SGD", "AdamW"]
MIDDLE = 6


def twins(checkpoints: dict[str, Any]) -> dict[str, Any]:
    """Return the results of all rules on the CPU, checkpoints from the middle, and what
    given checkpoints lead to."""
    results: dict[str, Any] = {}
    for name in RULES:
        run = Run(name, "cpu").go(0, MIDDLE)
        checkpoint = run.checkpoint()
        results[name] = {"checkpoint": checkpoint, "result": run.go(MIDDLE).result()}
    for name, checkpoint in checkpoints.items():
        resumed = Run(name, "cpu").load(checkpoint).go(MIDDLE)
        results[name]["resumed"] = resumed.result()
    return results


def on_cpu(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function of this file where the CPU's own kernels serve the host."""
    if CUDA:
        return function(*args)
    file = io.BytesIO()
    torch.save((function.__name__, args), file)
    folders = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    ordinary = [f for f in folders if not Path(f, "libfp16core.so").exists()]
    script = (
        "import io, sys, torch, test_device\n"
        "assert test_device.EMULATION is None\n"
        "torch.set_num_threads(1)\n"
        "name, args = torch.load(io.BytesIO(sys.stdin.buffer.read()))\n"
        "torch.save(getattr(test_device, name)(*args), sys.stdout.buffer)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script],
        input=file.getvalue(),
        capture_output=True,
        timeout=120,
        check=False,
        env={
            **os.environ,
            "LD_LIBRARY_PATH": os.pathsep.join(ordinary),
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
        },
    )
    assert result.returncode == 0, result.stderr.decode()
    return torch.load(io.BytesIO(result.stdout))


@pytest.fixture(scope="module")
def cpu_twins() -> dict[str, Any]:
    """What the CPU's kernels give; in one call, which takes seconds."""
    device = "cuda" if CUDA else "cpu"
    checkpoints = {n: Run(n, device).go(0, MIDDLE).checkpoint() for n in CHECKPOINTED}
    return dict(on_cpu(twins, to_host(checkpoints)))


def to_host(value: Any) -> Any:
    """Return what a checkpoint file would, read on a machine without a GPU."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, map_location="cpu")


def assert_near(got: Any, want: Any, ulps: int, where: str) -> None:
    """Assert that results are equal, tensors but for some ulps."""
    if isinstance(want, dict):
        assert set(got) == set(want), where
        for key in want:
            assert_near(got[key], want[key], ulps, f"{where}.{key}")
    elif isinstance(want, list):
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            assert_near(a, b, ulps, f"{where}[{i}]")
    elif not isinstance(want, torch.Tensor) or ulps == 0 or want.numel() == 0:
        assert_same(got, want, where)
    else:
        assert got.dtype == want.dtype, where
        if want.dtype == torch.float64:
            # Nothing is rounded away here, and 1 - 0.999 has a thousandth of the
            # precision of its terms. Up to 6 such steps add up.
            ulps *= 2**11
        # Of weights near 0 it is the update, at most 0.25 here, that sets the ulp.
        size = want.double().abs().clamp(min=0.25) * torch.finfo(want.dtype).eps
        worst = ((got.double() - want.double()).abs() / size).max()
        assert worst <= ulps, f"{where}: {worst} ulps"


# Numbers.


@both_modes
@every_rule
def test_every_rule_gives_what_the_cpu_gives(
    name: str, lean: bool, device: str, cpu_twins: dict[str, Any]
) -> None:
    got = Run(name, device, lean).go().result()
    want = cpu_twins[name]["result"]
    # The scale after three lots of clean steps and four overflows.
    assert (got["applied"], got["skipped"]) == (6, 4)
    ulps = RULES[name].ulps if CUDA else 0
    assert_near(got, want, ulps, name)


@every_rule
def test_every_rule_follows_torch_in_double(name: str, device: str) -> None:
    params = [p.detach().cpu().double().requires_grad_() for p in parameters(device)]
    oracle = RULES[name](params, **({} if name == "Lion" else {"foreach": False}))
    scaler = ScaleModel(INIT_SCALE, window=WINDOW)
    dtypes = [p.dtype for p in parameters(device)]
    for i in range(ITERATIONS):
        given = slopes([p.detach().cpu() for p in parameters(device)], i)
        for param, slope, dtype in zip(params, given, dtypes, strict=True):
            scaled = (slope * scaler.scale).to(dtype)
            param.grad = scaled.double() / scaler.scale
        scaler.update(i in PLANTED)
        if i not in PLANTED:
            oracle.step()
    run = Run(name, device).go()
    assert run.optimizer.loss_scale == scaler.scale
    for got, want, dtype in zip(run.weights(), params, dtypes, strict=True):
        # A few roundings a step, of numbers up to 4.
        exact = dtype == torch.float64
        tolerance = ITERATIONS * 16 * (2.0**-52 if exact else 2.0**-23)
        torch.testing.assert_close(got.double(), want.detach(), rtol=0, atol=tolerance)
    for param, weight in zip(run.params, run.weights(), strict=True):
        assert_same(param.detach().cpu(), weight.to(param.dtype), "model")


def test_the_state_lives_on_the_device(device: str) -> None:
    run = Run("NAdam", device).go(0, 2)
    for state in run.optimizer.state.values():
        assert {k: v.device.type for k, v in state.items()} == dict.fromkeys(
            ("step", "mu_product", "exp_avg", "exp_avg_sq"), device
        )
        assert state["step"].item() == 1


def test_counters_of_the_host_move_once(device: str) -> None:
    params = parameters(device)
    inner = torch.optim.AdamW(params, lr=0.25)
    optimizer = wrap(inner)
    (group,) = inner.param_groups
    for weight in group["params"]:
        inner.state[weight] = {
            "step": torch.tensor(3.0),
            "exp_avg": torch.zeros_like(weight),
            "exp_avg_sq": torch.zeros_like(weight),
        }
    iterate(optimizer, params, 1, (0, INF))
    steps = [inner.state[w]["step"] for w in group["params"]]
    assert [(s.device.type, s.item()) for s in steps] == [(device, 3.0)] * len(params)
    with waits(device, 0) if device == "cpu" else nullcontext():
        iterate(optimizer, params, 2)
    assert all(
        inner.state[w]["step"] is s for w, s in zip(group["params"], steps, strict=True)
    )
    assert [s.item() for s in steps] == [4.0] * len(params)


# Waiting.


def prepared(params: list[Any], seeds: range) -> list[list[torch.Tensor]]:
    """Return slopes of several iterations, already on the device."""
    return [slopes(params, seed, PLANTED.get(seed)) for seed in seeds]


def iterate_prepared(
    optimizer: Any,
    params: list[Any],
    given: list[torch.Tensor],
    norm: float | None = None,
) -> None:
    optimizer.zero_grad()
    optimizer.backward(loss_of(params, given))
    if norm is not None:
        optimizer.clip_master_grads(1.0, norm)
    optimizer.step()


@pytest.mark.parametrize("norm", [None, 2.0, INF], ids=["no_clip", "2", "inf"])
@both_modes
@every_rule
def test_an_iteration_by_a_rule_does_not_wait(
    name: str, lean: bool, norm: float | None, device: str
) -> None:
    run = Run(name, device, lean)
    given = prepared(run.params, range(6))
    # Overflows among them, and the first step that makes state.
    iterate_prepared(run.optimizer, run.params, given[0], norm)
    iterate_prepared(run.optimizer, run.params, given[1], norm)
    with waits(device, 0):
        for slopes_ in given[2:]:
            iterate_prepared(run.optimizer, run.params, slopes_, norm)
    assert run.optimizer.step_decided_on == "device"
    assert (run.optimizer.steps_applied, run.optimizer.steps_skipped) == (3, 3)
    with waits(device, 1):
        assert not run.optimizer.overflow
    with waits(device, 0):
        assert not run.optimizer.overflow


@pytest.mark.parametrize("name", ["plain_SGD", "AdamW"])
def test_a_step_that_makes_state_waits_once(name: str, device: str) -> None:
    run = Run(name, device)
    (given,) = prepared(run.params, range(1, 2))
    with waits(device, 1 if RULES[name].has_state else 0):
        iterate_prepared(run.optimizer, run.params, given)
    assert run.optimizer.steps_applied == 1


class OwnSGD(torch.optim.SGD):
    """A subclass with a step that the core knows nothing of."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.calls = getattr(self, "calls", 0) + 1
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"])


@pytest.mark.parametrize("kind", ["foreach", "subclass"])
def test_other_optimizers_wait_once(kind: str, device: str) -> None:
    params = parameters(device)
    if kind == "foreach":
        inner: Any = torch.optim.SGD(params, lr=0.25, foreach=True)
        optimizer = wrap(inner, fused=False)
    else:
        inner = OwnSGD(params, lr=0.25)
        optimizer = wrap(inner)
    for i, given in enumerate(prepared(params, range(5))):
        with waits(device, 1):
            iterate_prepared(optimizer, params, given, 2.0)
        assert optimizer.overflow is (i in PLANTED)
    assert (optimizer.steps_applied, optimizer.steps_skipped) == (2, 3)
    if kind == "subclass":
        assert inner.calls == 2


TORCH_FUSED = {
    "plain_SGD": (torch.optim.SGD, {"lr": 0.25}),
    "SGD": (torch.optim.SGD, {"lr": 0.25, "momentum": 0.5}),
    "Adam": (torch.optim.Adam, {"lr": 0.25}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.25, "amsgrad": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.25}),
}


@pytest.mark.parametrize("name", TORCH_FUSED)
def test_torchs_fused_optimizers_are_turned_off_by_a_flag(
    name: str, device: str
) -> None:
    optimizer_class, options = TORCH_FUSED[name]
    probe = torch.ones(1, device=device, requires_grad=True)
    probe.grad = torch.ones_like(probe)
    try:
        optimizer_class([probe], **options, fused=True).step()
    except RuntimeError as error:
        pytest.skip(f"torch has no such kernel for this device: {error}")
    params = parameters(device)
    oracle_params = [wide(p.detach().clone()).requires_grad_() for p in params]
    optimizer = wrap(optimizer_class(params, **options, fused=True), fused=False)
    oracle = optimizer_class(oracle_params, **options, fused=True)
    # Memory that is not zero is what a new buffer gets.
    junk = [torch.full_like(p, 1e4, dtype=torch.float32) for p in params]
    del junk
    given = prepared(params, range(ITERATIONS))
    scaler = ScaleModel(INIT_SCALE, window=WINDOW)
    for i, slopes_ in enumerate(given):
        # The first step overflows, the second one makes state.
        with waits(device, 0) if i > 1 else nullcontext():
            iterate_prepared(optimizer, params, slopes_)
        if i not in PLANTED:
            for own, slope, param in zip(oracle_params, slopes_, params, strict=True):
                scaled = (slope * scaler.scale).to(param.dtype).to(own.dtype)
                # In the layout of the weight, which is how torch's kernels pair.
                own.grad = torch.empty_like(own).copy_(scaled / scaler.scale)
            oracle.step()
        scaler.update(i in PLANTED)
    (group,) = optimizer.param_groups
    for weight, own in zip(group["params"], oracle_params, strict=True):
        assert_same(weight.detach(), own.detach(), name)
        for key, value in oracle.state.get(own, {}).items():
            if value is not None:
                assert_same(optimizer.state[weight][key], value, key)
    assert optimizer.loss_scale == scaler.scale
    assert (optimizer.steps_applied, optimizer.steps_skipped) == (6, 4)
    assert not hasattr(optimizer.optimizer, "found_inf")


# Overflows and the scale.


@pytest.mark.parametrize("value", [INF, -INF, NAN], ids=str)
@pytest.mark.parametrize("index", [0, 1, 2, 4, 5])
@both_modes
def test_an_overflow_changes_nothing_but_the_scale(
    index: int, value: float, lean: bool, device: str
) -> None:
    run = Run("AdamW", device, lean).go(1, 3)
    before = copy_of(run.result())
    iterate(run.optimizer, run.params, 5, (index, value))
    after = run.result()
    assert after.pop("overflow") and not before.pop("overflow")
    assert after.pop("scale") == before.pop("scale") / 2
    assert after.pop("skipped") == before.pop("skipped") + 1
    assert_same(after, before)
    report = run.optimizer.gradient_report()
    assert report.overflow
    offender = report.first_offender()
    assert (offender.group, offender.index) == (0, index)
    nan = math.isnan(value)
    assert (offender.inf_count, offender.nan_count) == (0, 1) if nan else (1, 0)
    assert len(report.tensors) == len(run.params)


SCALERS = {
    "plain": {},
    "hysteresis": {"delayed_shift": 3},
    "consecutive": {"delayed_shift": 2, "consecutive_hysteresis": True},
    "floor": {"min_scale": 300.0, "scale_factor": 3.0},
    "window": {"scale_window": 1, "scale_factor": 4.0},
}


@pytest.mark.parametrize("asked", [True, False], ids=["asked", "not_asked"])
@pytest.mark.parametrize("kind", SCALERS)
def test_the_scale_follows_its_rule(kind: str, asked: bool, device: str) -> None:
    args = SCALERS[kind]
    params = parameters(device)[3:5]
    optimizer = wrap(torch.optim.SGD(params, lr=0.25), dynamic_loss_args=args)
    names = {
        "scale_factor": "factor",
        "scale_window": "window",
        "min_scale": "floor",
        "delayed_shift": "shift",
        "consecutive_hysteresis": "consecutive",
    }
    model = ScaleModel(
        INIT_SCALE, **{"window": WINDOW, **{names[k]: v for k, v in args.items()}}
    )
    pattern = [False, True, True, True, False, False, False, False, True, False, True]
    for i, bad in enumerate(pattern):
        iterate(optimizer, params, i, (i % 2, NAN) if bad else None)
        want = model.update(bad)
        if asked:
            assert (optimizer.loss_scale, optimizer.overflow) == (want, bad)
    assert optimizer.loss_scale == model.scale
    assert optimizer.steps_skipped == sum(pattern)
    assert optimizer.steps_applied == len(pattern) - sum(pattern)
    assert optimizer.loss_scaler.cur_iter == len(pattern)


def test_a_scale_set_by_hand_counts_from_the_next_backward_pass(device: str) -> None:
    run = Run("SGD", device).go(1, 3)
    optimizer = run.optimizer
    scales = []
    for i, scale in enumerate([2.0**6, 2.0**12, 3.0]):
        optimizer.loss_scale = scale
        assert optimizer.loss_scale == scale
        optimizer.zero_grad()
        given = slopes(run.params, 1)
        optimizer.backward(loss_of(run.params, given))
        scaled = (given[1] * scale).to(torch.bfloat16)
        assert_same(run.params[1].grad, scaled, f"gradient {i}")
        optimizer.step()
        scales.append(optimizer.loss_scale)
    # The third clean iteration in a row lets it grow.
    assert scales == [2.0**7, 2.0**12, 3.0]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_the_kind_of_scaler_may_change(dynamic: bool, device: str) -> None:
    params = parameters(device)
    optimizer = wrap(
        torch.optim.SGD(params, lr=0.25), dynamic_loss_scale=dynamic,
        static_loss_scale=INIT_SCALE,
    )  # fmt: skip
    iterate(optimizer, params, 0, (0, INF))
    assert optimizer.loss_scale == (INIT_SCALE / 2 if dynamic else INIT_SCALE)
    optimizer.dynamic_loss_scale = not dynamic
    scale = optimizer.loss_scale
    iterate(optimizer, params, 1, (0, INF))
    assert optimizer.loss_scale == (scale if dynamic else scale / 2)
    iterate(optimizer, params, 2)
    assert (optimizer.steps_applied, optimizer.steps_skipped) == (1, 2)


@pytest.mark.parametrize("by_rule", [True, False], ids=["rule", "flag"])
def test_unchecked_overflows_reach_the_weights(by_rule: bool, device: str) -> None:
    params = parameters(device)
    optimizer = wrap(
        torch.optim.SGD(params, lr=0.25, fused=not by_rule),
        fused=None if by_rule else False,
        dynamic_loss_scale=False,
        static_loss_scale=8.0,
        check_overflow=False,
    )
    iterate(optimizer, params, 1, (3, INF))
    assert not optimizer.overflow
    assert (optimizer.steps_applied, optimizer.steps_skipped) == (1, 0)
    assert params[3][-1].item() == -INF and params[3][:-1].isfinite().all()


def test_raising_at_the_floor_is_at_once(device: str) -> None:
    params = parameters(device)
    optimizer = wrap(
        torch.optim.SGD(params, lr=0.25),
        on_min_scale="raise",
        dynamic_loss_args={"init_scale": 4.0, "min_scale": 4.0},
    )
    iterate(optimizer, params, 1)
    with pytest.raises(LossScaleError, match="at its floor 4, .*; first at group 0"):
        iterate(optimizer, params, 2, (1, NAN))
    assert (optimizer.steps_applied, optimizer.steps_skipped) == (1, 1)


# Messages.


def flush(optimizer: Any, params: list[Any]) -> None:
    """Let the device get ready, and take a step, which says what there is to say."""
    if CUDA:
        torch.cuda.synchronize()
    iterate(optimizer, params, 1)


def test_messages_come_late_but_come(device: str, caplog: Log) -> None:
    caplog.set_level(logging.DEBUG, "fp16core")
    params = parameters(device)
    optimizer = wrap(
        torch.optim.SGD(params, lr=0.25),
        dynamic_loss_args={
            "init_scale": 4.0, "min_scale": 2.0, "delayed_shift": 2, "scale_window": 2,
        },
    )  # fmt: skip
    for i in range(3):
        iterate(optimizer, params, i, (1, NAN))
    iterate(optimizer, params, 3, (5, -INF))
    for i in range(4, 6):
        iterate(optimizer, params, i)
    flush(optimizer, params)
    prefix = "FP16_Optimizer.step: gradient overflow"
    assert {(r.name, r.levelname) for r in caplog.records} == {("fp16core", "WARNING")}
    assert caplog.messages[:2] == [
        f"{prefix}, the step is skipped, tolerated: loss scale stays at 4, and so it "
        "will for 0 more",
        f"{prefix}, the step is skipped, loss scale 4 -> 2",
    ]
    assert caplog.messages[2].startswith(
        f"{prefix} with the loss scale at its floor 2, the step is skipped; first at "
        "group 0, index 1"
    )
    assert "1 NaN" in caplog.messages[2]
    assert caplog.messages[3:] == ["FP16_Optimizer.step: loss scale grows, 2 -> 4"]


def test_the_history_comes_late_but_comes(device: str) -> None:
    params = parameters(device)
    skipped: list[Any] = []
    optimizer = wrap(
        torch.optim.SGD(params, lr=0.25),
        dynamic_loss_args={"init_scale": 8.0},
        on_skip=skipped.append,
    )
    iterate(optimizer, params, 0)
    params_of_step = optimizer.param_groups[0]["params"]
    norm = torch.cat([p.grad.double().flatten() for p in params_of_step]).norm().item()
    for i in range(1, 3):
        iterate(optimizer, params, i, (1, NAN))
    iterate(optimizer, params, 3)
    assert optimizer.step_decided_on == "device"
    flush(optimizer, params)
    found = optimizer.history[:4]
    assert [(r.step, r.scale, r.skipped, r.skipped_in_a_row) for r in found] == [
        (1, 8.0, False, 0), (2, 8.0, True, 1), (3, 4.0, True, 2), (4, 2.0, False, 0),
    ]  # fmt: skip
    # Summed in another order.
    assert found[0].norm == pytest.approx(norm, rel=1e-6)
    assert [r.step for r in skipped] == [2, 3]
    (culprit,) = skipped[0].culprits
    assert (culprit.group, culprit.index, culprit.nan_count) == (0, 1, 1)


@pytest.mark.parametrize("by_rule", [True, False])
def test_saturated_weights_are_told_of(by_rule: bool, device: str, caplog: Log) -> None:
    caplog.set_level(logging.DEBUG, "fp16core")
    params = parameters(device)
    optimizer = wrap(torch.optim.SGD(params, lr=0.25), fused=None if by_rule else False)
    iterate(optimizer, params, 1)
    with torch.no_grad():
        masters(optimizer)[3][7] = 7e4
    iterate(optimizer, params, 2)
    flush(optimizer, params)
    told = [m for m in caplog.messages if "beyond the range" in m]
    assert len(told) == 1 and "group 0, index 3" in told[0]
    assert params[3][7].item() == INF
    assert [t.saturated for t in optimizer.gradient_report().tensors].count(True) == 1


# Clipping.


def gradients(optimizer: Any) -> list[torch.Tensor]:
    (grads,) = optimizer.inspect_master_grad_data()
    return [g.detach().clone() for g in grads]


@both_modes
@pytest.mark.parametrize("norm_type", [2.0, INF, 1.0, 3.0, 0.0], ids=str)
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clipping_follows_the_formula(
    max_norm: float, norm_type: float, lean: bool, device: str
) -> None:
    run = Run("SGD", device, lean)
    optimizer = run.optimizer
    given = slopes(run.params, 1)
    optimizer.backward(loss_of(run.params, given))
    # Not asked of the optimizer, which then would know whether they overflow.
    before = [
        (s * INIT_SCALE).to(p.dtype).to(s.dtype) / INIT_SCALE
        for s, p in zip(given, run.params, strict=True)
    ]
    flat = torch.cat([g.double().reshape(-1).cpu() for g in before])
    want = torch.linalg.vector_norm(flat, norm_type).item()
    direct = norm_type in (2.0, INF)
    with waits(device, 0) if direct else nullcontext():
        got = optimizer.clip_master_grads(max_norm, norm_type)
    assert got.dtype == torch.float32 and got.dim() == 0
    assert got.device.type == (device if direct else "cpu")
    # Squares may be summed up in single precision, 256 to a sum.
    assert got.item() == pytest.approx(want, rel=2.0**-16)
    coefficient = min(1.0, max_norm / (got.double().item() + 1e-6))
    for a, b in zip(gradients(optimizer), before, strict=True):
        # The norm comes rounded to single precision, and so does the product.
        torch.testing.assert_close(a, b * coefficient, rtol=2.0**-22, atol=0)
    optimizer.step()
    weights = parameters("cpu")
    for new, old, grad in zip(run.weights(), weights, before, strict=True):
        # SGD's first step: 0.25 times (1 + the momentum) times the decayed gradient.
        decayed = grad.cpu().double() * coefficient + 0.125 * old.double()
        torch.testing.assert_close(
            new.double(), old.double() - 0.375 * decayed, rtol=0, atol=2.0**-20
        )


@pytest.mark.parametrize("norm_type", [2.0, INF, 3.0], ids=str)
def test_an_overflow_is_not_clipped(norm_type: float, device: str) -> None:
    run = Run("SGD", device)
    optimizer = run.optimizer
    optimizer.backward(loss_of(run.params, slopes(run.params, 1, (3, INF))))
    (group,) = optimizer.param_groups
    before = copy_of([p.grad for p in group["params"]])
    assert optimizer.clip_master_grads(1e-3, norm_type).item() == -1.0
    assert_same([p.grad for p in group["params"]], before)


def test_an_edited_gradient_is_measured_anew(device: str) -> None:
    run = Run("SGD", device)
    optimizer = run.optimizer
    optimizer.backward(loss_of(run.params, slopes(run.params, 1)))
    with torch.no_grad():
        for weight in optimizer.param_groups[0]["params"]:
            weight.grad.zero_()
        masters(optimizer)[0].grad[0, 0] = 3.0
        masters(optimizer)[1].grad[0] = 4.0
    assert optimizer.clip_master_grads(10.0).item() == 5.0


# Accumulation.


def exact_slopes(params: list[Any], seed: int) -> list[torch.Tensor]:
    """Return small multiples of 1/4, whose sums are exact in every dtype."""
    # Without negative zeros.
    return [(s * 2).clamp(-4, 4).round() / 4 + 0.0 for s in slopes(params, seed)]


@both_modes
@pytest.mark.parametrize("taken", [True, False], ids=["each_taken", "taken_once"])
@pytest.mark.parametrize("drop", [True, False], ids=["dropped", "kept"])
def test_gradients_accumulate(drop: bool, taken: bool, lean: bool, device: str) -> None:
    run = Run("plain_SGD", device, lean)
    optimizer, params = run.optimizer, run.params
    for round_ in range(3):
        before = copy_of(run.weights())
        optimizer.zero_grad(set_to_none=drop)
        given = [exact_slopes(params, 3 * round_ + i) for i in range(3)]
        for slopes_ in given:
            optimizer.backward(loss_of(params, slopes_), update_master_grads=taken)
        if not taken:
            optimizer.update_master_grads()
        total = [sum(parts).cpu() for parts in zip(*given, strict=True)]
        for grad, want in zip(gradients(optimizer), total, strict=True):
            assert_same(grad.cpu(), want, f"round {round_}")
        optimizer.step()
        for new, old, want in zip(run.weights(), before, total, strict=True):
            assert_same(new, old - 0.25 * want, f"round {round_}")
    assert optimizer.steps_applied == 3


def test_gradients_waiting_for_an_update_are_not_forgotten(device: str) -> None:
    run = Run("SGD", device).go(1, 3)
    run.optimizer.zero_grad()
    given = slopes(run.params, 1)
    run.optimizer.backward(loss_of(run.params, given), update_master_grads=False)
    with pytest.raises(RuntimeError, match="must be taken before the step"):
        run.optimizer.step()


def test_gradients_outlive_a_change_of_the_scale(device: str) -> None:
    """Kept gradients are brought to the scale of the next backward pass."""
    run = Run("plain_SGD", device)
    optimizer, params = run.optimizer, run.params
    given = [exact_slopes(params, i) for i in range(3)]
    for i, slopes_ in enumerate(given):
        optimizer.backward(loss_of(params, slopes_))
        total = [sum(parts).cpu() for parts in zip(*given[: i + 1], strict=True)]
        for grad, want in zip(gradients(optimizer), total, strict=True):
            assert_same(grad.cpu(), want, f"pass {i}")
        optimizer.step()
        optimizer.loss_scale = 2.0 ** (8 - i)


def test_gradients_kept_over_a_growing_scale(device: str) -> None:
    run = Run("plain_SGD", device)
    optimizer, params = run.optimizer, run.params
    iterate(optimizer, params, 0)
    iterate(optimizer, params, 2)
    optimizer.zero_grad()
    first, second = exact_slopes(params, 1), exact_slopes(params, 3)
    optimizer.backward(loss_of(params, first))
    optimizer.step()  # the device alone knows that the scale grows here
    optimizer.backward(loss_of(params, second))
    assert optimizer.loss_scale == 2 * INIT_SCALE
    for grad, *parts in zip(gradients(optimizer), first, second, strict=True):
        assert_same(grad, sum(parts), "sum")


def test_native_gradients_are_kept_and_clipped(device: str) -> None:
    """A native gradient is unscaled and clipped in place, and accumulates even so."""
    param = torch.nn.Parameter(torch.zeros(4, device=device))
    optimizer = wrap(torch.optim.SGD([param], lr=1.0))
    slope = torch.full((4,), 2.0, device=device)
    optimizer.backward((param * slope).sum())
    # 4 is the norm: a quarter stays, but for what the formula adds to it.
    optimizer.clip_master_grads(1.0)
    torch.testing.assert_close(param.grad, slope / 4, rtol=1e-6, atol=0)
    optimizer.backward((param * slope).sum())
    torch.testing.assert_close(param.grad, 2 * slope, rtol=1e-6, atol=0)
    optimizer.step()
    torch.testing.assert_close(param.detach(), -2 * slope, rtol=1e-6, atol=0)
    pointer = param.grad.data_ptr()
    optimizer.zero_grad(set_to_none=False)
    assert param.grad.data_ptr() == pointer and not param.grad.any()
    optimizer.backward((param * slope).sum())
    assert_same(param.grad, slope, "after zeroing")


# Checkpoints.


@pytest.mark.parametrize("name", CHECKPOINTED)
@pytest.mark.parametrize("way", ["here_to_here", "here_to_cpu", "cpu_to_here"])
def test_checkpoints_move_between_devices(
    way: str, name: str, device: str, cpu_twins: dict[str, Any]
) -> None:
    twin = cpu_twins[name]
    if way == "here_to_cpu":
        got = twin["resumed"]
    elif way == "cpu_to_here":
        got = Run(name, device).load(twin["checkpoint"]).go(MIDDLE).result()
    else:
        checkpoint = Run(name, device).go(0, MIDDLE).checkpoint()
        got = Run(name, device).load(checkpoint).go(MIDDLE).result()
    ulps = RULES[name].ulps if CUDA else 0
    assert_near(got, twin["result"], ulps, way)


def test_saving_changes_nothing(device: str) -> None:
    run, twin = Run("AdamW", device).go(0, 5), Run("AdamW", device).go(0, 5)
    run.optimizer.state_dict()
    assert_same(run.go(5).result(), twin.go(5).result())


# Steps that the host decides on.


class Recording(DynamicLossScaler):
    """A scaler with something of its own, so the host has to run it."""

    def update_scale(self, overflow: bool) -> None:
        super().update_scale(overflow)
        self.seen = [*getattr(self, "seen", []), overflow]


class Foreign:
    """A scaler that is none of ours."""

    loss_scale = 8.0

    def update_scale(self, overflow: bool) -> None:
        self.loss_scale = self.loss_scale / 2 if overflow else self.loss_scale


@pytest.mark.parametrize("kind", [Recording, Foreign], ids=lambda kind: kind.__name__)
def test_scalers_of_users_are_run_by_the_host(kind: type, device: str) -> None:
    params = parameters(device)
    optimizer = wrap(torch.optim.SGD(params, lr=0.25, momentum=0.5))
    iterate(optimizer, params, 1)
    scaler = kind(init_scale=64.0) if kind is Recording else kind()
    start = scaler.loss_scale
    optimizer.loss_scaler = scaler
    for i in range(5):
        iterate(optimizer, params, i, PLANTED.get(i))
    assert optimizer.loss_scale == scaler.loss_scale == start / 8
    assert (optimizer.steps_applied, optimizer.steps_skipped) == (3, 3)
    if kind is Recording:
        assert scaler.seen == [i in PLANTED for i in range(5)]
    # And back to the device.
    optimizer.loss_scaler = LossScaler(4.0)
    iterate(optimizer, params, 5, (0, INF))
    iterate(optimizer, params, 6)
    assert (optimizer.steps_applied, optimizer.steps_skipped) == (4, 4)


@pytest.mark.parametrize("when", ["pre", "post"])
def test_hooks_of_the_wrapped_optimizer_run_on_applied_steps(
    when: str, device: str
) -> None:
    params = parameters(device)
    inner = torch.optim.SGD(params, lr=0.25)
    optimizer = wrap(inner)
    calls: list[int] = []
    register = getattr(inner, f"register_step_{when}_hook")
    handle = register(lambda *_: calls.append(1))
    seen = []
    for i in range(6):
        iterate(optimizer, params, i, PLANTED.get(i))
        seen.append(len(calls))
    assert seen == [0, 1, 2, 2, 2, 3]
    handle.remove()
    iterate(optimizer, params, 6)
    assert len(calls) == 3
    assert (optimizer.steps_applied, optimizer.steps_skipped) == (4, 3)


def test_hooks_of_the_wrapper_run_always_and_do_not_wait(device: str) -> None:
    run = Run("SGD", device).go(0, 2)
    calls: list[int] = []
    run.optimizer.register_step_post_hook(lambda *_: calls.append(1))
    given = prepared(run.params, range(2, 5))
    with waits(device, 0):
        for slopes_ in given:
            iterate_prepared(run.optimizer, run.params, slopes_)
    assert len(calls) == 3


def test_schedulers_hear_of_every_step(device: str) -> None:
    params = parameters(device)
    optimizer = wrap(torch.optim.SGD(params, lr=0.25))
    scheduler = StepLR(optimizer, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(4):
            iterate(optimizer, params, i, PLANTED.get(i))
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.25 / 100)


@pytest.mark.parametrize("by_rule", [True, False], ids=["SGD", "LBFGS"])
def test_closures(by_rule: bool, device: str) -> None:
    target = torch.tensor([1.0, -2.0, 3.0, 0.5], device=device)
    param = torch.nn.Parameter(torch.zeros(4, dtype=torch.float16, device=device))
    inner: Any
    if by_rule:
        inner = torch.optim.SGD([param], lr=0.5)
    else:
        inner = torch.optim.LBFGS([param], lr=1.0, max_iter=4)
    # The first evaluations overflow in float16.
    optimizer = wrap(inner, dynamic_loss_args={"init_scale": 2.0**16})
    iterate(optimizer, [param], 1, (0, INF)) if by_rule else None

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = ((param.float() - target) ** 2).sum() / 2
        optimizer.backward(loss)
        return loss

    losses = [optimizer.step(closure).item() for _ in range(4)]
    assert losses[0] == pytest.approx(7.125) and losses[-1] < 0.2
    assert optimizer.steps_applied == 4 and not optimizer.overflow
    assert optimizer.loss_scale < 2.0**16
    torch.testing.assert_close(masters(optimizer)[0], target, rtol=0, atol=0.25)


def test_sparse_gradients_are_left_to_the_wrapped_optimizer(device: str) -> None:
    table = torch.nn.Parameter(torch.ones(5, 3, dtype=torch.float16, device=device))
    optimizer = wrap(torch.optim.SGD([table], lr=0.5))
    rows = torch.tensor([1, 3, 1], device=device)
    for factor in (INF, 1.0):
        optimizer.zero_grad(set_to_none=True)
        looked_up = torch.nn.functional.embedding(rows, table, sparse=True)
        optimizer.backward(looked_up.float().sum() * factor)
        optimizer.step()
        assert optimizer.overflow is (factor == INF)
    assert optimizer.step_mode.startswith("generic (a sparse gradient")
    want = torch.ones(5, 3)
    want[1], want[3] = 0.0, 0.5
    assert_same(table.detach().cpu(), want.half(), "table")


def test_weights_written_by_others_are_adopted(device: str) -> None:
    run = Run("plain_SGD", device).go(1, 3)
    master = masters(run.optimizer)[1]
    before = master.detach().clone()
    with torch.no_grad():
        run.params[1][3] = 5.0
    run.optimizer.zero_grad()
    run.optimizer.backward(loss_of(run.params, exact_slopes(run.params, 1)))
    run.optimizer.step()
    before[3] = 5.0
    want = before - 0.25 * exact_slopes(run.params, 1)[1]
    assert_same(master.detach(), want, "master")


# Graphs.


@needs_emulation
@pytest.mark.parametrize("norm", [None, 2.0], ids=["no_clip", "clip"])
@both_modes
@every_rule
def test_an_iteration_can_be_recorded(
    name: str, lean: bool, norm: float | None, device: str
) -> None:
    """The emulated device runs what is recorded, and refuses to be read."""
    run, twin = Run(name, device, lean).go(1, 3), Run(name, device, lean).go(1, 3)
    given = prepared(run.params, range(2, 6))
    try:
        for slopes_ in given:
            iterate_prepared(twin.optimizer, twin.params, slopes_, norm)
            with waits(device, 0):
                EMULATION.fp16core_on_host_set_capturing(1)
                iterate_prepared(run.optimizer, run.params, slopes_, norm)
                EMULATION.fp16core_on_host_set_capturing(0)
    finally:
        EMULATION.fp16core_on_host_set_capturing(0)
    assert run.optimizer.steps_skipped == 2
    assert_same(run.result(), twin.result())


@needs_emulation
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_first_step_cannot_be_recorded(dynamic: bool, device: str) -> None:
    params = parameters(device)
    optimizer = wrap(torch.optim.SGD(params, lr=0.25), dynamic_loss_scale=dynamic)
    try:
        EMULATION.fp16core_on_host_set_capturing(1)
        with pytest.raises(
            RuntimeError, match="a step must have run before one is captured"
        ):
            iterate(optimizer, params, 1)
    finally:
        EMULATION.fp16core_on_host_set_capturing(0)


@needs_emulation
def test_nothing_is_asked_while_a_graph_is_recorded(device: str) -> None:
    run = Run("SGD", device).go(1, 3)
    EMULATION.fp16core_on_host_set_capturing(1)
    try:
        with pytest.raises(RuntimeError, match="while a CUDA graph is captured"):
            _ = run.optimizer.steps_applied
    finally:
        EMULATION.fp16core_on_host_set_capturing(0)
    assert run.optimizer.steps_applied == 2


def captured(run: Run, static: list[torch.Tensor], drop: bool) -> torch.cuda.CUDAGraph:
    """Warm up as torch asks for, and capture one iteration over static slopes."""
    optimizer, params = run.optimizer, run.params

    def iteration() -> None:
        optimizer.zero_grad(set_to_none=drop)
        optimizer.backward(loss_of(params, static))
        optimizer.clip_master_grads(50.0)
        optimizer.step()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            iteration()
    torch.cuda.current_stream().wait_stream(stream)
    if drop:
        optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        iteration()
    return graph


@needs_cuda
@pytest.mark.parametrize("drop", [True, False], ids=["dropped", "kept"])
@both_modes
@every_rule
def test_a_graph_replays_whole_iterations(
    name: str, lean: bool, drop: bool, device: str
) -> None:
    run, twin = Run(name, device, lean), Run(name, device, lean)
    static = slopes(run.params, 100)
    graph = captured(run, static, drop)
    for _ in range(3):
        twin.optimizer.zero_grad(set_to_none=drop)
        twin.optimizer.backward(loss_of(twin.params, static))
        twin.optimizer.clip_master_grads(50.0)
        twin.optimizer.step()
    # The scales of a graph move on after its capture, which ran nothing.
    assert run.optimizer.loss_scale == twin.optimizer.loss_scale
    planted = {2: (0, INF), 3: (1, NAN), 9: (4, -INF), 15: (5, NAN)}
    for i in range(20):
        given = slopes(run.params, i, planted.get(i))
        for old, new in zip(static, given, strict=True):
            old.copy_(new)
        graph.replay()
        twin.optimizer.zero_grad(set_to_none=drop)
        twin.optimizer.backward(loss_of(twin.params, given))
        twin.optimizer.clip_master_grads(50.0)
        twin.optimizer.step()
        assert run.optimizer.overflow is (i in planted)
        assert run.optimizer.loss_scale == twin.optimizer.loss_scale
    got = run.result()
    assert (got["applied"], got["skipped"]) == (19, 4)
    assert_same(got, twin.result())
    # And on without the graph.
    iterate(run.optimizer, run.params, 51)
    iterate(twin.optimizer, twin.params, 51)
    assert_same(run.result(), twin.result())


@needs_cuda
def test_a_graph_needs_a_step_before(device: str) -> None:
    run = Run("SGD", device)
    static = slopes(run.params, 1)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # torch's own warm-up, without a step
        run.optimizer.backward(loss_of(run.params, static))
        run.optimizer.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="a step must have run before one is"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            run.optimizer.backward(loss_of(run.params, static))
            run.optimizer.step()


# Devices and streams.


@needs_cuda
@some_rules
def test_parameters_on_two_kinds_of_devices(
    name: str, device: str, cpu_twins: dict[str, Any]
) -> None:
    run = Run(name, device)
    # Rebuilt with every second parameter on the host.
    run.params = [
        torch.nn.Parameter(p.detach().cpu()) if i % 2 else p
        for i, p in enumerate(parameters(device))
    ]
    run.optimizer = wrap(RULES[name](run.params))
    got = run.go().result()
    assert_near(got, cpu_twins[name]["result"], RULES[name].ulps, name)


@needs_cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@some_rules
def test_parameters_on_two_gpus(name: str, cpu_twins: dict[str, Any]) -> None:
    run = Run(name, "cuda:0")
    run.params = [
        torch.nn.Parameter(p.detach().to(f"cuda:{i % 2}"))
        for i, p in enumerate(parameters("cpu"))
    ]
    run.optimizer = wrap(RULES[name](run.params))
    got = run.go().result()
    assert_near(got, cpu_twins[name]["result"], RULES[name].ulps, name)


@needs_cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_current_gpu_may_be_another(device: str) -> None:
    run, twin = Run("AdamW", "cuda:1"), Run("AdamW", "cuda:1")
    with torch.cuda.device(1):
        twin.go()
    assert torch.cuda.current_device() == 0
    assert_same(run.go().result(), twin.result())


@needs_cuda
@both_modes
def test_streams_are_those_of_the_caller(lean: bool, device: str) -> None:
    """Gradients of a side stream, steps in another one: a wrong stream would be early,
    for the side stream first sleeps."""
    run, twin = Run("AdamW", device, lean), Run("AdamW", device, lean)
    makes, steps = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    for i in range(1, 5):
        given = slopes(run.params, i, PLANTED.get(i))
        torch.cuda.synchronize()
        makes.wait_stream(steps)
        with torch.cuda.stream(makes):
            torch.cuda._sleep(20_000_000)
            run.optimizer.zero_grad(set_to_none=True)
            loss = run.optimizer.scale_loss(loss_of(run.params, given))
            loss.backward()
        steps.wait_stream(makes)
        with torch.cuda.stream(steps):
            run.optimizer.update_master_grads()
            run.optimizer.clip_master_grads(1.0)
            run.optimizer.step()
        twin.optimizer.zero_grad(set_to_none=True)
        twin.optimizer.backward(loss_of(twin.params, given))
        twin.optimizer.clip_master_grads(1.0)
        twin.optimizer.step()
    torch.cuda.synchronize()
    assert_same(run.result(), twin.result())


@needs_cuda
@pytest.mark.slow
@both_modes
def test_more_elements_than_32_bits_count(lean: bool, device: str) -> None:
    needed = 40 * 2**30
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    if free < needed:
        pytest.skip(f"needs 40 GiB of free memory, {free >> 30} GiB are there")
    count = 2**31 + 17
    places = [0, 2**31 - 1, 2**31, count - 1]
    param = torch.nn.Parameter(torch.zeros(count, dtype=torch.bfloat16, device=device))
    optimizer = wrap(
        torch.optim.SGD([param], lr=1.0),
        dynamic_loss_args={"init_scale": 4.0},
        materialize_master_grads=not lean,
    )
    param.grad = torch.zeros_like(param)
    with torch.no_grad():
        for i, place in enumerate(places):
            param.grad[place] = -(2.0**i) * 4
    optimizer.update_master_grads()
    norm = optimizer.clip_master_grads(INF)
    assert norm.item() == pytest.approx(math.sqrt(1 + 4 + 16 + 64), rel=2.0**-23)
    optimizer.step()
    (master,) = masters(optimizer)
    for weights in (master.detach(), param.detach()):
        assert [weights[place].item() for place in places] == [1.0, 2.0, 4.0, 8.0]
        assert int(torch.count_nonzero(weights)) == len(places)
    with torch.no_grad():
        param.grad[-1] = NAN
    optimizer.update_master_grads()
    optimizer.step()
    (found,) = optimizer.gradient_report().tensors
    assert (found.inf_count, found.nan_count) == (0, 1)
    assert (optimizer.steps_applied, optimizer.steps_skipped) == (1, 1)
    assert master[-1].item() == 8.0
