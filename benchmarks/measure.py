"""Measures one set of tensors: every pass by every contestant, timed in turn."""

import ctypes
from dataclasses import dataclass

import bare_pass
import torch
from agreement import check_bare_pass, check_clipping, check_iteration
from contestants import Contestant, OriginalLoops, Ours, TorchLists
from tensors import TensorSet
from timing import Task, Timing, time_in_turn
from torch import Tensor

TAKE = "check+unscale"
WRITE = "masters to model"
STEP = "whole step"
REST = "step, no inner"

LOOPS = "original loops"
LISTS = "torch lists"
LISTS_LOOP_CLIP = "torch lists, loop clip"
OURS = "fp16core"
BARE = "bare pass"
INNER = "inner step alone"
LOOPS_DEFAULT = "loops, default AdamW"
INNER_DEFAULT = "default AdamW alone"

# Bytes that have to be moved for an element. A whole step zeroes both gradients (6),
# takes them (6), clips (8), runs AdamW (28) and writes the model (6).
INNER_BYTES = 28
BYTES = {TAKE: 6, WRITE: 6, STEP: 54, REST: 54 - INNER_BYTES}

# Standard deviations of gradients that are clipped, and of gradients that are not.
LARGE, TINY = 0.05, 1e-5


@dataclass(frozen=True)
class Row:
    """How one contestant did one task. The ratios are of times, the last to the
    fastest of torch's list operations."""

    tensors: str
    task: str
    contestant: str
    seconds: float
    quartiles: tuple[float, float]
    bytes_per_element: int
    bytes_per_second: float
    to_bare: float | None
    to_loops: float
    to_lists: float


def measure(
    tensors: TensorSet, rounds: int, warm_up: int, passes: ctypes.CDLL
) -> list[Row]:
    """Asserts that the contestants agree, times them, and returns the rows."""
    tiny, large = tensors.gradients(TINY), tensors.gradients(LARGE)
    loops = OriginalLoops(tensors, tiny, fused=True)
    lists = TorchLists(tensors, tiny, fused=True)
    ours = Ours(tensors, tiny, fused=True)
    loops_default = OriginalLoops(tensors, tiny)
    contestants: dict[str, Contestant] = {LOOPS: loops, LISTS: lists, OURS: ours}
    check_iteration(contestants)
    for contestant in [*contestants.values(), loops_default]:
        contestant.given_gradients = large
    check_clipping(contestants)
    lists.foreach_clip = False
    check_clipping({LISTS_LOOP_CLIP: lists})

    for contestant in contestants.values():
        contestant.put_gradients_back()
    wide = [torch.empty_like(master) for master in lists.masters]
    narrow = [torch.empty_like(gradient) for gradient in large]
    tasks = {name: Task(c.take) for name, c in contestants.items()}
    tasks[BARE] = bare_task(passes.widen, large, wide)
    rows = compare(tensors, TAKE, time_in_turn(tasks, rounds, warm_up))
    tasks = {name: Task(c.write_model) for name, c in contestants.items()}
    tasks[BARE] = bare_task(passes.narrow, wide, narrow)
    rows += compare(tensors, WRITE, time_in_turn(tasks, rounds, warm_up))
    del wide, narrow, tasks

    def prepare_lists(foreach_clip: bool) -> None:
        lists.foreach_clip = foreach_clip
        lists.put_gradients_back()

    def prepare_inner(contestant: Contestant) -> None:
        contestant.put_gradients_back()
        contestant.take()

    timings = time_in_turn(
        {
            LOOPS: Task(loops.finish_iteration, loops.put_gradients_back),
            LISTS: Task(lists.finish_iteration, lambda: prepare_lists(True)),
            LISTS_LOOP_CLIP: Task(lists.finish_iteration, lambda: prepare_lists(False)),
            OURS: Task(ours.finish_iteration, ours.put_gradients_back),
            INNER: Task(lists.inner.step, lambda: prepare_inner(lists)),
            LOOPS_DEFAULT: Task(
                loops_default.finish_iteration, loops_default.put_gradients_back
            ),
            INNER_DEFAULT: Task(
                loops_default.inner.step, lambda: prepare_inner(loops_default)
            ),
        },
        rounds,
        warm_up,
    )
    rows += compare(tensors, STEP, timings)

    # The rest is timed by itself, around an inner step that does nothing: the inner
    # step takes most of the whole, and a difference would be mostly its noise.
    for contestant in (loops, lists, ours):
        contestant.inner.step = lambda: None
    rests = time_in_turn(
        {
            LOOPS: Task(loops.finish_iteration, loops.put_gradients_back),
            LISTS: Task(lists.finish_iteration, lambda: prepare_lists(True)),
            LISTS_LOOP_CLIP: Task(lists.finish_iteration, lambda: prepare_lists(False)),
            OURS: Task(ours.finish_iteration, ours.put_gradients_back),
        },
        rounds,
        warm_up,
    )
    return rows + compare(tensors, REST, rests)


def bare_task(
    function: bare_pass.Pass, sources: list[Tensor], targets: list[Tensor]
) -> Task:
    """Returns a bare pass as a task, after a trial that must move every element."""
    run = bare_pass.prepare(function, sources, targets)
    run()
    check_bare_pass(sources, targets)
    return Task(run)


def compare(tensors: TensorSet, task: str, timings: dict[str, Timing]) -> list[Row]:
    """Returns a row for each timing of one task."""
    bare = timings.get(BARE)
    best_lists = min(
        timing.median
        for name, timing in timings.items()
        if name in (LISTS, LISTS_LOOP_CLIP)
    )
    rows = []
    for name, timing in timings.items():
        moved = INNER_BYTES if name in (INNER, INNER_DEFAULT) else BYTES[task]
        rows.append(
            Row(
                tensors=tensors.name,
                task=task,
                contestant=name,
                seconds=timing.median,
                quartiles=timing.quartiles,
                bytes_per_element=moved,
                bytes_per_second=moved * tensors.elements / timing.median,
                to_bare=timing.median / bare.median if bare else None,
                to_loops=timing.median / timings[LOOPS].median,
                to_lists=timing.median / best_lists,
            )
        )
    return rows
