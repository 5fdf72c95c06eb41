"""The sets of tensors that are measured: shapes, weights and gradients."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# Of the loss, and so of the gradients. A power of two, so that unscaling is exact.
SCALE = 1024.0

Shape = tuple[int, ...]


@dataclass(frozen=True)
class TensorSet:
    """Shapes under a name."""

    name: str
    shapes: list[Shape]

    @property
    def elements(self) -> int:
        return sum(map(math.prod, self.shapes))

    def weights(self) -> Iterator[Tensor]:
        """Yields fp16 weights, the same at every call."""
        return self._normal(0.02)

    def gradients(self, size: float) -> list[Tensor]:
        """Returns fp16 gradients that are scaled by SCALE, of standard deviation
        ``size`` before that; the same at every call."""
        return list(self._normal(size * SCALE))

    def _normal(self, size: float) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(0)
        for shape in self.shapes:
            tensor = torch.empty(shape, dtype=torch.half)
            yield tensor.normal_(0.0, size, generator=generator)


def gpt_set(layers: int, width: int, vocabulary: int, context: int) -> TensorSet:
    """Returns the tensors of a GPT with tied embeddings."""
    norm: list[Shape] = [(width,), (width,)]
    attention = [(3 * width, width), (3 * width,), (width, width), (width,)]
    mlp = [(4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    layer = [*norm, *attention, *norm, *mlp]
    embeddings = [(vocabulary, width), (context, width)]
    return TensorSet("GPT", [*embeddings, *layer * layers, *norm])


def embedding_set(vocabulary: int, width: int) -> TensorSet:
    """Returns one huge tensor."""
    return TensorSet("embedding", [(vocabulary, width)])


def small_set(count: int) -> TensorSet:
    """Returns ``count`` vectors of 200 to 500 elements."""
    return TensorSet("small", [(200 + 37 * i % 301,) for i in range(count)])


def resnet_set(width: int, classes: int) -> TensorSet:
    """Returns the tensors of a ResNet-50, which has width 64 and 1000 classes."""

    def convolution(inputs: int, outputs: int, size: int) -> list[Shape]:
        return [(outputs, inputs, size, size), (outputs,), (outputs,)]

    shapes = convolution(3, width, 7)
    inputs = width
    for stage, blocks in enumerate((3, 4, 6, 3)):
        inner = width << stage
        for block in range(blocks):
            shapes += convolution(inputs, inner, 1)
            shapes += convolution(inner, inner, 3)
            shapes += convolution(inner, 4 * inner, 1)
            if block == 0:
                shapes += convolution(inputs, 4 * inner, 1)
            inputs = 4 * inner
    return TensorSet("ResNet-50", [*shapes, (classes, inputs), (classes,)])


def blocks_set(blocks: int, side: int) -> TensorSet:
    """Returns square tensors, for sizes that grow."""
    return TensorSet(f"{blocks} x {side}^2", [(side, side)] * blocks)
