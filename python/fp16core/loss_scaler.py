"""The loss scalers as Python sees them: the core's, with methods for tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from fp16core import _core


def _has_inf_or_nan(tensor: torch.Tensor) -> bool:
    """Return whether any element of ``tensor`` is infinite or NaN."""
    return _core.has_overflow([tensor])


class _TensorMethods:
    """What both scalers do with tensors."""

    loss_scale: float

    def scale_gradient(
        self, module: object, grad_in: Iterable[Any], grad_out: object
    ) -> tuple[Any, ...]:
        """Scale the gradients of a module, as a full backward hook does.

        Entries of ``grad_in`` that are None stay None.
        """
        scale = self.loss_scale
        return tuple(None if g is None else g * scale for g in grad_in)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        """Run backward on ``loss`` times the loss scale.

        For loops without an ``FP16_Optimizer``: one with native parameters has to
        know when a backward pass begins, so use its ``backward`` or ``scale_loss``.
        """
        (loss * self.loss_scale).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]


class LossScaler(_TensorMethods, _core.LossScaler):
    """A loss scale that stays where it is put.

    Args:
        scale: the factor, finite and greater than 0 (else ValueError).

    ``loss_scale`` reads it; ``cur_scale`` reads and sets it.
    """

    def __init__(self, scale: float = 1.0) -> None:
        _core.LossScaler.__init__(self, scale)

    def has_overflow(self, params: Iterable[torch.Tensor]) -> bool:
        """Return False: a static scaler never looks at gradients."""
        return False

    has_overflow_serial = has_overflow

    @staticmethod
    def _has_inf_or_nan(x: torch.Tensor) -> bool:
        return False

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.cur_scale,), self.__dict__

    def __repr__(self) -> str:
        return f"{type(self).__name__}(scale={self.cur_scale:g})"


class DynamicLossScaler(_TensorMethods, _core.DynamicLossScaler):
    """A loss scale that follows the overflows.

    An overflow divides the scale by ``scale_factor``, after ``delayed_shift - 1``
    overflows that are tolerated, and never below ``min_scale``. After
    ``scale_window`` iterations without one the scale is multiplied by
    ``scale_factor``.

    Args:
        init_scale: the scale at the start.
        scale_factor: greater than 1.
        scale_window: clean iterations until a growth, at least 1.
        min_scale: the floor, greater than 0.
        delayed_shift: overflows until the scale is lowered, at least 1.
        consecutive_hysteresis: whether every clean iteration restores the
            tolerance; otherwise only a growth does.
        backoff_factor: what an overflow multiplies the scale by, between 0 and 1;
            0 to divide it by ``scale_factor``.

    Arguments that make no sense raise a ValueError that names them. All of them,
    and ``cur_scale``, ``cur_iter``, ``last_overflow_iter`` and ``cur_hysteresis``,
    are attributes that can be read and set.
    """

    def __init__(
        self,
        init_scale: float = 2**32,
        scale_factor: float = 2.0,
        scale_window: float = 1000,
        min_scale: float = 1,
        delayed_shift: int = 1,
        consecutive_hysteresis: bool = False,
        *,
        backoff_factor: float = 0.0,
    ) -> None:
        _core.DynamicLossScaler.__init__(
            self,
            init_scale,
            scale_factor,
            scale_window,
            min_scale,
            delayed_shift,
            consecutive_hysteresis,
            backoff_factor,
        )

    def has_overflow(self, params: Iterable[torch.Tensor]) -> bool:
        """Return whether any gradient of ``params`` holds inf or NaN."""
        return _core.has_overflow([p.grad for p in params if p.grad is not None])

    has_overflow_serial = has_overflow
    _has_inf_or_nan = staticmethod(_has_inf_or_nan)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self), scaler_state(self)), self.__dict__

    def __repr__(self) -> str:
        backoff = f", backoff_factor={self.backoff_factor:g}"
        return (
            f"{type(self).__name__}(cur_scale={self.cur_scale:g}, "
            f"scale_factor={self.scale_factor:g}, "
            f"scale_window={self.scale_window:g}, min_scale={self.min_scale:g}, "
            f"delayed_shift={self.delayed_shift}, "
            f"consecutive_hysteresis={self.consecutive_hysteresis}"
            f"{backoff if self.backoff_factor else ''})"
        )


_OPTIONS = (
    "scale_factor",
    "scale_window",
    "min_scale",
    "delayed_shift",
    "consecutive_hysteresis",
    "backoff_factor",
)
_COUNTERS = ("cur_iter", "last_overflow_iter", "cur_hysteresis")


def scaler_state(scaler: Any) -> dict[str, Any]:
    """Return all that a scaler knows as plain data.

    A scaler of another kind gives what its ``state_dict()`` says, or else its scale.
    """
    if isinstance(scaler, _core.DynamicLossScaler):
        names = ("cur_scale", *_COUNTERS, *_OPTIONS)
        return {"kind": "dynamic", **{name: getattr(scaler, name) for name in names}}
    if isinstance(scaler, _core.LossScaler):
        return {"kind": "static", "cur_scale": scaler.cur_scale}
    state_dict = getattr(scaler, "state_dict", None)
    if callable(state_dict):
        return {"kind": "other", "state": state_dict()}
    return {"kind": "other", "cur_scale": float(scaler.loss_scale)}


def _restore(kind: type[DynamicLossScaler], state: dict[str, Any]) -> DynamicLossScaler:
    # Checkpoints of the first days have no backoff_factor.
    options = {"backoff_factor": 0.0, **state}
    scaler = kind(
        init_scale=state["cur_scale"], **{name: options[name] for name in _OPTIONS}
    )
    for name in _COUNTERS:
        setattr(scaler, name, state[name])
    return scaler


def scaler_from_state(state: dict[str, Any]) -> LossScaler | DynamicLossScaler:
    """Make the scaler that :func:`scaler_state` described.

    Raises KeyError, TypeError or ValueError if the data are not its own.
    """
    if state["kind"] == "static":
        return LossScaler(state["cur_scale"])
    if state["kind"] == "dynamic":
        return _restore(DynamicLossScaler, state)
    raise ValueError(f"unknown kind of loss scaler {state['kind']!r}")
