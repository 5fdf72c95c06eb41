"""The contestant without half parameters: torch's GradScaler, as its documentation
has it."""

from typing import Any

import torch
from contestant import MAX_NORM, Contestant
from inner import Inner
from tensors import SCALE, TensorSet
from torch.amp import GradScaler
from torch.nn.utils import clip_grad_norm_


class ScaledFloats(Contestant):
    """fp32 parameters, which are their own masters, under autocast and GradScaler."""

    def __init__(self, tensors: TensorSet, inner: Inner, **how: Any) -> None:
        super().__init__(weight.float() for weight in tensors.weights())
        self.masters = list(self.model)
        self.inner = inner.build(self.masters, **how)
        self.foreach_clip = how.get("foreach")
        # An interval that no run reaches, so that the scale stays.
        self.scaler = GradScaler("cpu", init_scale=SCALE, growth_interval=10**9)
        # Makes the scaler's tensors, which the first scaled loss does.
        self.scaler.scale(torch.zeros(1))

    def take(self) -> None:
        self.scaler.unscale_(self.inner)

    def clip(self) -> None:
        clip_grad_norm_(self.masters, MAX_NORM, foreach=self.foreach_clip)

    def step(self) -> None:
        self.scaler.step(self.inner)
        self.scaler.update()

    def zero_grad(self) -> None:
        self.inner.zero_grad(set_to_none=False)
