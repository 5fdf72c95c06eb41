"""FP16_Optimizer of apex.fp16_utils and of Megatron-LM's fp16 package.

The keys are the six that ours begin with. The scaler in it is an object: of the
project's class, a :class:`PickledObject` in its place, or one of ours. What it has
for attributes tells the rule, whatever its class is called.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp16core import _core
from fp16core._old_pickles import PickledObject
from fp16core._receiver import Checkpoint, Receiver, expect, fail, place_masters
from fp16core._relatives import _scalers as scalers
from fp16core._relatives._inner_state import translate
from fp16core._relatives._origin import Origin
from fp16core.loss_scaler import scaler_from_state, scaler_state

_NAME = "apex.fp16_utils or Megatron-LM (fp16)"


def _recognises(state: Mapping[str, Any]) -> bool:
    return "fp32_from_fp16" in state or (
        "loss_scaler" in state and "optimizer_state_dict" in state
    )


def _read(state: Mapping[str, Any], receiver: Receiver) -> Checkpoint:
    kinds = {
        "loss_scaler": object,
        "dynamic_loss_scale": bool,
        "overflow": bool,
        "first_closure_call_this_step": bool,
        "optimizer_state_dict": dict,
        "fp32_from_fp16": list,
    }
    expect(state, kinds, _NAME)
    inner = translate(state["optimizer_state_dict"], receiver, _NAME)
    scaler = read_scaler(state["loss_scaler"], _NAME)
    result = Checkpoint(_NAME, inner, scaler=scaler, overflow=state["overflow"])
    place_masters(result, state["fp32_from_fp16"], receiver)
    counted = isinstance(scaler, _core.DynamicLossScaler)
    result.restored = {
        **scalers.described(scaler, "window, hysteresis" if counted else ""),
        "overflow flag": str(state["overflow"]),
    }
    result.not_restored = {"counts of steps": "not in the checkpoint; they stay"}
    return result


def read_scaler(scaler: Any, origin: str) -> Any:
    """Return our scaler for an object of another project's scaler class."""
    if isinstance(scaler, _core.LossScaler):
        return scaler_from_state(scaler_state(scaler))
    known = (
        scaler.attributes
        if isinstance(scaler, PickledObject)
        else getattr(scaler, "__dict__", {})
    )
    if "_loss_scale" in known:
        return _of_apex_amp(known, origin)
    if "cur_iter" in known:
        return _of_iterations(known, origin)
    if "cur_scale" in known:
        return scalers.hold(origin, known["cur_scale"])
    raise fail(f"must hold a loss scaler, but got {scaler!r}", origin)


def _of_apex_amp(known: Mapping[str, Any], origin: str) -> Any:
    """Translate apex.amp.scaler.LossScaler, which is static and dynamic in one."""
    kinds = {name: object for name in ("dynamic", "_scale_seq_len", "_unskipped")}
    kinds |= {name: object for name in ("_min_loss_scale", "_max_loss_scale")}
    expect(known, kinds, f"{origin} with a scaler of apex.amp that")
    if not known["dynamic"]:
        return scalers.hold(origin, known["_loss_scale"])
    parameters = {
        "scale_window": known["_scale_seq_len"],
        "min_loss_scale": known["_min_loss_scale"],
        "max_loss_scale": known["_max_loss_scale"],
    }
    counters = scalers.clean_run(origin, known["_unskipped"])
    return scalers.follow(
        origin, "apex_amp", known["_loss_scale"], parameters, counters
    )


def _of_iterations(known: Mapping[str, Any], origin: str) -> Any:
    """Translate the DynamicLossScaler of apex, Megatron-LM and DeepSpeed."""
    names = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor")
    kinds = {name: object for name in (*names, "scale_window")}
    expect(known, kinds, f"{origin} with a dynamic scaler that")
    counters = scalers.iterations(origin, known)
    parameters: dict[str, Any] = {"scale_window": known["scale_window"]}
    policy = "apex"
    if "raise_error_at_min_scale" in known:
        policy = "deepspeed"
        parameters["raise_error_at_min_scale"] = known["raise_error_at_min_scale"]
    elif "delayed_shift" in known or "min_scale" in known:
        policy = "megatron_v1"
    if policy != "apex":
        # What Megatron-LM takes for attributes that an old pickle lacks.
        parameters["min_scale"] = known.get("min_scale", 1)
        parameters["delayed_shift"] = known.get("delayed_shift", 1)
        parameters["consecutive_hysteresis"] = known.get("consecutive_hysteresis", True)
        counters["cur_hysteresis"] = scalers.count(
            origin, "cur_hysteresis", known.get("cur_hysteresis", 1), 1
        )
    return scalers.follow(
        origin,
        policy,
        known["cur_scale"],
        parameters,
        counters,
        known["scale_factor"],
    )


FP16_UTILS = Origin(_NAME, _recognises, _read)
