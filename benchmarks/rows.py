"""What is known of each contestant after a task."""

from collections.abc import Mapping
from dataclasses import dataclass

from inner import Inner
from lineup import LOOPS, PARTS, PARTS_LOOP_CLIP
from tensors import TensorSet
from timing import Timing

COPY = "copy"
# A copy of fp32 elements.
COPY_BYTES = 8


@dataclass(frozen=True)
class Case:
    """Under which circumstances a task is timed."""

    tensors: TensorSet
    inner: Inner
    threads: int
    task: str


@dataclass(frozen=True)
class Row:
    """How one contestant, or a bare pass, did one task.

    ``to_bare`` is its time as a multiple of that of its bare pass. The last two say
    how many times faster it is than the original's loops, and than the fastest of
    torch's parts.
    """

    tensors: str
    inner: str
    threads: int
    task: str
    contestant: str
    rounds: int
    seconds: float
    quartiles: tuple[float, float]
    bytes_per_element: int
    bytes_per_second: float
    to_bare: float | None
    over_loops: float
    over_parts: float


def bare(moves: str) -> str:
    """Returns the name of the bare pass for what is moved."""
    return f"bare pass, {moves}"


def compare(
    case: Case,
    timings: Mapping[str, Timing],
    moved: Mapping[str, int],
    bare_of: Mapping[str, str],
) -> list[Row]:
    """Returns a row for each timing. ``moved`` has the bytes that it moves for an
    element, ``bare_of`` the name of the bare pass that it is measured against."""
    loops = timings[LOOPS].median
    parts = min(timings[n].median for n in (PARTS, PARTS_LOOP_CLIP) if n in timings)
    rows = []
    for name, timing in timings.items():
        own_bare = timings.get(bare_of.get(name, ""))
        rows.append(
            Row(
                tensors=case.tensors.name,
                inner=case.inner.name,
                threads=case.threads,
                task=case.task,
                contestant=name,
                rounds=timing.rounds,
                seconds=timing.median,
                quartiles=timing.quartiles,
                bytes_per_element=moved[name],
                bytes_per_second=moved[name] * case.tensors.elements / timing.median,
                to_bare=timing.median / own_bare.median if own_bare else None,
                over_loops=loops / timing.median,
                over_parts=parts / timing.median,
            )
        )
    return rows
