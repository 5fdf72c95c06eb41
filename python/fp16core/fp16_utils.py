"""Master weights by hand, under the names that NVIDIA's fp16 utilities gave it.

For loops that do without an optimizer of :class:`fp16core.FP16_Optimizer`'s kind::

    model_params, master_params = prep_param_lists(model)
    optimizer = torch.optim.SGD(master_params, lr=1e-3)
    ...
    (loss * scale).backward()
    model_grads_to_master_grads(model_params, master_params)
    ...  # divide the gradients of the masters by the scale
    optimizer.step()
    master_params_to_model_params(model_params, master_params)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch

from fp16core import _core
from fp16core.half_modules import (
    FLOAT_TYPES,
    HALF_TYPES,
    BN_convert_float,
    FP16_Module,
    FP16Model,
    conversion_helper,
    convert_module,
    convert_network,
    fp16_to_fp32,
    fp32_to_fp16,
    network_to_half,
    tofp16,
)

__all__ = [
    "FLOAT_TYPES",
    "HALF_TYPES",
    "BN_convert_float",
    "FP16Model",
    "FP16_Module",
    "backwards_debug_hook",
    "clip_grad_norm",
    "conversion_helper",
    "convert_module",
    "convert_network",
    "fp16_to_fp32",
    "fp32_to_fp16",
    "master_params_to_model_params",
    "model_grads_to_master_grads",
    "network_to_half",
    "prep_param_lists",
    "to_python_float",
    "tofp16",
]


def prep_param_lists(
    model: torch.nn.Module, flat_master: bool = False
) -> tuple[list[torch.nn.Parameter], list[torch.Tensor]]:
    """Return the trainable parameters of ``model`` and fp32 masters of them.

    Args:
        model: parameters of any floating dtype.
        flat_master: whether there is one master that holds all parameters in a row,
            with a gradient of zeros, instead of one for each.

    Masters are leaves that require grad; those of single parameters have no gradient
    yet.
    """
    model_params = [p for p in model.parameters() if p.requires_grad]
    if not flat_master:
        masters = _core.cast([p.detach() for p in model_params], torch.float32)
        for master in masters:
            master.requires_grad_()
        return model_params, masters
    size = sum(p.numel() for p in model_params)
    device = model_params[0].device if model_params else None
    flat = torch.nn.Parameter(torch.zeros(size, device=device))
    _core.copy_(_views(flat.detach(), model_params), [p.detach() for p in model_params])
    flat.grad = torch.zeros_like(flat)
    return model_params, [flat]


def model_grads_to_master_grads(
    model_params: Sequence[torch.Tensor],
    master_params: Sequence[torch.Tensor],
    flat_master: bool = False,
) -> None:
    """Copy the gradients of the model to its masters, as fp32 and as they are.

    Gradients of masters are made where they are missing. The master of a parameter
    without a gradient gets none; in a flat master it gets zeros. A sparse gradient
    stays sparse, and cannot be a part of a flat one.

    Raises ValueError if the lists do not fit, and TypeError for a gradient that is not
    floating point, or that is sparse where there is a flat master. Nothing is changed
    then.
    """
    if flat_master:
        flat = _flat(master_params, model_params, "model_grads_to_master_grads")
        whole = torch.zeros_like(flat) if flat.grad is None else flat.grad
        pairs = list(zip(_views(whole, model_params), model_params, strict=True))
        given = [(v, p.grad) for v, p in pairs if p.grad is not None]
        _core.copy_([v for v, _ in given], [g for _, g in given])
        for view, param in pairs:
            if param.grad is None:
                view.zero_()
        flat.grad = whole
        return
    _check(model_params, master_params, "model_grads_to_master_grads")
    made: list[torch.Tensor | None] = []
    targets, sources = [], []
    for param, master in zip(model_params, master_params, strict=True):
        grad = param.grad
        if grad is None:
            made.append(None)
        elif grad.is_sparse:
            made.append(grad.to(torch.float32))
        else:
            own = master.grad
            if own is None or own.is_sparse:
                own = torch.empty_like(master)
            made.append(own)
            targets.append(own)
            sources.append(grad)
    _core.copy_(targets, sources)
    # Only now: a gradient that cannot be copied leaves the masters as they were.
    for master, gradient in zip(master_params, made, strict=True):
        master.grad = gradient


def master_params_to_model_params(
    model_params: Sequence[torch.Tensor],
    master_params: Sequence[torch.Tensor],
    flat_master: bool = False,
) -> None:
    """Copy the masters to the model, rounded to nearest even.

    Raises ValueError if the lists do not fit.
    """
    if flat_master:
        flat = _flat(master_params, model_params, "master_params_to_model_params")
        sources = _views(flat.detach(), model_params)
    else:
        _check(model_params, master_params, "master_params_to_model_params")
        sources = [m.detach() for m in master_params]
    _core.copy_([p.detach() for p in model_params], sources)


def to_python_float(t: Any) -> float:
    """Return the number in a tensor of one element, or the first of a sequence."""
    if hasattr(t, "item"):
        return t.item()  # type: ignore[no-any-return]
    return t[0]  # type: ignore[no-any-return]


def clip_grad_norm(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2,
) -> torch.Tensor:
    """Clip the norm over all gradients of ``parameters``, in place.

    Returns the norm before as a 0-dim fp32 tensor. Where it is not finite nothing is
    changed. Raises ValueError if ``max_norm`` is negative or NaN.
    """
    listed = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    grads = [p.grad for p in listed if p.grad is not None]
    return _core.clip_grad_norm_(grads, float(max_norm), float(norm_type))


def backwards_debug_hook(grad: torch.Tensor) -> NoReturn:
    """Raise RuntimeError: for a tensor whose gradient must never be asked for."""
    raise RuntimeError(
        "backwards_debug_hook: there must be no backward pass through this tensor, "
        f"but got a gradient of shape {list(grad.shape)}"
    )


def _views(flat: torch.Tensor, params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    sizes = [p.numel() for p in params]
    parts = torch.split(flat, sizes)
    return [part.view(p.shape) for part, p in zip(parts, params, strict=True)]


def _flat(
    masters: Sequence[torch.Tensor], params: Sequence[torch.Tensor], owner: str
) -> torch.Tensor:
    size = sum(p.numel() for p in params)
    if len(masters) != 1 or masters[0].shape != (size,):
        shapes = [list(m.shape) for m in masters]
        raise ValueError(
            f"{owner}: master_params must hold one flat master of {size} elements, "
            f"but got shapes {shapes}"
        )
    return masters[0]


def _check(
    params: Sequence[torch.Tensor], masters: Sequence[torch.Tensor], owner: str
) -> None:
    own, given = [p.shape for p in params], [m.shape for m in masters]
    if own != given:
        raise ValueError(
            f"{owner}: master_params must have the shapes of model_params, "
            f"{[list(s) for s in own]}, but got {[list(s) for s in given]}"
        )
