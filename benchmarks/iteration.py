"""Times whole iterations: everything between a backward pass and the next forward
pass, by every contestant and by bare passes."""

import ctypes
import gc
from collections.abc import Callable, Sequence
from functools import partial

import torch
from agreement import check_iteration, expect
from inner import Inner
from lineup import LINEUP
from passes import bytes_per_element, iteration
from rows import COPY, COPY_BYTES, Case, Row, bare, compare
from scratch import Scratch
from tensors import TensorSet
from timing import Effort, Task, time_in_turn

ITERATION = "iteration"

# Standard deviations of gradients that are clipped, and of gradients that are not.
LARGE, TINY = 0.05, 1e-5


def measure(
    tensors: TensorSet,
    inner: Inner,
    threads: Sequence[int],
    effort: Callable[[Case], Effort],
    library: ctypes.CDLL,
) -> list[Row]:
    """Asserts that the contestants agree, times them with each number of threads, and
    returns the rows."""
    gc.collect()
    contestants = {
        name: entrant.build(tensors, inner) for name, entrant in LINEUP.items()
    }
    exact = [name for name, entrant in LINEUP.items() if entrant.exact]
    check_iteration(contestants, tensors.gradients(TINY), exact)
    given = tensors.gradients(LARGE)
    check_iteration(contestants, given)
    for name, contestant in contestants.items():
        wanted = LINEUP[name].moves in ("fused", "lean")
        one_pass = contestant.steps_in_one_pass()
        expect(one_pass == wanted, name, "the step is of another mode")

    plans = iteration(inner)
    scratches = {
        moves: Scratch(tensors, plan, library) for moves, plan in plans.items()
    }
    copied = torch.ones(tensors.elements)
    copy = torch.empty_like(copied)
    moved = {COPY: COPY_BYTES}
    bare_of = {}
    for name, entrant in LINEUP.items():
        moved[name] = bytes_per_element(plans[entrant.moves])
        bare_of[name] = bare(entrant.moves)
    moved |= {bare(moves): bytes_per_element(plan) for moves, plan in plans.items()}

    torch.set_num_threads(max(threads))
    for scratch in scratches.values():
        scratch.check()
    rows = []
    for count in threads:
        torch.set_num_threads(count)
        tasks = {
            name: Task(c.finish_iteration, partial(c.backward, given))
            for name, c in contestants.items()
        }
        for moves, scratch in scratches.items():
            backward = partial(scratch.backward, given)
            tasks[bare(moves)] = Task(scratch.prepare_all(), backward)
        tasks[COPY] = Task(partial(copy.copy_, copied))
        case = Case(tensors, inner, count, ITERATION)
        rows += compare(case, time_in_turn(tasks, effort(case)), moved, bare_of)
    return rows
