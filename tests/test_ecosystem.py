"""Schedulers, hooks, subclasses and torch's tools take the wrapper for an optimizer."""

import copy
import gc
import inspect
import pathlib
import pickle
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fp16core import FP16_Optimizer
from helpers import (
    HALF_DTYPES,
    INF,
    assert_same,
    copy_of,
    half,
    masters,
    single,
    train,
)


def wrap(*params: torch.Tensor, lr: float = 0.5, **kwargs: Any) -> FP16_Optimizer:
    inner = torch.optim.SGD(list(params), lr=lr, momentum=0.0)
    return FP16_Optimizer(inner, verbose=False, **kwargs)


def clean(optimizer: Any) -> None:
    train(optimizer, optimizer.fp16_groups[0][0].float().sum())


def overflow(optimizer: Any) -> None:
    train(optimizer, optimizer.fp16_groups[0][0].float().sum() * INF)


# It is an optimizer.


def test_is_an_optimizer_with_all_of_its_public_and_private_members() -> None:
    optimizer = wrap(half(1.0))
    assert isinstance(optimizer, torch.optim.Optimizer)
    members = [n for n in dir(torch.optim.Optimizer) if not n.startswith("__")]
    assert [name for name in members if not hasattr(optimizer, name)] == []


def test_has_every_attribute_of_a_constructed_optimizer() -> None:
    inner = torch.optim.Optimizer([half(1.0)], {})
    optimizer = FP16_Optimizer(inner, verbose=False)
    assert [name for name in vars(inner) if not hasattr(optimizer, name)] == []


@pytest.mark.parametrize(
    "name, wanted",
    [
        ("backward", ["self", "loss", "update_master_grads", "retain_graph"]),
        ("step", ["self", "closure"]),
        ("zero_grad", ["self", "set_grads_to_None", "set_to_none"]),
        ("clip_master_grads", ["self", "max_norm", "norm_type"]),
        ("load_state_dict", ["self", "state_dict"]),
        ("add_param_group", ["self", "param_group"]),
    ],
)
def test_methods_have_real_signatures(name: str, wanted: list[str]) -> None:
    parameters = inspect.signature(getattr(FP16_Optimizer, name)).parameters
    assert list(parameters)[: len(wanted)] == wanted


def test_is_weakly_referenceable_and_dies_without_the_collector() -> None:
    gc.disable()
    try:
        optimizer = wrap(half(1.0))
        clean(optimizer)
        reference = weakref.ref(optimizer)
        del optimizer
        assert reference() is None
    finally:
        gc.enable()


def test_takes_new_attributes() -> None:
    optimizer = wrap(half(1.0))
    optimizer.note = "mine"
    assert optimizer.note == "mine"


@pytest.mark.parametrize(
    "copier", [copy.copy, copy.deepcopy, pickle.dumps], ids=["copy", "deep", "pickle"]
)
def test_cannot_be_copied_and_says_what_to_do(copier: Any) -> None:
    with pytest.raises(
        RuntimeError,
        match=r"^FP16_Optimizer: cannot be pickled or copied, .*state_dict\(\)",
    ):
        copier(wrap(half(1.0)))


def test_cannot_be_unpickled_either() -> None:
    with pytest.raises(RuntimeError, match=r"state_dict\(\)"):
        wrap(half(1.0)).__setstate__({})


# Forwarding.


class Extended(torch.optim.SGD):
    """An optimizer with members of its own, one of which moves the weights."""

    _step_supports_amp_scaling = True
    mode = "train"

    def eval(self, factor: float = 0.5) -> str:
        """Move to other weights."""
        self.mode = "eval"
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    param.mul_(factor)
        return "evaluating"


def test_public_members_are_forwarded() -> None:
    param = half(1.0)
    optimizer = FP16_Optimizer(Extended([param], lr=0.5), verbose=False)
    assert optimizer.mode == "train"
    assert optimizer.eval.__doc__ == "Move to other weights."
    assert list(inspect.signature(optimizer.eval).parameters) == ["factor"]
    assert optimizer.eval(factor=0.25) == "evaluating"
    assert optimizer.optimizer.mode == "eval"
    # Methods may move the masters; the model follows.
    assert masters(optimizer)[0].item() == 0.25
    assert param.item() == 0.25


