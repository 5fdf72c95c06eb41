"""What fp16core does to its process: threads, locks, references, memory."""

import gc
import json
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fp16core import FP16_Optimizer, LossScaleError

linux_only = pytest.mark.skipif(
    not Path("/proc/self/maps").exists(), reason="reads /proc, which Linux has"
)


def wrap(*params: torch.Tensor, **kwargs: object) -> FP16_Optimizer:
    inner = torch.optim.SGD(list(params), lr=0.5, momentum=0.5)
    return FP16_Optimizer(inner, verbose=False, **kwargs)  # type: ignore[arg-type]


def python(script: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a process of its own."""
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result


# ---- threads ----


THREADS_SCRIPT = """
import json
import os
import re
import sys
from pathlib import Path

import torch

from fp16core import FP16_Optimizer

compiler = "torch._dynamo" in sys.modules

def started(sizes, threads):
    torch.set_num_threads(1)
    params = [torch.nn.Parameter(torch.ones(n).half()) for n in sizes]
    optimizer = FP16_Optimizer(torch.optim.SGD(params, lr=1.0), verbose=False)
    for p in params:
        p.grad = torch.ones_like(p)
    torch.set_num_threads(threads)
    before = len(os.listdir("/proc/self/task"))
    optimizer.update_master_grads()
    optimizer.step()
    return len(os.listdir("/proc/self/task")) - before

small, large = [100] * 100, [1_000_000]
result = {
    "compiler": compiler,
    "small": started(small, 4),
    "large": [started(large, n) for n in (1, 2, 4)],
}
maps = Path("/proc/self/maps").read_text()
result["runtimes"] = sorted(set(re.findall(r"/.*/lib(?:gomp|iomp|omp).*", maps)))
print(json.dumps(result))
"""


@pytest.fixture(scope="module")
def thread_counts() -> dict[str, Any]:
    return dict(json.loads(python(THREADS_SCRIPT).stdout))


def test_importing_does_not_load_the_compiler_of_torch(
    thread_counts: dict[str, Any],
) -> None:
    # It takes two seconds.
    assert thread_counts["compiler"] is False


@linux_only
def test_one_openmp_runtime(thread_counts: dict[str, Any]) -> None:
    assert len(thread_counts["runtimes"]) == 1


@linux_only
def test_thread_count_is_obeyed(thread_counts: dict[str, Any]) -> None:
    # Threads of an OpenMP pool stay while passes ask for as many or more, so what is
    # new in the process are those beyond what the pass before asked for: 1, 2, 4
    # threads, the calling one among them.
    assert thread_counts["large"] == [0, 1, 2]


@linux_only
def test_small_lists_wake_no_threads(thread_counts: dict[str, Any]) -> None:
    assert thread_counts["small"] == 0


def progress_during(call: Callable[[], object]) -> int:
    """Return how often another thread ran in the middle of `call`."""
    ticks: list[float] = []
    stop = threading.Event()

    def tick() -> None:
        while not stop.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.0005)

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        while not ticks:
            time.sleep(0.001)
        start = time.perf_counter()
        call()
        end = time.perf_counter()
    finally:
        stop.set()
        thread.join()
    # Python may switch threads just before and after the call, not within it.
    margin = 0.1 * (end - start)
    return sum(start + margin < t < end - margin for t in ticks)


@pytest.fixture(scope="module")
def large() -> FP16_Optimizer:
    param = torch.nn.Parameter(torch.zeros(40_000_000, dtype=torch.bfloat16))
    optimizer = wrap(param)
    param.grad = torch.ones_like(param)
    optimizer.update_master_grads()
    return optimizer


@pytest.mark.parametrize(
    "call",
    [
        FP16_Optimizer.update_master_grads,
        lambda optimizer: optimizer.clip_master_grads(1e-3),
        lambda optimizer: optimizer.clip_master_grads(1e30, 1),
        FP16_Optimizer._master_params_to_model_params,
        FP16_Optimizer._model_params_to_master_params,
        FP16_Optimizer.zero_grad,
    ],
    ids=["update", "clip", "norm", "write", "overwrite", "zero"],
)
def test_other_threads_run_meanwhile(
    large: FP16_Optimizer, call: Callable[[FP16_Optimizer], object]
) -> None:
    assert progress_during(lambda: call(large)) > 0


def test_two_optimizers_in_two_threads() -> None:
    def train(seed: int, results: dict[int, torch.Tensor]) -> None:
        generator = torch.Generator().manual_seed(seed)
        param = torch.nn.Parameter(torch.zeros(50_000).half())
        optimizer = wrap(param, static_loss_scale=8.0)
        for _ in range(10):
            param.grad = torch.randn(50_000, generator=generator).half()
            optimizer.update_master_grads()
            optimizer.step()
        results[seed] = param.detach().clone()

    apart: dict[int, torch.Tensor] = {}
    together: dict[int, torch.Tensor] = {}
    for seed in range(4):
        train(seed, apart)
    threads = [threading.Thread(target=train, args=(s, together)) for s in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(apart[seed], together[seed]) for seed in range(4))


# ---- references ----


def everything() -> tuple[FP16_Optimizer, list[torch.nn.Parameter]]:
    """Call whatever might keep a reference."""
    params = [
        torch.nn.Parameter(torch.ones(3, dtype=dtype))
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    ]
    params.append(torch.nn.Parameter(torch.ones(8, 8).half().t()))
    optimizer = wrap(
        *params, dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 4.0}
    )
    for factor in (1.0, 1e30, 1.0):
        optimizer.zero_grad()
        optimizer.backward(sum(p.float().sum() for p in params) * factor)
        optimizer.clip_master_grads(1.0)
        optimizer.gradient_report().first_offender()
        optimizer.step()
    optimizer.inspect_master_grad_data()
    _ = optimizer.fp16_groups, optimizer.fp32_from_fp16_groups
    _ = optimizer.fp32_from_fp32_groups, optimizer.loss_scaler, repr(optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    extra = torch.nn.Parameter(torch.ones(2).half())
    optimizer.add_param_group({"params": [extra]})

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = sum(p.float().sum() for p in params)
        optimizer.backward(loss)
        return loss

    optimizer.step(closure)
    return optimizer, params


def test_optimizer_dies_with_its_last_name() -> None:
    gc.collect()
    gc.disable()
    try:
        optimizer, params = everything()
        watched = [weakref.ref(optimizer), weakref.ref(optimizer.optimizer)]
        masters = [m for group in optimizer.fp32_from_fp16_groups for m in group]
        watched += [weakref.ref(m) for m in masters]
        watched += [weakref.ref(p) for p in params]
        del optimizer, masters, params
        alive = [ref() for ref in watched if ref() is not None]
    finally:
        gc.enable()
    assert alive == []


def test_reference_counts_return_to_what_they_were() -> None:
    param = torch.nn.Parameter(torch.ones(4).half())
    native = torch.nn.Parameter(torch.ones(4))
    before = sys.getrefcount(param), sys.getrefcount(native)
    for _ in range(50):
        optimizer = wrap(param, native)
        for _ in range(3):
            optimizer.zero_grad()
            optimizer.backward(param.float().sum() + native.sum())
            optimizer.step()
        del optimizer
    gc.collect()
    after = sys.getrefcount(param), sys.getrefcount(native)
    assert after == before


def test_steps_keep_no_references() -> None:
    param = torch.nn.Parameter(torch.ones(4).half())
    optimizer = wrap(param)
    (master,) = optimizer.fp32_from_fp16_groups[0]

    def iterate() -> None:
        optimizer.zero_grad()
        optimizer.backward(param.float().sum())
        optimizer.clip_master_grads(1.0)
        optimizer.step()
        optimizer.inspect_master_grad_data()
        optimizer.gradient_report()
        optimizer.state_dict()

    iterate()
    gc.collect()
    before = [sys.getrefcount(x) for x in (param, master, optimizer)]
    for _ in range(50):
        iterate()
    gc.collect()
    after = [sys.getrefcount(x) for x in (param, master, optimizer)]
    assert after == before


def test_replaced_gradients_are_let_go() -> None:
    param = torch.nn.Parameter(torch.ones(4).half())
    optimizer = wrap(param)
    param.grad = torch.ones(4).half()
    gradient = weakref.ref(param.grad.untyped_storage())
    optimizer.update_master_grads()
    optimizer.step()
    param.grad = None
    assert gradient() is None


def test_gradient_report_outlives_the_optimizer() -> None:
    param = torch.nn.Parameter(torch.ones(4).half())
    optimizer = wrap(param)
    optimizer.backward((param.float() * 1e30).sum())
    offender = optimizer.gradient_report().first_offender()
    watched = weakref.ref(optimizer)
    del optimizer
    assert watched() is None
    assert offender.inf_count == 4 and offender.parameter is param


def test_failed_constructions_leave_nothing_behind() -> None:
    param = torch.nn.Parameter(torch.ones(4).half())
    odd = torch.nn.Parameter(torch.ones(4, dtype=torch.complex64))
    inner = torch.optim.SGD([param, odd], lr=0.5)
    before = sys.getrefcount(param), sys.getrefcount(inner)
    for _ in range(20):
        with pytest.raises(TypeError):
            FP16_Optimizer(inner, verbose=False)
    gc.collect()
    assert (sys.getrefcount(param), sys.getrefcount(inner)) == before


def test_errors_keep_nothing_alive() -> None:
    param = torch.nn.Parameter(torch.ones(4).half())
    optimizer = wrap(param, on_min_scale="raise")
    optimizer.backward((param.float() * 1e30).sum())
    with pytest.raises(LossScaleError):
        optimizer.step()
    watched = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert watched() is None


@pytest.mark.parametrize("ending", ["alive", "dead"])
def test_nanobind_reports_no_leaks_at_exit(ending: str) -> None:
    result = python(
        f"""
        import torch
        from fp16core import FP16_Optimizer, LossScaleError

        class Sub(FP16_Optimizer):
            def step(self, closure=None):
                return super().step(closure)

        kept = []
        for cls in (FP16_Optimizer, Sub):
            w = torch.nn.Parameter(torch.ones(3).half())
            b = torch.nn.Parameter(torch.ones(3))
            optimizer = cls(
                torch.optim.Adam([w, b]), static_loss_scale=4.0, verbose=False,
                on_min_scale="raise"
            )
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
            for factor in (1.0, 1e30, 1.0):
                optimizer.zero_grad()
                optimizer.backward(((w.float() + b) * factor).sum())
                report = optimizer.gradient_report()
                offender = report.first_offender()
                try:
                    optimizer.step()
                except LossScaleError as error:
                    kept.append(error)
                schedule.step()
            optimizer.load_state_dict(optimizer.state_dict())
            kept += [report, optimizer.loss_scaler]
        if {ending == "dead"}:
            del kept, w, b, optimizer, schedule, report, offender
        """
    )
    assert "leaked" not in result.stderr


def test_scalers_written_in_python_leak_nothing() -> None:
    # The script's globals hold the optimizers, which hold the scalers, whose methods
    # hold the script's globals.
    result = python(
        """
        import torch
        from fp16core import DynamicLossScaler, FP16_Optimizer

        class Foreign:
            loss_scale = 4.0
            def update_scale(self, overflow):
                pass

        class Sub(DynamicLossScaler):
            def update_scale(self, overflow):
                super().update_scale(overflow)

        def make(scaler):
            w = torch.nn.Parameter(torch.ones(3).half())
            optimizer = FP16_Optimizer(torch.optim.SGD([w], lr=1.0), verbose=False)
            optimizer.loss_scaler = scaler
            optimizer.backward(w.float().sum())
            optimizer.step()
            return optimizer

        foreign, sub = make(Foreign()), make(Sub())
        """
    )
    assert "leaked" not in result.stderr


# ---- memory ----


class Allocations(TorchDispatchMode):
    """Adds up the bytes of the storages that appear in results."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, int] = {}
        self.kept: list[torch.Tensor] = []

    @property
    def total(self) -> int:
        return sum(self.seen.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        known = {
            a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)
        }
        if isinstance(result, torch.Tensor):
            storage = result.untyped_storage()
            if storage.data_ptr() not in known:
                self.kept.append(result)  # so that no address comes twice
                self.seen[storage.data_ptr()] = storage.nbytes()
        return result


def test_wrapping_takes_four_bytes_a_trainable_half_element() -> None:
    half = [torch.nn.Parameter(torch.ones(30, 5).half()) for _ in range(3)]
    half.append(torch.nn.Parameter(torch.ones(8, 4, dtype=torch.bfloat16).t()))
    half.append(torch.nn.Parameter(torch.ones(8, 8).half()[:, ::2]))
    others = [
        torch.nn.Parameter(torch.ones(100)),
        torch.nn.Parameter(torch.ones(100, dtype=torch.float64)),
        torch.nn.Parameter(torch.ones(100).half(), requires_grad=False),
    ]
    inner = torch.optim.AdamW([*half, *others])
    with Allocations() as allocations:
        optimizer = FP16_Optimizer(inner, verbose=False)
    assert allocations.total == 4 * sum(p.numel() for p in half)
    masters = optimizer.fp32_from_fp16_groups[0]
    assert sum(m.untyped_storage().nbytes() for m in masters) == allocations.total


@linux_only
def test_wrapping_peaks_at_no_more_than_one_parameter_above() -> None:
    count, elements = 8, 8_000_000
    result = python(
        f"""
        import re
        from pathlib import Path
        import torch
        from fp16core import FP16_Optimizer

        def peak():
            status = Path("/proc/self/status").read_text()
            return int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1]) * 1024

        params = [
            torch.nn.Parameter(torch.zeros({elements}, dtype=torch.bfloat16))
            for _ in range({count})
        ]
        inner = torch.optim.AdamW(params)
        small = torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
        FP16_Optimizer(torch.optim.AdamW([small]), verbose=False)  # loads what it needs
        before = peak()
        optimizer = FP16_Optimizer(inner, verbose=False)
        print(peak() - before)
        """
    )
    masters, one = 4 * count * elements, 4 * elements
    # The allocator and the kernel round to pages: a few for each parameter.
    slack = count * 64 * 1024
    grown = int(result.stdout)
    assert masters - slack <= grown <= masters + one + slack
