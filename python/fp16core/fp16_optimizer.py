"""FP16_Optimizer: master weights and loss scaling around a torch optimizer."""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch.nn.utils import clip_grad_norm_
from torch.utils.hooks import RemovableHandle

from fp16core import _checkpoint, _core, _export
from fp16core._core import (
    Evaluation,
    LossScaleError,
    ModelWrites,
    OnMinScale,
    Reduction,
)
from fp16core._found_inf import step_with_flag, takes_flag
from fp16core._inner_optimizer import (
    adopt,
    check_group,
    check_optimizer,
    mark_wrapped,
    tell_schedulers,
)
from fp16core._parameter_names import parameter_names
from fp16core._process_group import ProcessGroup
from fp16core._receiver import Receiver
from fp16core._update_rule import find_rule, has_hooks, step_by_rule
from fp16core.load_report import LoadReport
from fp16core.loss_scaler import (
    DynamicLossScaler,
    LossScaler,
    scaler_from_arguments,
)

logger = logging.getLogger("fp16core")

_ON_MIN_SCALE = {
    "continue": OnMinScale.CONTINUE,
    "warn": OnMinScale.WARN,
    "raise": OnMinScale.RAISE,
}
_MODEL_WRITES = {"version": ModelWrites.VERSION, "values": ModelWrites.VALUES}


class _SkippedStep(BaseException):
    """Unwinds an inner step whose first evaluation overflows for good.

    Not an Exception, so that an optimizer that guards its closure lets it pass.
    """


