"""The table, and the figures that are wanted."""

from dataclasses import dataclass

from measure import (
    BARE,
    LISTS,
    LISTS_LOOP_CLIP,
    LOOPS,
    OURS,
    REST,
    STEP,
    TAKE,
    WRITE,
    Row,
)
from wrapping_memory import WrappingMemory

HEADINGS = (
    "tensors",
    "task",
    "contestant",
    "ms",
    "quartiles",
    "B/elem",
    "GB/s",
    "to bare",
    "to loops",
    "to lists",
)
TEXT_COLUMNS = 3


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


def table(rows: list[Row]) -> str:
    """Returns all rows as aligned text."""
    lines = [HEADINGS, *map(cells, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if index < TEXT_COLUMNS else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def cells(row: Row) -> tuple[str, ...]:
    """Returns the texts of one row, in the order of HEADINGS."""
    low, high = row.quartiles
    return (
        row.tensors,
        row.task,
        row.contestant,
        f"{row.seconds * 1e3:.3f}",
        f"{low * 1e3:.3f}-{high * 1e3:.3f}",
        str(row.bytes_per_element),
        f"{row.bytes_per_second / 1e9:.1f}",
        "-" if row.to_bare is None else f"{row.to_bare:.2f}",
        f"{row.to_loops:.3f}",
        f"{row.to_lists:.2f}",
    )


def wanted(large: list[Row], small: list[Row], memory: WrappingMemory) -> list[Wanted]:
    """Returns the figures for the rows of the large and of the many small tensors."""

    def seconds(rows: list[Row], task: str, *contestants: str) -> float:
        return min(
            row.seconds
            for row in rows
            if row.task == task and row.contestant in contestants
        )

    take, write, step = (seconds(large, task, OURS) for task in (TAKE, WRITE, STEP))
    lists_step = seconds(large, STEP, LISTS, LISTS_LOOP_CLIP)
    small_gain = seconds(small, REST, LOOPS) / seconds(small, REST, OURS)
    return [
        Wanted(
            "check+unscale, time to that of the bare pass",
            take / seconds(large, TAKE, BARE),
            1.1,
            at_most=True,
        ),
        Wanted(
            "masters to model, time to that of the bare pass",
            write / seconds(large, WRITE, BARE),
            1.1,
            at_most=True,
        ),
        Wanted(
            "check+unscale, times faster than the original loops",
            seconds(large, TAKE, LOOPS) / take,
            2.8,
            at_most=False,
        ),
        Wanted(
            "whole step, time to that of torch's lists",
            step / lists_step,
            0.9,
            at_most=True,
        ),
        Wanted(
            "small tensors, step apart from the inner one, times faster than loops",
            small_gain,
            10,
            at_most=False,
        ),
        Wanted(
            "wrapping, bytes added per trainable half element",
            memory.bytes_per_element,
            4,
            at_most=True,
        ),
        Wanted(
            "wrapping, peak above that in largest masters",
            memory.peak_above_masters,
            1,
            at_most=True,
        ),
    ]
