"""What is timed: our steps under AdamW, and the same made of torch's parts.

Each contestant has a model with gradients and yields its operations one by one. Bytes
are those that an operation must move for one element, each tensor once.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.amp import GradScaler

from fp16core import FP16_Optimizer

SCALE = 2.0**10
LR = 1e-3


@dataclass(frozen=True)
class Shape:
    """A set of equal tensors."""

    name: str
    tensors: int
    elements: int

    def total(self) -> int:
        return self.tensors * self.elements


@dataclass(frozen=True)
class Operation:
    """Something to time, and what has to come before, off the clock."""

    name: str
    bytes_per_element: int
    run: Callable[[], object]
    prepare: Callable[[], object] = lambda: None


class Contestant(ABC):
    """A model of one dtype with gradients that stay as they are."""

    name: str
    dtype = torch.float16
    # What it takes an element, temporary tensors included.
    memory_per_element: int

    def __init__(self, shape: Shape, device: str) -> None:
        self.device = device
        self.model = []
        for index in range(shape.tensors):
            weight = torch.full(
                (shape.elements,), 1.0 + index % 8, dtype=self.dtype, device=device
            )
            param = torch.nn.Parameter(weight)
            param.grad = torch.full_like(weight, 0.5)
            self.model.append(param)

    @abstractmethod
    def operations(self) -> Iterator[Operation]:
        """Yields what is timed, in the order of an iteration."""


class Ours(Contestant):
    """FP16_Optimizer with its fused step."""

    name = "ours"
    lean = False
    memory_per_element = 20
    take_bytes = 2 + 4
    # Gradient, master and two moments; the last three and the model.
    step_bytes = 16 + 14

    def __init__(self, shape: Shape, device: str) -> None:
        super().__init__(shape, device)
        self.optimizer = FP16_Optimizer(
            torch.optim.AdamW(self.model, lr=LR),
            dynamic_loss_scale=True,
            # A window that no run reaches, so that the scale stays.
            dynamic_loss_args={"init_scale": SCALE, "scale_window": 10**9},
            verbose=False,
            fused=True,
            materialize_master_grads=not self.lean,
        )

    def operations(self) -> Iterator[Operation]:
        take = self.optimizer.update_master_grads
        yield Operation("take", self.take_bytes, take)
        # Only a step after an update is decided on the device.
        yield Operation("step", self.step_bytes, self.optimizer.step, take)


class OursLean(Ours):
    """The same without master gradients."""

    name = "ours, lean"
    lean = True
    memory_per_element = 16
    take_bytes = 2
    step_bytes = 14 + 14


class TorchByHand(Contestant):
    """float32 masters with torch's optimizer, and lists copied there and back."""

    name = "torch fused + copies"
    how: dict[str, Any] = {"fused": True}
    memory_per_element = 20

    def __init__(self, shape: Shape, device: str) -> None:
        super().__init__(shape, device)
        self.masters = [
            torch.nn.Parameter(param.detach().float()) for param in self.model
        ]
        for master in self.masters:
            master.grad = torch.zeros_like(master)
        self.inner = torch.optim.AdamW(self.masters, lr=LR, **self.how)
        self.found_inf = torch.zeros(1, device=device)
        self.inverse_scale = torch.full((1,), 1 / SCALE, device=device)

    def operations(self) -> Iterator[Operation]:
        # Copied, then unscaled in place: two passes.
        yield Operation("take", 2 + 4 + 4 + 4, self.take)
        yield Operation("step", 16 + 12 + 4 + 2, self.step)

    @torch.no_grad()
    def take(self) -> None:
        own = [m.grad for m in self.masters if m.grad is not None]
        given = [p.grad for p in self.model if p.grad is not None]
        torch._foreach_copy_(own, given)
        torch._amp_foreach_non_finite_check_and_unscale_(
            own, self.found_inf, self.inverse_scale
        )

    @torch.no_grad()
    def step(self) -> None:
        self.inner.step()
        torch._foreach_copy_(list(self.model), list(self.masters))


class TorchForeach(TorchByHand):
    """The same with the optimizer that makes lists of temporary tensors."""

    name = "torch foreach + copies"
    how = {"foreach": True}
    memory_per_element = 36


class ScaledFloats(Contestant):
    """float32 weights under torch's GradScaler, which asks the device each step."""

    name = "GradScaler, fp32 fused"
    dtype = torch.float32
    memory_per_element = 16

    def __init__(self, shape: Shape, device: str) -> None:
        super().__init__(shape, device)
        self.inner = torch.optim.AdamW(self.model, lr=LR, fused=True)
        # An interval that no run reaches.
        self.scaler = GradScaler(device, init_scale=SCALE, growth_interval=10**9)
        # Makes the scaler's tensors, which the first scaled loss does.
        self.scaler.scale(torch.zeros(1, device=device))

    def operations(self) -> Iterator[Operation]:
        # The check reads the gradients once more.
        yield Operation("take and step", 4 + 16 + 12, self.step)

    def step(self) -> Any:
        self.scaler.step(self.inner)
        self.scaler.update()


CONTESTANTS: tuple[type[Contestant], ...] = (
    Ours,
    OursLean,
    TorchByHand,
    TorchForeach,
    ScaledFloats,
)
