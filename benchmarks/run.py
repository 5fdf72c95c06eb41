"""Times fp16core against the loops of the original, against torch's list operations
and against bare passes over memory, and prints one table."""

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path

import bare_pass
import machine
import torch
import wrapping_memory
from measure import measure
from report import table, wanted
from tensors import gpt_set, small_set
from timing import keep_freed_memory

LEGEND = """
Medians, timed in turn. The inner optimizer is AdamW(fused=True) where nothing else is
said. A whole step is check+unscale, clip (which bites), step, masters to model, and
zero_grad in place, of model and masters. "to" gives the time as a multiple of that of
the bare pass, of the original loops, and of the fastest of torch's list operations.
"""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, one round: only a trial"
    )
    parser.add_argument("--threads", type=int, help="by default torch's own choice")
    parser.add_argument("--json", type=Path, help="a file to write the numbers to")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    keep_freed_memory()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    if arguments.quick:
        large = gpt_set(layers=2, width=64, vocabulary=512, context=64)
        small = small_set(50)
        large_rounds = small_rounds = 1
    else:
        large = gpt_set(layers=8, width=512, vocabulary=8192, context=512)
        small = small_set(1000)
        large_rounds, small_rounds = 30, 100

    here = machine.describe()
    here["copy GB/s"] = round(machine.copy_bandwidth(large.elements) / 1e9, 1)
    for key, value in here.items():
        print(f"{key}: {value}")
    for tensors in (large, small):
        print(
            f"{tensors.name} tensors: {len(tensors.shapes)} of fp16, "
            f"{tensors.elements:,} elements"
        )
    memory = wrapping_memory.measure(large)
    print(
        f"wrapping {large.name}: {memory.bytes_per_element:.2f} bytes per half "
        f"element, peak {memory.peak_above_bytes:,} bytes above that"
    )
    print(LEGEND, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        passes = bare_pass.load(Path(folder))
        large_rows = measure(large, large_rounds, large_rounds // 10 + 1, passes)
        small_rows = measure(small, small_rounds, small_rounds // 10 + 1, passes)
    figures = wanted(large_rows, small_rows, memory)
    print(table(large_rows + small_rows))
    print("\nWanted")
    for figure in figures:
        print(figure)

    if arguments.json is not None:
        result = {
            "machine": here,
            "tensors": {
                tensors.name: {
                    "count": len(tensors.shapes),
                    "elements": tensors.elements,
                }
                for tensors in (large, small)
            },
            "rows": [asdict(row) for row in large_rows + small_rows],
            "wrapping": asdict(memory),
            "wanted": [asdict(figure) | {"met": figure.met} for figure in figures],
        }
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
