"""Times lean iterations of AdamW over sizes that grow."""

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from inner import ADAMW
from lineup import LEAN, LINEUP
from tensors import SCALE, TensorSet
from timing import Effort, Task, time_in_turn


@dataclass(frozen=True)
class Size:
    """The time of an iteration at one size."""

    elements: int
    rounds: int
    seconds: float
    quartiles: tuple[float, float]
    nanoseconds_per_element: float


def measure(sets: Sequence[TensorSet], effort: Effort) -> list[Size]:
    """Times all sizes in turn, so that none finds its tensors in the caches."""
    gc.collect()
    tasks = {}
    for tensors in sets:
        contestant = LINEUP[LEAN].build(tensors, ADAMW)
        tasks[tensors.name] = Task(
            contestant.finish_iteration, partial(contestant.fill_gradients, SCALE)
        )
    timings = time_in_turn(tasks, effort)
    return [
        Size(
            elements=tensors.elements,
            rounds=timings[tensors.name].rounds,
            seconds=timings[tensors.name].median,
            quartiles=timings[tensors.name].quartiles,
            nanoseconds_per_element=timings[tensors.name].median
            / tensors.elements
            * 1e9,
        )
        for tensors in sets
    ]
