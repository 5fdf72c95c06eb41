"""Times a step on a GPU against the memory that it has to move.

    python tests/gpu/timings.py [--device cpu --elements 20000]

A ratio of 1 means as fast as copying the same bytes. Exits with 1 if ours take longer
than wanted on a GPU, where there are enough elements to fill it.
"""

import argparse
import gc
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from clock import Clock, copy_bandwidth
from contestants import CONTESTANTS, Contestant, Shape

import fp16core

# The most that a pass of ours may take, as a multiple of what a copy takes.
WANTED = 1.15
# From here on launches no longer count.
LARGE = 100_000_000
# For torch, for its copies, and to spare.
MEMORY_SHARE = 0.8


@dataclass(frozen=True)
class Row:
    """One operation of one contestant."""

    tensors: str
    elements: int
    contestant: str
    operation: str
    seconds: float
    bytes_per_element: int
    ratio: float

    def too_slow(self) -> bool:
        return (
            self.contestant.startswith("ours")
            and self.elements >= LARGE
            and self.ratio > WANTED
        )


def measure(
    contestant: type[Contestant], shape: Shape, clock: Clock, bandwidth: float
) -> Iterator[Row]:
    for operation in contestant(shape, clock.device).operations():
        ahead = shape.total() >= LARGE
        seconds = clock.seconds(operation.run, operation.prepare, ahead=ahead)
        floor = operation.bytes_per_element * shape.total() / bandwidth
        yield Row(
            shape.name,
            shape.total(),
            contestant.name,
            operation.name,
            seconds,
            operation.bytes_per_element,
            seconds / floor,
        )


def free_memory(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def most_elements(device: str, wanted: int) -> int:
    """Returns how many elements all contestants have room for, at most ``wanted``."""
    if device == "cpu":
        return wanted
    free, _ = torch.cuda.mem_get_info()
    largest = max(contestant.memory_per_element for contestant in CONTESTANTS)
    return min(wanted, int(free * MEMORY_SHARE) // largest)


def shapes(elements: int) -> list[Shape]:
    tensors = 64
    each = max(1, elements // tensors)
    small = max(1, min(4096, elements // 1000))
    return [
        Shape(f"{tensors} x {each:,}", tensors, each),
        Shape(f"1000 x {small:,}", 1000, small),
    ]


def table(rows: Sequence[Row]) -> str:
    """Returns the rows in columns, the numbers to the right."""
    lines = [("tensors", "contestant", "operation", "ms", "B/elem", "GB/s", "ratio")]
    for row in rows:
        rate = row.bytes_per_element * row.elements / row.seconds
        lines.append(
            (
                row.tensors,
                row.contestant,
                row.operation,
                f"{row.seconds * 1e3:.3f}",
                str(row.bytes_per_element),
                f"{rate / 1e9:.0f}",
                f"{row.ratio:.2f}" + (" !" if row.too_slow() else "  "),
            )
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = [
        "  ".join(
            cell.ljust(width) if index < 3 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    return "\n".join(texts)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--elements", type=int, default=1_000_000_000)
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--json", type=Path, help="also write the numbers there")
    options = parser.parse_args(arguments)
    device: str = options.device
    if device == "cuda" and not torch.cuda.is_available():
        parser.error(f"torch {torch.__version__} finds no CUDA device")

    if device == "cpu":
        torch.set_num_threads(1)  # tensors this small gain nothing from more
    clock = Clock(device, options.repeats)
    elements = most_elements(device, options.elements)
    bandwidth = copy_bandwidth(clock, max(1, elements // 2))
    free_memory(device)
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, fp16core {fp16core.__version__}")
    print(f"copying moves {bandwidth / 1e9:.0f} GB/s; medians of {options.repeats}")
    rows: list[Row] = []
    for shape in shapes(elements):
        for contestant in CONTESTANTS:
            rows.extend(measure(contestant, shape, clock, bandwidth))
            free_memory(device)
    print(table(rows))
    if options.json:
        result = {
            "device": name,
            "torch": torch.__version__,
            "copy_bytes_per_second": bandwidth,
            "repeats": options.repeats,
            "wanted": WANTED,
            "rows": [asdict(row) for row in rows],
        }
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    slow = [row for row in rows if device == "cuda" and row.too_slow()]
    if slow:
        print(f"! takes more than {WANTED} times what copying the same bytes takes")
    return 1 if slow else 0


if __name__ == "__main__":
    raise SystemExit(main())
