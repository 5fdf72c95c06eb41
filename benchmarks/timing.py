"""Times functions in turn and sums their times up as a median with quartiles."""

import ctypes
import gc
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from statistics import quantiles
from time import perf_counter


@dataclass(frozen=True)
class Timing:
    """Seconds, over a number of rounds."""

    median: float
    quartiles: tuple[float, float]
    rounds: int


@dataclass(frozen=True)
class Effort:
    """How long to go on: as many rounds as fit into ``seconds``, and not fewer than
    ``rounds``."""

    seconds: float
    rounds: int


@dataclass(frozen=True)
class Task:
    """A function to time, and what to run before each time, off the clock."""

    run: Callable[[], object]
    prepare: Callable[[], object] = lambda: None


def time_in_turn(tasks: Mapping[str, Task], effort: Effort) -> dict[str, Timing]:
    """Runs every task once a round, so that whatever disturbs the machine meets all
    of them, and returns their timings. The first round does not count."""
    # The order changes: on a shared machine whoever comes last in a round may be
    # throttled for the work of the others.
    order = list(tasks)
    shuffle = random.Random(0).shuffle
    seconds: dict[str, list[float]] = {name: [] for name in tasks}
    gc.disable()
    try:
        end = perf_counter() + effort.seconds
        for round_ in count():
            if round_ > effort.rounds and perf_counter() > end:
                break
            shuffle(order)
            for name in order:
                task = tasks[name]
                task.prepare()
                start = perf_counter()
                task.run()
                elapsed = perf_counter() - start
                if round_ > 0:
                    seconds[name].append(elapsed)
    finally:
        gc.enable()
    return {name: summary(times) for name, times in seconds.items()}


def summary(seconds: list[float]) -> Timing:
    """Returns the median and the quartiles of at least one time."""
    if len(seconds) == 1:
        return Timing(seconds[0], (seconds[0], seconds[0]), 1)
    low, median, high = quantiles(seconds, n=4, method="inclusive")
    return Timing(median, (low, high), len(seconds))


def keep_freed_memory() -> None:
    """Tells glibc's allocator to keep what is freed, for the rest of the process.

    Otherwise it depends on the run whether temporary tensors are mapped anew each
    time. That is costly for the loops of the original, which make one for every
    gradient, so they are measured in the faster of their two modes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    trim_threshold, mmap_max = -1, -4
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(mmap_max, 0)
