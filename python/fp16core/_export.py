"""State for others: plain torch with a GradScaler, and fp32 weights by name."""

from __future__ import annotations

import copy
from typing import Any

import torch

from fp16core import _core
from fp16core._inner_optimizer import map_tensors


def torch_state_dict(
    core: _core.OptimizerCore, optimizer: Any, names: list[list[str]]
) -> dict[str, Any]:
    """Return the state dicts of a plain optimizer and of a torch.amp.GradScaler."""
    saved = optimizer.state_dict()
    groups = [copy.deepcopy(group) for group in saved["param_groups"]]
    for group, known in zip(groups, names, strict=True):
        if known and all(known):
            group["param_names"] = list(known)
    state = {
        key: map_tensors(_unshared(entry), torch.Tensor.clone, steps=True)
        for key, entry in saved["state"].items()
    }
    return {
        "optimizer": {**saved, "state": state, "param_groups": groups},
        "scaler": _grad_scaler_state(core.loss_scaler),
    }


def _unshared(value: Any) -> Any:
    """Return the same nest in containers of its own, with the same tensors."""
    if isinstance(value, dict):
        return {key: _unshared(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_unshared(item) for item in value]
    return copy.copy(value) if not isinstance(value, torch.Tensor) else value.detach()


def _grad_scaler_state(scaler: Any) -> dict[str, Any]:
    if not isinstance(scaler, _core.LossScaler):
        raise TypeError(
            "FP16_Optimizer.torch_state_dict: loss_scaler must be a LossScaler or a "
            f"DynamicLossScaler, but got {type(scaler).__name__}"
        )
    if not isinstance(scaler, _core.DynamicLossScaler):
        # With factors of 1 it stays where it is.
        return _numbers(scaler.cur_scale, 1.0, 1.0, 2000, 0)
    window = scaler.scale_window
    if window != int(window):
        raise ValueError(
            "FP16_Optimizer.torch_state_dict: scale_window must be a whole number, "
            f"but got {window!r}"
        )
    # A late window grows after one update more than its length, which a count below
    # zero says too, for the first time.
    clean = scaler.cur_iter - 1 - scaler.last_overflow_iter - scaler.window_lag
    return _numbers(
        scaler.cur_scale,
        scaler.scale_factor,
        scaler.backoff_factor or 1.0 / scaler.scale_factor,
        int(window),
        clean % int(window) if clean >= 0 else clean,
    )


def _numbers(
    scale: float, growth: float, backoff: float, interval: int, tracker: int
) -> dict[str, Any]:
    return {
        "scale": scale,
        "growth_factor": growth,
        "backoff_factor": backoff,
        "growth_interval": interval,
        "_growth_tracker": tracker,
    }


def fp32_state_dict(
    core: _core.OptimizerCore, model: torch.nn.Module | None
) -> dict[str, Any]:
    """Return the state dict of ``model`` with masters for half parameters."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            "FP16_Optimizer.fp32_state_dict: model must be a module, "
            f"but got {type(model).__name__}"
        )
    masters = {
        id(param): master
        for params, own in zip(core.model_params(), core.master_params(), strict=True)
        for param, master in zip(params, own, strict=True)
    }
    # Its own tensors, and not aliases, tell which of them have masters.
    state = model.state_dict(keep_vars=True)
    tensors = {id(v): v for v in state.values() if isinstance(v, torch.Tensor)}
    if masters and not masters.keys() & tensors.keys():
        raise ValueError(
            "FP16_Optimizer.fp32_state_dict: model must have parameters of the "
            f"optimizer, but got {type(model).__name__} without any of them"
        )
    halves = [
        v
        for key, v in tensors.items()
        if v.dtype in (torch.float16, torch.bfloat16) and key not in masters
    ]
    wide = dict(zip(map(id, halves), _core.cast(halves, torch.float32), strict=True))
    # Tied weights stay tied: one copy for all names of a tensor.
    copies = {
        key: wide[key] if key in wide else masters.get(key, v).detach().clone()
        for key, v in tensors.items()
    }
    return {
        name: copies[id(v)] if isinstance(v, torch.Tensor) else copy.deepcopy(v)
        for name, v in state.items()
    }
