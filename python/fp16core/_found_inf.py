"""Steps of torch's own optimizers that a flag on the device turns off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fp16core._update_rule import find_rule


def takes_flag(inner: Any) -> bool:
    """Return whether ``inner.step`` changes nothing where a flag on the device is set.

    torch's fused optimizers take it from the attribute ``found_inf``, as from
    torch.amp.GradScaler. SGD among them is to be trusted only once it has momentum
    buffers: a first step that the flag turns off leaves them uninitialized.
    """
    groups = inner.param_groups
    # Whoever has a rule and supports scaling is torch's, with torch's own step.
    if (
        isinstance(find_rule(inner), str)
        or not getattr(inner, "_step_supports_amp_scaling", False)
        or not all(group.get("fused") for group in groups)
    ):
        return False
    if not isinstance(inner, torch.optim.SGD):
        return True
    return all(
        not group["momentum"]
        or p.grad is None
        or inner.state.get(p, {}).get("momentum_buffer") is not None
        for group in groups
        for p in group["params"]
    )


def step_with_flag(inner: Any, step: Callable[[], Any], found_inf: torch.Tensor) -> Any:
    """Run the ``step`` of ``inner``, which ``found_inf`` turns off: 1, or else 0."""
    inner.grad_scale = None
    inner.found_inf = found_inf
    try:
        return step()
    finally:
        del inner.grad_scale
        del inner.found_inf
