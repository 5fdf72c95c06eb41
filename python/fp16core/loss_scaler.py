"""The loss scalers as Python sees them: the core's, with methods for tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Self

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
        max_scale: the ceiling of a growth.
        window_lag: clean iterations by which every growth comes later.
        tolerance: an overflow lowers the scale only where the overflows since it
            was lowered last are at least this share of the iterations since it was
            moved last; between 0 and 1.
        raise_at_floor: whether an overflow that would lower a scale which is at
            ``min_scale`` raises :class:`LossScaleError`.
        error_scale: an overflow that would lower the scale to it or below raises
            :class:`LossScaleError`; 0 for no such scale.
        float32_scale: whether the scale is rounded to float32.
        float32_factors: whether the factors are rounded to float32 first.

    :meth:`preset` has the rules of other projects. Arguments that make no sense
    raise a ValueError that names them. All of them are attributes, and so are
    ``cur_scale`` and the counters ``cur_iter``, ``last_overflow_iter``,
    ``cur_hysteresis``, ``last_rescale_iter`` and ``overflows_since_rescale``. They
    can be read and set, the two of float32 apart.

    Several optimizers may share a scaler: pass it as ``loss_scaler`` to each. Every
    step of every one of them counts as an iteration: whoever steps updates the
    scale, and an overflow of one lowers it for all.
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
        max_scale: float = math.inf,
        window_lag: int = 0,
        tolerance: float = 0.0,
        raise_at_floor: bool = False,
        error_scale: float = 0.0,
        float32_scale: bool = False,
        float32_factors: bool = False,
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
            max_scale,
            window_lag,
            tolerance,
            raise_at_floor,
            error_scale,
            float32_scale,
            float32_factors,
        )

    @classmethod
    def preset(cls, name: str, **parameters: float | None) -> Self:
        """Make a scaler that follows the rule of another project.

        Its scales are those of the project bit for bit, save where it would lose
        the scale for good: where the project has no floor this one stops at 2^-126,
        and a growth that is not finite is left out. Where the project raises, this
        raises :class:`LossScaleError`.

        Args:
            name: "apex" (``apex.fp16_utils``), "apex_amp", "apex_hysteresis_kernel",
                "megatron_v1" (its ``fp16`` package), "megatron_core", "deepspeed"
                (its loss scaler), "deepspeed_fp16_optimizer" (the rule of its
                optimizer), "torch" (``torch.amp.GradScaler``), "colossalai",
                "fairseq", "keras" or "jmp".
            parameters: under the project's own names; its defaults for the others.

        Raises:
            ValueError: for another name, and for values that make no sense.
            TypeError: for parameters that the project does not have.
        """
        known = _core.scale_policy_parameters(name)
        unknown = [parameter for parameter in parameters if parameter not in known]
        if unknown:
            raise TypeError(
                f"DynamicLossScaler.preset: parameters of {name} must be among "
                f"{', '.join(known)}, but got {', '.join(unknown)}"
            )
        return cls(**_core.scale_policy(name, parameters))

    def has_overflow(self, params: Iterable[torch.Tensor]) -> bool:
        """Return whether any gradient of ``params`` holds inf or NaN."""
        return _core.has_overflow([p.grad for p in params if p.grad is not None])

    has_overflow_serial = has_overflow
    _has_inf_or_nan = staticmethod(_has_inf_or_nan)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self), scaler_state(self)), self.__dict__

    def __repr__(self) -> str:
        options = {"cur_scale": self.cur_scale}
        for option in _OPTIONS:
            value = getattr(self, option)
            if option in _ORIGINAL_OPTIONS or value != _DEFAULTS[option]:
                options[option] = value
        text = ", ".join(
            f"{option}={value:g}" if isinstance(value, float) else f"{option}={value}"
            for option, value in options.items()
        )
        return f"{type(self).__name__}({text})"


_OPTIONS, _COUNTERS = _core.DynamicLossScaler._names()
_ORIGINAL_OPTIONS = (
    "scale_factor",
    "scale_window",
    "min_scale",
    "delayed_shift",
    "consecutive_hysteresis",
)
_ORIGINAL_COUNTERS = ("cur_iter", "last_overflow_iter", "cur_hysteresis")
# Of what checkpoints may lack, because it came later.
_DEFAULTS = {
    name: getattr(_core.DynamicLossScaler(), name) for name in (*_OPTIONS, *_COUNTERS)
}


def scaler_from_arguments(
    arguments: Mapping[str, Any] | None,
    kind: type[DynamicLossScaler] = DynamicLossScaler,
) -> DynamicLossScaler:
    """Make the scaler that ``dynamic_loss_args`` asks for, as one of class ``kind``."""
    options = dict(arguments or {})
    policy = options.pop("policy", None)
    if policy is None:
        return kind(**options)
    return kind.preset(policy, **options)


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
    missing = [
        name for name in (*_ORIGINAL_OPTIONS, *_ORIGINAL_COUNTERS) if name not in state
    ]
    if missing:
        raise KeyError(missing[0])
    numbers = {**_DEFAULTS, **state}
    scaler = kind(
        init_scale=state["cur_scale"], **{name: numbers[name] for name in _OPTIONS}
    )
    for name in _COUNTERS:
        setattr(scaler, name, numbers[name])
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
