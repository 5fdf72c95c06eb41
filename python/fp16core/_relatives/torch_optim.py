"""A plain optimizer of torch.optim, which knows neither masters nor a scale."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp16core._receiver import Checkpoint, Receiver
from fp16core._relatives._inner_state import translate
from fp16core._relatives._origin import Origin

_NAME = "torch.optim"


def _recognises(state: Mapping[str, Any]) -> bool:
    return set(state) == {"state", "param_groups"}


def _read(state: Mapping[str, Any], receiver: Receiver) -> Checkpoint:
    return Checkpoint(
        _NAME,
        translate(state, receiver, ""),
        keeps_run=True,
        not_restored={
            "masters": "not in the state dict; they stay, and follow the model",
            "scale": "not in the state dict; the present scaler stays",
        },
    )


TORCH_OPTIM = Origin(_NAME, _recognises, _read)
