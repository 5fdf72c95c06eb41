"""Bare passes over tensors of their own."""

import ctypes
from collections.abc import Callable, Sequence

import torch
from agreement import check_bare_pass
from bare_pass import Prepared, prepare
from passes import WIDTHS, Pass
from tensors import TensorSet
from torch import Tensor


class Scratch:
    """The lists of tensors that some passes read and write, in the shapes of a set.
    They hold bits: int16 for halves and int32 for singles."""

    def __init__(
        self, tensors: TensorSet, passes: Sequence[Pass], library: ctypes.CDLL
    ) -> None:
        self.elements = tensors.elements
        self.passes = passes
        self.library = library
        kinds = {2: torch.int16, 4: torch.int32}
        names = dict.fromkeys(name for one in passes for name in one.operands)
        self.lists = {
            name: [
                torch.empty(shape, dtype=kinds[WIDTHS[name]]).random_()
                for shape in tensors.shapes
            ]
            for name in names
        }

    def backward(self, given: list[Tensor]) -> None:
        """Does what a backward pass would do: writes what is read first."""
        read = self.lists[self.passes[0].operands[0]]
        torch._foreach_copy_(read, [tensor.view(torch.int16) for tensor in given])

    def check(self) -> None:
        """Asserts that each pass moves every element."""
        for one in self.passes:
            check_bare_pass(one.function, self.prepare(one), self.operands(one))

    def prepare_all(self) -> Callable[[], None]:
        """Returns a call that runs the passes one after the other, with as many
        threads as torch has now."""
        prepared = [self.prepare(one) for one in self.passes]

        def run() -> None:
            for one in prepared:
                one.run()

        return run

    def prepare(self, one: Pass) -> Prepared:
        function = getattr(self.library, one.function)
        written = one.bytes_only_written * self.elements
        return prepare(function, self.operands(one), written)

    def operands(self, one: Pass) -> list[list[Tensor]]:
        """Returns the lists in the order that the pass wants."""
        lists = [self.lists[name] for name in one.operands]
        if one.function != "zero_halves":
            return lists
        # One list after the other, and singles as pairs of halves.
        return [[tensor.view(torch.int16) for each in lists for tensor in each]]
