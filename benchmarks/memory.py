"""Measures the memory that contestants take, and that wrapping takes."""

import multiprocessing
import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from contestant import Contestant
from inner import ADAMW, INNERS
from lineup import LINEUP
from tensors import SCALE, TensorSet, small_set
from torch.nn import Parameter
from torch.profiler import ProfilerActivity, profile

from fp16core import FP16_Optimizer


@dataclass(frozen=True)
class Memory:
    """Bytes for an element that a contestant takes with its model and gradients: that
    torch's allocator holds after an iteration, that it held at the peak, and that the
    process had resident at the peak."""

    inner: str
    contestant: str
    held: float
    peak: float
    resident: float | None


@dataclass(frozen=True)
class WrappingMemory:
    """Bytes for each half element that stay, and bytes that the peak lies above that,
    in all and in units of the largest master."""

    bytes_per_element: float
    peak_above_bytes: int
    peak_above_masters: float


def measure(tensors: TensorSet) -> list[Memory]:
    """Measures every contestant with every inner optimizer in a fresh process."""
    # A server that has loaded torch, with what it loads when an optimizer is made, and
    # has run nothing forks the processes.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch._dynamo", "fp16core"])
    cases = [(tensors, inner, name) for inner in INNERS for name in LINEUP]
    with context.Pool(1, maxtasksperchild=1) as pool:
        return pool.starmap(measure_contestant, cases, chunksize=1)


def measure_contestant(tensors: TensorSet, inner: str, name: str) -> Memory:
    """Measures a contestant in this process."""

    def train(tensors: TensorSet) -> Contestant:
        contestant = LINEUP[name].build(tensors, INNERS[inner])
        for _ in range(2):
            contestant.fill_gradients(SCALE)
            contestant.finish_iteration()
        return contestant

    # Loads what is loaded at first use.
    train(small_set(2))
    before = resident("VmRSS")
    train(tensors)
    after = resident("VmHWM")
    held, peak = allocated(lambda: train(tensors))
    return Memory(
        inner=inner,
        contestant=name,
        held=held / tensors.elements,
        peak=peak / tensors.elements,
        resident=(after - before) / tensors.elements if before else None,
    )


def measure_wrapping(tensors: TensorSet) -> WrappingMemory:
    """Wraps a fresh AdamW over the parameters of ``tensors``."""
    weights = [Parameter(weight) for weight in tensors.weights()]
    inner = ADAMW.build(weights)
    held, peak = allocated(lambda: FP16_Optimizer(inner, verbose=False))
    largest_master = 4 * max(weight.numel() for weight in weights)
    return WrappingMemory(
        held / tensors.elements, peak - held, (peak - held) / largest_master
    )


def allocated(make: Callable[[], object]) -> tuple[int, int]:
    """Returns the bytes that torch's allocator holds for what ``make`` makes, and the
    most that it held meanwhile."""
    # Keeps the profiler from writing to the terminal.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        made = make()
    # The public view of the record adds memory up by operation, which hides the peak.
    changes = [
        event.nbytes()
        for event in sorted(
            record.profiler.kineto_results.events(), key=lambda event: event.start_ns()
        )
        if event.name() == "[memory]"
    ]
    del made
    return sum(changes), max(accumulate(changes, initial=0))


def resident(key: str) -> int:
    """Returns the bytes of memory that the kernel reports for this process under
    ``key``; 0 where it reports none."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    kilobytes = [line.split()[1] for line in lines if line.startswith(f"{key}:")]
    return 1024 * int(kilobytes[0]) if kilobytes else 0
