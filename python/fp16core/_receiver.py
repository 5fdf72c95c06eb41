"""What a state dict must fit, and the checks that all formats share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fp16core import _core
from fp16core._parameter_names import parameter_names
from fp16core._update_rule import find_rule
from fp16core.load_report import LoadReport

# State that has the shape of its parameter, whichever optimizer it is of.
_MOMENTS = frozenset(
    (
        "acc_delta",
        "exp_avg",
        "exp_avg_sq",
        "exp_inf",
        "grad_avg",
        "max_exp_avg_sq",
        "momentum_buffer",
        "square_avg",
        "sum",
    )
)

_HALF = (torch.float16, torch.bfloat16)


@dataclass
class Checkpoint:
    """A state dict that has been checked and fits an optimizer.

    Attributes:
        origin: the name of the format.
        optimizer_state: the inner optimizer's, in the form of ``torch.optim``.
        masters: by group, those at ``positions``; None to leave them.
        natives: trainable parameters without a master, with the values to write.
        masters_are_weights: whether the masters become the model's weights.
        scaler: the one that will be in place, a function that fills the present one,
            or None to leave it.
        keeps_run: whether overflow flag and counts of steps stay as they are.
        restored, not_restored: what the report says beyond the inner state.
        warning: what to warn of, if anything.
    """

    origin: str
    optimizer_state: Mapping[str, Any]
    masters: list[list[torch.Tensor]] | None = None
    positions: list[list[int]] | None = None
    natives: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    masters_are_weights: bool = False
    scaler: Any = None
    keeps_run: bool = False
    overflow: bool = False
    update_pending: bool = False
    step_counts: tuple[int, int] | None = None
    restored: dict[str, str] = field(default_factory=dict)
    not_restored: dict[str, str] = field(default_factory=dict)
    warning: str = ""

    def report(self) -> LoadReport:
        """Return what :class:`LoadReport` says of it."""
        state = self.optimizer_state["state"].values()
        entries = [e for e in state if isinstance(e, Mapping) and e]
        keys = {key: None for entry in entries for key in entry if key != "step"}
        restored: dict[str, str] = {}
        if self.masters is not None:
            count = sum(map(len, self.masters)) + len(self.natives)
            restored["masters"] = f"{count} in fp32"
        if keys:
            restored["moments"] = f"{', '.join(keys)} of {len(entries)} parameters"
        if any("step" in entry for entry in entries):
            restored["steps"] = f"of {len(entries)} parameters"
        restored["hyper-parameters"] = (
            f"of {len(self.optimizer_state['param_groups'])} groups"
        )
        return LoadReport(
            self.origin, {**restored, **self.restored}, dict(self.not_restored)
        )


@dataclass(frozen=True)
class Receiver:
    """The optimizer that a state dict is to be loaded into.

    Attributes:
        optimizer: the inner one.
        groups: by group, the tensors it holds: masters and native parameters.
        master_positions: by group, the indices of masters.
        trainable: by group, the indices of all that are trained.
        names: by group, the names of the parameters, empty where unknown.
        scaler: the present one.
        loss_index: which of several scalers of a checkpoint is meant.
    """

    optimizer: Any
    groups: list[list[torch.Tensor]]
    master_positions: list[list[int]]
    trainable: list[list[int]]
    names: list[list[str]]
    scaler: Any
    loss_index: int

    @classmethod
    def of(
        cls,
        core: _core.OptimizerCore,
        optimizer: Any,
        model: torch.nn.Module | None,
        loss_index: int,
    ) -> Receiver:
        """Look at ``optimizer`` and its masters in ``core``."""
        groups = [list(group["params"]) for group in optimizer.param_groups]
        positions = core.master_positions()
        return cls(
            optimizer,
            groups,
            positions,
            [
                [i for i, p in enumerate(g) if i in at or p.requires_grad]
                for g, at in zip(groups, positions, strict=True)
            ],
            parameter_names(optimizer.param_groups, core.parameters(), model),
            core.loss_scaler,
            loss_index,
        )

    def halves(self) -> list[list[int]]:
        """Return, by group, the indices of masters and of frozen half parameters."""
        return [
            [i for i, p in enumerate(g) if i in at or p.dtype in _HALF]
            for g, at in zip(self.groups, self.master_positions, strict=True)
        ]


def fail(text: str, origin: str = "") -> ValueError:
    """Return the error that a state dict must be something else than it is."""
    of = f" of {origin}" if origin else ""
    return ValueError(f"FP16_Optimizer.load_state_dict: the state dict{of} {text}")


def expect(
    state: Mapping[str, Any], kinds: Mapping[str, type | tuple[type, ...]], origin: str
) -> None:
    """Raise unless ``state`` has all keys of ``kinds``, with values of these types."""
    missing = [key for key in kinds if key not in state]
    if missing:
        raise fail(
            f"must hold {', '.join(kinds)}, but got one without {', '.join(missing)}",
            origin,
        )
    for key, kind in kinds.items():
        if not isinstance(state[key], kind):
            listed = kind if isinstance(kind, tuple) else (kind,)
            raise fail(
                f"must hold a {' or '.join(k.__name__ for k in listed)} as {key}, "
                f"but got {type(state[key]).__name__}",
                origin,
            )


def check_form(state: Any, origin: str = "") -> None:
    """Raise unless ``state`` has the form of a state dict of ``torch.optim``."""
    groups = state.get("param_groups") if isinstance(state, Mapping) else None
    if (
        not isinstance(groups, list)
        or not isinstance(state.get("state"), Mapping)
        or not all(
            isinstance(group, Mapping) and isinstance(group.get("params"), list)
            for group in groups
        )
    ):
        raise fail(
            "must hold state and param_groups of the inner optimizer, "
            "but got something else under these names",
            origin,
        )


def check_inner(state: Any, receiver: Receiver, origin: str = "") -> None:
    """Raise unless ``state``, in the form of ``torch.optim``, fits the receiver.

    Shapes in it are compared where the core knows the optimizer: others may have
    state of any form.
    """
    groups = receiver.groups
    check_form(state, origin)
    saved = [len(group["params"]) for group in state["param_groups"]]
    own = [len(group) for group in groups]
    if saved != own:
        raise fail(f"must have groups of {own} parameters, but got {saved}", origin)
    if isinstance(find_rule(receiver.optimizer), str):
        return
    entries = state["state"]
    for number, (group, params) in enumerate(
        zip(state["param_groups"], groups, strict=True)
    ):
        for index, (key, param) in enumerate(zip(group["params"], params, strict=True)):
            entry = entries.get(key, {})
            if not isinstance(entry, Mapping):
                raise fail(
                    f"must hold a dict as state of group {number}, index {index}, "
                    f"but got {type(entry).__name__}",
                    origin,
                )
            where = f"of group {number}, index {index}"
            for name in _MOMENTS & entry.keys():
                _check_moment(name, entry[name], param, where, origin)
            _check_step(entry.get("step", 0), where, origin)


def _check_moment(
    name: str, value: Any, param: torch.Tensor, where: str, origin: str
) -> None:
    if value is None:  # a momentum that has not begun
        return
    got = (
        f"{value.dtype} of shape {list(value.shape)}"
        if isinstance(value, torch.Tensor)
        else type(value).__name__
    )
    if (
        not isinstance(value, torch.Tensor)
        or value.shape != param.shape
        or not value.is_floating_point()
    ):
        raise fail(
            f"must hold a floating point {name} of shape {list(param.shape)} {where}, "
            f"but got {got}",
            origin,
        )


def _check_step(value: Any, where: str, origin: str) -> None:
    one = isinstance(value, torch.Tensor) and value.numel() == 1
    if not one and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise fail(f"must hold a number as step {where}, but got {value!r}", origin)


def check_masters(
    masters: Any,
    positions: Any,
    groups: list[list[torch.Tensor]],
    origin: str = "",
) -> None:
    """Raise unless ``masters`` fit the parameters at ``positions`` in ``groups``."""
    if not len(masters) == len(positions) == len(groups):
        raise fail(
            f"must have {len(groups)} groups of masters, but got {len(masters)}",
            origin,
        )
    for number, (group, saved, indices) in enumerate(
        zip(groups, masters, positions, strict=True)
    ):
        if not (isinstance(saved, list) and isinstance(indices, list)):
            raise fail(f"must hold lists of masters, but got {saved!r}", origin)
        if len(saved) != len(indices):
            raise fail(
                f"must have a position for each master of group {number}", origin
            )
        for index, master in zip(indices, saved, strict=True):
            if not isinstance(index, int) or not 0 <= index < len(group):
                raise fail(f"must hold valid positions, but got {index!r}", origin)
            if not isinstance(master, torch.Tensor):
                raise fail(f"must hold tensors as masters, but got {master!r}", origin)
            shape = group[index].shape
            if master.shape != shape or not master.is_floating_point():
                raise fail(
                    f"must hold a floating point master of shape {list(shape)} for "
                    f"group {number}, index {index}, but got {master.dtype} of shape "
                    f"{list(master.shape)}",
                    origin,
                )


def place_masters(
    checkpoint: Checkpoint, masters: Any, receiver: Receiver, of_all: bool = False
) -> None:
    """Check ``masters`` and put them into ``checkpoint``.

    By group they are those of the trainable half parameters, or of all half ones,
    where some are frozen now. With ``of_all`` they are those of all trainable
    parameters: what native ones have there becomes their value.
    """
    origin = checkpoint.origin
    if not isinstance(masters, list) or not all(isinstance(g, list) for g in masters):
        raise fail(f"must hold lists of masters, but got {masters!r}", origin)
    saved = [len(group) for group in masters]
    first = receiver.trainable if of_all else receiver.master_positions
    for positions in (first, receiver.halves()):
        if saved == [len(indices) for indices in positions]:
            break
    else:
        raise fail(
            f"must have groups of {[len(indices) for indices in first]} masters, "
            f"but got {saved}",
            origin,
        )
    check_masters(masters, positions, receiver.groups, origin)
    checkpoint.masters, checkpoint.positions = [], []
    for group, given, indices, halves in zip(
        receiver.groups, masters, positions, receiver.halves(), strict=True
    ):
        own = list(zip(indices, given, strict=True))
        checkpoint.positions.append([i for i, _ in own if i in halves])
        checkpoint.masters.append([value for i, value in own if i in halves])
        checkpoint.natives += [(group[i], v) for i, v in own if i not in halves]
