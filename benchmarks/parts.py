"""Times the parts of an iteration: the pass that takes the gradients, the pass that
writes the model, and all but the inner step."""

import ctypes
import gc
from functools import partial

from inner import ADAMW
from iteration import LARGE
from lineup import GENERIC, LINEUP, LOOPS, PARTS, PARTS_LOOP_CLIP
from passes import SCALE, TAKE, WRITE, bytes_per_element, zero
from rows import Case, Row, bare, compare
from scratch import Scratch
from tensors import TensorSet
from timing import Effort, Task, time_in_turn

TAKING = "check+unscale"
WRITING = "masters to model"
REST = "iteration, no inner step"

PLANS = {
    TAKING: [TAKE],
    WRITING: [WRITE],
    REST: [TAKE, SCALE, WRITE, zero("gradient", "master gradient")],
}


def measure(
    tensors: TensorSet, threads: int, effort: Effort, library: ctypes.CDLL
) -> list[Row]:
    """Times those contestants that do the parts one after the other."""
    gc.collect()
    contestants = {
        name: LINEUP[name].build(tensors, ADAMW)
        for name in (LOOPS, PARTS, PARTS_LOOP_CLIP, GENERIC)
    }
    given = tensors.gradients(LARGE)
    for contestant in contestants.values():
        # The inner step is left out by itself, since it takes most of the whole, and
        # a difference would be mostly its noise.
        contestant.inner.step = lambda: None
        contestant.backward(given)
        contestant.take()

    rows = []
    for task, plan in PLANS.items():
        tasks = {}
        for name, contestant in contestants.items():
            if task == REST:
                tasks[name] = Task(
                    contestant.finish_iteration, partial(contestant.backward, given)
                )
            elif name != PARTS_LOOP_CLIP:
                run = contestant.take if task == TAKING else contestant.write_model
                tasks[name] = Task(run)
        scratch = Scratch(tensors, plan, library)
        scratch.check()
        run = scratch.prepare_all()
        tasks[bare(task)] = (
            Task(run, partial(scratch.backward, given)) if task == REST else Task(run)
        )
        case = Case(tensors, ADAMW, threads, task)
        moved = dict.fromkeys(tasks, bytes_per_element(plan))
        bare_of = dict.fromkeys(contestants, bare(task))
        rows += compare(case, time_in_turn(tasks, effort), moved, bare_of)
    return rows
