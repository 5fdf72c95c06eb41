"""Describes the machine that the numbers come from."""

import os
import platform
from collections.abc import Sequence
from pathlib import Path

import torch

from fp16core import __version__, _core


def describe(threads: Sequence[int]) -> dict[str, str | int | float]:
    """Returns what the numbers depend on; ``threads`` are those that are measured."""
    return {
        "processor": processor(),
        "threads": ", ".join(map(str, threads)),
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
