"""fairseq's FP16Optimizer: the inner state and a scale, without masters.

The moments are by parameter, or one flat tensor over all of them in the model's
order, which the receiver's group has to have then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp16core._receiver import Checkpoint, Receiver, check_form
from fp16core._relatives import _scalers as scalers
from fp16core._relatives._inner_state import translate
from fp16core._relatives._origin import Origin

_NAME = "fairseq"
_PARAMETERS = {
    "scale_factor": None,
    "scale_window": None,
    "tolerance": None,
    "threshold": "min_scale",
    "min_loss_scale": "error_scale",
}


def _recognises(state: Mapping[str, Any]) -> bool:
    return "param_groups" in state and "loss_scale" in state


def _read(state: Mapping[str, Any], receiver: Receiver) -> Checkpoint:
    check_form(state, _NAME)
    saved = [len(group["params"]) for group in state["param_groups"]]
    own = [len(group) for group in receiver.groups]
    flat = saved != own and saved == [1] * len(own)
    inner = translate(state, receiver, _NAME, flat)
    parameters, said = scalers.present_parameters(receiver.scaler, _PARAMETERS)
    scaler = scalers.follow(_NAME, "fairseq", state["loss_scale"], parameters, {})
    return Checkpoint(
        _NAME,
        inner,
        masters_are_weights=True,
        scaler=scaler,
        restored=scalers.described(scaler),
        not_restored={
            "masters": "not in the checkpoint; they become the model's weights",
            **said,
            "counters": "not in the checkpoint; they start anew",
            "counts of steps": "not in the checkpoint; they stay",
        },
    )


FAIRSEQ = Origin(_NAME, _recognises, _read)
