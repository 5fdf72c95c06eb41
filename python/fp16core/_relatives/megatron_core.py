"""The mixed-precision optimizers of Megatron-LM 2 and later, and Megatron-Core."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp16core._receiver import Checkpoint, Receiver, expect, fail, place_masters
from fp16core._relatives import _scalers as scalers
from fp16core._relatives._inner_state import translate
from fp16core._relatives._origin import Origin

_NAME = "Megatron-Core"
_PARAMETERS = dict.fromkeys(
    ("min_scale", "growth_factor", "backoff_factor", "growth_interval", "hysteresis")
)


def _recognises(state: Mapping[str, Any]) -> bool:
    return "fp32_from_fp16_params" in state


def _read(state: Mapping[str, Any], receiver: Receiver) -> Checkpoint:
    expect(state, {"optimizer": dict, "fp32_from_fp16_params": list}, _NAME)
    inner = translate(state["optimizer"], receiver, _NAME)
    result = Checkpoint(_NAME, inner)
    place_masters(result, state["fp32_from_fp16_params"], receiver)
    # bf16 models have no scaler, and a constant one writes nothing.
    saved = state.get("grad_scaler") or {}
    if not isinstance(saved, Mapping):
        raise fail(
            f"must hold a dict as grad_scaler, but got {type(saved).__name__}", _NAME
        )
    result.not_restored = {
        "counts of steps": "not in the checkpoint; they stay",
        "overflow flag": "not in the checkpoint; it is cleared",
    }
    if not saved:
        result.not_restored["scale"] = "not in the checkpoint; the present scaler stays"
        return result
    names = ("scale", "growth_tracker", "hysteresis_tracker")
    expect(saved, dict.fromkeys(names, object), f"{_NAME} with a grad_scaler that")
    parameters, said = scalers.present_parameters(receiver.scaler, _PARAMETERS)
    counters = scalers.clean_run(_NAME, saved["growth_tracker"])
    left = scalers.count(_NAME, "hysteresis_tracker", saved["hysteresis_tracker"], None)
    # At 0 and below every overflow lowers the scale, as at 1.
    counters["cur_hysteresis"] = max(left, 1)
    result.scaler = scalers.follow(
        _NAME, "megatron_core", saved["scale"], parameters, counters
    )
    result.restored = scalers.described(result.scaler, "window, hysteresis")
    result.not_restored.update(said)
    return result


MEGATRON_CORE = Origin(_NAME, _recognises, _read)
