"""Compiles bare_pass.cpp and runs it over lists of tensors."""

import ctypes
import os
import shlex
import subprocess
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

# All as in the product.
CHUNK_ELEMENTS = 65536
STREAM_ABOVE_BYTES = 16 << 20
ONE_THREAD_BELOW = 131072

MOST_TENSORS = 5


class Span(ctypes.Structure):
    _fields_ = [
        ("tensors", ctypes.c_void_p * MOST_TENSORS),
        ("elements", ctypes.c_int64),
        ("sum", ctypes.c_uint16),
    ]


def load(folder: Path) -> ctypes.CDLL:
    """Compiles the passes into ``folder`` with the system's compiler."""
    source = Path(__file__).with_suffix(".cpp")
    library = folder / "bare_pass.so"
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    options = ["-std=c++20", "-O3", "-march=native", "-fPIC", "-fopenmp"]
    # Without AVX a vector could not cross a call; none does, all are inlined.
    options += ["-Wno-psabi"]
    compiled = library.with_suffix(".o")
    subprocess.run([*compiler, *options, "-c", source, "-o", compiled], check=True)
    # Against the OpenMP runtime that torch brought: a second one would have
    # threads of its own, which compete with torch's.
    subprocess.run(
        [*compiler, "-shared", compiled, openmp_runtime(), "-o", library], check=True
    )
    return ctypes.CDLL(str(library))


def openmp_runtime() -> Path:
    """Returns the OpenMP library that this process has loaded."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    files = {Path(line.split(maxsplit=5)[5]) for line in maps if "/" in line}
    (runtime,) = [
        f for f in files if f.name.startswith(("libgomp", "libiomp", "libomp"))
    ]
    return runtime


@dataclass(frozen=True)
class Prepared:
    """A pass over certain tensors."""

    run: Callable[[], None]
    spans: ctypes.Array[Span]

    def sum_read(self) -> int:
        """Returns the sum, modulo 2**16, of all that the last run read, if the pass
        writes nothing."""
        return sum(int(span.sum) for span in self.spans) % 2**16


def prepare(
    function: Callable[..., None],
    operands: Sequence[Sequence[Tensor]],
    bytes_only_written: int,
) -> Prepared:
    """Prepares one of the passes over ``operands``, lists of tensors that pair up, for
    as many threads as torch has now."""
    # The product counts the bytes of what it zeroes, not the elements.
    width = 2 if function.__name__ == "zero_halves" else 1
    chunk = CHUNK_ELEMENTS // width
    spans = [
        Span(
            (ctypes.c_void_p * MOST_TENSORS)(
                *(t.data_ptr() + begin * t.element_size() for t in tensors)
            ),
            min(chunk, tensors[0].numel() - begin),
        )
        for tensors in zip(*operands, strict=True)
        for begin in range(0, tensors[0].numel(), chunk)
    ]
    ends = list(accumulate(span.elements for span in spans)) or [0]
    total = ends[-1]
    threads = 1 if total * width < ONE_THREAD_BELOW else torch.get_num_threads()
    # A thread takes the spans from the one in which its share begins.
    shares = [total // threads * thread for thread in range(threads)]
    first = [bisect_right(ends, share) for share in shares] + [len(spans)]
    table = (Span * len(spans))(*spans)
    arguments = (
        table,
        (ctypes.c_int64 * len(first))(*first),
        threads,
        int(bytes_only_written > STREAM_ABOVE_BYTES),
    )
    return Prepared(lambda: function(*arguments), table)
