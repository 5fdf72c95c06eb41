"""Training resumes bit for bit from a checkpoint; bad checkpoints change nothing."""

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fp16core import DynamicLossScaler, FP16_Optimizer, LossScaler
from helpers import INF, assert_same, copy_of, half, masters, single, train

INNER: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True),
    "fused_adamw": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, centered=True),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.05),
    "lbfgs": lambda params: torch.optim.LBFGS(params, lr=0.2, max_iter=3),
}


class Net(torch.nn.Module):
    """Half linear layers around a float32 norm, one bias frozen."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 8).to(dtype)
        self.norm = torch.nn.LayerNorm(8)
        self.last = torch.nn.Linear(8, 2).to(dtype)
        self.last.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(x.to(self.first.weight.dtype)).float())
        result: torch.Tensor = self.last(hidden.to(self.last.weight.dtype))
        return result


class Training:
    """A model and its optimizer, and what happens in each iteration.

    A plan has a letter for each iteration: "." is clean, "x" overflows.
    """

    def __init__(self, inner: str, dtype: torch.dtype, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = Net(dtype)
        self.closure_style = inner == "lbfgs"
        self.optimizer = FP16_Optimizer(
            INNER[inner](list(self.model.parameters())),
            dynamic_loss_scale=True,
            dynamic_loss_args={
                "init_scale": 2.0**8,
                "scale_window": 3,
                "delayed_shift": 2,
            },
            verbose=False,
        )

    def loss(self, iteration: int, bad: bool) -> torch.Tensor:
        generator = torch.Generator().manual_seed(iteration)
        x = torch.randn(5, 6, generator=generator)
        loss = self.model(x).float().pow(2).mean()
        return loss * INF if bad else loss

    def step(self, iteration: int, event: str) -> None:
        bad = event == "x"
        if not self.closure_style:
            train(self.optimizer, self.loss(iteration, bad))
            return
        evaluations = [bad]

        def closure() -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = self.loss(iteration, evaluations.pop() if evaluations else False)
            self.optimizer.backward(loss)
            return loss

        self.optimizer.step(closure)

    def run(self, start: int, plan: str) -> None:
        for iteration, event in enumerate(plan, start):
            self.step(iteration, event)

    def everything(self) -> Any:
        """Return a copy of all weights and all state."""
        return copy_of(
            [
                dict(self.model.state_dict()),
                self.optimizer.state_dict(),
                self.optimizer.overflow,
                self.optimizer.loss_scale,
            ]
        )


def through_a_file(state: Any) -> Any:
    """Return what torch saves and, with its defaults, loads again."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


pytestmark = pytest.mark.usefixtures("one_thread")


# Bit-exact resume.

PLANS = {
    "mid-window": "....",
    "spent hysteresis": "..x",
    "after a skipped step": "..xx",
    "after recovery": "x.x..",
    "at the start": "",
}
REST = "..x..xx...."


@pytest.mark.parametrize("model_first", [True, False], ids=["model", "optimizer"])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize(
    "inner, dtype",
    [*((inner, torch.float16) for inner in INNER), ("adam", torch.bfloat16)],
)
def test_resume_is_bit_exact(
    inner: str, plan: str, model_first: bool, dtype: torch.dtype
) -> None:
    straight = Training(inner, dtype, seed=1)
    straight.run(0, plan)
    saved = through_a_file(
        {
            "model": straight.model.state_dict(),
            "optimizer": straight.optimizer.state_dict(),
        }
    )
    resumed = Training(inner, dtype, seed=2)
    if model_first:
        resumed.model.load_state_dict(saved["model"])
    resumed.optimizer.load_state_dict(saved["optimizer"])
    if not model_first:
        resumed.model.load_state_dict(saved["model"])
    assert_same(resumed.everything(), straight.everything())
    for training in (straight, resumed):
        training.run(len(plan), REST)
    assert straight.optimizer.steps_applied > 5
    assert_same(resumed.everything(), straight.everything())


