"""The figures that are wanted."""

from collections.abc import Sequence
from dataclasses import dataclass

from growth import Size
from inner import ADAMW
from iteration import ITERATION
from lineup import FUSED, GENERIC, LEAN, LOOPS, PARTS, PARTS_LOOP_CLIP
from memory import Memory, WrappingMemory
from parts import REST, TAKING, WRITING
from rows import Row, bare


@dataclass(frozen=True)
class Wanted:
    """A figure with its limit."""

    text: str
    value: float
    limit: float
    at_most: bool

    @property
    def met(self) -> bool:
        return self.value <= self.limit if self.at_most else self.value >= self.limit

    def __str__(self) -> str:
        relation = "at most" if self.at_most else "at least"
        verdict = "met" if self.met else "not met"
        return f"{verdict:8} {self.text}: {self.value:.2f}, {relation} {self.limit:g}"


def wanted(
    rows: Sequence[Row],
    sizes: Sequence[Size],
    memory: Sequence[Memory],
    wrapping: WrappingMemory,
) -> list[Wanted]:
    """Returns the figures, all with AdamW and the most threads."""
    threads = max(row.threads for row in rows)

    def seconds(tensors: str, task: str, *contestants: str) -> float:
        return min(
            row.seconds
            for row in rows
            if (row.tensors, row.inner, row.threads) == (tensors, ADAMW.name, threads)
            and row.task == task
            and row.contestant in contestants
        )

    def iteration(tensors: str, *contestants: str) -> float:
        return seconds(tensors, ITERATION, *contestants)

    parts = (PARTS, PARTS_LOOP_CLIP)
    lean = iteration("GPT", LEAN)
    fused = iteration("GPT", FUSED)
    small = iteration("small", FUSED)
    take, write = (seconds("GPT", task, GENERIC) for task in (TAKING, WRITING))
    held = next(m for m in memory if (m.inner, m.contestant) == (ADAMW.name, LEAN))
    growth = sizes[-1].nanoseconds_per_element / sizes[0].nanoseconds_per_element

    def at_most(text: str, value: float, limit: float) -> Wanted:
        return Wanted(text, value, limit, at_most=True)

    def at_least(text: str, value: float, limit: float) -> Wanted:
        return Wanted(text, value, limit, at_most=False)

    return [
        at_most(
            "GPT, lean iteration, time to that of its bare pass",
            lean / iteration("GPT", bare("lean")),
            1.05,
        ),
        at_least(
            "GPT, lean iteration, times faster than the original loops",
            iteration("GPT", LOOPS) / lean,
            3.8,
        ),
        at_least(
            "GPT, lean iteration, times faster than the best of torch's parts",
            iteration("GPT", *parts) / lean,
            1.9,
        ),
        at_least(
            "GPT, default iteration, times faster than the best of torch's parts",
            iteration("GPT", *parts) / fused,
            1.65,
        ),
        at_least(
            "small, default iteration, times faster than the original loops",
            iteration("small", LOOPS) / small,
            15,
        ),
        at_least(
            "small, default iteration, times faster than the best of torch's parts",
            iteration("small", *parts) / small,
            4,
        ),
        at_most(
            f"lean, time an element with {sizes[-1].elements:,} elements to that with "
            f"{sizes[0].elements:,}",
            growth,
            1.2,
        ),
        # 16 and what belongs to a tensor, such as the count of its steps.
        at_most("lean, peak bytes a parameter in all, allocated", held.peak, 16.01),
        at_most(
            "lean, peak bytes a parameter in all, resident",
            held.peak if held.resident is None else held.resident,
            16.25,
        ),
        at_most(
            "GPT, check+unscale, time to that of the bare pass",
            take / seconds("GPT", TAKING, bare(TAKING)),
            1.1,
        ),
        at_most(
            "GPT, masters to model, time to that of the bare pass",
            write / seconds("GPT", WRITING, bare(WRITING)),
            1.1,
        ),
        at_least(
            "GPT, check+unscale, times faster than the original loops",
            seconds("GPT", TAKING, LOOPS) / take,
            2.8,
        ),
        at_most(
            "GPT, generic iteration, time to that of the best of torch's parts",
            iteration("GPT", GENERIC) / iteration("GPT", *parts),
            0.9,
        ),
        at_least(
            "small, iteration without the inner step, times faster than loops",
            seconds("small", REST, LOOPS) / seconds("small", REST, GENERIC),
            10,
        ),
        at_most(
            "wrapping, bytes added per trainable half element",
            wrapping.bytes_per_element,
            4,
        ),
        at_most(
            "wrapping, peak above that in largest masters",
            wrapping.peak_above_masters,
            1,
        ),
    ]
