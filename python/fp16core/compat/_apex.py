"""What ``apex.fp16_utils`` has beside the utilities."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import fp16core
from fp16core.fp16_utils import to_python_float
from fp16core.loss_scaler import DynamicLossScaler, LossScaler

__all__ = ["DynamicLossScaler", "FP16_Optimizer", "LossScaler", "to_python_float"]


class FP16_Optimizer(fp16core.FP16_Optimizer):  # noqa: N801 - the original's name
    """:class:`fp16core.FP16_Optimizer` with the arguments of apex' forms of it.

    ``dynamic_loss_args`` may have ``min_loss_scale`` and ``max_loss_scale``, as since
    2019: then the scale follows apex.amp's rule, whose factor is 2, whatever
    ``scale_factor`` says.
    """

    def __init__(
        self,
        init_optimizer: Any,
        static_loss_scale: float | None = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, Any] | None = None,
        verbose: bool = True,
        **options: Any,
    ) -> None:
        args = dict(dynamic_loss_args or {})
        if dynamic_loss_scale and args.keys() & {"min_loss_scale", "max_loss_scale"}:
            args.pop("scale_factor", None)
            args["policy"] = "apex_amp"
        super().__init__(
            init_optimizer,
            static_loss_scale,
            dynamic_loss_scale,
            args,
            verbose,
            **options,
        )