def test_private_members_are_not_forwarded() -> None:
    optimizer = FP16_Optimizer(Extended([half(1.0)], lr=0.5), verbose=False)
    with pytest.raises(AttributeError, match="no attribute '_step_supports_amp"):
        _ = optimizer._step_supports_amp_scaling
    assert not hasattr(optimizer, "_private")


def test_missing_members_are_missing() -> None:
    with pytest.raises(AttributeError, match="no_such_method"):
        wrap(half(1.0)).no_such_method()


# Schedulers.

SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.5**epoch),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.5),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 1, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 2], 0.5),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.5),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.5),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 3),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(
        o, 2
    ),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.5, step_size_up=2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=8),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.StepLR(o, 2), lr_scheduler.ExponentialLR(o, 0.5)]
    ),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.5)], [2]
    ),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.1),
}


def test_no_scheduler_of_torch_is_left_out() -> None:
    bases = {"LRScheduler", "_LRScheduler", "ReduceLROnPlateau"}
    known = {
        name
        for name, kind in vars(lr_scheduler).items()
        if inspect.isclass(kind) and issubclass(kind, lr_scheduler.LRScheduler)
    }
    assert known - bases <= set(SCHEDULERS)


@pytest.mark.parametrize("where", ["wrapper", "inner after", "inner before"])
@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
def test_schedulers_drive_the_rate_as_without_wrapping(make: Any, where: str) -> None:
    def sgd() -> torch.optim.SGD:
        return torch.optim.SGD([single(1.0)], lr=0.25, momentum=0.5)

    plain = sgd()
    reference = make(plain)
    inner = torch.optim.SGD([half(1.0)], lr=0.25, momentum=0.5)
    scheduler = make(inner) if where == "inner before" else None
    optimizer = FP16_Optimizer(inner, verbose=False)
    if scheduler is None:
        scheduler = make(optimizer if where == "wrapper" else inner)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(5):
            clean(optimizer)
            plain.step()
            # SequentialLR steps its schedulers in a way that torch deprecates.
            warnings.filterwarnings("ignore", "The epoch parameter in")
            scheduler.step()
            reference.step()
            assert optimizer.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
            assert scheduler.get_last_lr() == reference.get_last_lr()


@pytest.mark.parametrize("where", ["wrapper", "inner after", "inner before"])
@pytest.mark.parametrize("by_closure", [False, True])
def test_a_skipped_first_step_counts_as_a_step_for_schedulers(
    where: str, by_closure: bool
) -> None:
    param = half(1.0)
    inner = torch.optim.SGD([param], lr=0.5)
    before = lr_scheduler.StepLR(inner, 1, 0.5) if where == "inner before" else None
    optimizer = FP16_Optimizer(inner, verbose=False)
    scheduler = before or lr_scheduler.StepLR(
        optimizer if where == "wrapper" else inner, 1, 0.5
    )

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (param.float() * INF).sum()
        optimizer.backward(loss)
        return loss

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if by_closure:
            optimizer.step(closure)
        else:
            overflow(optimizer)
        assert optimizer.overflow is True
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_schedulers_still_warn_of_a_wrong_order() -> None:
    optimizer = wrap(half(1.0))
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        scheduler.step()


def test_a_schedule_may_wait_for_steps_that_are_applied() -> None:
    param = half(1.0)
    optimizer = wrap(
        param, dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 16.0}
    )
    scheduler = lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for step in (overflow, clean, overflow, clean):
        step(optimizer)
        if not optimizer.overflow:
            scheduler.step()
    assert scheduler.last_epoch == optimizer.steps_applied == 2
    assert param.item() == 1.0 - 0.5 - 0.25


@pytest.mark.parametrize("tensor_lr", [False, True])
def test_schedulers_are_resumed_with_the_optimizer(tensor_lr: bool) -> None:
    def make() -> tuple[FP16_Optimizer, Any]:
        lr = torch.tensor(0.5) if tensor_lr else 0.5
        inner = torch.optim.Adam([half(1.0)], lr=lr)
        optimizer = FP16_Optimizer(inner, verbose=False)
        return optimizer, lr_scheduler.CosineAnnealingLR(optimizer, 8)

    def run(optimizer: FP16_Optimizer, scheduler: Any) -> None:
        for _ in range(3):
            clean(optimizer)
            scheduler.step()

    first, other = make(), make()
    run(*first)
    saved = copy_of([part.state_dict() for part in first])
    for part, state in zip(other, saved, strict=True):
        part.load_state_dict(state)
    for pair in (first, other):
        run(*pair)
    assert_same(other[0].state_dict(), first[0].state_dict())
    assert_same(other[1].get_last_lr(), first[1].get_last_lr())


