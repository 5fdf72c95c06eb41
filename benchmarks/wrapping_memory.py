"""Measures the memory that wrapping takes, as torch's allocator sees it."""

import os
from dataclasses import dataclass
from itertools import accumulate

from tensors import TensorSet
from torch.nn import Parameter
from torch.optim import AdamW
from torch.profiler import ProfilerActivity, profile

from fp16core import FP16_Optimizer


@dataclass(frozen=True)
class WrappingMemory:
    """Bytes for each half element that stay, and bytes that the peak lies above that,
    in all and in units of the largest master."""

    bytes_per_element: float
    peak_above_bytes: int
    peak_above_masters: float


def measure(tensors: TensorSet) -> WrappingMemory:
    """Wraps a fresh AdamW over the parameters of ``tensors``."""
    weights = tensors.weights()
    inner = AdamW([Parameter(weight) for weight in weights])
    # Keeps the profiler from writing to the terminal.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        optimizer = FP16_Optimizer(inner, verbose=False)
    # The public view of the record adds memory up by operation, which hides the peak.
    changes = [
        event.nbytes()
        for event in sorted(
            record.profiler.kineto_results.events(), key=lambda event: event.start_ns()
        )
        if event.name() == "[memory]"
    ]
    del optimizer
    total = sum(changes)
    peak = max(accumulate(changes, initial=0))
    largest_master = 4 * max(weight.numel() for weight in weights)
    return WrappingMemory(
        total / tensors.elements, peak - total, (peak - total) / largest_master
    )
