"""The scalers of other projects, as ours with the same future."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fp16core import _core
from fp16core._receiver import fail
from fp16core.loss_scaler import DynamicLossScaler, LossScaler

# Where a parameter of another project stands in a scaler of ours.
_OPTIONS = {
    "scale_factor": "scale_factor",
    "growth_factor": "scale_factor",
    "scale_window": "scale_window",
    "growth_interval": "scale_window",
    "min_scale": "min_scale",
    "max_loss_scale": "max_scale",
    "hysteresis": "delayed_shift",
    "tolerance": "tolerance",
}


def present_parameters(
    scaler: Any, names: Mapping[str, str | None]
) -> tuple[dict[str, float | None], dict[str, str]]:
    """Return parameters that a checkpoint lacks, from the present ``scaler``.

    ``names`` maps them to the attribute that holds them, None for the ordinary one.
    A static scaler has none of them: the project's defaults stand then. The second
    result is what the report says.
    """
    what = ", ".join(names)
    if not isinstance(scaler, _core.DynamicLossScaler):
        return {}, {what: "not in the checkpoint; the project's defaults stand"}
    parameters: dict[str, float | None] = {}
    for name, attribute in names.items():
        if name == "backoff_factor":
            value = scaler.backoff_factor or 1.0 / scaler.scale_factor
        else:
            value = getattr(scaler, attribute or _OPTIONS[name])
        parameters[name] = value
    return parameters, {what: "not in the checkpoint; those of the present scaler stay"}


def follow(
    origin: str,
    policy: str,
    scale: Any,
    parameters: Mapping[str, Any],
    counters: Mapping[str, int],
    scale_factor: Any = None,
) -> DynamicLossScaler:
    """Make a scaler that goes on by the rule of another project.

    ``scale_factor`` is for those that save one but have no parameter for it.
    """
    try:
        # Each names its first scale first, and some have a ceiling for it.
        first, *_ = _core.scale_policy_parameters(policy)
        scaler = DynamicLossScaler.preset(
            policy, **{**parameters, first: number(scale)}
        )
        scaler.cur_scale = number(scale)
        if scale_factor is not None:
            scaler.scale_factor = number(scale_factor)
        for name, value in counters.items():
            setattr(scaler, name, value)
    except (TypeError, ValueError) as error:
        raise fail(f"must hold a valid loss scaler, but got {error}", origin) from error
    return scaler


def hold(origin: str, scale: Any) -> LossScaler:
    """Make a scaler that stays at ``scale``."""
    try:
        return LossScaler(number(scale))
    except (TypeError, ValueError) as error:
        raise fail(f"must hold a valid loss scaler, but got {error}", origin) from error


def clean_run(origin: str, updates: Any) -> dict[str, int]:
    """Return counters that say: so many clean updates since the window began."""
    length = count(origin, "clean updates", updates)
    return {"cur_iter": length, "last_overflow_iter": -1}


def iterations(origin: str, state: Mapping[str, Any]) -> dict[str, int]:
    """Return ``cur_iter`` and ``last_overflow_iter`` of ``state``, checked."""
    now = count(origin, "cur_iter", state["cur_iter"])
    last = count(origin, "last_overflow_iter", state["last_overflow_iter"], -1)
    if last >= now:
        raise fail(
            f"must hold a last_overflow_iter below cur_iter {now}, but got {last}",
            origin,
        )
    return {"cur_iter": now, "last_overflow_iter": last}


def count(origin: str, name: str, value: Any, least: int | None = 0) -> int:
    """Return ``value`` as an integer that is at least ``least``."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or (least is not None and value < least)
    ):
        bound = "" if least is None else f" of at least {least}"
        raise fail(f"must hold an integer{bound} as {name}, but got {value!r}", origin)
    return value


def number(value: Any) -> float:
    """Return a number, or a tensor of one, as a float; else raise TypeError."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} in the place of a number")
    return float(value)


def described(scaler: Any, counters: str = "") -> dict[str, str]:
    """Return what the report says about a scaler that was restored."""
    said = {"scale": f"{scaler.loss_scale:g}"}
    if counters:
        said["counters"] = counters
    return said