def test_reduce_on_plateau_reduces() -> None:
    optimizer = wrap(half(1.0))
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    for _ in range(3):
        clean(optimizer)
        scheduler.step(1.0)
    assert optimizer.param_groups[0]["lr"] == 0.125


# Hooks.


def test_hooks_run_in_order_and_as_often_as_promised() -> None:
    optimizer = wrap(half(1.0))
    inner = optimizer.optimizer
    log: list[str] = []

    def note(name: str) -> Any:
        return lambda instance, *_: log.append(
            f"{name} {'outer' if instance is optimizer else 'inner'}"
        )

    handles = [
        optimizer.register_step_pre_hook(note("pre")),
        optimizer.register_step_post_hook(note("post")),
        inner.register_step_pre_hook(note("pre")),
        inner.register_step_post_hook(note("post")),
        register_optimizer_step_pre_hook(note("global pre")),
        register_optimizer_step_post_hook(note("global post")),
    ]
    try:
        clean(optimizer)
        assert log == [
            "pre outer",
            "global pre inner",
            "pre inner",
            "post inner",
            "global post inner",
            "post outer",
        ]
        log.clear()
        overflow(optimizer)
        assert log == ["pre outer", "post outer"]
    finally:
        for handle in handles:
            handle.remove()
    log.clear()
    clean(optimizer)
    assert log == []


def test_a_pre_hook_may_replace_the_arguments() -> None:
    param = half(1.0)
    optimizer = wrap(param)
    seen: list[Any] = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = param.float().sum()
        optimizer.backward(loss)
        return loss

    def pre(instance: Any, args: Any, kwargs: Any) -> Any:
        seen.append((args, kwargs))
        return (instance,), {"closure": closure}

    optimizer.register_step_pre_hook(pre)
    optimizer.register_step_post_hook(lambda o, args, kwargs: seen.append(kwargs))
    assert optimizer.step() is not None
    assert param.item() == 0.5
    assert seen[0] == ((optimizer,), {})
    assert seen[1] == {"closure": closure}


def test_hooks_see_the_written_model_and_the_flag() -> None:
    param = half(1.0)
    optimizer = wrap(param)
    seen: list[Any] = []
    optimizer.register_step_post_hook(
        lambda o, *_: seen.append((param.item(), o.overflow))
    )
    clean(optimizer)
    overflow(optimizer)
    assert seen == [(0.5, False), (0.5, True)]


