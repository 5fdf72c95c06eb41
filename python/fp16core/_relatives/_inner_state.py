"""The inner optimizer's state as other projects and older torch wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fp16core._receiver import Receiver, check_form, check_inner, fail

# Options that came to torch's optimizers later than to checkpoints, or that others
# leave out. What the receiver has stands in for them.
_LATER_OPTIONS = frozenset(
    (
        "amsgrad",
        "capturable",
        "decoupled_weight_decay",
        "differentiable",
        "foreach",
        "fused",
        "maximize",
        "nesterov",
    )
)


def translate(
    state: Any, receiver: Receiver, origin: str, flat: bool = False
) -> dict[str, Any]:
    """Return ``state`` as the receiver's inner optimizer loads it, checked.

    Options that the file lacks because it is older become those of the receiver, and
    a count of steps that a group or the whole holds is given to each parameter.

    Args:
        flat: whether each group has one parameter that holds all trainable ones of
            the receiver's, one after the other.
    """
    check_form(state, origin)
    groups = state["param_groups"]
    entries = dict(state["state"])
    common_step = entries.pop("common_step", None)
    if flat:
        if len(groups) != len(receiver.groups):
            raise fail(
                f"must have {len(receiver.groups)} groups, but got {len(groups)}",
                origin,
            )
        groups, entries = _split(groups, entries, receiver, origin)
    else:
        check_inner(state, receiver, origin)
    own_groups = receiver.optimizer.param_groups
    for number, (group, own) in enumerate(zip(groups, own_groups, strict=True)):
        missing = own.keys() - group.keys() - {"params", "param_names", "step"}
        expected = set(getattr(receiver.optimizer, "defaults", None) or own)
        needed = sorted((missing & expected) - _LATER_OPTIONS)
        if needed:
            raise fail(
                f"must be of an optimizer like {type(receiver.optimizer).__name__}, "
                f"but got one without {', '.join(needed)} in group {number}",
                origin,
            )
    translated = []
    for group, own in zip(groups, own_groups, strict=True):
        options = {**own, **group}
        if "param_names" in own:
            # Others may have given theirs a prefix.
            options["param_names"] = own["param_names"]
        _spread_step(options, own, entries, common_step)
        translated.append(options)
    result = {**state, "state": entries, "param_groups": translated}
    check_inner(result, receiver, origin)
    return result


def _spread_step(
    group: dict[str, Any],
    own: Mapping[str, Any],
    entries: dict[Any, Any],
    common: Any,
) -> None:
    """Give each parameter the count of steps that its group or all of them have."""
    step = common if common is not None else group.get("step")
    if step is None or "step" in own:
        return
    group.pop("step", None)
    for key in group["params"]:
        entry = entries.get(key)
        if isinstance(entry, Mapping) and entry:
            entries[key] = {"step": step, **entry}


def _split(
    groups: list[Any], entries: Mapping[Any, Any], receiver: Receiver, origin: str
) -> tuple[list[dict[str, Any]], dict[Any, Any]]:
    """Return groups and state by parameter, made from flat ones."""
    split_groups: list[dict[str, Any]] = []
    split_entries: dict[Any, Any] = {}
    start = 0
    for number, (group, params, trainable) in enumerate(
        zip(groups, receiver.groups, receiver.trainable, strict=True)
    ):
        if len(group["params"]) > 1:
            raise fail(
                f"must have one flat parameter in group {number}, "
                f"but got {len(group['params'])}",
                origin,
            )
        keys = list(range(start, start + len(params)))
        start += len(params)
        split_groups.append({**group, "params": keys})
        pieces: list[dict[str, Any]] = [{} for _ in trainable]
        entry = entries.get(group["params"][0], {}) if group["params"] else {}
        if not isinstance(entry, Mapping):
            raise fail(
                f"must hold a dict as state of group {number}, "
                f"but got {type(entry).__name__}",
                origin,
            )
        for name, value in entry.items():
            whole = isinstance(value, torch.Tensor) and value.dim() > 0
            values = (
                split_flat(value, [params[i] for i in trainable], name, number, origin)
                if whole
                else [value] * len(trainable)
            )
            for piece, part in zip(pieces, values, strict=True):
                piece[name] = part
        split_entries.update(
            (keys[i], piece)
            for i, piece in zip(trainable, pieces, strict=True)
            if piece
        )
    return split_groups, split_entries


def split_flat(
    flat: Any, params: list[torch.Tensor], name: str, group: int, origin: str
) -> list[torch.Tensor]:
    """Return views of a flat tensor, one for each of ``params``, in their shapes."""
    sizes = [p.numel() for p in params]
    if (
        not isinstance(flat, torch.Tensor)
        or flat.dim() != 1
        or flat.numel() != sum(sizes)
    ):
        got = list(flat.shape) if isinstance(flat, torch.Tensor) else repr(flat)
        raise fail(
            f"must hold a flat {name} of {sum(sizes)} elements for group {group}, "
            f"but got {got}",
            origin,
        )
    return [
        piece.view(p.shape)
        for piece, p in zip(torch.split(flat, sizes), params, strict=True)
    ]
