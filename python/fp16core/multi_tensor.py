"""apex' multi_tensor_apply and functions of its amp_C, on the core's list kernels.

Each function takes what amp_C's takes: a chunk size, which means nothing here, a flag
of one element, lists of tensors, and its own arguments. They work on the CPU and on
CUDA, in any strides. A flag is set to 1 where an *element* is infinite or NaN, never
for a sum of finite ones; on CUDA the host waits to learn it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fp16core import _core
from fp16core._core import update_scale_hysteresis

__all__ = [
    "MultiTensorApply",
    "multi_tensor_applier",
    "multi_tensor_axpby",
    "multi_tensor_l2norm",
    "multi_tensor_l2norm_mp",
    "multi_tensor_l2norm_scale",
    "multi_tensor_scale",
    "multi_tensor_unscale_l2norm",
    "update_scale_hysteresis",
]

Lists = Sequence[Sequence[torch.Tensor]]


class MultiTensorApply:
    """Calls a function of amp_C with a chunk size."""

    available = True
    warned = False

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def check_avail(self) -> None:
        """Does nothing: the functions are always there."""

    def __call__(
        self,
        op: Callable[..., Any],
        noop_flag_buffer: torch.Tensor,
        tensor_lists: Lists,
        *args: Any,
    ) -> Any:
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)


multi_tensor_applier = MultiTensorApply(2048 * 32)


def _check(owner: str, lists: Lists, depth: int) -> list[list[torch.Tensor]]:
    if len(lists) != depth:
        raise ValueError(
            f"{owner}: tensor_lists must be {depth} lists, but got {len(lists)}"
        )
    checked = [list(tensors) for tensors in lists]
    sizes = [[t.numel() for t in tensors] for tensors in checked]
    if any(other != sizes[0] for other in sizes):
        raise ValueError(
            f"{owner}: tensor_lists must hold tensors of equal sizes, but got {sizes}"
        )
    for others in checked[1:]:
        for index, (first, other) in enumerate(zip(checked[0], others, strict=True)):
            if first.shape != other.shape:
                others[index] = _reshaped(owner, other, first)
    return checked


def _reshaped(owner: str, tensor: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """Return a view of ``tensor`` of the shape of ``first``. Elements pair by their
    place in memory then, as they do in amp_C."""
    if not (tensor.is_contiguous() and first.is_contiguous()):
        raise ValueError(
            f"{owner}: tensors of equal size must be contiguous or have the same "
            f"shape, but got {list(first.shape)} and {list(tensor.shape)}"
        )
    return tensor.detach().view(first.shape)


def _raise_flag(flag: torch.Tensor, overflow: bool) -> None:
    if overflow:
        flag.fill_(1)


def multi_tensor_scale(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, scale: float
) -> None:
    """Write ``scale`` times the first list to the second, each in its own dtype.

    Sets the flag if an element of the first list is infinite or NaN; everything is
    written all the same.
    """
    sources, targets = _check("multi_tensor_scale", tensor_lists, 2)
    _raise_flag(noop_flag, _core.scaled_copy_(targets, sources, float(scale)))


def multi_tensor_axpby(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    a: float,
    b: float,
    arg_to_check: int,
) -> None:
    """Write ``a`` times the first list plus ``b`` times the second to the third.

    Sets the flag if an element of what ``arg_to_check`` names is infinite or NaN: 0 the
    first list, 1 the second, -1 both.
    """
    x, y, targets = _check("multi_tensor_axpby", tensor_lists, 3)
    if arg_to_check not in (-1, 0, 1):
        raise ValueError(
            "multi_tensor_axpby: arg_to_check must be -1, 0 or 1, "
            f"but got {arg_to_check!r}"
        )
    checked = {-1: x + y, 0: x, 1: y}[arg_to_check]
    overflow = _core.has_overflow(checked)
    _core.axpby_(targets, float(a), x, float(b), y)
    _raise_flag(noop_flag, overflow)


def multi_tensor_l2norm(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    per_tensor: bool | None = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the 2-norm over a list, of shape [1], and of each tensor, of shape [n].

    The second is empty unless ``per_tensor`` is set. Sets the flag if an element is
    infinite or NaN.
    """
    return _norms("multi_tensor_l2norm", noop_flag, tensor_lists, 1.0, per_tensor)


def multi_tensor_l2norm_mp(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    per_tensor: bool | None = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, with zeros where the flag is set already."""
    if noop_flag.item():
        (tensors,) = _check("multi_tensor_l2norm_mp", tensor_lists, 1)
        count = len(tensors) if per_tensor else 0
        device = noop_flag.device
        return torch.zeros(1, device=device), torch.zeros(count, device=device)
    return _norms("multi_tensor_l2norm_mp", noop_flag, tensor_lists, 1.0, per_tensor)


def multi_tensor_l2norm_scale(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    scale: float,
    per_tensor: bool | None = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write ``scale`` times the first list to the second, and return the norms of the
    first as it was."""
    sources, targets = _check("multi_tensor_l2norm_scale", tensor_lists, 2)
    found = _norms("multi_tensor_l2norm_scale", noop_flag, [sources], 1.0, per_tensor)
    _core.scaled_copy_(targets, sources, float(scale))
    return found


def multi_tensor_unscale_l2norm(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    inv_scale: torch.Tensor,
    per_tensor: bool | None = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norms of ``inv_scale`` times a list, which is left as it is."""
    factor = float(inv_scale)
    owner = "multi_tensor_unscale_l2norm"
    return _norms(owner, noop_flag, tensor_lists, factor, per_tensor)


def _norms(
    owner: str,
    flag: torch.Tensor,
    lists: Lists,
    factor: float,
    per_tensor: bool | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    (tensors,) = _check(owner, lists, 1)
    _raise_flag(flag, _core.has_overflow(tensors))
    total, each = _core.norms(tensors, factor)
    return total, each if per_tensor else each[:0]