@pytest.mark.parametrize("closure", [False, True])
def test_an_overflow_that_waits_for_its_step_is_saved(closure: bool) -> None:
    straight = Training("adam", torch.float16, seed=1)
    straight.run(0, "..x")
    straight.optimizer.zero_grad()
    straight.optimizer.backward(straight.loss(3, bad=True))
    saved = through_a_file(straight.optimizer.state_dict())
    resumed = Training("adam", torch.float16, seed=2)
    resumed.model.load_state_dict(straight.model.state_dict())
    resumed.optimizer.load_state_dict(saved)
    assert resumed.optimizer.overflow is True
    for training in (straight, resumed):
        training.closure_style = closure
        if not closure:
            assert training.optimizer.step() is None
            assert training.optimizer.steps_skipped == 2
        training.run(4, REST)
        assert training.optimizer.loss_scaler.cur_iter >= 4 + len(REST)
    assert_same(resumed.everything(), straight.everything())


def test_an_overflow_that_was_stepped_lowers_the_scale_once() -> None:
    straight = Training("adam", torch.float16, seed=1)
    straight.run(0, "xx")
    scale = straight.optimizer.loss_scale
    resumed = Training("adam", torch.float16, seed=2)
    resumed.optimizer.load_state_dict(straight.optimizer.state_dict())
    assert resumed.optimizer.step() is None
    assert resumed.optimizer.loss_scale == scale == 2.0**7
    assert resumed.optimizer.steps_skipped == 2


def test_masters_come_back_with_the_bits_that_the_model_lacks() -> None:
    param, other = half(1.0), half(3.0)
    optimizer = FP16_Optimizer(torch.optim.SGD([param], lr=2.0**-20), verbose=False)
    train(optimizer, param.float().sum())
    again = FP16_Optimizer(torch.optim.SGD([other], lr=0.5), verbose=False)
    again.load_state_dict(through_a_file(optimizer.state_dict()))
    assert masters(again)[0].item() == 1.0 - 2.0**-20
    # The model, which was not loaded, is written from them.
    assert other.item() == 1.0


def test_masters_keep_their_identity() -> None:
    training = Training("adam", torch.float16, seed=1)
    before = masters(training.optimizer)
    training.optimizer.load_state_dict(
        Training("adam", torch.float16, seed=2).optimizer.state_dict()
    )
    after = masters(training.optimizer)
    assert all(a is b for a, b in zip(after, before, strict=True))
    held = [p for g in training.optimizer.param_groups for p in g["params"]]
    assert all(any(m is p for p in held) for m in after)


def test_the_checkpoint_overrides_the_scaler_of_the_constructor() -> None:
    param = half(1.0)
    inner = torch.optim.SGD([param], lr=0.5)
    optimizer = FP16_Optimizer(inner, static_loss_scale=4.0, verbose=False)
    dynamic = FP16_Optimizer(
        torch.optim.SGD([half(1.0)], lr=0.5),
        dynamic_loss_scale=True,
        dynamic_loss_args={"init_scale": 64.0, "delayed_shift": 3},
        verbose=False,
    )
    static = copy_of(optimizer.state_dict())
    optimizer.load_state_dict(through_a_file(dynamic.state_dict()))
    assert type(optimizer.loss_scaler) is DynamicLossScaler
    assert optimizer.dynamic_loss_scale is True
    assert (optimizer.loss_scale, optimizer.loss_scaler.delayed_shift) == (64.0, 3)
    optimizer.load_state_dict(static)
    assert type(optimizer.loss_scaler) is LossScaler
    assert optimizer.loss_scale == 4.0


@pytest.mark.parametrize("inner", INNER)
def test_loading_its_own_state_back_changes_nothing(inner: str) -> None:
    loading, straight = (Training(inner, torch.float16, seed=1) for _ in range(2))
    for training in (loading, straight):
        training.run(0, "..x")
    loading.optimizer.load_state_dict(loading.optimizer.state_dict())
    assert_same(loading.everything(), straight.everything())
    for training in (loading, straight):
        training.run(3, "x...")
    assert_same(loading.everything(), straight.everything())


