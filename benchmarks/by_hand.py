"""Contestants with masters that are written with torch alone: the loops of the
original in Python, and the best of torch's parts."""

from abc import abstractmethod
from typing import Any

import torch
from contestant import MAX_NORM, Contestant
from inner import Inner
from tensors import SCALE, TensorSet
from torch import Tensor
from torch.nn.utils import clip_grad_norm_


class ByHand(Contestant):
    """fp16 parameters with fp32 masters, which have gradients of their own."""

    def __init__(self, tensors: TensorSet, inner: Inner, **how: Any) -> None:
        super().__init__(tensors.weights())
        self.masters = [w.detach().float().requires_grad_() for w in self.model]
        for master in self.masters:
            master.grad = torch.empty_like(master)
        self.inner = inner.build(self.masters, **how)

    def step(self) -> None:
        self.inner.step()
        self.write_model()

    @abstractmethod
    def write_model(self) -> None:
        """Writes the masters to the model."""


class OriginalLoops(ByHand):
    """The loops over tensors of the FP16_Optimizer that fp16core follows."""

    def take(self) -> None:
        for weight in self.model:
            total = float(weight.grad.data.float().sum())
            if total in (float("inf"), -float("inf")) or total != total:
                raise OverflowError("the gradients of the benchmark are finite")
        for weight, master in zip(self.model, self.masters, strict=True):
            master.grad.data.copy_(weight.grad.data)
        for master in self.masters:
            master.grad.data.mul_(1.0 / SCALE)

    def clip(self) -> None:
        squares = 0.0
        for master in self.masters:
            squares += master.grad.data.norm(2).item() ** 2
        coefficient = MAX_NORM / (squares**0.5 + 1e-6)
        if coefficient < 1:
            for master in self.masters:
                master.grad.data.mul_(coefficient)

    def write_model(self) -> None:
        for weight, master in zip(self.model, self.masters, strict=True):
            weight.data.copy_(master.data)

    def zero_grad(self) -> None:
        for tensor in [*self.masters, *self.model]:
            tensor.grad.detach_()
            tensor.grad.zero_()


class TorchParts(ByHand):
    """The fastest operations that torch has for lists of tensors.

    Which of the two forms of clipping is faster depends on the machine.
    """

    def __init__(
        self, tensors: TensorSet, inner: Inner, *, foreach_clip: bool, **how: Any
    ) -> None:
        super().__init__(tensors, inner, **how)
        self.foreach_clip = foreach_clip
        self.own_gradients: list[Tensor] = self.master_gradients()
        self.found_inf = torch.zeros(1)
        self.inverse_scale = torch.tensor([1.0 / SCALE])

    @torch.no_grad()
    def take(self) -> None:
        torch._foreach_copy_(self.own_gradients, self.gradients)
        self.found_inf.zero_()
        torch._amp_foreach_non_finite_check_and_unscale_(
            self.own_gradients, self.found_inf, self.inverse_scale
        )
        if self.found_inf.item():
            raise OverflowError("the gradients of the benchmark are finite")

    def clip(self) -> None:
        clip_grad_norm_(self.masters, MAX_NORM, foreach=self.foreach_clip)

    @torch.no_grad()
    def write_model(self) -> None:
        torch._foreach_copy_(self.model, self.masters)

    @torch.no_grad()
    def zero_grad(self) -> None:
        torch._foreach_zero_(self.own_gradients)
        torch._foreach_zero_(self.gradients)
