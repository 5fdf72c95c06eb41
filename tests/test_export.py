"""Plain torch goes on from what is exported, with the same numbers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fp16core import DynamicLossScaler, FP16_Optimizer, LossScaler
from helpers import HALF_DTYPES, INF, assert_same, copy_of, half, masters, train

pytestmark = pytest.mark.usefixtures("one_thread")

INNER: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
}


class Net(torch.nn.Module):
    """Half and float32 parameters, a frozen one, tied ones, and buffers."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 4).to(dtype)
        self.norm = torch.nn.BatchNorm1d(4)
        self.last = torch.nn.Linear(3, 4).to(dtype)
        self.last.weight = self.first.weight
        self.last.bias.requires_grad_(False)
        self.register_buffer("table", torch.arange(3).to(dtype) / 3)
        self.register_buffer("ids", torch.arange(3))

    def loss(self, iteration: int) -> torch.Tensor:
        """Return a loss whose gradients do not depend on the weights, so that they
        are the same in all precisions, and exact in half ones."""
        generator = torch.Generator().manual_seed(iteration)
        terms = []
        for parameter in self.parameters():
            if parameter.requires_grad:
                factors = torch.randint(-8, 9, parameter.shape, generator=generator)
                terms.append((parameter.float() * (factors / 8)).sum())
        return torch.stack(terms).sum()


def half_precision(
    inner: str, dtype: torch.dtype = torch.float16, named: bool = False, **scale: Any
) -> tuple[Net, FP16_Optimizer]:
    torch.manual_seed(1)
    model = Net(dtype)
    params = model.named_parameters() if named else model.parameters()
    # Torch's own step, to compare its bits.
    optimizer = FP16_Optimizer(
        INNER[inner](list(params)), verbose=False, fused=False, **scale
    )
    return model, optimizer


def run(
    model: Net, optimizer: FP16_Optimizer, plan: str, start: int = 0
) -> list[float]:
    """Run an iteration for each letter, "x" for an overflow; return the scales."""
    scales = []
    for iteration, event in enumerate(plan, start):
        loss = model.loss(iteration)
        train(optimizer, loss * INF if event == "x" else loss)
        scales.append(optimizer.loss_scale)
    return scales