def test_a_thawed_parameter_has_its_master_in_the_checkpoint() -> None:
    def make() -> tuple[torch.nn.Parameter, FP16_Optimizer]:
        late = torch.nn.Parameter(torch.ones(1).half(), requires_grad=False)
        inner = torch.optim.SGD([late, half(1.0)], lr=2.0**-20, momentum=0.5)
        return late, FP16_Optimizer(inner, verbose=False)

    late, optimizer = make()
    late.requires_grad_(True)
    train(optimizer, late.float().sum())
    other_late, other = make()
    other.load_state_dict(through_a_file(optimizer.state_dict()))
    assert_same(other.state_dict(), optimizer.state_dict())
    for param, opt in ((late, optimizer), (other_late, other)):
        param.requires_grad_(True)
        train(opt, param.float().sum())
    assert_same(other.state_dict(), optimizer.state_dict())


def test_loading_clears_the_gradients_scale_of_before() -> None:
    training = Training("sgd", torch.float16, seed=1)
    other = Training("sgd", torch.float16, seed=1)
    training.optimizer.backward(training.loss(0, False), update_master_grads=False)
    training.optimizer.load_state_dict(other.optimizer.state_dict())
    for each in (training, other):
        each.run(0, "...")
    assert_same(training.everything(), other.everything())


# What is in a checkpoint.

OLD_KEYS = [
    "loss_scaler",
    "dynamic_loss_scale",
    "overflow",
    "first_closure_call_this_step",
    "optimizer_state_dict",
    "fp32_from_fp16",
]


def assert_plain(value: Any, where: str) -> None:
    """Assert that there is nothing but tensors, numbers, text, lists and dicts."""
    if type(value) is dict:
        for key, item in value.items():
            assert type(key) in (str, int), f"{where}: key {key!r}"
            assert_plain(item, f"{where}[{key!r}]")
    elif type(value) in (list, tuple):
        for index, item in enumerate(value):
            assert_plain(item, f"{where}[{index}]")
    else:
        plain = (bool, int, float, str, torch.Tensor, type(None))
        assert type(value) in plain, f"{where}: {type(value)}"


@pytest.mark.parametrize("inner", INNER)
def test_a_checkpoint_is_plain_data_with_the_old_keys_first(inner: str) -> None:
    training = Training(inner, torch.float16, seed=1)
    training.run(0, "..x.")
    state = training.optimizer.state_dict()
    assert list(state)[:6] == OLD_KEYS
    assert list(state)[6] == "format_version"
    assert type(state["loss_scaler"]) is dict
    assert all(
        type(value) in (bool, int, float, str)
        for value in state["loss_scaler"].values()
    )
    assert type(state["loss_scaler"]["cur_scale"]) is float
    assert_plain(state, "state")


def test_the_masters_in_a_checkpoint_are_the_live_ones() -> None:
    training = Training("sgd", torch.float16, seed=1)
    state = training.optimizer.state_dict()
    for saved, live in zip(
        state["fp32_from_fp16"][0],
        training.optimizer.fp32_from_fp16_groups[0],
        strict=True,
    ):
        assert saved is live


def tensors_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for item in value.values() for t in tensors_of(item)]
    if isinstance(value, list | tuple):
        return [t for item in value for t in tensors_of(item)]
    return []


@pytest.mark.parametrize("inner", INNER)
def test_two_optimizers_of_one_process_share_nothing_after_loading(inner: str) -> None:
    one = Training(inner, torch.float16, seed=1)
    one.run(0, "...")
    two = Training(inner, torch.float16, seed=2)
    given = one.optimizer.state_dict()
    kept = copy_of(given)
    two.optimizer.load_state_dict(given)
    assert two.optimizer.loss_scaler is not one.optimizer.loss_scaler
    addresses = [
        {t.data_ptr() for t in tensors_of(x.optimizer.state_dict()) if t.numel()}
        for x in (one, two)
    ]
    assert not addresses[0] & addresses[1]
    two.run(3, "..x..")
    assert_same(one.optimizer.state_dict(), kept)


