"""Everything that was measured, as aligned text."""

from collections.abc import Sequence
from itertools import groupby

from growth import Size
from memory import Memory
from rows import Row

HEADINGS = (
    "ms",
    "quartiles",
    "rounds",
    "B/elem",
    "GB/s",
    "to bare",
    "x loops",
    "x parts",
)


def table(rows: Sequence[Row]) -> str:
    """Returns one table for each case."""
    cases = groupby(rows, lambda r: (r.tensors, r.inner, r.threads, r.task))
    tables = []
    for (tensors, inner, threads, task), members in cases:
        plural = "s" if threads > 1 else ""
        title = f"{tensors}, {inner}, {threads} thread{plural}, {task}"
        tables.append(align([(title, *HEADINGS), *map(cells, members)]))
    return "\n\n".join(tables)


def cells(row: Row) -> tuple[str, ...]:
    """Returns the texts of one row, in the order of HEADINGS."""
    low, high = row.quartiles
    return (
        row.contestant,
        f"{row.seconds * 1e3:.3f}",
        f"{low * 1e3:.3f}-{high * 1e3:.3f}",
        str(row.rounds),
        str(row.bytes_per_element),
        f"{row.bytes_per_second / 1e9:.1f}",
        "-" if row.to_bare is None else f"{row.to_bare:.2f}",
        f"{row.over_loops:.2f}",
        f"{row.over_parts:.2f}",
    )


def memory_table(memory: Sequence[Memory], tensors: str) -> str:
    """Returns the bytes of an element that each contestant takes."""
    lines = [(f"{tensors}, bytes an element", "held", "peak", "resident peak")]
    for one in memory:
        resident = "-" if one.resident is None else f"{one.resident:.2f}"
        name = f"{one.contestant}, {one.inner}"
        lines.append((name, f"{one.held:.2f}", f"{one.peak:.2f}", resident))
    return align(lines)


def growth_table(sizes: Sequence[Size]) -> str:
    """Returns the time of a lean iteration at each size."""
    lines = [("lean, elements", "ms", "quartiles", "rounds", "ns/element")]
    for size in sizes:
        low, high = size.quartiles
        lines.append(
            (
                f"{size.elements:,}",
                f"{size.seconds * 1e3:.3f}",
                f"{low * 1e3:.3f}-{high * 1e3:.3f}",
                str(size.rounds),
                f"{size.nanoseconds_per_element:.3f}",
            )
        )
    return align(lines)


def align(lines: Sequence[tuple[str, ...]]) -> str:
    """Returns columns: the first one to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )
