"""The format of ``FP16_Optimizer.state_dict()``, and the way of every state dict in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from fp16core import _core
from fp16core._inner_optimizer import map_tensors
from fp16core._receiver import (
    Checkpoint,
    Receiver,
    check_inner,
    check_masters,
    fail,
)
from fp16core._relatives import RELATIVES, Origin, training_checkpoint
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


def check(state_dict: Any, receiver: Receiver) -> Checkpoint:
    """Return what ``state_dict`` holds, or raise ValueError. Changes nothing."""
    if not isinstance(state_dict, Mapping):
        raise fail(f"must be a dict, but got {type(state_dict).__name__}")
    return (_find_origin(state_dict) or _OWN).read(state_dict, receiver)


def _find_origin(state: Mapping[str, Any]) -> Origin | None:
    return next((origin for origin in _ORIGINS if origin.recognises(state)), None)


def _is_own(state: Mapping[str, Any]) -> bool:
    if "format_version" in state:
        return "loss_scaler" in state or "optimizer_state_dict" in state
    # The relatives hold an object there.
    return "fp32_from_fp16" in state and isinstance(state.get("loss_scaler"), Mapping)


def _read_own(state: Mapping[str, Any], receiver: Receiver) -> Checkpoint:
    missing = [key for key in _KEYS if key not in state]
    if missing:
        raise fail(
            "must be one of FP16_Optimizer (loss_scaler, ..., optimizer_state_dict, "
            "fp32_from_fp16, format_version, ...), of a project that it follows, or of "
            "torch.optim (state, param_groups), or hold one of them as optimizer, but "
            f"got one without {', '.join(missing)}"
        )
    version = state["format_version"]
    if version != FORMAT_VERSION:
        raise fail(f"must have format_version {FORMAT_VERSION}, but got {version!r}")
    for key, kind in _KEYS.items():
        if not isinstance(state[key], kind):
            raise fail(
                f"must hold a {kind.__name__} as {key}, "
                f"but got {type(state[key]).__name__}"
            )
    inner = state["optimizer_state_dict"]
    check_inner(inner, receiver)
    warning = _check_class(state["optimizer_class"], inner, receiver.optimizer)
    masters = state["fp32_from_fp16"]
    positions = state["fp32_from_fp16_positions"]
    check_masters(masters, positions, receiver.groups)
    if min(state["steps_applied"], state["steps_skipped"]) < 0:
        raise fail("must hold step counts of at least 0, but got a negative one")
    return Checkpoint(
        "fp16core",
        inner,
        masters,
        positions,
        scaler=_read_scaler(state["loss_scaler"], receiver.scaler),
        overflow=state["overflow"],
        update_pending=state["update_pending"],
        step_counts=(state["steps_applied"], state["steps_skipped"]),
        restored={
            "scale, counters and flags": "all of them",
            "counts of steps": f"{state['steps_applied']} applied, "
            f"{state['steps_skipped']} skipped",
        },
        warning=warning,
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


def load_masters(core: _core.OptimizerCore, saved: Checkpoint) -> None:
    """Put the masters of ``saved`` into place and write the model from them."""
    for param, value in saved.natives:
        with torch.no_grad():
            param.copy_(value)
    if saved.masters_are_weights:
        core.overwrite_masters()
    if saved.masters is None or saved.positions is None:
        return
    masters = core.master_params()
    for own, positions, group, indices in zip(
        masters, core.master_positions(), saved.masters, saved.positions, strict=True
    ):
        given = dict(zip(indices, group, strict=True))
        own[:] = [
            given.get(i, master) for i, master in zip(positions, own, strict=True)
        ]
    core.load_masters(masters)


def _check_class(name: str, state: Mapping[str, Any], optimizer: Any) -> str:
    """Return what to warn of where ``state`` is of another class; "" for nothing."""
    own = type(optimizer).__name__
    if name == own:
        return ""
    options = set(getattr(optimizer, "defaults", None) or optimizer.param_groups[0])
    for group in state["param_groups"]:
        if not options <= set(group):
            raise fail(
                f"must be of an optimizer like {own}, but got one of {name} "
                f"without {', '.join(sorted(options - set(group)))}"
            )
    saved_keys = {key for entry in state["state"].values() for key in entry}
    own_keys = {key for entry in optimizer.state.values() for key in entry}
    if saved_keys and own_keys and saved_keys != own_keys:
        raise fail(
            f"must have the state of {own} ({', '.join(sorted(own_keys))}), "
            f"but got that of {name} ({', '.join(sorted(saved_keys))})"
        )
    return f"FP16_Optimizer.load_state_dict: state of {name} is loaded into {own}"


def _read_scaler(state: Mapping[str, Any], current: Any) -> Any:
    """Return the scaler that will be in place, or a function that fills it."""
    try:
        if state["kind"] != "other":
            return scaler_from_state(dict(state))
    except (KeyError, TypeError, ValueError) as error:
        raise fail(f"must hold a valid loss_scaler, but got {error}") from error
    if isinstance(current, _core.LossScaler):
        raise fail(
            f"must hold a loss scaler like {current!r}, but got one of another kind"
        )
    if "state" in state:
        return lambda: current.load_state_dict(state["state"])
    return lambda: setattr(current, "cur_scale", state["cur_scale"])


_OWN = Origin("fp16core", _is_own, _read_own)
_ORIGINS = (_OWN, *RELATIVES, training_checkpoint(_find_origin))