def test_the_inner_part_fits_a_plain_optimizer_and_back() -> None:
    training = Training("adam", torch.float16, seed=1)
    training.run(0, "...")
    inner_state = training.optimizer.state_dict()["optimizer_state_dict"]
    params = [
        torch.nn.Parameter(p.detach().float()) for p in training.model.parameters()
    ]
    plain = INNER["adam"](params)
    plain.load_state_dict(copy_of(inner_state))
    assert_same(plain.state_dict(), inner_state)

    other = Training("adam", torch.float16, seed=2)
    before = [m.detach().clone() for m in masters(other.optimizer)]
    scale = other.optimizer.loss_scale
    other.optimizer.load_state_dict(through_a_file(plain.state_dict()))
    assert_same(other.optimizer.optimizer.state_dict(), inner_state)
    assert_same([m.detach() for m in masters(other.optimizer)], before)
    assert other.optimizer.loss_scale == scale


def test_half_moments_of_another_source_become_float32() -> None:
    param = half(1.0, 2.0)
    plain = torch.optim.SGD([param], lr=0.5, momentum=0.5)
    param.grad = torch.tensor([1.0, 3.0]).half()
    plain.step()
    own = half(1.0, 2.0)
    optimizer = FP16_Optimizer(
        torch.optim.SGD([own], lr=0.5, momentum=0.5), verbose=False
    )
    optimizer.load_state_dict(plain.state_dict())
    [state] = optimizer.state.values()
    assert_same(state["momentum_buffer"], torch.tensor([1.0, 3.0]))


# Bad checkpoints.


def trained() -> Training:
    training = Training("adam", torch.float16, seed=1)
    training.run(0, "..x.")
    return training


Spoil = Callable[[dict[str, Any]], Any]


def setting(*path: Any, to: Any) -> Spoil:
    """Return a function that puts `to` at a path of keys in a state dict."""

    def spoil(state: dict[str, Any]) -> dict[str, Any]:
        target: Any = state
        for key in path[:-1]:
            target = target[key]
        target[path[-1]] = to
        return state

    return spoil


def dropping(*path: Any) -> Spoil:
    """Return a function that removes the item at a path of keys."""

    def spoil(state: dict[str, Any]) -> dict[str, Any]:
        target: Any = state
        for key in path[:-1]:
            target = target[key]
        del target[path[-1]]
        return state

    return spoil


INNER_STATE = "optimizer_state_dict"
BAD: dict[str, tuple[Spoil, str]] = {
    "a number": (lambda state: 3, "must be a dict, but got int"),
    "empty": (lambda state: {}, "but got one without loss_scaler, dynamic"),
    "nonsense": (lambda state: {"nonsense": 1}, "of torch.optim"),
    **{
        f"without {key}": (dropping(key), f"but got one without {key}$")
        for key in trained().optimizer.state_dict()
    },
    **{
        f"wrong type of {key}": (setting(key, to={1}), f"as {key}, but got set$")
        for key in trained().optimizer.state_dict()
        if key != "format_version"
    },
    "other version": (
        setting("format_version", to=99),
        "must have format_version 1, but got 99$",
    ),
    "no inner state": (dropping(INNER_STATE, "state"), "must hold state and"),
    "no inner groups": (dropping(INNER_STATE, "param_groups"), "must hold state and"),
    "group without params": (dropping(INNER_STATE, "param_groups", 0, "params"), ""),
    "groups of another type": (setting(INNER_STATE, "param_groups", to=3), ""),
    "state of another type": (setting(INNER_STATE, "state", to=[]), ""),
    "fewer groups": (
        setting(INNER_STATE, "param_groups", to=[]),
        r"must have groups of \[6\] parameters, but got \[\]$",
    ),
    "smaller group": (
        setting(INNER_STATE, "param_groups", 0, "params", to=[0, 1]),
        r"must have groups of \[6\] parameters, but got \[2\]$",
    ),
    "fewer groups of masters": (setting("fp32_from_fp16", to=[]), "groups of masters"),
    "fewer masters": (dropping("fp32_from_fp16", 0, 0), "position for each master"),
    "master that would broadcast": (
        setting("fp32_from_fp16", 0, 0, to=torch.ones(1)),
        r"floating point master of shape \[8, 6\] for group 0, index 0, but got "
        r"torch.float32 of shape \[1\]$",
    ),
    "master of integers": (
        setting("fp32_from_fp16", 0, 0, to=torch.ones(8, 6).int()),
        r"but got torch.int32 of shape \[8, 6\]$",
    ),
    "master that is a list": (
        setting("fp32_from_fp16", 0, 0, to=[1.0]),
        r"must hold tensors as masters, but got \[1.0\]$",
    ),
    "group of masters that is none": (setting("fp32_from_fp16", 0, to=None), ""),
    "position beyond the group": (
        setting("fp32_from_fp16_positions", 0, 0, to=6),
        "must hold valid positions, but got 6$",
    ),
    "position twice": (
        setting("fp32_from_fp16_positions", 0, 1, to=0),
        "",
    ),
    "position of a native parameter": (
        setting("fp32_from_fp16_positions", 0, 1, to=3),
        "",
    ),
    "negative count": (setting("steps_applied", to=-1), "step counts of at least 0"),
    "unknown scaler": (
        setting("loss_scaler", "kind", to="magic"),
        "must hold a valid loss_scaler, but got unknown kind of loss scaler 'magic'$",
    ),
    "scaler without kind": (dropping("loss_scaler", "kind"), "valid loss_scaler"),
    "scaler without scale": (dropping("loss_scaler", "cur_scale"), "valid loss_scaler"),
    "scaler with scale 0": (
        setting("loss_scaler", "cur_scale", to=0.0),
        "must hold a valid loss_scaler, but got DynamicLossScaler: init_scale must be "
        r"finite and greater than 0, but got 0$",
    ),
    "scaler with text": (setting("loss_scaler", "cur_iter", to="7"), "valid loss_sc"),
    "scaler of a foreign kind": (
        setting("loss_scaler", to={"kind": "other", "cur_scale": 4.0}),
        "must hold a loss scaler like DynamicLossScaler",
    ),
}


