"""Compiles bare_pass.cpp and runs it over lists of tensors."""

import ctypes
import os
import shlex
import subprocess
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

# All as in the product.
CHUNK_ELEMENTS = 65536
STREAM_ABOVE_BYTES = 16 << 20
ONE_THREAD_BELOW = 32768

Pass = Callable[..., None]


class Span(ctypes.Structure):
    _fields_ = [
        ("source", ctypes.c_void_p),
        ("target", ctypes.c_void_p),
        ("elements", ctypes.c_int64),
    ]


def load(folder: Path) -> ctypes.CDLL:
    """Compiles the passes into ``folder`` with the system's compiler."""
    source = Path(__file__).with_suffix(".cpp")
    library = folder / "bare_pass.so"
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    options = ["-std=c++20", "-O3", "-march=native", "-fPIC", "-fopenmp"]
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


def prepare(
    function: Pass, sources: Sequence[Tensor], targets: Sequence[Tensor]
) -> Callable[[], None]:
    """Returns a call of ``widen`` or ``narrow`` from ``sources`` to ``targets``."""
    spans = [
        Span(
            source.data_ptr() + begin * source.element_size(),
            target.data_ptr() + begin * target.element_size(),
            min(CHUNK_ELEMENTS, source.numel() - begin),
        )
        for source, target in zip(sources, targets, strict=True)
        for begin in range(0, source.numel(), CHUNK_ELEMENTS)
    ]
    *begins, total = accumulate((span.elements for span in spans), initial=0)
    threads = 1 if total < ONE_THREAD_BELOW else torch.get_num_threads()
    # A thread takes the spans that begin within its share of the elements.
    shares = [total * thread // threads for thread in range(threads)]
    first = [bisect_left(begins, share) for share in shares] + [len(spans)]
    written = sum(target.nbytes for target in targets)
    arguments = (
        (Span * len(spans))(*spans),
        (ctypes.c_int64 * len(first))(*first),
        threads,
        int(written > STREAM_ABOVE_BYTES),
    )
    return lambda: function(*arguments)