def run_torch(
    model: Net,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    plan: str,
    start: int,
) -> list[float]:
    """Do the same in plain torch."""
    scales = []
    for iteration, event in enumerate(plan, start):
        optimizer.zero_grad()
        loss = model.loss(iteration)
        scaler.scale(loss * INF if event == "x" else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


SCALERS: dict[str, Callable[[], Any]] = {
    "seed": lambda: DynamicLossScaler(2.0**8, scale_window=3),
    "torch": lambda: DynamicLossScaler.preset(
        "torch", init_scale=2.0**8, growth_factor=4.0, growth_interval=3
    ),
    "static": lambda: LossScaler(64.0),
}
REST = "...x....xx..."


@pytest.mark.parametrize("plan", ["", "..", "....", "..x", "x....", "x.xx."])
@pytest.mark.parametrize("scaler", SCALERS)
@pytest.mark.parametrize("inner", INNER)
def test_plain_torch_goes_on_with_the_same_scales_and_steps(
    inner: str, scaler: str, plan: str
) -> None:
    model, optimizer = half_precision(inner, loss_scaler=SCALERS[scaler]())
    run(model, optimizer, plan)
    exported = optimizer.torch_state_dict()
    plain = Net(torch.float32)
    plain.load_state_dict(optimizer.fp32_state_dict(model))
    plain_optimizer = INNER[inner](list(plain.parameters()))
    plain_optimizer.load_state_dict(exported["optimizer"])
    grad_scaler = torch.amp.GradScaler("cpu")
    grad_scaler.load_state_dict(exported["scaler"])

    start = len(plan)
    ours = run(model, optimizer, REST, start)
    assert run_torch(plain, plain_optimizer, grad_scaler, REST, start) == ours
    want = optimizer.fp32_state_dict(model)
    got = dict(plain.state_dict())
    got["table"] = want["table"]  # was rounded before the export
    assert_same(got, want)
    assert_same(
        plain_optimizer.state_dict()["state"],
        optimizer.torch_state_dict()["optimizer"]["state"],
    )


def test_a_late_window_is_late_once_more() -> None:
    scaler = DynamicLossScaler(8.0, scale_window=3, window_lag=1)
    model, optimizer = half_precision("sgd", loss_scaler=scaler)
    exported = optimizer.torch_state_dict()["scaler"]
    assert exported["_growth_tracker"] == -1
    ours = run(model, optimizer, "....")
    plain = Net(torch.float32)
    grad_scaler = torch.amp.GradScaler("cpu")
    grad_scaler.load_state_dict(exported)
    inner = INNER["sgd"](list(plain.parameters()))
    assert run_torch(plain, inner, grad_scaler, "....", 0) == ours == [8, 8, 8, 16]


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("inner", INNER)
def test_what_is_exported_comes_back_bit_for_bit(
    inner: str, dtype: torch.dtype
) -> None:
    scale = {"dynamic_loss_scale": True, "dynamic_loss_args": {"policy": "torch"}}
    model, optimizer = half_precision(inner, dtype, **scale)
    run(model, optimizer, "..x..")
    weights = optimizer.fp32_state_dict(model)
    saved = {"model": weights, **optimizer.torch_state_dict(model)}
    other, back = half_precision(inner, dtype, **scale)
    other.load_state_dict(weights)
    back.load_state_dict(saved, model=other)
    assert back.loss_scale == optimizer.loss_scale
    ours, theirs = (run(*pair, REST, 5) for pair in ((model, optimizer), (other, back)))
    assert theirs == ours
    want, got = optimizer.state_dict(), back.state_dict()
    assert_same(got["fp32_from_fp16"], want["fp32_from_fp16"])
    assert_same(
        got["optimizer_state_dict"]["state"], want["optimizer_state_dict"]["state"]
    )
    assert_same(dict(other.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("named", [False, True])
def test_groups_have_names_where_they_are_known(named: bool) -> None:
    model, optimizer = half_precision("adam", named=named)
    [group] = optimizer.torch_state_dict()["optimizer"]["param_groups"]
    names = [name for name, _ in model.named_parameters()]
    assert group.get("param_names") == (names if named else None)
    [group] = optimizer.torch_state_dict(model)["optimizer"]["param_groups"]
    assert group["param_names"] == names
    assert "param_names" not in optimizer.param_groups[0] or named


def storages(value: Any) -> set[int]:
    if isinstance(value, torch.Tensor):
        return {value.data_ptr()} if value.numel() else set()
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return {address for item in value for address in storages(item)}
    return set()


def test_all_are_copies() -> None:
    model, optimizer = half_precision("adam")
    run(model, optimizer, "..")
    exported = [optimizer.torch_state_dict(), optimizer.fp32_state_dict(model)]
    live = [optimizer.state_dict(), dict(model.state_dict())]
    assert not storages(exported) & storages(live)
    kept = copy_of(exported)
    run(model, optimizer, "..")
    assert_same(exported, kept)
    before = copy_of(optimizer.state_dict())
    exported[0]["optimizer"]["param_groups"][0]["lr"] = 7.0
    exported[0]["optimizer"]["state"][0]["exp_avg"].fill_(7.0)
    assert_same(copy_of(optimizer.state_dict()), before)


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_fp32_weights_have_the_keys_and_order_of_the_model(dtype: torch.dtype) -> None:
    model, optimizer = half_precision("sgd", dtype)
    run(model, optimizer, "...")
    weights = optimizer.fp32_state_dict(model)
    plain = model.state_dict()
    assert list(weights) == list(plain)
    for name, weight in weights.items():
        wide = name == "ids" or name.endswith("num_batches_tracked")
        assert weight.dtype == (torch.int64 if wide else torch.float32), name
        assert not weight.requires_grad
        assert_same(weight.to(plain[name].dtype), plain[name], name)
    assert weights["last.weight"] is weights["first.weight"]
    by_name = dict(zip(["first.weight", "first.bias"], masters(optimizer), strict=True))
    for name, master in by_name.items():
        assert_same(weights[name], master.detach(), name)
        assert not torch.equal(weights[name], plain[name].float()), name
    other = Net(torch.float32)
    other.load_state_dict(weights)


def test_weights_that_were_written_to_the_model_are_seen() -> None:
    model, optimizer = half_precision("sgd")
    with torch.no_grad():
        model.first.bias.fill_(2.0)
    assert_same(optimizer.fp32_state_dict(model)["first.bias"], torch.full((4,), 2.0))


def test_the_model_of_the_constructor_is_enough() -> None:
    torch.manual_seed(1)
    model = Net(torch.float16)
    inner = INNER["sgd"](list(model.parameters()))
    optimizer = FP16_Optimizer(inner, verbose=False, model=model)
    assert_same(optimizer.fp32_state_dict(), optimizer.fp32_state_dict(model))
    [group] = optimizer.torch_state_dict()["optimizer"]["param_groups"]
    assert group["param_names"][0] == "first.weight"


def test_a_part_of_the_model_may_be_exported() -> None:
    model, optimizer = half_precision("sgd")
    weights = optimizer.fp32_state_dict(model.first)
    assert list(weights) == ["weight", "bias"]
    assert_same(weights["bias"], masters(optimizer)[1].detach())


class WithExtraState(torch.nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"seen": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"seen": 3}


def test_what_is_no_tensor_comes_along() -> None:
    model = WithExtraState(2, 2).half()
    inner = torch.optim.SGD(model.parameters(), lr=0.5)
    weights = FP16_Optimizer(inner, verbose=False).fp32_state_dict(model)
    assert weights["_extra_state"] == {"seen": 3}
    WithExtraState(2, 2).load_state_dict(weights)


def test_another_model_is_refused() -> None:
    _, optimizer = half_precision("sgd")
    with pytest.raises(
        ValueError,
        match="^FP16_Optimizer.fp32_state_dict: model must have parameters of the "
        "optimizer, but got Linear without any of them$",
    ):
        optimizer.fp32_state_dict(torch.nn.Linear(2, 2))
    with pytest.raises(
        TypeError,
        match="^FP16_Optimizer.fp32_state_dict: model must be a module, but got "
        "NoneType$",
    ):
        optimizer.fp32_state_dict()


class Foreign:
    loss_scale = cur_scale = 4.0

    def update_scale(self, overflow: bool) -> None:
        pass


def test_a_scaler_that_torch_cannot_follow_is_refused() -> None:
    optimizer = FP16_Optimizer(torch.optim.SGD([half(1.0)], lr=0.5), verbose=False)
    optimizer.loss_scaler = Foreign()
    with pytest.raises(
        TypeError,
        match="^FP16_Optimizer.torch_state_dict: loss_scaler must be a LossScaler or a "
        "DynamicLossScaler, but got Foreign$",
    ):
        optimizer.torch_state_dict()
    optimizer.loss_scaler = DynamicLossScaler(scale_window=2.5)
    with pytest.raises(
        ValueError,
        match="^FP16_Optimizer.torch_state_dict: scale_window must be a whole number, "
        "but got 2.5$",
    ):
        optimizer.torch_state_dict()
