"""The ways to run the phases of an iteration around AdamW, all with the same result:
the loops of the original in Python, torch's list operations, and fp16core.

Each has tensors of its own. ``zero_grad`` zeroes the gradients of model and masters in
place, in all of them.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from tensors import SCALE, TensorSet
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW

from fp16core import FP16_Optimizer

MAX_NORM = 1.0
LEARNING_RATE = 1e-4


class Contestant(ABC):
    """fp16 parameters with gradients, their masters, and an inner AdamW."""

    inner: AdamW
    masters: list[Tensor]

    def __init__(self, tensors: TensorSet, gradients: list[Tensor]) -> None:
        self.given_gradients = gradients
        self.model = [Parameter(weight) for weight in tensors.weights()]
        self.gradients = [torch.empty_like(weight) for weight in self.model]
        for weight, gradient in zip(self.model, self.gradients, strict=True):
            weight.grad = gradient

    def put_gradients_back(self) -> None:
        """Does what a backward pass would do: writes scaled gradients."""
        torch._foreach_copy_(self.gradients, self.given_gradients)

    def finish_iteration(self) -> None:
        """Runs all that follows a backward pass, up to the next forward pass."""
        self.take()
        self.clip()
        self.step()
        self.zero_grad()

    @abstractmethod
    def take(self) -> None:
        """Checks the gradients and unscales them into fp32."""

    @abstractmethod
    def clip(self) -> None:
        """Clips the norm of the master gradients to MAX_NORM."""

    @abstractmethod
    def write_model(self) -> None:
        """Writes the masters to the model."""

    @abstractmethod
    def step(self) -> None:
        """Updates the masters and writes the model."""

    @abstractmethod
    def zero_grad(self) -> None:
        """Zeroes the gradients in place."""


class ByHand(Contestant):
    """What the contestants that are written with torch alone share."""

    def __init__(
        self, tensors: TensorSet, gradients: list[Tensor], **options: Any
    ) -> None:
        super().__init__(tensors, gradients)
        self.masters = [w.detach().float().requires_grad_() for w in self.model]
        for master in self.masters:
            master.grad = torch.empty_like(master)
        self.master_gradients: list[Tensor] = [m.grad for m in self.masters]
        self.inner = AdamW(self.masters, lr=LEARNING_RATE, **options)

    def step(self) -> None:
        self.inner.step()
        self.write_model()


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


class TorchLists(ByHand):
    """The fastest operations that torch has for lists of tensors."""

    def __init__(
        self, tensors: TensorSet, gradients: list[Tensor], **options: Any
    ) -> None:
        super().__init__(tensors, gradients, **options)
        # Which of the two forms of clipping is faster depends on the machine.
        self.foreach_clip = True
        self.found_inf = torch.zeros(1)
        self.inverse_scale = torch.tensor([1.0 / SCALE])

    @torch.no_grad()
    def take(self) -> None:
        torch._foreach_copy_(self.master_gradients, self.gradients)
        self.found_inf.zero_()
        torch._amp_foreach_non_finite_check_and_unscale_(
            self.master_gradients, self.found_inf, self.inverse_scale
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
        torch._foreach_zero_(self.master_gradients)
        torch._foreach_zero_(self.gradients)


class Ours(Contestant):
    """fp16core, as a training script would use it."""

    def __init__(
        self, tensors: TensorSet, gradients: list[Tensor], **options: Any
    ) -> None:
        super().__init__(tensors, gradients)
        self.inner = AdamW(self.model, lr=LEARNING_RATE, **options)
        self.optimizer = FP16_Optimizer(
            self.inner,
            dynamic_loss_scale=True,
            # A window that no run reaches, so that the scale stays.
            dynamic_loss_args={"init_scale": SCALE, "scale_window": 10**9},
            verbose=False,
        )
        (self.masters,) = self.optimizer.fp32_from_fp16_groups

    def take(self) -> None:
        self.optimizer.update_master_grads()

    def clip(self) -> None:
        self.optimizer.clip_master_grads(MAX_NORM)

    def write_model(self) -> None:
        self.optimizer._master_params_to_model_params()

    def step(self) -> None:
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()