def test_state_dict_hooks_run_around_the_whole_state() -> None:
    optimizer = wrap(half(1.0))
    log: list[str] = []
    optimizer.register_state_dict_pre_hook(lambda o: log.append("pre save"))

    def post_save(o: Any, state: dict[str, Any]) -> dict[str, Any]:
        log.append("post save")
        return {**state, "mine": 1}

    def pre_load(o: Any, state: dict[str, Any]) -> dict[str, Any]:
        log.append("pre load")
        assert state.pop("mine") == 1
        return state

    optimizer.register_state_dict_post_hook(post_save)
    optimizer.register_load_state_dict_pre_hook(pre_load)
    optimizer.register_load_state_dict_post_hook(lambda o: log.append("post load"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert log == ["pre save", "post save", "pre load", "post load"]


def test_hooks_may_be_put_in_front_and_removed() -> None:
    optimizer = wrap(half(1.0))
    log: list[str] = []
    handles = []
    for name, prepend in (("first", False), ("second", False), ("zeroth", True)):
        handles.append(
            optimizer.register_state_dict_pre_hook(
                lambda o, name=name: log.append(name), prepend=prepend
            )
        )
        handles.append(
            optimizer.register_load_state_dict_post_hook(
                lambda o, name=name: log.append(name), prepend=prepend
            )
        )
    optimizer.load_state_dict(optimizer.state_dict())
    assert log == ["zeroth", "first", "second"] * 2
    for handle in handles:
        handle.remove()
    optimizer.load_state_dict(optimizer.state_dict())
    assert len(log) == 6


def test_a_hook_that_raises_comes_out_and_leaves_a_usable_optimizer() -> None:
    param = half(1.0)
    optimizer = wrap(param)

    def fail(*_: Any) -> None:
        raise KeyError("mine")

    for register in (
        optimizer.register_step_pre_hook,
        optimizer.optimizer.register_step_pre_hook,
    ):
        before = param.item()
        handle = register(fail)
        with pytest.raises(KeyError, match="mine"):
            clean(optimizer)
        handle.remove()
        assert param.item() == before
        optimizer.step()
        assert param.item() == before - 0.5


def test_the_profiler_sees_the_inner_step_once() -> None:
    optimizer = wrap(half(1.0))
    with torch.profiler.profile() as profile:
        clean(optimizer)
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["Optimizer.step#SGD.step"] == 1


# Subclasses and mixtures.


def test_a_subclass_may_extend_every_method() -> None:
    log = []

    class Logged(FP16_Optimizer):
        def step(self, closure: Any = None) -> Any:
            log.append("step")
            return super().step(closure)

        def update_master_grads(self) -> None:
            log.append("update")
            super().update_master_grads()

        def zero_grad(self, *args: Any, **kwargs: Any) -> None:
            log.append("zero")
            super().zero_grad(*args, **kwargs)

    param = half(1.0)
    optimizer = Logged(torch.optim.SGD([param], lr=0.5), verbose=False)
    posts = []
    optimizer.register_step_post_hook(lambda *_: posts.append(1))
    clean(optimizer)
    assert param.item() == 0.5
    assert log == ["zero", "update", "step"]
    assert len(posts) == 1
    assert repr(optimizer).startswith("Logged(")


def test_a_second_instance_does_not_touch_the_first() -> None:
    first, second = wrap(half(1.0)), wrap(half(1.0))
    overflow(first)
    clean(second)
    assert (first.overflow, second.overflow) == (True, False)
    assert (first.steps_skipped, second.steps_skipped) == (1, 0)


class Strategy:
    """Mixes itself in front of an optimizer's class and takes over its attributes."""

    def __init__(self, optimizer: Any) -> None:
        skipped = ("step", "__del__")
        self.__dict__ = {
            k: v for k, v in optimizer.__dict__.items() if k not in skipped
        }
        self.__class__ = type(
            "Mixed" + type(optimizer).__name__, (Strategy, type(optimizer)), {}
        )
        self._wrapped = optimizer
        self.steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        return self._wrapped.step(closure)


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_class_that_mixes_itself_in_shares_all_state(scheduled: bool) -> None:
    param = half(1.0)
    optimizer = wrap(
        param, dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 16.0}
    )
    if scheduled:
        lr_scheduler.StepLR(optimizer, 10)
    mixed: Any = Strategy(optimizer)
    assert isinstance(mixed, FP16_Optimizer)
    assert mixed.param_groups is optimizer.param_groups
    clean(mixed)
    assert param.item() == 0.5
    assert (mixed.steps, mixed.steps_applied, optimizer.steps_applied) == (1, 1, 1)
    overflow(mixed)
    assert mixed.overflow is optimizer.overflow is True
    assert mixed.loss_scale == optimizer.loss_scale == 8.0
    mixed.loss_scale = 4.0
    assert optimizer.loss_scale == 4.0
    clean(optimizer)
    assert mixed.overflow is False
    assert mixed.state_dict().keys() == optimizer.state_dict().keys()


# torch's own tools.


def test_a_lookahead_style_wrapper_may_stand_inside() -> None:
    class Lars:
        """Not an Optimizer at all, and its step takes no closure."""

        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optim = optimizer

        @property
        def param_groups(self) -> Any:
            return self.optim.param_groups

        @param_groups.setter
        def param_groups(self, value: Any) -> None:
            self.optim.param_groups = value

        @property
        def state(self) -> Any:
            return self.optim.state

        def state_dict(self) -> Any:
            return self.optim.state_dict()

        def load_state_dict(self, state_dict: Any) -> None:
            self.optim.load_state_dict(state_dict)

        def step(self) -> None:
            self.optim.step()

    param = half(1.0)
    optimizer = FP16_Optimizer(
        Lars(torch.optim.SGD([param], lr=0.5)), static_loss_scale=8.0, verbose=False
    )
    clean(optimizer)
    overflow(optimizer)
    assert param.item() == 0.5


def test_gradient_clipping_by_torch_on_the_groups() -> None:
    param = half(0.0, 0.0)
    optimizer = wrap(param, static_loss_scale=64.0)
    optimizer.backward((param.float() * torch.tensor([3.0, 4.0])).sum())
    norm = torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 2.5)
    assert norm.item() == 5.0
    optimizer.step()
    torch.testing.assert_close(
        # Half of the gradient times the rate, up to torch's 1e-6 in the norm.
        masters(optimizer)[0].detach(),
        torch.tensor([-0.75, -1.0]),
        rtol=1e-6,
        atol=0,
    )


