"""The format of ``FP16_Optimizer.state_dict()``, read and checked."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fp16core import _core
from fp16core._inner_optimizer import map_tensors
from fp16core.loss_scaler import scaler_from_state, scaler_state

FORMAT_VERSION = 1

_KEYS = {
    "loss_scaler": dict,
    "dynamic_loss_scale": bool,
    "overflow": bool,
    "first_closure_call_this_step": bool,
    "optimizer_state_dict": dict,
    "fp32_from_fp16": list,
    "format_version": int,
    "fp32_from_fp16_positions": list,
    "update_pending": bool,
    "steps_applied": int,
    "steps_skipped": int,
    "optimizer_class": str,
}


@dataclass
class Checkpoint:
    """A state dict that has been checked and fits an optimizer.

    ``masters`` and ``positions`` are None where the dict is a plain one of
    ``torch.optim``, which knows neither masters nor a scale.
    """

    optimizer_state: Mapping[str, Any]
    masters: list[list[torch.Tensor]] | None = None
    positions: list[list[int]] | None = None
    scaler: Any = None
    overflow: bool = False
    update_pending: bool = False
    steps_applied: int = 0
    steps_skipped: int = 0


def save(core: _core.OptimizerCore, optimizer: Any) -> dict[str, Any]:
    """Return the state of ``core`` and of the inner ``optimizer``, plain data only.

    The masters in it are the live tensors.
    """
    for group in core.model_params():
        for param in group:
            # Left behind by someone who looked for state under the model's
            # parameter, in a defaultdict.
            if param in optimizer.state and not optimizer.state[param]:
                del optimizer.state[param]
    return {
        "loss_scaler": scaler_state(core.loss_scaler),
        "dynamic_loss_scale": core.dynamic,
        "overflow": core.overflow,
        "first_closure_call_this_step": core.first_evaluation,
        "optimizer_state_dict": optimizer.state_dict(),
        "fp32_from_fp16": core.master_params(),
        "format_version": FORMAT_VERSION,
        "fp32_from_fp16_positions": core.master_positions(),
        "update_pending": core.update_pending,
        "steps_applied": core.steps_applied,
        "steps_skipped": core.steps_skipped,
        "optimizer_class": type(optimizer).__name__,
    }


def check(state_dict: Any, core: _core.OptimizerCore, optimizer: Any) -> Checkpoint:
    """Return what ``state_dict`` holds, or raise ValueError. Changes nothing."""
    if not isinstance(state_dict, Mapping):
        raise _error(f"must be a dict, but got {type(state_dict).__name__}")
    if set(state_dict) == {"state", "param_groups"}:
        _check_groups(state_dict, optimizer)
        return Checkpoint(state_dict)
    missing = [key for key in _KEYS if key not in state_dict]
    if missing:
        raise _error(
            "must be one of FP16_Optimizer (loss_scaler, ..., optimizer_state_dict, "
            "fp32_from_fp16, format_version, ...) or of torch.optim (state, "
            f"param_groups), but got one without {', '.join(missing)}"
        )
    version = state_dict["format_version"]
    if version != FORMAT_VERSION:
        raise _error(f"must have format_version {FORMAT_VERSION}, but got {version!r}")
    for key, kind in _KEYS.items():
        if not isinstance(state_dict[key], kind):
            raise _error(
                f"must hold a {kind.__name__} as {key}, "
                f"but got {type(state_dict[key]).__name__}"
            )
    inner = state_dict["optimizer_state_dict"]
    _check_groups(inner, optimizer)
    _check_class(state_dict["optimizer_class"], inner, optimizer)
    masters = state_dict["fp32_from_fp16"]
    positions = state_dict["fp32_from_fp16_positions"]
    _check_masters(masters, positions, optimizer)
    if min(state_dict["steps_applied"], state_dict["steps_skipped"]) < 0:
        raise _error("must hold step counts of at least 0, but got a negative one")
    return Checkpoint(
        inner,
        masters,
        positions,
        _read_scaler(state_dict["loss_scaler"], core.loss_scaler),
        state_dict["overflow"],
        state_dict["update_pending"],
        state_dict["steps_applied"],
        state_dict["steps_skipped"],
    )


def load_inner(optimizer: Any, state: Mapping[str, Any]) -> Callable[[], None]:
    """Load ``state`` into the inner optimizer; on an error put the old state back.

    Afterwards the optimizer shares no tensor with ``state``. Returns a function
    that puts the old state back.
    """
    given = set[int]()

    def remember(tensor: torch.Tensor) -> torch.Tensor:
        given.add(id(tensor))
        return tensor

    def unshare(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone() if id(tensor) in given else tensor

    map_tensors(state["state"], remember, steps=True)
    old_groups = optimizer.param_groups
    old_options = [dict(group) for group in old_groups]
    old_state = optimizer.state
    old_entries = {
        key: dict(entry) if isinstance(entry, dict) else entry
        for key, entry in old_state.items()
    }

    def put_back() -> None:
        for group, options in zip(old_groups, old_options, strict=True):
            group.clear()
            group.update(options)
        old_state.clear()
        old_state.update(old_entries)
        optimizer.param_groups = old_groups
        optimizer.state = old_state

    try:
        optimizer.load_state_dict(dict(state))
        for entry in optimizer.state.values():
            map_tensors(entry, unshare, steps=True)
    except BaseException:
        put_back()
        raise
    return put_back


def _error(text: str) -> ValueError:
    return ValueError(f"FP16_Optimizer.load_state_dict: the state dict {text}")


def _check_groups(state: Mapping[str, Any], optimizer: Any) -> None:
    groups = state.get("param_groups")
    if (
        not isinstance(state.get("state"), Mapping)
        or not isinstance(groups, list)
        or not all(isinstance(g, Mapping) and "params" in g for g in groups)
    ):
        raise _error(
            "must hold state and param_groups of the inner optimizer, "
            "but got something else under these names"
        )
    saved = [len(group["params"]) for group in state["param_groups"]]
    own = [len(group["params"]) for group in optimizer.param_groups]
    if saved != own:
        raise _error(f"must have groups of {own} parameters, but got {saved}")


def _check_class(name: str, state: Mapping[str, Any], optimizer: Any) -> None:
    own = type(optimizer).__name__
    if name == own:
        return
    options = set(getattr(optimizer, "defaults", None) or optimizer.param_groups[0])
    for group in state["param_groups"]:
        if not options <= set(group):
            raise _error(
                f"must be of an optimizer like {own}, but got one of {name} "
                f"without {', '.join(sorted(options - set(group)))}"
            )
    saved_keys = {key for entry in state["state"].values() for key in entry}
    own_keys = {key for entry in optimizer.state.values() for key in entry}
    if saved_keys and own_keys and saved_keys != own_keys:
        raise _error(
            f"must have the state of {own} ({', '.join(sorted(own_keys))}), "
            f"but got that of {name} ({', '.join(sorted(saved_keys))})"
        )
    warnings.warn(
        f"FP16_Optimizer.load_state_dict: state of {name} is loaded into {own}",
        stacklevel=4,
    )


def _check_masters(masters: Any, positions: Any, optimizer: Any) -> None:
    groups = optimizer.param_groups
    if not len(masters) == len(positions) == len(groups):
        raise _error(f"must have {len(groups)} groups of masters, not {len(masters)}")
    for number, (group, saved, indices) in enumerate(
        zip(groups, masters, positions, strict=True)
    ):
        if not (isinstance(saved, list) and isinstance(indices, list)):
            raise _error(f"must hold lists of masters, but got {saved!r}")
        if len(saved) != len(indices):
            raise _error(f"must have a position for each master of group {number}")
        for index, master in zip(indices, saved, strict=True):
            if not isinstance(index, int) or not 0 <= index < len(group["params"]):
                raise _error(f"must hold valid positions, but got {index!r}")
            if not isinstance(master, torch.Tensor):
                raise _error(f"must hold tensors as masters, but got {master!r}")
            shape = group["params"][index].shape
            if master.shape != shape or not master.is_floating_point():
                raise _error(
                    f"must hold a floating point master of shape {list(shape)} for "
                    f"group {number}, index {index}, but got {master.dtype} of shape "
                    f"{list(master.shape)}"
                )


def _read_scaler(state: Mapping[str, Any], current: Any) -> Any:
    """Return the scaler that will be in place, or a function that fills it."""
    try:
        if state["kind"] != "other":
            return scaler_from_state(dict(state))
    except (KeyError, TypeError, ValueError) as error:
        raise _error(f"must hold a valid loss_scaler, but got {error}") from error
    if isinstance(current, _core.LossScaler):
        raise _error(
            f"must hold a loss scaler like {current!r}, but got one of another kind"
        )
    if "state" in state:
        return lambda: current.load_state_dict(state["state"])
    return lambda: setattr(current, "cur_scale", state["cur_scale"])
