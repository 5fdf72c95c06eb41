"""Parameters that come, thaw, freeze or change their kind after wrapping."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

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

SGD = torch.optim.SGD


def wrap(*params: torch.Tensor, **kwargs: Any) -> FP16_Optimizer:
    inner = SGD(list(params), lr=0.5, momentum=0.5)
    return FP16_Optimizer(inner, static_loss_scale=8.0, verbose=False, **kwargs)


# add_param_group.


@pytest.mark.parametrize(
    "listed",
    [
        lambda p: [p],
        lambda p: (p,),
        lambda p: (q for q in [p]),
        lambda p: p,
        lambda p: torch.nn.ParameterList([p]),
    ],
    ids=["list", "tuple", "generator", "tensor", "module"],
)
def test_a_new_group_gets_masters_and_keeps_its_options(
    listed: Callable[[torch.Tensor], Any],
) -> None:
    old, new = half(1.0), half(1.0)
    optimizer = wrap(old)
    train(optimizer, old.float().sum())
    optimizer.add_param_group({"params": listed(new), "lr": 0.25})
    train(optimizer, (old.float() + new.float()).sum())
    # Momentum of the old one survives: 0.5 * (1 + 0.5).
    assert (old.item(), new.item()) == (1.0 - 0.5 - 0.75, 0.75)
    assert optimizer.param_groups[1]["params"][0].dtype == torch.float32
    assert [len(group) for group in optimizer.fp16_groups] == [1, 1]


def test_a_new_group_is_seen_when_the_inner_optimizer_got_it() -> None:
    old, new = half(1.0), half(1.0)
    optimizer = wrap(old)
    optimizer.optimizer.add_param_group({"params": [new]})
    train(optimizer, (old.float() + new.float()).sum())
    assert (old.item(), new.item()) == (0.5, 0.5)
    assert optimizer.param_groups[1]["params"][0].dtype == torch.float32


def test_a_new_group_may_have_names() -> None:
    model = torch.nn.Linear(2, 1).half()
    more = torch.nn.Linear(2, 1).half()
    inner = SGD(model.named_parameters(), lr=0.5)
    optimizer = FP16_Optimizer(inner, verbose=False)
    optimizer.add_param_group({"params": more.named_parameters()})
    group = optimizer.param_groups[1]
    assert group["param_names"] == ["weight", "bias"]
    assert [p.dtype for p in group["params"]] == [torch.float32] * 2


def test_a_new_group_of_native_and_frozen_parameters() -> None:
    frozen = torch.nn.Parameter(torch.ones(1).half(), requires_grad=False)
    native = single(1.0)
    optimizer = wrap(half(1.0))
    optimizer.add_param_group({"params": [frozen, native]})
    assert optimizer.param_groups[1]["params"] == [frozen, native]
    assert optimizer.fp32_from_fp32_groups[1][0] is native
    train(optimizer, native.sum())
    assert native.item() == 0.5


def test_a_new_group_is_in_later_checkpoints() -> None:
    optimizer = wrap(half(1.0))
    optimizer.add_param_group({"params": [half(2.0)]})
    state = optimizer.state_dict()
    assert len(state["optimizer_state_dict"]["param_groups"]) == 2
    assert [len(group) for group in state["fp32_from_fp16"]] == [1, 1]


class Grown:
    """A model that gets a second layer, with a frozen bias, while it trains."""

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        torch.manual_seed(seed)
        self.layers = [torch.nn.Linear(3, 3).to(dtype), torch.nn.Linear(3, 1).to(dtype)]
        self.layers[1].bias.requires_grad_(False)
        self.native = single(1.0)
        inner = torch.optim.Adam(self.named(0), lr=2.0**-6)
        self.optimizer = FP16_Optimizer(
            inner,
            dynamic_loss_scale=True,
            dynamic_loss_args={"init_scale": 16.0, "scale_window": 2},
            verbose=False,
        )

    def named(self, layer: int) -> list[tuple[str, torch.Tensor]]:
        params = self.layers[layer].named_parameters()
        return [(f"{layer}.{name}", p) for name, p in params]

    def grow(self) -> None:
        named = [*self.named(1), ("native", self.native)]
        self.optimizer.add_param_group(
            {"params": (pair for pair in named), "lr": 2.0**-4, "weight_decay": 0.25}
        )

    def run(self, factors: tuple[float, ...]) -> None:
        for iteration, factor in enumerate(factors):
            generator = torch.Generator().manual_seed(iteration)
            x = torch.randn(4, 3, generator=generator).to(self.layers[0].weight.dtype)
            grown = len(self.optimizer.param_groups) > 1
            y = self.layers[0](x)
            loss = self.layers[1](y).float() * self.native if grown else y.float()
            train(self.optimizer, loss.pow(2).mean() * factor)

    def everything(self) -> Any:
        model = [dict(layer.state_dict()) for layer in self.layers]
        return copy_of([model, self.native, self.optimizer.state_dict()])


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
def test_a_new_group_of_all_kinds_is_resumed_bit_for_bit(dtype: torch.dtype) -> None:
    first = Grown(dtype, seed=1)
    first.run((1.0, INF, 1.0))
    first.grow()
    first.run((INF, 1.0, 1.0, 1.0))
    group = first.optimizer.param_groups[1]
    assert group["param_names"] == ["1.weight", "1.bias", "native"]
    kinds = [torch.float32, dtype, torch.float32]
    assert [p.dtype for p in group["params"]] == kinds
    # The moments of the first group survived, those of the second are younger.
    steps = [first.optimizer.state[p]["step"].item() for p in masters(first.optimizer)]
    assert steps == [5.0, 5.0, 3.0]

    again = Grown(dtype, seed=2)
    again.grow()
    saved = first.everything()
    with torch.no_grad():
        # What has no master is the model's to save.
        again.native.copy_(first.native)
        again.layers[1].bias.copy_(first.layers[1].bias)
    again.optimizer.load_state_dict(saved[2])
    assert_same(again.everything(), saved)
    for run in (first, again):
        run.run((1.0, INF, 1.0))
    assert_same(again.everything(), first.everything())


def test_a_checkpoint_of_before_a_group_came_is_refused_and_changes_nothing() -> None:
    before = Grown(torch.float16, seed=1)
    saved = copy_of(before.optimizer.state_dict())
    before.run((1.0,))
    before.grow()
    state = before.everything()
    with pytest.raises(ValueError, match=r"groups of \[2, 3\] parameters.*got \[2\]"):
        before.optimizer.load_state_dict(saved)
    assert_same(before.everything(), state)


def test_a_new_group_is_printed_if_verbose(capsys: pytest.CaptureFixture[str]) -> None:
    optimizer = wrap(half(1.0))
    optimizer.verbose = True
    optimizer.add_param_group({"params": [half(1.0, 2.0)]})
    assert capsys.readouterr().out.splitlines() == [
        "FP16_Optimizer: group 1: 1 half parameters "
        "(2 elements, 8 bytes of masters), 0 native, 0 frozen",
        "  0: [2] float16, master float32",
    ]


@pytest.mark.parametrize(
    "make_bad, error, message",
    [
        (
            lambda old: [half(1.0), old],
            ValueError,
            "^FP16_Optimizer: a parameter must stand in the groups once, but got it "
            r"again as group 1, index 1: shape \[1\], float16, cpu$",
        ),
        (
            lambda old: [half(1.0), half(1.0).detach().to_sparse().requires_grad_()],
            TypeError,
            "^FP16_Optimizer: parameters must be plain strided tensors of float16, "
            "bfloat16, float32 or float64, but got group 1, index 1: ",
        ),
        (
            lambda old: [torch.nn.UninitializedParameter()],
            TypeError,
            "^FP16_Optimizer: parameters must be initialized, "
            "but got a lazy one as group 1, index 0$",
        ),
        (lambda old: {half(1.0)}, TypeError, "set"),
        (lambda old: ["text"], TypeError, "tensors, but got 'text'"),
    ],
    ids=["twice", "sparse", "lazy", "set", "text"],
)
def test_a_bad_group_is_refused_and_nothing_changes(
    make_bad: Callable[[torch.Tensor], Any], error: type[Exception], message: str
) -> None:
    old = half(1.0)
    optimizer = wrap(old)
    with pytest.raises(error, match=message):
        optimizer.add_param_group({"params": make_bad(old)})
    assert len(optimizer.param_groups) == 1
    train(optimizer, old.float().sum())
    assert old.item() == 0.5


def test_parameters_may_leave_the_groups_and_come_back() -> None:
    leaving, staying = half(1.0), half(1.0)
    optimizer = wrap(leaving, staying)
    optimizer.param_groups[0]["params"].pop(0)
    train(optimizer, leaving.float().sum() + staying.float().sum())
    assert (leaving.item(), staying.item()) == (1.0, 0.5)
    assert optimizer.fp16_groups[0][0] is staying
    optimizer.param_groups[0]["params"].append(leaving)
    leaving.grad = None
    train(optimizer, leaving.float().sum())
    assert leaving.item() == 0.5
    assert optimizer.param_groups[0]["params"][1].dtype == torch.float32


# Thawing and freezing.


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
def test_a_thawed_half_parameter_gets_its_master_with_its_first_gradient(
    dtype: torch.dtype,
) -> None:
    late = torch.nn.Parameter(torch.ones(2).to(dtype), requires_grad=False)
    param = half(1.0, dtype=dtype)
    optimizer = wrap(late, param)
    train(optimizer, param.float().sum())
    late.requires_grad_(True)
    train(optimizer, param.float().sum() + late.float().sum())
    master = optimizer.param_groups[0]["params"][0]
    assert master.dtype == torch.float32
    assert optimizer.fp16_groups[0][0] is late
    assert_same(master.detach(), torch.full((2,), 0.5))
    assert_same(late.detach(), torch.full((2,), 0.5, dtype=dtype))


def test_a_thawed_native_parameter_just_trains() -> None:
    late = torch.nn.Parameter(torch.ones(1), requires_grad=False)
    param = half(1.0)
    optimizer = wrap(late, param)
    train(optimizer, param.float().sum())
    late.requires_grad_(True)
    train(optimizer, late.sum())
    assert late.item() == 0.5
    assert optimizer.fp32_from_fp32_groups[0][0] is late


def test_a_frozen_parameter_rests_and_goes_on_with_all_its_bits() -> None:
    param = half(1.0)
    optimizer = FP16_Optimizer(SGD([param], lr=2.0**-20), verbose=False)
    train(optimizer, param.float().sum())
    param.requires_grad_(False)
    optimizer.zero_grad(set_to_none=True)
    optimizer.step()
    [master] = masters(optimizer)
    assert master.item() == 1.0 - 2.0**-20
    param.requires_grad_(True)
    train(optimizer, param.float().sum())
    assert master.item() == 1.0 - 2.0**-19


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
def test_a_parameter_may_thaw_and_freeze_under_a_dynamic_scale(
    dtype: torch.dtype,
) -> None:
    late = torch.nn.Parameter(torch.ones(2).to(dtype), requires_grad=False)
    param = half(1.0, dtype=dtype)
    optimizer = FP16_Optimizer(
        torch.optim.Adam([late, param], lr=2.0**-12),
        dynamic_loss_scale=True,
        dynamic_loss_args={"init_scale": 8.0},
        verbose=False,
    )

    def run(factor: float = 1.0) -> None:
        loss = late.float().sum() * factor + param.float().sum()
        optimizer.zero_grad(set_to_none=True)
        optimizer.backward(loss)
        optimizer.step()

    run()
    late.requires_grad_(True)
    # The first gradient of all that its master sees is an overflow.
    run(INF)
    assert (optimizer.overflow, optimizer.loss_scale) == (True, 4.0)
    [culprit] = optimizer.gradient_report().culprits()
    assert (culprit.index, culprit.parameter is late) == (0, True)
    run()
    run()
    master = optimizer.param_groups[0]["params"][0]
    assert optimizer.state[master]["step"] == 2
    thawed = master.detach().clone()
    assert_same(late.detach(), thawed.to(dtype))

    late.requires_grad_(False)
    run()
    run(INF)  # of a loss that needs no gradient of it any more
    assert optimizer.steps_skipped == 1
    assert_same(master.detach(), thawed)
    late.requires_grad_(True)
    run()
    assert optimizer.param_groups[0]["params"][0] is master
    assert optimizer.state[master]["step"] == 3
    assert (master < thawed).all()


# Other dtypes and other storage.


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
def test_a_model_made_half_after_wrapping_gets_masters_and_keeps_its_momentum(
    dtype: torch.dtype,
) -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    model.weight.data.fill_(1.0)
    optimizer = wrap(model.weight)
    train(optimizer, model.weight.float().sum())
    model.to(dtype)
    train(optimizer, model.weight.float().sum())
    [master] = masters(optimizer)
    assert master.dtype == torch.float32
    assert model.weight.dtype == dtype
    assert_same(master.detach(), torch.full((1, 2), 1.0 - 0.5 - 0.75))
    assert_same(model.weight.detach(), master.detach().to(dtype))


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
def test_a_model_may_change_its_dtype_at_any_time_and_keeps_its_moments(
    dtype: torch.dtype,
) -> None:
    model = torch.nn.Linear(3, 2)
    values = copy_of(dict(model.state_dict()))
    kwargs = {"lr": 2.0**-12, "betas": (0.5, 0.5)}
    optimizer = FP16_Optimizer(
        torch.optim.Adam(model.parameters(), **kwargs),
        dynamic_loss_scale=True,
        dynamic_loss_args={"init_scale": 4.0, "scale_window": 100},
        verbose=False,
    )
    # Gradients that do not depend on the weights, so that rounding those plays no
    # part, and the twin may stay in float32.
    twin = torch.nn.Linear(3, 2)
    twin.load_state_dict(values)
    plain = torch.optim.Adam(twin.parameters(), **kwargs, fused=True)
    first = True
    for kind in (torch.float32, dtype, dtype, torch.float32, dtype):
        model.to(kind)
        if kind == dtype and first:
            # From here on the master is a half weight that is trained.
            with torch.no_grad():
                for param in twin.parameters():
                    param.copy_(param.to(dtype))
            first = False
        weights = torch.tensor([[1.0, 2.0, -4.0], [0.5, -0.25, 8.0]])
        losses = [
            (network.weight.float() * weights).sum() + network.bias.float().sum()
            for network in (model, twin)
        ]
        optimizer.zero_grad()
        optimizer.backward(losses[0])
        plain.zero_grad()
        losses[1].backward()
        optimizer.step()
        plain.step()
        params = optimizer.param_groups[0]["params"]
        assert_same(
            [p.detach() for p in params], [p.detach() for p in twin.parameters()]
        )
        assert_same(model.weight.detach(), twin.weight.detach().to(kind))
        for master, param in zip(params, twin.parameters(), strict=True):
            assert_same(dict(optimizer.state[master]), dict(plain.state[param]))


def test_a_model_made_float_after_wrapping_shows_its_masters() -> None:
    model = torch.nn.Linear(2, 1, bias=False).half()
    optimizer = FP16_Optimizer(SGD(model.parameters(), lr=2.0**-20), verbose=False)
    train(optimizer, model.weight.float().sum())
    [master] = masters(optimizer)
    before = master.detach().clone()
    model.float()
    train(optimizer, model.weight.sum())
    assert_same(master.detach(), before - 2.0**-20)
    assert_same(model.weight.detach(), master.detach())
    model.half()
    train(optimizer, model.weight.float().sum())
    assert_same(model.weight.detach(), master.detach().half())
    # The model's roundings did not reach the master.
    assert_same(master.detach(), before - 2.0**-19)


def test_a_parameter_moved_into_a_flat_buffer_trains_there() -> None:
    first, second = half(1.0, 2.0), half(3.0)
    optimizer = FP16_Optimizer(SGD([first, second], lr=2.0**-12), verbose=False)
    train(optimizer, first.float().sum() + second.float().sum())
    flat = torch.cat([first.data, second.data])
    first.data, second.data = flat[:2], flat[2:]
    train(optimizer, (first.float().sum() + second.float().sum()) * 2.0**11)
    want = torch.tensor([0.5, 1.5, 2.5]) - 2.0**-12
    assert_same(torch.cat(masters(optimizer)).detach(), want)
    assert_same(flat, want.half())


def test_a_parameter_pointed_at_other_values_takes_them_over() -> None:
    param = half(1.0, 2.0)
    optimizer = wrap(param)
    param.data = torch.tensor([1.0, 4.0]).half()
    train(optimizer, param.float().sum())
    assert_same(param.detach(), torch.tensor([0.5, 3.5]).half())


def test_a_parameter_that_changes_its_shape_is_an_error() -> None:
    param = half(1.0, 2.0)
    optimizer = wrap(param)
    param.data = torch.ones(3).half()
    with pytest.raises(
        RuntimeError,
        match=r"^FP16_Optimizer: a parameter must keep its shape \[2\], "
        r"but got group 0, index 0: shape \[3\], float16, cpu$",
    ):
        train(optimizer, param.float().sum())


def test_strides_may_change_after_wrapping() -> None:
    param = torch.nn.Parameter(torch.arange(6.0).view(2, 3).half())
    optimizer = wrap(param)
    param.data = param.data.t().contiguous().t()
    weights = torch.arange(6.0).view(2, 3)
    train(optimizer, (param.float() * weights).sum())
    assert_same(param.detach(), (weights - 0.5 * weights).half())


def test_groups_that_shrink_leave_a_report_without_them() -> None:
    first, second = half(1.0), half(1.0)
    inner = torch.optim.SGD([{"params": [first]}, {"params": [second]}], lr=1.0)
    optimizer = FP16_Optimizer(inner, verbose=False)
    optimizer.backward(first.float().sum() + second.float().sum() * 1e30)
    assert optimizer.overflow
    del optimizer.param_groups[1]
    optimizer.step()
    assert optimizer.gradient_report().tensors == []
    assert first.item() == 1.0


def test_a_parameter_put_back_into_its_group_keeps_its_master() -> None:
    weight = half(1.0)
    optimizer = FP16_Optimizer(
        torch.optim.SGD([weight], lr=2.0**-14, momentum=0.5), verbose=False
    )
    train(optimizer, weight.float().sum())
    (master,) = masters(optimizer)
    optimizer.param_groups[0]["params"] = [weight]
    train(optimizer, weight.float().sum())
    assert masters(optimizer)[0] is master
    # The rounded weight has lost the first step: 2^-14 is below half a spacing.
    assert master.item() == 1.0 - 2.0**-14 - 1.5 * 2.0**-14