@pytest.mark.parametrize("spoil, message", BAD.values(), ids=BAD)
def test_a_bad_checkpoint_is_refused_and_changes_nothing(
    spoil: Spoil, message: str
) -> None:
    state = spoil(copy_of(trained().optimizer.state_dict()))
    target = Training("adam", torch.float16, seed=2)
    target.run(0, "x..")
    inner = target.optimizer.optimizer
    identities = [inner.param_groups, inner.param_groups[0], inner.state]
    scaler = target.optimizer.loss_scaler
    before = target.everything()
    with pytest.raises(
        ValueError,
        match=f"^FP16_Optimizer.load_state_dict: .*{message}",
    ):
        target.optimizer.load_state_dict(state)
    assert_same(target.everything(), before)
    assert inner.param_groups is identities[0]
    assert inner.param_groups[0] is identities[1]
    assert inner.state is identities[2]
    assert target.optimizer.loss_scaler is scaler
    target.run(3, "..")


class LoadsHalfWay(torch.optim.Adam):
    """Its loader changes much and then fails, before or after torch's part."""

    fails = "never"

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.fails == "before":
            self._spoil()
        super().load_state_dict(state_dict)
        if self.fails == "after":
            self._spoil()

    def _spoil(self) -> None:
        self.param_groups[0]["lr"] = 77.0
        for entry in self.state.values():
            entry["step"] = 77
        self.state.popitem()
        raise OSError("half-way")


@pytest.mark.parametrize("fails", ["before", "after"])
@pytest.mark.parametrize("plain", [False, True])
def test_an_inner_loader_that_fails_leaves_everything_as_it_was(
    plain: bool, fails: str
) -> None:
    param, native = half(1.0, 2.0), single(1.0)
    inner = LoadsHalfWay([param, native], lr=0.1)
    optimizer = FP16_Optimizer(inner, dynamic_loss_scale=True, verbose=False)
    while optimizer.steps_applied < 2:
        train(optimizer, param.float().sum() + native.sum())
    state = copy_of(optimizer.state_dict())
    for _ in range(2):
        train(optimizer, param.float().sum() + native.sum())
    before = copy_of([optimizer.state_dict(), param, native])
    groups, group = inner.param_groups, inner.param_groups[0]
    scaler = optimizer.loss_scaler
    inner.fails = fails
    with pytest.raises(OSError, match="half-way"):
        optimizer.load_state_dict(state[INNER_STATE] if plain else state)
    assert_same([optimizer.state_dict(), param, native], before)
    assert inner.param_groups is groups
    assert inner.param_groups[0] is group
    assert optimizer.loss_scaler is scaler
    inner.fails = "never"
    optimizer.load_state_dict(state)
    assert_same(optimizer.state_dict(), state)


