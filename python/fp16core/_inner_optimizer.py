"""What the facade needs to know about the optimizer it wraps."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, MutableSequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from fp16core import _core

_wrapped: weakref.WeakSet[Any] = weakref.WeakSet()


def check_optimizer(optimizer: Any, owner: str) -> None:
    """Raise unless ``optimizer`` can be wrapped. Changes nothing."""
    missing = [
        name
        for name in ("param_groups", "state", "step", "state_dict", "load_state_dict")
        if not hasattr(optimizer, name)
    ]
    if missing or isinstance(optimizer, type):
        raise TypeError(
            f"{owner}: init_optimizer must be an optimizer, but got {optimizer!r}"
            + (f" without {', '.join(missing)}" if missing else "")
        )
    try:
        already = optimizer in _wrapped
    except TypeError:  # not weakly referenceable
        already = False
    if already:
        raise ValueError(
            f"{owner}: init_optimizer must not be wrapped already, but got "
            f"{type(optimizer).__name__} that is or belongs to an {owner}"
        )
    for number, group in enumerate(optimizer.param_groups):
        if not isinstance(group["params"], list):
            raise TypeError(
                f"{owner}: the params of a group must be a list, "
                f"but got {type(group['params']).__name__} in group {number}"
            )
        check_group(group, number, owner)


def check_group(group: dict[str, Any], number: int, owner: str) -> None:
    """Raise ValueError for a group whose steps are to be differentiated, and
    TypeError for a parameter that has no shape yet."""
    if group.get("differentiable"):
        raise ValueError(
            f"{owner}: init_optimizer must not be differentiable, "
            f"but got differentiable=True in group {number}"
        )
    for index, param in enumerate(group["params"]):
        if is_lazy(param):
            raise TypeError(
                f"{owner}: parameters must be initialized, "
                f"but got a lazy one as group {number}, index {index}"
            )


def mark_wrapped(optimizer: Any) -> None:
    """Remember that ``optimizer`` holds masters now."""
    try:
        _wrapped.add(optimizer)
    except TypeError:  # not weakly referenceable
        pass


def adopt(optimizer: Any, adoptions: Iterable[tuple[int, int, Any, Any]]) -> None:
    """Put masters in the place of half parameters.

    The lists of the groups are edited in place; state moves from the parameter to
    its master, entry by entry, half tensors in it becoming float32; attributes set
    on the parameter are copied.
    """
    for group, index, model, master in adoptions:
        optimizer.param_groups[group]["params"][index] = master
        master.__dict__.update(model.__dict__)
        if model in optimizer.state:
            entry = optimizer.state.pop(model)
            widen = _widener(master)
            optimizer.state[master] = map_tensors(entry, widen)


def _widener(master: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: _core.widen_state(tensor, master)


def map_tensors(
    value: Any, change: Callable[[torch.Tensor], torch.Tensor], steps: bool = False
) -> Any:
    """Apply ``change`` to every tensor in a piece of optimizer state.

    Dicts, lists and deques are edited in place. Step counters are left as they are
    unless ``steps`` is set.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        for key, item in value.items():
            if steps or key != "step":
                value[key] = map_tensors(item, change, steps)
        return value
    if isinstance(value, MutableSequence):  # lists, deques
        for index, item in enumerate(list(value)):
            value[index] = map_tensors(item, change, steps)
        return value
    if type(value) is tuple:
        return tuple(map_tensors(item, change, steps) for item in value)
    return value


def tell_schedulers(optimizer: Any) -> None:
    """Make schedulers on the inner optimizer see a step that was skipped.

    They patch its ``step``, which a skipped step does not call, and would warn
    that ``lr_scheduler.step()`` came first.
    """
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        optimizer._opt_called = True
