"""A whole training checkpoint: a dict with the optimizer's state dict among others.

Beside the optimizer's, two things count. A scaler that its project keeps apart:
torch.amp.GradScaler's or apex.amp's. And the model's weights: where the optimizer's
state dict has no masters, they are what the masters become, in fp32 if the file has
them in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from fp16core._receiver import Checkpoint, Receiver, expect, fail, place_masters
from fp16core._relatives import _scalers as scalers
from fp16core._relatives._origin import Origin

_OPTIMIZER = ("optimizer", "optimizer_state_dict", "last_optimizer_state")
_MODEL = ("model", "model_state_dict", "state_dict", "module")
_GRAD_SCALER = ("scaler", "grad_scaler", "scaler_state_dict")

Find = Callable[[Mapping[str, Any]], Origin | None]


def training_checkpoint(find: Find) -> Origin:
    """Return the origin of dicts with an optimizer's that ``find`` knows."""

    def read(state: Mapping[str, Any], receiver: Receiver) -> Checkpoint:
        inner = _first(state, _OPTIMIZER)
        origin = find(inner)
        if origin is None:
            raise fail(
                "must hold one of a known format as optimizer, but got one with "
                f"{', '.join(map(str, inner))}",
                "a training run",
            )
        result = origin.read(inner, receiver)
        if result.scaler is None:
            _add_scaler(result, state, receiver)
        if result.masters is None:
            _add_masters(result, _first(state, _MODEL), receiver)
        if result.scaler is not None or result.masters is not None:
            result.keeps_run = False
        return result

    return Origin(
        "a training run", lambda state: _first(state, _OPTIMIZER) is not None, read
    )


def _first(state: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    """Return the first dict that is there under one of ``names``, or None."""
    found = (state[name] for name in names if isinstance(state.get(name), Mapping))
    return next(found, None)


def _add_scaler(
    result: Checkpoint, state: Mapping[str, Any], receiver: Receiver
) -> None:
    if "amp" in state:
        _add_apex_amp(result, state["amp"], receiver)
    else:
        saved = _first(state, _GRAD_SCALER)
        if saved:  # that of a disabled scaler is empty
            _add_grad_scaler(result, saved)


def _add_apex_amp(result: Checkpoint, saved: Any, receiver: Receiver) -> None:
    origin = "apex.amp"
    name = f"loss_scaler{receiver.loss_index}"
    if not isinstance(saved, Mapping) or not isinstance(saved.get(name), Mapping):
        raise fail(f"must hold a {name} in amp, but got {saved!r}", origin)
    saved = saved[name]
    expect(saved, {"loss_scale": object, "unskipped": object}, origin)
    parameters, said = scalers.present_parameters(
        receiver.scaler,
        {
            "scale_window": None,
            "min_loss_scale": "min_scale",
            "max_loss_scale": None,
        },
    )
    result.scaler = scalers.follow(
        origin,
        "apex_amp",
        saved["loss_scale"],
        parameters,
        scalers.clean_run(origin, saved["unskipped"]),
    )
    result.masters_are_weights = True
    result.not_restored["masters"] = (
        "not in the checkpoint; they become the model's weights"
    )
    _tell(result, f"{result.origin} with a scaler of apex.amp", said)


def _add_grad_scaler(result: Checkpoint, saved: Mapping[str, Any]) -> None:
    origin = "torch.amp.GradScaler"
    names = ("growth_factor", "backoff_factor", "growth_interval")
    kinds = dict.fromkeys(("scale", *names, "_growth_tracker"), object)
    expect(saved, kinds, origin)
    result.scaler = scalers.follow(
        origin,
        "torch",
        saved["scale"],
        {name: saved[name] for name in names},
        scalers.clean_run(origin, saved["_growth_tracker"]),
    )
    _tell(result, f"{result.origin} with a torch.amp.GradScaler", {})


def _tell(result: Checkpoint, origin: str, said: Mapping[str, str]) -> None:
    result.origin = origin
    result.restored.update(scalers.described(result.scaler, "window"))
    result.not_restored.pop("scale", None)
    result.not_restored.update(said)


def _add_masters(
    result: Checkpoint, weights: Mapping[str, Any] | None, receiver: Receiver
) -> None:
    if weights is None:
        return
    masters: list[list[torch.Tensor]] = []
    for names, positions in zip(receiver.names, receiver.master_positions, strict=True):
        found = [_weight(weights, names[i]) for i in positions]
        if not all(isinstance(weight, torch.Tensor) for weight in found):
            result.not_restored["masters"] += (
                "; the file has weights, which load_state_dict(..., model=model) finds"
                if not all(names[i] for i in positions)
                else "; the file has no weights under the names of the parameters"
            )
            return
        masters.append(found)
    place_masters(result, masters, receiver)
    result.masters_are_weights = False
    result.not_restored.pop("masters")
    result.restored["source of masters"] = "the weights of the checkpoint's model"


def _weight(weights: Mapping[str, Any], name: str) -> Any:
    """Return the weight of the parameter of this name, or None.

    A wrapper for data parallelism puts "module." before the names.
    """
    for key in (name, f"module.{name}", name.removeprefix("module.")):
        if name and key in weights:
            return weights[key]
    return None