def test_loading_does_not_change_the_dict_that_it_is_given() -> None:
    state = trained().optimizer.state_dict()
    kept = copy_of(state)
    target = Training("adam", torch.float16, seed=2)
    target.optimizer.load_state_dict(state)
    target.run(0, "...")
    assert_same(state, kept)


class Foreign:
    """A scaler with a state dict of its own."""

    def __init__(self) -> None:
        self.cur_scale = 4.0
        self.fails = False

    @property
    def loss_scale(self) -> float:
        return self.cur_scale

    def update_scale(self, overflow: bool) -> None:
        self.cur_scale *= 0.5 if overflow else 2.0

    def state_dict(self) -> dict[str, float]:
        return {"scale": self.cur_scale}

    def load_state_dict(self, state: dict[str, float]) -> None:
        if self.fails:
            raise KeyError("of the scaler")
        self.cur_scale = state["scale"]


def test_a_foreign_scaler_saves_and_loads_itself() -> None:
    def make() -> tuple[torch.nn.Parameter, Any]:
        param = half(1.0)
        inner = torch.optim.SGD([param], lr=0.5, momentum=0.5)
        optimizer = FP16_Optimizer(inner, verbose=False)
        optimizer.loss_scaler = Foreign()
        return param, optimizer

    param, optimizer = make()
    train(optimizer, param.float().sum())
    assert optimizer.loss_scale == 8.0
    saved = through_a_file(optimizer.state_dict())
    _, other = make()
    scaler = other.loss_scaler
    other.load_state_dict(saved)
    assert other.loss_scaler is scaler
    assert other.loss_scale == 8.0

    fresh, failing = make()
    failing.loss_scaler.fails = True
    before = copy_of([failing.state_dict(), fresh])
    with pytest.raises(KeyError, match="of the scaler"):
        failing.load_state_dict(saved)
    assert_same([failing.state_dict(), fresh], before)


# Another class of inner optimizer.


def test_state_of_a_class_with_other_options_is_refused() -> None:
    adam = trained()
    sgd = Training("sgd", torch.float16, seed=1)
    before = sgd.everything()
    with pytest.raises(
        ValueError,
        match="^FP16_Optimizer.load_state_dict: the state dict must be of an optimizer "
        "like SGD, but got one of Adam without dampening, momentum, nesterov$",
    ):
        sgd.optimizer.load_state_dict(adam.optimizer.state_dict())
    assert_same(sgd.everything(), before)


def test_state_of_a_class_with_other_entries_is_refused() -> None:
    state = trained().optimizer.state_dict()
    state["optimizer_class"] = "Adamant"
    for entry in state[INNER_STATE]["state"].values():
        entry["more"] = torch.ones(1)
    target = trained()
    before = target.everything()
    with pytest.raises(
        ValueError,
        match="must have the state of Adam .*, but got that of Adamant .*more",
    ):
        target.optimizer.load_state_dict(state)
    assert_same(target.everything(), before)


def test_state_of_a_class_that_fits_is_loaded_with_a_warning() -> None:
    def make(kind: type) -> FP16_Optimizer:
        param = half(1.0)
        optimizer = FP16_Optimizer(kind([param], lr=0.5), verbose=False)
        train(optimizer, param.float().sum())
        return optimizer

    source, target = make(torch.optim.Adam), make(torch.optim.AdamW)
    train(source, source.fp16_groups[0][0].float().sum())
    state = source.state_dict()
    with pytest.warns(
        UserWarning,
        match="^FP16_Optimizer.load_state_dict: state of Adam is loaded into AdamW$",
    ) as caught:
        target.load_state_dict(state)
    assert caught[0].filename == __file__
    assert_same(target.state_dict()["fp32_from_fp16"], state["fp32_from_fp16"])


def test_state_of_the_same_class_is_loaded_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained().optimizer.load_state_dict(copy.copy(trained().optimizer.state_dict()))
