"""A small character-level GPT whose matrix products the caller may choose."""

from collections.abc import Callable
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Product = Callable[[Tensor, Tensor], Tensor]


class UpcastProduct(torch.autograd.Function):
    """Multiplies half tensors in fp32 and rounds: operands, result and gradients
    are half tensors, only the arithmetic in between is wider."""

    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return (a.float() @ b.float()).to(a.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        grad = grad.float()
        grad_a = (grad @ b.float().mT).to(a.dtype)
        grad_b = (a.float().mT @ grad).to(b.dtype)
        return grad_a, grad_b


def time_product(dtype: torch.dtype, size: int = 256) -> float:
    """Returns the seconds that a square matrix product takes on one thread: the mean
    over the three layouts that training uses, each with its best of ten."""
    a = torch.randn(size, size).to(dtype)
    threads = torch.get_num_threads()
    # One thread: a busy neighbour on the second core would spoil the comparison.
    torch.set_num_threads(1)
    total = 0.0
    for left, right in ((a, a), (a, a.mT), (a.mT, a)):
        times = []
        for _ in range(10):
            start = perf_counter()
            left @ right
            times.append(perf_counter() - start)
        total += min(times)
    torch.set_num_threads(threads)
    return total / 3


class Linear(nn.Linear):
    def __init__(self, inputs: int, outputs: int, product: Product) -> None:
        super().__init__(inputs, outputs)
        self.product = product

    def forward(self, x: Tensor) -> Tensor:
        rows = self.product(x.flatten(0, -2), self.weight.t())
        return rows.unflatten(0, x.shape[:-1]) + self.bias


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, product: Product) -> None:
        super().__init__()
        self.heads = heads
        self.product = product
        self.qkv = Linear(width, 3 * width, product)
        self.out = Linear(width, width, product)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        # Scaled before the product, where half still has room.
        scores = self.product(q * q.shape[-1] ** -0.5, k.mT)
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        return self.out(self.product(weights, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, product: Product) -> None:
        super().__init__()
        self.attention = nn.Sequential(
            nn.LayerNorm(width), Attention(width, heads, product)
        )
        self.mlp = nn.Sequential(
            nn.LayerNorm(width),
            Linear(width, 4 * width, product),
            nn.GELU(),
            Linear(4 * width, width, product),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.mlp(x)


class CharGPT(nn.Module):
    """Predicts the next character. Layer norm and softmax take and return tensors of
    the model's dtype and accumulate in fp32 inside; the loss is computed in fp32."""

    def __init__(
        self,
        vocabulary: int,
        context: int,
        product: Product = torch.matmul,
        width: int = 128,
        heads: int = 4,
        layers: int = 2,
    ) -> None:
        super().__init__()
        self.characters = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.Sequential(
            *(Block(width, heads, product) for _ in range(layers)),
            nn.LayerNorm(width),
            Linear(width, vocabulary, product),
        )
        nn.init.normal_(self.characters.weight, std=0.1)

    def forward(self, text: Tensor) -> Tensor:
        return self.blocks(self.characters(text) + self.positions)

    def loss(self, text: Tensor) -> Tensor:
        """Returns the mean cross entropy, in nats, of each character of `text`
        (rows of `context + 1` character numbers) given those before it."""
        logits = self(text[:, :-1]).float()
        return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
