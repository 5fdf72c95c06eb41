"""Running the core's update rule where the wrapped optimizer would run its step."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.optim import Optimizer, optimizer

from fp16core import _core
from fp16core._inner_optimizer import tell_schedulers

_TORCH = os.path.dirname(torch.__file__) + os.sep


def find_rule(inner: Any) -> _core.UpdateRule | str:
    """Return the rule that ``inner.step`` follows, or why the core has none."""
    cls: type = type(inner)
    rule = _rule_of_class(cls)
    if rule is None:
        return f"{cls.__name__}, for which the core has no update rule"
    if _step_is_overridden(inner, rule):
        return f"{cls.__name__} with another step than its class came with"
    return rule


@functools.lru_cache(maxsize=64)
def _rule_of_class(cls: type) -> _core.UpdateRule | None:
    return _core.find_update_rule(f"{cls.__module__}.{cls.__qualname__}")


def _step_is_overridden(inner: Any, rule: _core.UpdateRule) -> bool:
    modules = {name.rpartition(".")[0] for name in rule.optimizers}
    body = _step_without_hooks(inner)
    # Whoever replaces the step of the class may make it look like torch's, but
    # not lie in torch's folder.
    if body.__module__ not in modules or not (
        _is_torchs(type(inner).step) and _is_torchs(body)
    ):
        return True
    own = inner.__dict__.get("step")
    # A scheduler that counts calls wraps the step of the class.
    return own is not None and not (
        hasattr(own, "_wrapped_by_lr_sched")
        and getattr(own, "__wrapped__", None) is type(inner).step
    )


def _is_torchs(function: Any) -> bool:
    """Return whether ``function``, or the decorator around it, is torch's code."""
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename.startswith(_TORCH)


def _step_without_hooks(inner: Any) -> Callable[..., Any]:
    step = type(inner).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[no-any-return]


def step_by_rule(
    inner: Any,
    closure: Callable[[], Any] | None,
    update: Callable[[], str | None],
    run_inner: Callable[[str, Callable[[], Any]], None],
) -> Any:
    """Do all that ``inner.step`` does, with ``update`` in the place of its body.

    Hooks, the profiler and schedulers see a step of ``inner``. Where ``update``
    returns an obstacle, ``run_inner`` gets it, and the body, to run it after all.
    """

    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        obstacle = update()
        if obstacle is not None:
            run_inner(obstacle, lambda: _step_without_hooks(self)(self))
        return loss

    tell_schedulers(inner)
    args = () if closure is None else (closure,)
    return Optimizer.profile_hook_step(step)(inner, *args)


def has_hooks(inner: Any, when: Literal["pre", "post"]) -> bool:
    """Return whether hooks run before, or after, the step of ``inner``. The former
    may edit its groups, the latter may move masters."""
    own = getattr(inner, f"_optimizer_step_{when}_hooks", None)
    return bool(own or getattr(optimizer, f"_global_optimizer_{when}_hooks"))
