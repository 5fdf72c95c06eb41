"""What Megatron-LM's ``fp16`` package has beside the utilities."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

import fp16core
from fp16core import loss_scaler
from fp16core._core import Reduction
from fp16core._process_group import ProcessGroup
from fp16core.loss_scaler import LossScaler

__all__ = ["DynamicLossScaler", "FP16_Optimizer", "LossScaler"]


def model_parallel_group() -> Any:
    """Return the model parallel group of a Megatron ``mpu`` module that a script has
    imported and initialized; None where there is none, or it has one process."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    for name in ("mpu", "megatron.mpu", "megatron.core.parallel_state"):
        mpu = sys.modules.get(name)
        get_group = getattr(mpu, "get_model_parallel_group", None)
        ready = getattr(mpu, "model_parallel_is_initialized", lambda: True)
        if get_group is not None and ready():
            group = get_group()
            return group if dist.get_world_size(group) > 1 else None
    return None


class DynamicLossScaler(loss_scaler.DynamicLossScaler):
    """The dynamic loss scaler, whose ``has_overflow`` asks the model parallel group."""

    def has_overflow_serial(self, params: Iterable[torch.Tensor]) -> bool:
        """Return whether any gradient of this process holds inf or NaN."""
        return super().has_overflow(params)

    def has_overflow(self, params: Iterable[torch.Tensor]) -> bool:
        """Return whether any gradient of the group holds inf or NaN. All its processes
        have to ask."""
        overflow = super().has_overflow(params)
        group = model_parallel_group()
        if group is None:
            return overflow
        combine = ProcessGroup(group, "DynamicLossScaler.has_overflow")
        return combine(float(overflow), Reduction.MAX) > 0


class FP16_Optimizer(fp16core.FP16_Optimizer):  # noqa: N801 - the original's name
    """:class:`fp16core.FP16_Optimizer` as Megatron-LM has it: quiet by default, and
    with the model parallel group of the script's ``mpu`` as its process group.

    Parameters whose attribute ``model_parallel`` is true are counted in every process
    of the group, all others in its first.
    """

    def __init__(
        self,
        init_optimizer: Any,
        static_loss_scale: float | None = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, Any] | None = None,
        verbose: bool = False,
        **options: Any,
    ) -> None:
        options.setdefault("process_group", model_parallel_group())
        if dynamic_loss_scale and options.get("loss_scaler") is None:
            scaler = loss_scaler.scaler_from_arguments(
                dynamic_loss_args, DynamicLossScaler
            )
            options["loss_scaler"] = scaler
        super().__init__(
            init_optimizer,
            static_loss_scale,
            dynamic_loss_scale,
            dict(dynamic_loss_args or {}),
            verbose,
            **options,
        )

    def load_state_dict(self, state_dict: Any, **options: Any) -> None:
        """As :meth:`fp16core.FP16_Optimizer.load_state_dict`; a dynamic scaler is of
        this module's class afterwards, too."""
        super().load_state_dict(state_dict, **options)
        if type(self.loss_scaler) is loss_scaler.DynamicLossScaler:
            restore, (_, state), _ = self.loss_scaler.__reduce__()
            self.loss_scaler = restore(DynamicLossScaler, state)
