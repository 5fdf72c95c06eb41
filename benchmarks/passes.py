"""What an iteration has to move: the passes over memory of each kind of contestant,
each with what it reads and what it writes."""

from dataclasses import dataclass

from inner import Inner

# Bytes of an element. The names are those of lists of tensors.
WIDTHS = {
    "gradient": 2,
    "model": 2,
    "master gradient": 4,
    "master": 4,
    "moment 1": 4,
    "moment 2": 4,
}


@dataclass(frozen=True)
class Pass:
    """One pass of bare_pass.cpp over lists of tensors."""

    function: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()

    @property
    def operands(self) -> tuple[str, ...]:
        """The lists in the order that the function wants."""
        return tuple(dict.fromkeys(self.reads + self.writes))

    @property
    def bytes(self) -> int:
        """Bytes that it moves for an element."""
        return sum(WIDTHS[name] for name in self.reads + self.writes)

    @property
    def bytes_only_written(self) -> int:
        """Bytes of an element that it writes without having read them."""
        return sum(WIDTHS[name] for name in set(self.writes) - set(self.reads))


CHECK = Pass("read_halves", reads=("gradient",))
TAKE = Pass("widen_halves", reads=("gradient",), writes=("master gradient",))
SCALE = Pass("flip_singles", ("master gradient",), ("master gradient",))
WRITE = Pass("narrow_singles", reads=("master",), writes=("model",))


def zero(*names: str) -> Pass:
    return Pass("zero_halves", writes=names)


def iteration(inner: Inner) -> dict[str, list[Pass]]:
    """Returns the passes of an iteration, by kind of contestant: with masters around
    an inner step, with fp32 parameters, in one pass from the master gradients, and
    in one pass from the model's gradients. A norm is measured on the way."""
    weights = ("master", "moment 1", "moment 2")[: 1 + inner.moments]
    masters = ("master gradient", *weights)
    halves = ("gradient", *weights)
    step = Pass(f"step_{inner.passes}", masters, weights)
    fused = Pass(f"fused_{inner.passes}", masters, (*weights, "model"))
    lean = Pass(f"lean_{inner.passes}", halves, (*weights, "model"))
    both = zero("gradient", "master gradient")
    return {
        "masters": [TAKE, SCALE, step, WRITE, both],
        "fp32": [SCALE, SCALE, step, zero("master gradient")],
        "fused": [TAKE, SCALE, fused, both],
        "lean": [CHECK, lean, zero("gradient")],
    }


def bytes_per_element(passes: list[Pass]) -> int:
    return sum(one.bytes for one in passes)
