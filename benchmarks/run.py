"""Times fp16core against the loops of the original, against what torch offers, and
against bare passes over memory. Prints tables, and writes JSON and a chart."""

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import bare_pass
import growth
import iteration
import machine
import memory
import parts
import torch
from inner import ADAMW, INNERS
from report import growth_table, memory_table, table
from rows import Case
from tensors import (
    TensorSet,
    blocks_set,
    embedding_set,
    gpt_set,
    resnet_set,
    small_set,
)
from timing import Effort, keep_freed_memory
from wanted import wanted

LEGEND = """
Medians, timed in turn. An iteration is all between a backward pass and the next forward
pass: take the gradients, clip (which bites), step, write the model, and zero_grad in
place. B/elem is what has to be moved for it, and its bare pass moves the same with the
same mix of reads and writes. "x loops" and "x parts" say how many times faster it is
than the original's loops and than the fastest of torch's parts with masters.
"""


@dataclass(frozen=True)
class Size:
    """How much is measured, and for how long."""

    gpt: TensorSet
    small: TensorSet
    others: Sequence[TensorSet]
    growth: Sequence[TensorSet]
    # For the cases with wanted figures, for the others, and for parts and growth.
    main: Effort
    side: Effort
    part: Effort


def full() -> Size:
    return Size(
        gpt=gpt_set(layers=8, width=512, vocabulary=8192, context=512),
        small=small_set(1000),
        others=[embedding_set(50_000, 768), resnet_set(64, 1000)],
        growth=[blocks_set(millions, 1000) for millions in (1, 3, 10, 30, 100, 200)],
        main=Effort(seconds=20, rounds=15),
        side=Effort(seconds=7, rounds=5),
        part=Effort(seconds=5, rounds=7),
    )


def quick() -> Size:
    once = Effort(seconds=0, rounds=1)
    return Size(
        gpt=gpt_set(layers=2, width=64, vocabulary=512, context=64),
        small=small_set(50),
        others=[embedding_set(1000, 16), resnet_set(4, 10)],
        growth=[blocks_set(1, 100), blocks_set(20, 100)],
        main=once,
        side=once,
        part=once,
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, one round: only a trial"
    )
    parser.add_argument(
        "--threads",
        type=int,
        nargs="+",
        default=[1, 2],
        help="numbers of threads; by default 1 and 2",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("build/bench"),
        help="a folder for bench.json and bench.png; by default build/bench",
    )
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    size = quick() if arguments.quick else full()
    threads = sorted(set(arguments.threads))
    most = threads[-1]
    here = machine.describe(threads)
    for key, value in here.items():
        print(f"{key}: {value}")
    sets = [size.gpt, size.small, *size.others]
    for tensors in sets:
        print(
            f"{tensors.name}: {len(tensors.shapes)} tensors, "
            f"{tensors.elements:,} elements"
        )
    print(LEGEND, flush=True)

    memories = memory.measure(size.gpt)
    wrapping = memory.measure_wrapping(size.gpt)
    # After the measurements of memory.
    keep_freed_memory()

    def effort(case: Case) -> Effort:
        wanted = case.tensors in (size.gpt, size.small)
        return (
            size.main
            if wanted and (case.inner, case.threads) == (ADAMW, most)
            else size.side
        )

    with tempfile.TemporaryDirectory() as folder:
        library = bare_pass.load(Path(folder))
        rows = []
        for tensors in sets:
            for inner in INNERS.values():
                new = iteration.measure(tensors, inner, threads, effort, library)
                print(table(new), end="\n\n", flush=True)
                rows += new
        torch.set_num_threads(most)
        for tensors in (size.gpt, size.small):
            new = parts.measure(tensors, most, size.part, library)
            print(table(new), end="\n\n", flush=True)
            rows += new
    sizes = growth.measure(size.growth, size.part)
    print(growth_table(sizes), end="\n\n")
    print(memory_table(memories, size.gpt.name), end="\n\n")
    figures = wanted(rows, sizes, memories, wrapping)
    print("Wanted")
    for figure in figures:
        print(figure)

    arguments.out.mkdir(parents=True, exist_ok=True)
    result = {
        "machine": here,
        "tensors": {
            tensors.name: {"count": len(tensors.shapes), "elements": tensors.elements}
            for tensors in sets
        },
        "rows": [asdict(row) for row in rows],
        "growth": [asdict(one) for one in sizes],
        "memory": [asdict(one) for one in memories],
        "wrapping": asdict(wrapping),
        "wanted": [asdict(figure) | {"met": figure.met} for figure in figures],
    }
    (arguments.out / "bench.json").write_text(json.dumps(result, indent=2) + "\n")
    try:
        from chart import draw
    except ImportError as error:
        print(f"no chart: {error}")
    else:
        title = f"{here['processor']}, {most} threads, torch {torch.__version__}"
        draw(rows, title, arguments.out / "bench.png")


if __name__ == "__main__":
    main()
