"""Several processes that decide alike, over torch.distributed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from fp16core._core import Reduction

_MODEL_PARALLEL = ("model_parallel", "tensor_model_parallel")


class ProcessGroup:
    """A group of processes as the core's door to them: called with a number and a
    reduction it returns the same number in all of them."""

    def __init__(self, group: Any, owner: str) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                f"{owner}: process_group needs torch.distributed to be initialized, "
                "but got a process that has not called init_process_group"
            )
        if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
            raise ValueError(
                f"{owner}: process_group must be a group that this process belongs "
                f"to, but got {group!r}"
            )
        self._group = group
        self._first = dist.get_rank(group) == 0
        backend = dist.get_backend(group)
        self._device = "cuda" if backend == "nccl" else "cpu"

    def __call__(self, value: float, reduction: Reduction) -> float:
        number = torch.tensor([value], dtype=torch.float64, device=self._device)
        # A torch without its distributed part has no ReduceOp to look up before.
        sum_ = reduction is Reduction.SUM
        operation = dist.ReduceOp.SUM if sum_ else dist.ReduceOp.MAX
        dist.all_reduce(number, operation, self._group)
        return number.item()

    def counts(
        self, param: torch.Tensor, norm_filter: Callable[[torch.Tensor], bool] | None
    ) -> bool:
        """Return whether norms count ``param`` in this process."""
        if norm_filter is not None:
            return bool(norm_filter(param))
        return self._first or any(getattr(param, n, False) for n in _MODEL_PARALLEL)
