"""Describes the machine that the numbers come from."""

import os
import platform
from pathlib import Path
from time import perf_counter

import torch

from fp16core import __version__, _core


def describe() -> dict[str, str | int | float]:
    """Returns what the numbers depend on."""
    return {
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
        "torch": torch.__version__,
        "torch capability": torch.backends.cpu.get_cpu_capability(),
        "fp16core": __version__,
        "fp16core capability": _core.cpu_capability(),
    }


def processor() -> str:
    """Returns the name of the processor."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def copy_bandwidth(elements: int, rounds: int = 10) -> float:
    """Returns the bytes read and written in a second by the best of several copies
    of ``elements`` fp32 values."""
    source = torch.ones(elements)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(rounds):
        start = perf_counter()
        target.copy_(source)
        best = min(best, perf_counter() - start)
    return 2 * source.nbytes / best
