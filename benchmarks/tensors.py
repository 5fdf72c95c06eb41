"""The sets of tensors that are measured: shapes, weights and gradients."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# Of the loss, and so of the gradients. A power of two, so that unscaling is exact.
SCALE = 1024.0


@dataclass(frozen=True)
class TensorSet:
    """Shapes under a name."""

    name: str
    shapes: list[tuple[int, ...]]

    @property
    def elements(self) -> int:
        return sum(map(math.prod, self.shapes))

    def weights(self) -> list[Tensor]:
        """Returns fp16 weights, the same at every call."""
        return self._normal(0.02)

    def gradients(self, size: float) -> list[Tensor]:
        """Returns fp16 gradients that are scaled by SCALE, of standard deviation
        ``size`` before that; the same at every call."""
        return self._normal(size * SCALE)

    def _normal(self, size: float) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        return [
            torch.randn(shape, generator=generator).mul_(size).half()
            for shape in self.shapes
        ]


def gpt_set(layers: int, width: int, vocabulary: int, context: int) -> TensorSet:
    """Returns the tensors of a GPT with tied embeddings."""
    norm = [(width,), (width,)]
    attention = [(3 * width, width), (3 * width,), (width, width), (width,)]
    mlp = [(4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    layer = [*norm, *attention, *norm, *mlp]
    embeddings = [(vocabulary, width), (context, width)]
    return TensorSet("GPT", [*embeddings, *layer * layers, *norm])


def small_set(count: int) -> TensorSet:
    """Returns ``count`` vectors of 200 to 500 elements."""
    return TensorSet("small", [(200 + 37 * i % 301,) for i in range(count)])
