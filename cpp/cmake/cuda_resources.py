"""Says what each CUDA kernel needs of a GPU, and fails where it is too much.

A kernel with too many registers leaves a GPU's threads waiting for one another,
and one whose registers spill, or whose arrays are indexed at run time, goes
through memory for them. Neither shows in a result, so a build looks here:

    python cuda_resources.py --ptxas LOG     what nvcc -Xptxas=-v said
    python cuda_resources.py OBJECT...       what cuobjdump finds in the objects
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence

# A line of nvcc -Xptxas=-v, by what it starts with.
ENTRY = re.compile(r"Compiling entry function '(?P<name>[^']+)' for '(?P<arch>\w+)'")
PROPERTIES = re.compile(r"Function properties for '?(?P<name>[^\s']+)")
MEMORY = re.compile(
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads"
)
USED = re.compile(r"Used (?P<registers>\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")

# Two lines of cuobjdump, one before the kernels of an architecture and one that
# follows each kernel's name.
ARCH = re.compile(r"^arch = (?P<arch>sm_\w+)$")
FUNCTION = re.compile(r"^ *Function (?P<name>\S+):$")
RESOURCES = re.compile(r"\bREG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


@dataclasses.dataclass
class Kernel:
    """A kernel, or a function that one calls, for one architecture."""

    name: str
    arch: str
    registers: int = 0  # unknown, so 0, of a function
    stack: int = 0
    spill: int = 0  # bytes stored and loaded
    shared: int = 0


def read_ptxas(lines: Iterable[str]) -> list[Kernel]:
    """Returns what nvcc -Xptxas=-v said, other output between it or not."""
    kernels: list[Kernel] = []
    entry = described = None
    for line in lines:
        if match := ENTRY.search(line):
            entry = described = Kernel(match["name"], match["arch"])
            kernels.append(entry)
        elif entry is None or described is None:
            continue
        elif match := PROPERTIES.search(line):
            described = entry
            if match["name"] != entry.name:
                # Not inlined: it has a stack frame of its own.
                described = Kernel(match["name"], entry.arch)
                kernels.append(described)
        elif match := MEMORY.search(line):
            described.stack = int(match["stack"])
            described.spill = int(match["stores"]) + int(match["loads"])
        elif match := USED.search(line):
            entry.registers = int(match["registers"])
            if match := SHARED.search(line):
                entry.shared = int(match[1])
    return kernels


def read_cuobjdump(lines: Iterable[str]) -> list[Kernel]:
    """Returns what cuobjdump --dump-resource-usage said."""
    kernels: list[Kernel] = []
    arch = name = ""
    for line in lines:
        if match := ARCH.search(line):
            arch = match["arch"]
        elif match := FUNCTION.search(line):
            name = match["name"]
        elif name and (match := RESOURCES.search(line)):
            registers, stack, shared, local = (int(number) for number in match.groups())
            # It counts what spills as stack.
            kernels.append(Kernel(name, arch, registers, stack + local, 0, shared))
            name = ""
    return kernels


def toolkit_program(name: str) -> str | None:
    """Returns a program's path: beside nvcc, the real one, or from PATH."""
    if nvcc := shutil.which("nvcc"):
        beside = pathlib.Path(nvcc).resolve().parent
        if found := shutil.which(name, path=str(beside)):
            return found
    return shutil.which(name)


def dump(objects: Sequence[str]) -> list[Kernel]:
    """Returns the kernels of object files."""
    cuobjdump = toolkit_program("cuobjdump")
    if cuobjdump is None:
        raise SystemExit("cuobjdump was not found; --ptxas needs none")
    kernels = []
    for file in objects:
        result = subprocess.run(
            [cuobjdump, "--dump-resource-usage", file],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        kernels += read_cuobjdump(result.stdout.splitlines())
    return kernels


def short(name: str) -> str:
    """Returns a demangled name without its namespaces, parameters and type."""
    name = re.sub(r"\(anonymous namespace\)::|\b[a-zA-Z_]\w*::", "", name)
    depth = 0
    for i, letter in enumerate(name):
        depth += (letter in "<[") - (letter in ">]")
        if letter == "(" and depth == 0:
            name = name[:i]
            break
    return name.removeprefix("void ")


def demangle(kernels: Sequence[Kernel]) -> None:
    """Gives the kernels their short names, where there is a demangler."""
    program = toolkit_program("cu++filt") or toolkit_program("c++filt")
    if program is None or not kernels:
        return
    result = subprocess.run(
        [program],
        input="".join(kernel.name + "\n" for kernel in kernels),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    for kernel, name in zip(kernels, result.stdout.splitlines(), strict=True):
        kernel.name = short(name)


def table(kernels: Sequence[Kernel], source: str) -> str:
    """Returns the kernels as aligned columns, by name and architecture."""
    rows = [("kernel", "arch", "registers", "stack", "spill", "shared")]
    rows += [
        (k.name, k.arch, f"{k.registers}", f"{k.stack}", f"{k.spill}", f"{k.shared}")
        for k in sorted(kernels, key=lambda k: (k.name, int(re.sub(r"\D", "", k.arch))))
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [f"Registers of a thread and bytes of memory, from {source}:"]
    for row in rows:
        left = [word.ljust(width) for word, width in zip(row[:2], widths, strict=False)]
        right = [word.rjust(w) for word, w in zip(row[2:], widths[2:], strict=True)]
        lines.append("  ".join(left + right))
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; returns 1 where a kernel is over a limit."""
    parser = argparse.ArgumentParser(
        description="Says which registers and memory CUDA kernels need."
    )
    parser.add_argument("objects", nargs="*", metavar="OBJECT", help="an object file")
    parser.add_argument(
        "--ptxas",
        type=pathlib.Path,
        metavar="LOG",
        help="read what nvcc -Xptxas=-v said instead of objects",
    )
    parser.add_argument("--most-registers", type=int, default=128, metavar="N")
    parser.add_argument("--most-stack", type=int, default=0, metavar="BYTES")
    options = parser.parse_args(arguments)
    if bool(options.objects) == bool(options.ptxas):
        parser.error("either objects or --ptxas is needed")

    if options.ptxas:
        with open(options.ptxas, encoding="utf-8", errors="replace") as log:
            kernels = read_ptxas(log)
        source = "ptxas -v"
    else:
        kernels = dump(options.objects)
        source = "cuobjdump"
    if not kernels:
        print("no kernels were found", file=sys.stderr)
        return 1
    demangle(kernels)
    print(table(kernels, source))

    bad = [
        kernel
        for kernel in kernels
        if kernel.registers > options.most_registers
        or max(kernel.stack, kernel.spill) > options.most_stack
    ]
    for kernel in bad:
        print(
            f"{kernel.name} for {kernel.arch} is over the limits: "
            f"{kernel.registers} registers of {options.most_registers}, "
            f"{kernel.stack} bytes of stack and {kernel.spill} of spills of "
            f"{options.most_stack}",
            file=sys.stderr,
        )
    names = {kernel.name for kernel in kernels}
    archs = {kernel.arch for kernel in kernels}
    print(
        f"{len(names)} kernels on {len(archs)} architectures: at most "
        f"{max(kernel.registers for kernel in kernels)} registers, "
        f"{len(bad)} over the limits"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