class FP16_Optimizer(torch.optim.Optimizer):
    """Wraps an optimizer so that it trains fp16 and bf16 parameters well.

    Trainable float16 and bfloat16 parameters get fp32 master weights, which the
    wrapped optimizer updates in their place; float32 and float64 parameters stay
    as they are, and all kinds may be mixed. The loss is scaled before the backward
    pass, gradients are unscaled into fp32, and a step whose gradients hold inf or
    NaN is skipped::

        model = Net().half()
        optimizer = FP16_Optimizer(
            torch.optim.AdamW(model.parameters(), lr=1e-3), dynamic_loss_scale=True
        )
        ...
        optimizer.zero_grad()
        loss = criterion(model(x).float(), y)
        optimizer.backward(loss)  # instead of loss.backward()
        optimizer.clip_master_grads(1.0)  # optional
        optimizer.step()

    It is a ``torch.optim.Optimizer`` and shares ``param_groups``, ``state`` and
    ``defaults`` with the wrapped one, so schedulers may sit on either. Public
    attributes and methods that it lacks are those of the wrapped optimizer.

    Weights that something else writes to the model (``load_state_dict``, an EMA
    swap, ``Embedding(max_norm=...)``) are noticed before the next step, and only
    the elements that differ from the rounded master replace it. Writes through
    ``.data``, numpy or DLPack do not show in a version counter: call
    ``_model_params_to_master_params()`` after them, or pass
    ``track_model_writes="values"``.

    Where the wrapped optimizer is SGD, Adam, AdamW, Adagrad, RMSprop, NAdam or Adamax
    of ``torch.optim``, or :class:`fp16core.optim.Lion`, the core runs its update rule
    itself, in one pass that also writes the model. State, options and hooks are those
    of the wrapped optimizer all the same, and the numbers are those of torch's fused
    kernels, or of its loops where it has none. :attr:`step_mode` tells what is done.

    Args:
        init_optimizer: a constructed optimizer, of ``torch.optim`` or anything
            with ``param_groups``, ``state``, ``step`` and the state dict methods.
            It is changed in place: the masters go into its groups.
        static_loss_scale: the scale, unless ``dynamic_loss_scale`` is set.
        dynamic_loss_scale: whether the scale follows the overflows.
        dynamic_loss_args: keyword arguments of :class:`DynamicLossScaler`, or with
            ``"policy"`` among them, of :meth:`DynamicLossScaler.preset`.
        verbose: whether to print what is ingested.
        check_overflow: whether inf and NaN skip the step. Off (with a static scale
            only), they reach the wrapped optimizer.
        on_min_scale: what a step skipped with the scale at its floor leads to:
            "continue", "warn" (once a streak) or "raise" (:class:`LossScaleError`).
            A static scale is always at its floor.
        track_model_writes: "version", or "values" to compare all weights before
            every step.
        fused: None to run the core's update rule where it applies, which is decided
            anew at every step; True to insist on it; False to leave every step to the
            wrapped optimizer. It does not apply to other classes than those above,
            subclasses among them, to an optimizer whose ``step`` was replaced, to
            ``capturable`` and ``differentiable`` groups, to sparse gradients, and to
            state of another dtype, layout or device than the weight's.
        loss_scaler: a scaler to use in the place of all of the above: ours, a subclass,
            or anything with ``loss_scale`` and ``update_scale``. Several optimizers
            may share one (see :class:`DynamicLossScaler`).
        model: the module, whose names for its parameters are used in reports and
            messages. Groups that were made from ``named_parameters()`` have names
            without it.
        process_group: a group of ``torch.distributed`` whose processes decide alike:
            an overflow in one skips the step in all, and the norm that is clipped is
            that over all. Every one of them has to take part in every update and
            every clipping, gradients or not. For models that are split over
            processes; plain DistributedDataParallel needs none.
        norm_filter: with ``process_group``, tells for a parameter of the model whether
            this process counts it in norms. By default it does if the parameter's
            attribute ``model_parallel`` or ``tensor_model_parallel`` is true, or else
            if this process is the first of the group: what all processes have is
            counted once.
        on_skip: called with the :class:`StepRecord` of every skipped step. Where a
            device decides, a few steps late.
        max_consecutive_skips: when so many steps in a row were skipped, :meth:`step`
            raises :class:`LossScaleError`, which names the first culprit; None for
            never. It may be set later. Where a device decides, a few steps late.
        history_size: how many records :attr:`history` keeps.
        materialize_master_grads: False saves the fp32 gradients, 4 bytes a parameter:
            masters have none, a backward pass only checks and measures, and the
            update rule reads the half gradients. It insists on the rule as
            ``fused=True`` does. Same bits.

    Raises:
        TypeError: for something that is not an optimizer, and for a trainable
            parameter of another dtype, layout or kind, naming its group and index.
        NotImplementedError: for a trainable parameter on a device without kernels.
        ValueError: for an optimizer that is wrapped already or differentiable, for one
            without an update rule where one is insisted on, and for scaler arguments
            that make no sense.

    All of these come before anything is changed.
    """

    optimizer: Any

    def __init__(
        self,
        init_optimizer: Any,
        static_loss_scale: float | None = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: dict[str, Any] | None = None,
        verbose: bool = True,
        *,
        check_overflow: bool = True,
        on_min_scale: str = "warn",
        track_model_writes: str = "version",
        fused: bool | None = None,
        materialize_master_grads: bool = True,
        loss_scaler: Any = None,
        model: torch.nn.Module | None = None,
        process_group: Any = None,
        norm_filter: Callable[[torch.Tensor], bool] | None = None,
        on_skip: Callable[[_core.StepRecord], object] | None = None,
        max_consecutive_skips: int | None = None,
        history_size: int = 1000,
    ) -> None:
        # Optimizer.__init__ is not run: it would make groups and state of its own.
        check_optimizer(init_optimizer, "FP16_Optimizer")
        insistence = _insistence(fused, materialize_master_grads)
        if insistence:
            found = find_rule(init_optimizer)
            if not isinstance(found, str):
                found = found.obstacle(init_optimizer.param_groups) or ""
            if found:
                raise ValueError(f"FP16_Optimizer: {insistence}, but got {found}")
        scaler: Any
        if loss_scaler is not None:
            scaler = loss_scaler
        elif dynamic_loss_scale:
            scaler = scaler_from_arguments(dynamic_loss_args)
        elif static_loss_scale is None:
            raise TypeError(
                "FP16_Optimizer: static_loss_scale must be a number "
                "without dynamic_loss_scale, but got None"
            )
        else:
            scaler = LossScaler(static_loss_scale)
        if max_consecutive_skips is not None and (
            not isinstance(max_consecutive_skips, int) or max_consecutive_skips < 1
        ):
            raise ValueError(
                "FP16_Optimizer: max_consecutive_skips must be None or an integer of "
                f"at least 1, but got {max_consecutive_skips!r}"
            )
        if not isinstance(history_size, int) or history_size < 0:
            raise ValueError(
                "FP16_Optimizer: history_size must be an integer of at least 0, "
                f"but got {history_size!r}"
            )
        _check_callable("on_skip", on_skip)
        _check_callable("norm_filter", norm_filter)
        if norm_filter is not None and process_group is None:
            raise ValueError(
                "FP16_Optimizer: norm_filter needs a process_group, but got none"
            )
        if not (model is None or isinstance(model, torch.nn.Module)):
            raise TypeError(
                "FP16_Optimizer: model must be a torch.nn.Module, "
                f"but got {type(model).__name__}"
            )
        group = None
        if process_group is not None:
            group = ProcessGroup(process_group, "FP16_Optimizer")
        core = _core.OptimizerCore(
            "FP16_Optimizer",
            scaler,
            check_overflow,
            _choice(_ON_MIN_SCALE, "on_min_scale", on_min_scale),
            _choice(_MODEL_WRITES, "track_model_writes", track_model_writes),
            materialize_master_grads,
            group,
            history_size,
        )
        groups = init_optimizer.param_groups
        names = parameter_names(groups, [g["params"] for g in groups], model)
        core.set_names(names)
        core.check(groups)

        self.optimizer = init_optimizer
        self.verbose = verbose
        self.clip_grad_norm: Callable[..., Any] = clip_grad_norm_
        self.on_skip = on_skip
        self.max_consecutive_skips = max_consecutive_skips
        self._core = core
        self._model = model
        self._process_group = group
        self._norm_filter = norm_filter
        self._fused = fused
        self._insistence = insistence
        # What kept the rule from the last step that it should have run.
        self._obstacle: str | None = None
        self._load_report: LoadReport | None = None
        for name in (
            "step_pre",
            "step_post",
            "state_dict_pre",
            "state_dict_post",
            "load_state_dict_pre",
            "load_state_dict_post",
        ):
            setattr(self, f"_optimizer_{name}_hooks", OrderedDict())
        self._repeat_hooks: dict[int, Callable[[], None]] = OrderedDict()
        self._zero_grad_profile_name = "Optimizer.zero_grad#FP16_Optimizer.zero_grad"
        self._warned_capturable_if_run_uncaptured = True
        self._ingest()
        mark_wrapped(init_optimizer)
        mark_wrapped(self)
        self._print_groups(0)

    # The iteration.

    def backward(
        self,
        loss: torch.Tensor,
        update_master_grads: bool = True,
        retain_graph: bool = False,
        *,
        create_graph: bool = False,
        inputs: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Run backward on the scaled loss and take the gradients.

        The loss is cast to fp32 (a float64 loss stays float64), multiplied by the
        loss scale, and differentiated; then :meth:`update_master_grads` is called.
        Several losses may be accumulated, in either way::

            optimizer.backward(loss1)
            optimizer.backward(loss2)

            optimizer.backward(loss1, update_master_grads=False)
            optimizer.backward(loss2, update_master_grads=False)
            optimizer.update_master_grads()

        Args:
            loss: a tensor of one floating point element that has a graph.
            update_master_grads: whether to take the gradients now. If not, they
                have to be taken before the step.
            retain_graph: as in ``torch.Tensor.backward``.
            create_graph: likewise.
            inputs: likewise.

        Raises:
            TypeError: if the loss is not a floating point tensor.
            RuntimeError: if it is not a scalar or has no graph.
        """
        try:
            self.scale_loss(loss).backward(  # type: ignore[no-untyped-call]
                retain_graph=retain_graph or create_graph,
                create_graph=create_graph,
                inputs=inputs,
            )
        except BaseException:
            if update_master_grads:
                self._fail_update()
            raise
        if update_master_grads:
            self.update_master_grads()

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss times the loss scale, to call backward on yourself.

        Call :meth:`update_master_grads` after the backward pass. Until then all
        backward passes count with the scale of the first. Raises like
        :meth:`backward`.
        """
        if not isinstance(loss, torch.Tensor):
            raise TypeError(
                "FP16_Optimizer.backward: loss must be a tensor, "
                f"but got {type(loss).__name__}"
            )
        # Not as a bound method: torch.compile would lose the core.
        return _core.OptimizerCore.scale_loss(self._core, loss)

    def update_master_grads(self) -> None:
        """Take the gradients: check them, and unscale them into fp32.

        Sets :attr:`overflow`. The master gradients are rebuilt from the model's
        gradients each time, so calling it again is harmless; it also undoes
        clipping, which therefore comes last. With ``process_group`` all processes have
        to call it.

        Raises:
            RuntimeError: with ``process_group``, if another process failed in it.
            TypeError: for a gradient that is not floating point, or of another dtype
                than a parameter without a master.
            NotImplementedError: for a gradient that is neither strided nor sparse COO;
                with ``materialize_master_grads=False`` for a sparse one too.
        """
        try:
            self._ingest()
        except BaseException:
            self._fail_update()
            raise
        self._core.update_master_grads()

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """Clip the norm of the master gradients, native parameters included.

        Args:
            max_norm: the norm to clip to, at least 0.
            norm_type: p of the p-norm; may be inf, or "inf".

        Edits of master gradients since the update are seen, except those through
        ``.data``: the norm that the update measured is used again.

        Returns:
            The norm before clipping as a 0-dim fp32 tensor; -1 after an overflow,
            with nothing touched.

        Raises:
            ValueError: if ``max_norm`` is negative or NaN, or ``norm_type`` is NaN.
        """
        if self.clip_grad_norm is not clip_grad_norm_ and not self.overflow:
            # Scripts put a function of their own into this attribute.
            if not self._core.materialize_gradients:
                raise RuntimeError(
                    "FP16_Optimizer.clip_master_grads: clip_grad_norm must be left as "
                    "it is with materialize_master_grads=False, since masters have no "
                    f"gradients, but got {self.clip_grad_norm!r}"
                )
            params = [p for group in self.param_groups for p in group["params"]]
            return self.clip_grad_norm(params, max_norm, norm_type)  # type: ignore[no-any-return]
        return self._core.clip_master_grads(float(max_norm), float(norm_type))

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the loss scale, run the wrapped optimizer, write the model.

        After an overflow the step is skipped: masters, model, optimizer state and
        hyper-parameters stay as they are. Test :attr:`overflow` afterwards to learn
        whether the step was applied.

        Args:
            closure: a function that clears the gradients, computes the loss, calls
                :meth:`backward` and returns the loss, for optimizers that evaluate
                it several times. An evaluation that overflows lowers the scale and
                is repeated. An overflow that no lower scale can cure skips the step
                if it is the first evaluation's, and is an error in a later one; to
                undo the step then, the trained weights are copied meanwhile.

        Returns:
            What the wrapped optimizer's step returns; None if the step was skipped.

        Raises:
            RuntimeError: while gradients wait that have not been taken; where an update
                rule is insisted on, if something stands in its way; and with
                ``materialize_master_grads=False`` if gradients were cleared or changed
                since the update.
            LossScaleError: if a later evaluation of a closure overflows for good,
                with masters and model back at their values on entry; under
                ``on_min_scale="raise"``; and for ``max_consecutive_skips``.
        """
        args: tuple[Any, ...] = (self,) if closure is None else (self, closure)
        kwargs: dict[str, Any] = {}
        for pre_hook in list(self._optimizer_step_pre_hooks.values()):
            changed = pre_hook(self, args, kwargs)
            if changed is not None:
                args, kwargs = changed
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            result = self._step()
        else:
            result = self._step_with_closure(closure)
        for post_hook in list(self._optimizer_step_post_hooks.values()):
            post_hook(self, args, kwargs)
        return result

    # Keeps torch from wrapping the method in hooks once more.
    step.hooked = True  # type: ignore[attr-defined]

    def _step(self) -> Any:
        self._ingest()
        self._insist_on_rule()
        # Hooks of the wrapped optimizer run with an applied step alone, so the host
        # has to know.
        hooked = has_hooks(self.optimizer, "pre") or has_hooks(self.optimizer, "post")
        try:
            applies = self._core.begin_step(may_defer=not hooked)
            if not applies:
                tell_schedulers(self.optimizer)
        finally:
            skip = self._log()
        if not applies:
            self._limit_skips(skip)
            return None
        rewrite = has_hooks(self.optimizer, "post")
        result = self._inner_step()
        self._limit_skips(self._finish_step(rewrite) or skip)
        return result

    def _step_with_closure(self, closure: Callable[[], Any]) -> Any:
        self._ingest()
        self._insist_on_rule()
        core = self._core
        core.begin_closure_step()

        def evaluate() -> Any:
            core.begin_evaluation()
            while True:
                loss = closure()
                outcome = None
                try:
                    outcome = core.end_evaluation()
                finally:
                    # A skip is told when it has been counted.
                    if outcome is not Evaluation.SKIP:
                        self._log()
                if outcome is Evaluation.ACCEPT:
                    return loss
                if outcome is Evaluation.SKIP:
                    raise _SkippedStep
                for hook in list(self._repeat_hooks.values()):
                    hook()

        rewrite = has_hooks(self.optimizer, "post")
        try:
            result = self._inner_step(evaluate)
        except _SkippedStep:
            tell_schedulers(self.optimizer)
            try:
                core.abandon_step(True)
            finally:
                skip = self._log()
            self._limit_skips(skip)
            return None
        except BaseException:
            core.abandon_step(False)
            raise
        self._finish_step(rewrite)
        return result

    def _inner_step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run the wrapped optimizer's step, or the core's rule in its place."""
        rule = "" if self._fused is False else find_rule(self.optimizer)
        if isinstance(rule, str):
            step = self.optimizer.step
            return self._run_inner(step) if closure is None else step(closure)

        # Asked now: a hook may be gone when it has run.
        may_edit_groups = closure is not None or has_hooks(self.optimizer, "pre")

        def update() -> str | None:
            inner = self.optimizer
            if may_edit_groups:
                self._ingest()
            obstacle = self._core.update(rule, inner.param_groups, inner.state)
            # Options are looked at again by whoever asks.
            of_option = obstacle and rule.obstacle(inner.param_groups)
            self._obstacle = None if of_option else obstacle
            return obstacle

        def run_inner(obstacle: str, body: Callable[[], Any]) -> None:
            self._refuse(obstacle)
            self._run_inner(body)

        return step_by_rule(self.optimizer, closure, update, run_inner)

    def _run_inner(self, step: Callable[[], Any]) -> Any:
        """Run ``step`` unless there was an overflow, which a device may know alone."""
        if self._core.deferred and takes_flag(self.optimizer):
            return step_with_flag(self.optimizer, step, self._core.found_inf())
        if self._core.settle():
            return step()
        tell_schedulers(self.optimizer)
        return None

    def _finish_step(self, rewrite: bool) -> _core.StepRecord | None:
        # A hook may write masters through `.data`, which leaves no trace, and it
        # may come or go while the step runs.
        self._core.finish_step(rewrite or has_hooks(self.optimizer, "post"))
        return self._log()

    def _limit_skips(self, last: _core.StepRecord | None) -> None:
        limit = self.max_consecutive_skips
        if last is not None and limit is not None and last.skipped_in_a_row >= limit:
            culprit = repr(last.culprits[0]) if last.culprits else "no parameter"
            raise LossScaleError(
                "FP16_Optimizer.step: skipped steps in a row must be fewer than "
                f"max_consecutive_skips={limit}, but got {last.skipped_in_a_row}; "
                f"first at {culprit}"
            )

    def _insist_on_rule(self) -> None:
        if self._insistence:
            rule = find_rule(self.optimizer)
            if isinstance(rule, str):
                self._refuse(rule)

    def _refuse(self, obstacle: str) -> None:
        if self._insistence:
            raise RuntimeError(
                f"FP16_Optimizer.step: {self._insistence}, but got {obstacle}"
            )

    def _register_repeat_hook(self, hook: Callable[[], None]) -> RemovableHandle:
        """Have ``hook`` run before an evaluation of a closure is repeated."""
        handle = RemovableHandle(self._repeat_hooks)
        self._repeat_hooks[handle.id] = hook
        return handle

    def zero_grad(  # type: ignore[override]
        self, set_grads_to_None: bool = False, *, set_to_none: bool | None = None
    ) -> None:
        """Clear the gradients of masters and model alike.

        Args:
            set_grads_to_None: whether to drop the gradients, which frees their
                memory, instead of zeroing them.
            set_to_none: torch's name for the same; it wins where both are given.
        """
        drop = set_grads_to_None if set_to_none is None else set_to_none
        self._ingest()
        self._core.zero_grad(bool(drop))

    # What happened.

    @property
    def overflow(self) -> bool:
        """Whether the last update met inf or NaN. Lasts until the next update."""
        return self._core.overflow

    @overflow.setter
    def overflow(self, value: bool) -> None:
        self._core.overflow = bool(value)

    @property
    def steps_applied(self) -> int:
        """How many steps moved the weights. Part of the checkpoint."""
        return self._core.steps_applied

    @property
    def steps_skipped(self) -> int:
        """How many steps were skipped for an overflow. Part of the checkpoint."""
        return self._core.steps_skipped

    @property
    def step_mode(self) -> str:
        """How a step is made: "fused Adam", by the core's update rule of that name,
        or "generic (...)", by the wrapped optimizer, and why. What state and
        gradients had to do with it is that of the last step."""
        if self._fused is False:
            return "generic (fused=False)"
        rule = find_rule(self.optimizer)
        if isinstance(rule, str):
            return f"generic ({rule})"
        obstacle = rule.obstacle(self.optimizer.param_groups) or self._obstacle
        return f"generic ({obstacle})" if obstacle else f"fused {rule.name}"

    @property
    def step_decided_on(self) -> str:
        """Where the last step was decided: "host", or "device" if the host did not
        wait to learn whether there was an overflow. Always "host" on the CPU."""
        return "device" if self._core.decided_on_device else "host"

    def gradient_report(self) -> _core.GradientReport:
        """Return what the last update found, for each gradient and in total.

        For each parameter with a gradient its position and name, the counts of inf and
        of NaN, the norm and the largest magnitude; ``culprits()`` are those with inf
        or NaN. The pass that unscales has measured it: on the CPU it costs the copy,
        on CUDA it waits for the device.
        """
        return self._core.gradient_report()

    @property
    def history(self) -> list[_core.StepRecord]:
        """What the last steps came to, oldest first, at most ``history_size`` of them.

        A record has the number of the step, the scale, whether it overflowed, the norm
        of the gradients and, after an overflow, the culprits. A step that a device
        decided is told late, and a step in a CUDA graph never.
        """
        self._log()
        return self._core.history()

    def inspect_master_grad_data(self) -> list[list[torch.Tensor | None]] | None:
        """Return the gradients that the wrapped optimizer sees, by group.

        They alias the real ones; None stands for a parameter without one. Those of
        masters are made for the call with ``materialize_master_grads=False``, and None
        where the model's gradient changed since the update. After an overflow they
        mean nothing: a warning is printed and None returned.
        """
        if self.overflow:
            print(
                "Warning: FP16_Optimizer.inspect_master_grad_data called after an "
                "overflow: the gradients are invalid, returning None."
            )
            return None
        groups = self._core.master_gradients()
        return [list[torch.Tensor | None](group) for group in groups]

    # The scale.

    @property
    def loss_scale(self) -> float:
        """The scale of the next backward pass.

        A value set by hand must be finite and greater than 0 (else ValueError) and
        takes effect with the next backward pass after an update.
        """
        return self._core.loss_scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self._core.loss_scale = float(value)

    @property
    def loss_scaler(self) -> Any:
        """The loss scaler. May be replaced by anything with ``loss_scale`` and
        ``update_scale``."""
        return self._core.loss_scaler

    @loss_scaler.setter
    def loss_scaler(self, scaler: Any) -> None:
        self._core.loss_scaler = scaler

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the scaler may move the scale.

        Setting it replaces the scaler by one of the other kind with the same scale.
        """
        return self._core.dynamic

    @dynamic_loss_scale.setter
    def dynamic_loss_scale(self, value: bool) -> None:
        if bool(value) != self._core.dynamic:
            scale = self.loss_scale
            self.loss_scaler = (
                DynamicLossScaler(init_scale=scale) if value else LossScaler(scale)
            )

    # Parameters and state.

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The param groups of the wrapped optimizer, masters in them."""
        return self.optimizer.param_groups  # type: ignore[no-any-return]

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = value

    @property
    def state(self) -> Any:
        """The state of the wrapped optimizer, keyed by master."""
        return self.optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        self.optimizer.state = value

    @property
    def fp16_groups(self) -> list[list[torch.Tensor]]:
        """By group, the half parameters of the model that have masters."""
        self._ingest()
        return self._core.model_params()

    @property
    def fp32_from_fp16_groups(self) -> list[list[torch.Tensor]]:
        """By group, the masters, in the order of :attr:`fp16_groups`."""
        self._ingest()
        self._core.adopt_model_writes()
        return self._core.master_params()

    @property
    def fp32_from_fp32_groups(self) -> list[list[torch.Tensor]]:
        """By group, the trainable parameters that need no master."""
        self._ingest()
        return self._core.native_params()

    @property
    def all_fp16_params(self) -> list[torch.Tensor]:
        """:attr:`fp16_groups` in one list."""
        return [p for group in self.fp16_groups for p in group]

    @property
    def all_fp32_from_fp16_params(self) -> list[torch.Tensor]:
        """:attr:`fp32_from_fp16_groups` in one list."""
        return [p for group in self.fp32_from_fp16_groups for p in group]

    @property
    def all_fp32_from_fp32_params(self) -> list[torch.Tensor]:
        """:attr:`fp32_from_fp32_groups` in one list."""
        return [p for group in self.fp32_from_fp32_groups for p in group]

    @property
    def first_closure_call_this_step(self) -> bool:
        """Whether the next evaluation of a closure is the first of its step."""
        return self._core.first_evaluation

    @first_closure_call_this_step.setter
    def first_closure_call_this_step(self, value: bool) -> None:
        self._core.first_evaluation = bool(value)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as ``torch.optim.Optimizer.add_param_group`` does.

        Its half parameters get masters. Raises like the constructor, before
        anything is changed.
        """
        params = param_group["params"]
        if not isinstance(params, torch.Tensor | set):
            # Once only, should it be a generator. torch refuses sets.
            param_group["params"] = params = list(params)
        if not isinstance(params, set):
            listed = [params] if isinstance(params, torch.Tensor) else params
            tensors = [p[1] if isinstance(p, tuple) else p for p in listed]
            group = {**param_group, "params": tensors}
            check_group(group, len(self.param_groups), "FP16_Optimizer")
            self._check_new_group(listed, tensors)
        self.optimizer.add_param_group(param_group)
        self._ingest()
        self._print_groups(len(self.param_groups) - 1)

    def _check_new_group(self, listed: Any, tensors: list[torch.Tensor]) -> None:
        self._ingest()
        core = self._core
        names = parameter_names(self.param_groups, core.parameters(), self._model)
        told = [p[0] if isinstance(p, tuple) else "" for p in listed]
        group = {"params": tensors, "param_names": told}
        core.set_names(names + parameter_names([group], [tensors], self._model))
        try:
            core.check([group], len(names))
        except BaseException:
            core.set_names(names)
            raise

    def state_dict(self) -> dict[str, Any]:
        """Return all state as plain data, which ``torch.load`` reads as it is.

        ``fp32_from_fp16`` holds the live masters. The model's weights are not in
        it, except those that have masters.
        """
        for pre_hook in list(self._optimizer_state_dict_pre_hooks.values()):
            pre_hook(self)
        self._ingest()
        self._core.adopt_model_writes()
        result = _checkpoint.save(self._core, self.optimizer)
        for post_hook in list(self._optimizer_state_dict_post_hooks.values()):
            changed = post_hook(self, result)
            if changed is not None:
                result = changed
        return result

    def torch_state_dict(self, model: torch.nn.Module | None = None) -> dict[str, Any]:
        """Return copies of all state in the form of plain torch.

        For going on without this class, in fp32 under autocast: ``"optimizer"`` is
        for an optimizer like the wrapped one over the same parameters in fp32, with
        the weights of :meth:`fp32_state_dict`; ``"scaler"`` for a
        ``torch.amp.GradScaler``. That has neither hysteresis nor floor nor ceiling, so
        its next scales are the same where the present scaler uses none of them. A
        static scale stays.

        With the weights under "model" beside them, :meth:`load_state_dict` takes it.

        Args:
            model: for the names of the parameters in the groups, ``param_names``; that
                of the constructor by default. Groups that were made from
                ``named_parameters()`` have them without it.

        Raises:
            TypeError: if the scaler is none of ours.
            ValueError: if its window is no whole number.
        """
        self._ingest()
        self._core.adopt_model_writes()
        names = parameter_names(
            self.param_groups, self._core.parameters(), model or self._model
        )
        return _export.torch_state_dict(self._core, self.optimizer, names)

    def fp32_state_dict(self, model: torch.nn.Module | None = None) -> dict[str, Any]:
        """Return the state dict of the model in fp32, for evaluation, EMA and export.

        It has the keys and the order of ``model.state_dict()``. Half parameters are
        their masters, or cast where they have none, as half buffers are; everything
        else is as it is. All are copies; tied weights share one.

        Args:
            model: the model, or a part of it; that of the constructor by default.

        Raises:
            TypeError: if there is no model.
            ValueError: if it has none of the half parameters that are trained.
        """
        self._ingest()
        self._core.adopt_model_writes()
        return _export.fp32_state_dict(
            self._core, self._model if model is None else model
        )

    def load_state_dict(
        self,
        state_dict: dict[str, Any],
        *,
        model: torch.nn.Module | None = None,
        loss_index: int = 0,
    ) -> None:
        """Restore what :meth:`state_dict` returned, or what a relative saved.

        Masters are copied into the present ones and written to the model, rounded,
        so it does not matter whether the model is loaded before or after. The
        scaler is replaced by the saved one. :attr:`load_report` tells afterwards what
        was restored.

        The state dicts of these are taken too: FP16_Optimizer of apex.fp16_utils and
        of Megatron-LM, Megatron-LM 2 and Megatron-Core, DeepSpeed's fp16 optimizers
        without ZeRO, fairseq, and plain optimizers of ``torch.optim``. So is a whole
        training checkpoint, a dict with one of them under "optimizer", beside which a
        scaler may stand: torch.amp.GradScaler's under "scaler", apex.amp's under
        "amp". :func:`fp16core.load_checkpoint` reads the files.

        The scaler then goes on by the rule of its project, counters included; what
        of its parameters the project does not save comes from the present scaler.
        Without masters in it, a whole checkpoint gives its model's weights to them,
        in fp32 if it has them in fp32, provided that the names of the parameters are
        known. A state dict of ``torch.optim`` alone leaves masters and scale as they
        are. Parameters without masters are the model's: load that too.

        Args:
            state_dict: what was saved.
            model: the model that is trained, to find its weights in a whole
                checkpoint; that of the constructor by default. Param groups that were
                made from ``named_parameters()`` have the names without it.
            loss_index: which scaler of apex.amp, where it had several losses.

        Raises:
            ValueError: if the state dict does not fit, with nothing changed.
        """
        for pre_hook in list(self._optimizer_load_state_dict_pre_hooks.values()):
            changed = pre_hook(self, state_dict)
            if changed is not None:
                state_dict = changed
        self._ingest()
        core = self._core
        saved = _checkpoint.check(
            state_dict,
            Receiver.of(core, self.optimizer, model or self._model, loss_index),
        )
        if saved.warning:
            warnings.warn(saved.warning, stacklevel=2)
        if saved.positions is not None:
            adopt(self.optimizer, core.adopt_at(saved.positions))
        core.adopt_model_writes()
        scaler = core.loss_scaler
        if saved.scaler is not None and not callable(saved.scaler):
            core.loss_scaler = saved.scaler
        try:
            put_back = _checkpoint.load_inner(self.optimizer, saved.optimizer_state)
        except BaseException:
            core.loss_scaler = scaler
            raise
        if callable(saved.scaler):
            try:
                saved.scaler()
            except BaseException:
                put_back()
                raise
        self._ingest()
        _checkpoint.load_masters(core, saved)
        if not saved.keeps_run:
            core.overflow = saved.overflow
            core.update_pending = saved.update_pending
            core.first_evaluation = True
        if saved.step_counts is not None:
            core.set_step_counts(*saved.step_counts)
        self._load_report = saved.report()
        for post_hook in list(self._optimizer_load_state_dict_post_hooks.values()):
            post_hook(self)

    @property
    def load_report(self) -> LoadReport | None:
        """What the last :meth:`load_state_dict` restored, and what it did not; None
        before the first."""
        return self._load_report

    # Names that old scripts and subclasses use.

    def maybe_print(self, msg: str) -> None:
        """Print ``msg`` if :attr:`verbose`."""
        if self.verbose:
            print(msg)

    def _check_overflow(self) -> None:
        self._ingest()
        params = [*self.fp16_groups, *self.fp32_from_fp32_groups]
        grads = [p.grad for group in params for p in group if p.grad is not None]
        overflow = _core.has_overflow(grads)
        if self._process_group is not None:
            overflow = self._process_group(float(overflow), Reduction.MAX) > 0
        self.overflow = overflow

    def _update_scale(self, has_overflow: bool = False) -> None:
        self.loss_scaler.update_scale(has_overflow)

    def _model_grads_to_master_grads(self) -> None:
        self._ingest()
        self._core.copy_gradients()

    def _downscale_master(self) -> None:
        self._core.downscale_gradients()

    def _master_params_to_model_params(self) -> None:
        self._ingest()
        self._core.write_model()
        self._log()

    def _model_params_to_master_params(self) -> None:
        self._ingest()
        self._core.overwrite_masters()

    # Plumbing.

    def _ingest(self) -> None:
        core, groups = self._core, self.optimizer.param_groups
        if core.is_current(groups):
            return
        adopt(self.optimizer, core.ingest(groups))
        params = core.parameters()
        core.set_names(parameter_names(groups, params, self._model))
        if self._process_group is not None:
            counts = self._process_group.counts
            core.set_counted(
                [[counts(p, self._norm_filter) for p in group] for group in params]
            )

    def _fail_update(self) -> None:
        # What went wrong here says more than that the others could not be told.
        with contextlib.suppress(RuntimeError):
            self._core.fail_update()

    def _log(self) -> _core.StepRecord | None:
        """Tell what happened, and return the last skip among it."""
        for text in self._core.take_messages():
            logger.warning(text)
        skips = self._core.take_skips()
        for record in skips:
            if self.on_skip is not None:
                self.on_skip(record)
        return skips[-1] if skips else None

    def _print_groups(self, first: int) -> None:
        if self.verbose:
            for line in self._core.describe(first):
                print(line)

    def __getattr__(self, name: str) -> Any:
        # Private names stay private: some of torch's mark abilities that only the
        # wrapped optimizer has.
        if name.startswith("_") or name == "optimizer":
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}"
            )
        value = getattr(self.optimizer, name)
        if getattr(value, "__self__", None) is not self.optimizer:
            return value

        @functools.wraps(value)
        def forward(*args: Any, **kwargs: Any) -> Any:
            # The method may move the masters, as `eval` of a schedule-free
            # optimizer does.
            self._ingest()
            self._core.adopt_model_writes()
            result = value(*args, **kwargs)
            self._ingest()
            self._core.write_model()
            self._log()
            return result

        return forward

    def __repr__(self) -> str:
        kind = "dynamic" if self.dynamic_loss_scale else "static"
        return (
            f"{type(self).__name__}({kind} loss scale {self.loss_scale:g}, "
            f"{self.step_mode} step, {self.optimizer!r})"
        )

    def __getstate__(self) -> NoReturn:
        raise RuntimeError(
            "FP16_Optimizer: cannot be pickled or copied, since that would cut the "
            "ties to the model; use state_dict() and load_state_dict()"
        )

    def __setstate__(self, state: object) -> NoReturn:
        self.__getstate__()


def _insistence(fused: Any, materialize: Any) -> str:
    """Return what insists on an update rule, as the rule of an error; "" if nothing."""
    if not (fused is None or isinstance(fused, bool)):
        raise ValueError(
            f"FP16_Optimizer: fused must be None, True or False, but got {fused!r}"
        )
    if not isinstance(materialize, bool):
        raise ValueError(
            "FP16_Optimizer: materialize_master_grads must be True or False, "
            f"but got {materialize!r}"
        )
    if not materialize:
        rule = "materialize_master_grads=False needs a step by an update rule"
        if fused is False:
            raise ValueError(f"FP16_Optimizer: {rule}, but got fused=False")
        return rule
    return "fused=True needs a step by an update rule" if fused else ""


def _check_callable(name: str, value: Any) -> None:
    if value is not None and not callable(value):
        raise TypeError(
            f"FP16_Optimizer: {name} must be callable or None, but got {value!r}"
        )


def _choice(choices: dict[str, Any], name: str, value: Any) -> Any:
    if not isinstance(value, str) or value not in choices:
        raise ValueError(
            f"FP16_Optimizer: {name} must be one of {', '.join(choices)}, "
            f"but got {value!r}"
        )
    return choices[value]
