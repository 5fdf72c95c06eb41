"""The contestant fp16core, as a training script would use it."""

from typing import Any

from contestant import MAX_NORM, Contestant
from inner import Inner
from tensors import SCALE, TensorSet
from torch import Tensor

from fp16core import FP16_Optimizer


class Ours(Contestant):
    """fp16 parameters under FP16_Optimizer with ``options``."""

    def __init__(
        self, tensors: TensorSet, inner: Inner, options: dict[str, Any], **how: Any
    ) -> None:
        super().__init__(tensors.weights())
        self.inner = inner.build(self.model, **how)
        self.optimizer = FP16_Optimizer(
            self.inner,
            dynamic_loss_scale=True,
            # A window that no run reaches, so that the scale stays.
            dynamic_loss_args={"init_scale": SCALE, "scale_window": 10**9},
            verbose=False,
            **options,
        )
        (self.masters,) = self.optimizer.fp32_from_fp16_groups

    def take(self) -> None:
        self.optimizer.update_master_grads()

    def clip(self) -> None:
        self.optimizer.clip_master_grads(MAX_NORM)

    def write_model(self) -> None:
        """Writes the masters to the model."""
        self.optimizer._master_params_to_model_params()

    def step(self) -> None:
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def steps_in_one_pass(self) -> bool:
        return self.optimizer.step_mode.startswith("fused ")

    def master_gradients(self) -> list[Tensor]:
        groups = self.optimizer.inspect_master_grad_data() or []
        return [grad for group in groups for grad in group if grad is not None]
