"""What a contestant is: a way to run an iteration between backward and forward."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

MAX_NORM = 1.0


class Contestant(ABC):
    """Parameters with gradients, what the inner optimizer updates, and the phases of
    an iteration. Each has tensors of its own."""

    inner: Optimizer
    # What the inner optimizer updates.
    masters: list[Tensor]

    def __init__(self, weights: Iterable[Tensor]) -> None:
        self.model = [Parameter(weight) for weight in weights]
        self.gradients = [torch.empty_like(weight) for weight in self.model]
        for weight, gradient in zip(self.model, self.gradients, strict=True):
            weight.grad = gradient

    def backward(self, given: list[Tensor]) -> None:
        """Does what a backward pass would do: writes ``given``, scaled gradients."""
        torch._foreach_copy_(self.gradients, given)

    def fill_gradients(self, value: float) -> None:
        """Does the same with one value for all elements."""
        for gradient in self.gradients:
            gradient.fill_(value)

    def finish_iteration(self) -> None:
        """Runs all that follows a backward pass, up to the next forward pass."""
        self.take()
        self.clip()
        self.step()
        self.zero_grad()

    @abstractmethod
    def take(self) -> None:
        """Checks the gradients and unscales them."""

    @abstractmethod
    def clip(self) -> Any:
        """Clips the norm of the master gradients to MAX_NORM."""

    @abstractmethod
    def step(self) -> None:
        """Updates the masters and writes the model."""

    @abstractmethod
    def zero_grad(self) -> None:
        """Zeroes the gradients of model and masters in place."""

    def steps_in_one_pass(self) -> bool:
        """Returns whether the update of the masters writes the model too."""
        return False

    def master_gradients(self) -> list[Tensor]:
        """Returns the gradients that the inner optimizer sees."""
        return [master.grad for master in self.masters if master.grad is not None]