def test_clipping_values_by_torch_on_the_groups() -> None:
    param = half(0.0, 0.0)
    optimizer = wrap(param, static_loss_scale=64.0)
    optimizer.backward((param.float() * torch.tensor([3.0, -0.25])).sum())
    torch.nn.utils.clip_grad_value_(optimizer.param_groups[0]["params"], 0.5)
    optimizer.step()
    assert param.tolist() == [-0.25, 0.125]


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
def test_averaged_models_of_torch_work_beside_it(dtype: torch.dtype) -> None:
    model = torch.nn.Linear(3, 1).to(dtype)
    optimizer = wrap(*model.parameters(), lr=2.0**-12)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    for _ in range(2):
        train(optimizer, model(torch.ones(1, 3).to(dtype)).float().sum())
        averaged.update_parameters(model)
    assert all(p.dtype == dtype for p in averaged.parameters())
    # Averaged weights swapped in, evaluated and swapped out cost the masters no bit.
    before = copy_of(masters(optimizer))
    own = copy_of(dict(model.state_dict()))
    model.load_state_dict(averaged.module.state_dict())
    model.load_state_dict(own)
    assert_same(copy_of(optimizer.fp32_from_fp16_groups[0]), before)


def test_an_average_of_the_masters_sees_every_small_step() -> None:
    param = half(1.0)
    optimizer = wrap(param, lr=2.0**-14)
    ema = torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
    average = copy_of(masters(optimizer))
    for _ in range(2):
        clean(optimizer)
        ema(average, [m.detach() for m in masters(optimizer)], 0)
    # Steps that the float16 weight does not show.
    assert param.item() == 1.0
    assert average[0].item() == 1.0 - 1.25 * 2.0**-14


class Around(torch.optim.Optimizer):
    """An optimizer around ours, with its groups and state, as launchers make them."""

    def __init__(self, optimizer: FP16_Optimizer) -> None:
        self.optimizer = optimizer
        # What a launcher does to move the state to its device.
        self.load_state_dict(self.optimizer.state_dict())

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)
    defaults = property(lambda self: self.optimizer.defaults)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        accepted = inspect.signature(self.optimizer.zero_grad).parameters
        assert "set_to_none" in accepted
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


def test_a_wrapper_may_stand_around_it() -> None:
    param = half(1.0)
    ours = wrap(param, static_loss_scale=4.0)
    outer = Around(ours)
    scheduler = lr_scheduler.StepLR(outer, 1, gamma=0.5)
    for _ in range(2):
        outer.zero_grad()
        ours.backward(param.float().sum())
        outer.step()
        scheduler.step()
    assert param.item() == 1.0 - 0.5 - 0.25
    saved = copy_of(outer.state_dict())
    outer.load_state_dict(saved)
    assert_same(outer.state_dict(), saved)


def test_a_step_put_on_the_instance_is_called() -> None:
    param = half(1.0)
    optimizer: Any = wrap(param)
    own_step, calls = optimizer.step, []

    def counted(closure: Any = None) -> Any:
        calls.append(closure)
        return own_step(closure)

    optimizer.step = counted
    clean(optimizer)
    assert (param.item(), calls) == (0.5, [None])


def test_gradients_scaled_by_torch_are_not_unscaled_again() -> None:
    # Pieces of torch.amp around an optimizer with a scale of 1.
    param = half(1.0)
    optimizer = wrap(param)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(param.float().sum()).backward()
    optimizer.update_master_grads()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert param.item() == 0.5
    optimizer.zero_grad()
    scaler.scale(param.float().sum() * INF).backward()
    optimizer.update_master_grads()
    scaler.step(optimizer)
    scaler.update()
    assert (param.item(), scaler.get_scale()) == (0.5, 2.0)


