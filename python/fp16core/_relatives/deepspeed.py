"""DeepSpeed's fp16 optimizers, without ZeRO: fused, with flat masters, and unfused.

apex.contrib wrote the keys of the unfused one. Its window is one update shorter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp16core._receiver import Checkpoint, Receiver, expect, fail, place_masters
from fp16core._relatives import _scalers as scalers
from fp16core._relatives._inner_state import split_flat, translate
from fp16core._relatives._origin import Origin

_FUSED = "DeepSpeed (fused)"
_UNFUSED = "DeepSpeed (unfused)"


def _recognises(state: Mapping[str, Any]) -> bool:
    return (
        "cur_scale" in state
        and "optimizer_state_dict" in state
        or ("fp32_groups_flat" in state or "fp32_groups" in state)
    )


def _read(state: Mapping[str, Any], receiver: Receiver) -> Checkpoint:
    flat = "fp32_groups_flat" in state
    origin = _FUSED if flat else _UNFUSED
    masters_key = "fp32_groups_flat" if flat else "fp32_groups"
    kinds: dict[str, Any] = {"dynamic_loss_scale": bool, "cur_scale": object}
    kinds["cur_iter"] = int
    if state.get("dynamic_loss_scale"):
        names = ("last_overflow_iter", "scale_factor", "scale_window")
        kinds |= dict.fromkeys(names, object)
    kinds |= {"optimizer_state_dict": dict, masters_key: list}
    expect(state, kinds, origin)
    inner = translate(state["optimizer_state_dict"], receiver, origin, flat)
    result = Checkpoint(origin, inner)
    masters = state[masters_key]
    if flat:
        if len(masters) != len(receiver.groups):
            raise fail(
                f"must have {len(receiver.groups)} groups of masters, "
                f"but got {len(masters)}",
                origin,
            )
        masters = [
            split_flat(master, [group[i] for i in indices], "master", number, origin)
            for number, (master, group, indices) in enumerate(
                zip(masters, receiver.groups, receiver.trainable, strict=True)
            )
        ]
    place_masters(result, masters, receiver, of_all=True)
    result.not_restored = {
        "counts of steps": "not in the checkpoint; they stay",
        "overflow flag": "not in the checkpoint; it is cleared",
    }
    if "clip_grad" in state:
        result.not_restored["clip_grad"] = (
            f"clipping at {state['clip_grad']} is for the caller: clip_master_grads"
        )
    _read_scale(state, receiver, origin, result)
    return result


def _read_scale(
    state: Mapping[str, Any], receiver: Receiver, origin: str, result: Checkpoint
) -> None:
    if not state["dynamic_loss_scale"]:
        result.scaler = scalers.hold(origin, state["cur_scale"])
        result.restored = scalers.described(result.scaler)
        return
    parameters, said = scalers.present_parameters(receiver.scaler, {"min_scale": None})
    parameters["scale_window"] = state["scale_window"]
    result.scaler = scalers.follow(
        origin,
        "deepspeed_fp16_optimizer",
        state["cur_scale"],
        parameters,
        scalers.iterations(origin, state),
        state["scale_factor"],
    )
    result.restored = scalers.described(result.scaler, "window")
    result.not_restored.update(said)


DEEPSPEED = Origin("DeepSpeed", _recognises, _read)