@pytest.fixture
def process_group() -> Iterator[None]:
    """A group of this process alone."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("accumulation", ["none", "delayed", "naive"])
@pytest.mark.parametrize("as_bucket_view", [False, True])
def test_data_parallel_training_needs_nothing(
    as_bucket_view: bool, accumulation: str
) -> None:
    def run(parallel: bool) -> Any:
        torch.manual_seed(1)
        # Half and native layers.
        model = torch.nn.ModuleList(
            [torch.nn.Linear(4, 6).half(), torch.nn.LayerNorm(6)]
        )

        def forward(x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = model[1](model[0](x.half()).float())
            return y

        model.forward = forward  # makes the list a network
        callee: Any = model
        if parallel:
            callee = torch.nn.parallel.DistributedDataParallel(
                model, gradient_as_bucket_view=as_bucket_view
            )
        optimizer = FP16_Optimizer(
            torch.optim.AdamW(model.parameters(), lr=0.05),
            dynamic_loss_scale=True,
            dynamic_loss_args={"init_scale": 64.0, "scale_window": 2},
            verbose=False,
        )
        weights = torch.linspace(-1, 1, 6)
        for iteration in range(5):
            optimizer.zero_grad()
            for _ in range(1 if accumulation == "none" else 3):
                loss = (callee(torch.randn(3, 4)) * weights).sum()
                if iteration == 2:
                    loss = loss * INF
                optimizer.backward(loss, accumulation != "delayed")
            if accumulation == "delayed":
                optimizer.update_master_grads()
            optimizer.clip_master_grads(0.5)
            optimizer.step()
        assert optimizer.steps_applied == 4
        return copy_of([list(model.parameters()), optimizer.state_dict()])

    assert_same(run(parallel=True), run(parallel=False))


def test_distributed_checkpoint_takes_the_inner_optimizer_of_a_native_model() -> None:
    from torch.distributed.checkpoint.state_dict import (
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    model = torch.nn.Linear(3, 2)
    inner = torch.optim.Adam(model.parameters(), lr=0.5)
    optimizer = FP16_Optimizer(inner, static_loss_scale=8.0, verbose=False)
    train(optimizer, model(torch.ones(1, 3)).sum())
    state = get_optimizer_state_dict(model, inner)
    assert set(state["state"]) == {"weight", "bias"}
    set_optimizer_state_dict(model, inner, optim_state_dict=state)
    train(optimizer, model(torch.ones(1, 3)).sum())
    assert optimizer.state[model.weight]["step"] == 2


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
def test_distributed_checkpoint_saves_and_loads_the_whole_state(
    dtype: torch.dtype, tmp_path: pathlib.Path
) -> None:
    from torch.distributed import checkpoint

    def make() -> tuple[torch.nn.Module, FP16_Optimizer]:
        model = torch.nn.Linear(3, 2).to(dtype)
        optimizer = FP16_Optimizer(
            torch.optim.AdamW(model.parameters(), lr=2.0**-10),
            dynamic_loss_scale=True,
            dynamic_loss_args={"init_scale": 16.0},
            verbose=False,
        )
        clean(optimizer)  # makes the state that loading fills
        return model, optimizer

    model, optimizer = make()
    clean(optimizer)
    overflow(optimizer)
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    checkpoint.save(saved, checkpoint_id=tmp_path, no_dist=True)
    other_model, other = make()
    loaded = {"model": other_model.state_dict(), "optimizer": other.state_dict()}
    checkpoint.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    other_model.load_state_dict(loaded["model"])
    other.load_state_dict(loaded["optimizer"])
    assert_same(other.state_dict(), optimizer.state_dict())
    for both in (optimizer, other):
        clean(both)
    assert_same(other.state_dict(), optimizer.state_dict())
    assert_same(list(other_model.parameters()), list(model.parameters()))


def test_an_iteration_may_be_compiled() -> None:
    results = []
    for compiled in (False, True):
        param = half(1.0, 2.0)
        optimizer = wrap(param, lr=0.125, static_loss_scale=8.0)

        def iterate(param: Any, optimizer: Any, factor: torch.Tensor) -> None:
            optimizer.zero_grad()
            optimizer.backward((param.float() * factor).pow(2).sum())
            optimizer.clip_master_grads(1.0)
            optimizer.step()

        run: Any = torch.compile(iterate, backend="eager") if compiled else iterate
        for factor in (1.0, INF, 2.0):
            run(param, optimizer, torch.tensor(factor))
        assert (optimizer.steps_applied, optimizer.steps_skipped) == (2, 1)
        results.append(copy_of([param, masters(optimizer)]))
    assert_same(results[1], results[0])
