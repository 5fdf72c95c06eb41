"""The report on the gradients: names, and what was found against float64."""

import logging
from typing import Any

import pytest
import torch

from fp16core import FP16_Optimizer
from helpers import HALF_DTYPES, INF, NAN, half


def network(dtype: torch.dtype = torch.float16) -> torch.nn.Sequential:
    first, last = torch.nn.Linear(2, 3).to(dtype), torch.nn.Linear(3, 1, bias=False)
    return torch.nn.Sequential(first, last)


def loss_of(model: torch.nn.Module, factor: float = 1.0) -> torch.Tensor:
    return sum(p.float().sum() for p in model.parameters()) * factor  # type: ignore[return-value]


def wrap(params: Any, **kwargs: Any) -> FP16_Optimizer:
    kwargs.setdefault("verbose", False)
    return FP16_Optimizer(torch.optim.SGD(params, lr=0.5), **kwargs)


def names(optimizer: FP16_Optimizer) -> list[str]:
    return [t.name for t in optimizer.gradient_report().tensors]


NAMES = ["0.weight", "0.bias", "1.weight"]


# Names.


def named(model: torch.nn.Module, how: str, **kwargs: Any) -> FP16_Optimizer:
    """Wrap an optimizer that knows the names in one way or the other."""
    if how == "groups":
        return wrap(model.named_parameters(), **kwargs)
    return wrap(model.parameters(), model=model, **kwargs)


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("how", ["groups", "model"])
def test_reports_have_names(how: str, dtype: torch.dtype) -> None:
    model = network(dtype)
    optimizer = named(model, how)
    optimizer.backward(loss_of(model))
    assert names(optimizer) == NAMES
    assert [t.parameter for t in optimizer.gradient_report().tensors] == list(
        model.parameters()
    )
    optimizer.backward(model[0].bias.float().sum() * INF)
    kind = str(dtype).removeprefix("torch.")
    (culprit,) = optimizer.gradient_report().culprits()
    assert str(culprit) == (
        f"group 0, index 1, 0.bias: shape [3], {kind}, cpu, with 3 inf and 0 NaN"
    )


def test_without_names_there_are_none() -> None:
    model = network()
    optimizer = wrap(model.parameters())
    optimizer.backward(loss_of(model))
    assert names(optimizer) == ["", "", ""]
    optimizer = wrap([half(1.0)], model=network())
    optimizer.backward(optimizer.all_fp16_params[0].float().sum())
    assert names(optimizer) == [""]


@pytest.mark.parametrize("how", ["groups", "model"])
def test_error_messages_have_names(how: str) -> None:
    model = network()
    odd = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    model.register_parameter("odd", odd)
    with pytest.raises(TypeError, match=r"got group 0, index 0, odd: shape \[2\],"):
        named(model, how)
    del model.odd
    optimizer = named(model, how)
    optimizer.backward(loss_of(model), update_master_grads=False)
    with pytest.raises(RuntimeError, match=r"waits at group 0, index 0, 0\.weight:"):
        optimizer.step()


@pytest.mark.parametrize("how", ["groups", "model"])
def test_log_messages_and_listings_have_names(
    how: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    model = network()
    optimizer = named(model, how, verbose=True)
    assert capsys.readouterr().out.splitlines()[1:] == [
        "  0: 0.weight [3, 2] float16, master float32",
        "  1: 0.bias [3] float16, master float32",
        "  2: 1.weight [1, 3] float32, native",
    ]
    with caplog.at_level(logging.WARNING, "fp16core"):
        optimizer.backward(model[1].weight.sum() * NAN)
        optimizer.step()
    (message,) = caplog.messages
    assert "first at group 0, index 2, 1.weight: shape [1, 3], float32" in message


@pytest.mark.parametrize("how", ["groups", "model"])
def test_new_groups_have_names(how: str) -> None:
    model = network()
    optimizer = named(model, how)
    model.append(torch.nn.Linear(1, 1, bias=False).half())
    extra: Any = list(model[2].named_parameters(prefix="2"))
    odd = torch.nn.Parameter(torch.ones(1, dtype=torch.complex64))
    bad: Any = [("2.odd", odd)]
    if how == "model":
        model[2].odd = odd
        bad, extra = [odd], list(model[2].parameters())[:1]
    with pytest.raises(TypeError, match="got group 1, index 0, 2.odd: shape"):
        optimizer.add_param_group({"params": bad})
    optimizer.backward(loss_of(model[:2]))
    assert names(optimizer) == NAMES
    optimizer.add_param_group({"params": extra})
    optimizer.zero_grad()
    optimizer.backward(loss_of(model[:2]) + model[2].weight.float().sum())
    assert names(optimizer) == [*NAMES, "2.weight"]


def test_names_of_the_model_follow_the_parameters() -> None:
    model = network()
    optimizer = wrap(model.parameters(), model=model)
    optimizer.param_groups[0]["params"] = [model[1].weight, model[0].weight]
    optimizer.backward(loss_of(model))
    assert names(optimizer) == ["1.weight", "0.weight"]


def test_names_of_a_group_that_was_replaced_are_not_guessed() -> None:
    model = network()
    optimizer = wrap(model.named_parameters())
    optimizer.param_groups[0]["params"] = [model[1].weight]
    optimizer.backward(loss_of(model))
    assert names(optimizer) == [""]


@pytest.mark.parametrize("how", ["groups", "model"])
def test_parameters_that_thaw_have_names(how: str) -> None:
    model = network()
    model[0].weight.requires_grad_(False)
    optimizer = named(model, how)
    optimizer.backward(loss_of(model))
    assert names(optimizer) == NAMES[1:]
    model[0].weight.requires_grad_(True)
    optimizer.zero_grad()
    optimizer.backward(loss_of(model))
    assert names(optimizer) == NAMES


def test_a_tied_parameter_has_its_first_name() -> None:
    model = torch.nn.ModuleDict(
        {"in": torch.nn.Linear(2, 2), "out": torch.nn.Linear(2, 2, bias=False)}
    ).half()
    model["out"].weight = model["in"].weight
    optimizer = wrap(model.parameters(), model=model)
    optimizer.backward(loss_of(model))
    assert names(optimizer) == ["in.weight", "in.bias"]


def test_names_are_those_in_the_module_that_is_given() -> None:
    # DistributedDataParallel has its model as this name.
    outer = torch.nn.ModuleDict({"module": network()})
    optimizer = wrap(outer.parameters(), model=outer)
    optimizer.backward(loss_of(outer))
    assert names(optimizer) == [f"module.{name}" for name in NAMES]
    inner: Any = outer["module"]
    optimizer = wrap(outer.named_parameters(), model=inner)
    optimizer.zero_grad()
    optimizer.backward(loss_of(outer))
    assert names(optimizer) == NAMES


@pytest.mark.parametrize("model", [3, "net", [half(1.0)], network])
def test_a_model_must_be_a_module(model: Any) -> None:
    with pytest.raises(
        TypeError, match="^FP16_Optimizer: model must be a torch.nn.Module, but got"
    ):
        wrap([half(1.0)], model=model)


# Findings.


def laid_out(values: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "transposed":
        return values.t().contiguous().t()
    if layout == "strided":
        return torch.stack([values, values], dim=-1)[..., 0]
    if layout == "expanded":
        return values[:1].expand_as(values)
    return values


@pytest.mark.parametrize("layout", ["dense", "transposed", "strided", "expanded"])
@pytest.mark.parametrize("dtype", [*HALF_DTYPES, torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [False, True])
def test_findings_are_those_of_float64(
    dtype: torch.dtype, layout: str, bad: bool
) -> None:
    scale = 8.0
    gradient = torch.randn(37, 29, dtype=torch.float64).to(dtype)
    if bad:
        gradient[0, 3:5], gradient[0, 7], gradient[0, 11] = INF, -INF, NAN
    param = torch.nn.Parameter(torch.zeros(37, 29, dtype=dtype))
    optimizer = wrap([param], static_loss_scale=scale)
    param.grad = laid_out(gradient, layout)
    truth = param.grad.double() / scale
    optimizer.update_master_grads()
    report = optimizer.gradient_report()
    (found,) = report.tensors
    assert found.inf_count == truth.isinf().sum().item()
    assert found.nan_count == truth.isnan().sum().item()
    assert report.overflow is bad
    assert [t.index for t in report.culprits()] == ([0] if bad else [])
    if bad:
        assert found.largest != found.largest  # a NaN among them
        return
    # float32 sums in fixed lanes, and one rounding an element for float64.
    assert found.norm == pytest.approx(truth.norm().item(), rel=2.0**-20)
    assert found.largest == pytest.approx(truth.abs().max().item(), rel=2.0**-23)
    assert report.norm == pytest.approx(found.norm, rel=2.0**-50)
    assert report.largest == found.largest


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_duplicate_rows_of_a_sparse_gradient_are_one(dtype: torch.dtype) -> None:
    table = torch.nn.Embedding(4, 2, sparse=True).to(dtype)
    optimizer = wrap(table.named_parameters(), static_loss_scale=4.0)
    rows = table(torch.tensor([1, 1, 2])).float()
    optimizer.backward((rows * torch.tensor([[1.0, 2], [2, -4], [1, 3]])).sum())
    (found,) = optimizer.gradient_report().tensors
    assert (found.inf_count, found.nan_count, found.largest) == (0, 0, 3.0)
    assert found.norm == pytest.approx((9 + 4 + 1 + 9) ** 0.5, rel=2.0**-22)
    optimizer.zero_grad(set_to_none=True)
    rows = table(torch.tensor([1, 1, 2])).float()
    optimizer.backward((rows * torch.tensor([[1.0, INF], [2, 1], [NAN, 3]])).sum())
    (culprit,) = optimizer.gradient_report().culprits()
    assert (culprit.name, culprit.inf_count, culprit.nan_count) == ("weight", 1, 1)


def test_culprits_are_told_apart() -> None:
    params = {name: half(1.0, 2.0) for name in ("fine", "inf", "nan", "both", "none")}
    optimizer = wrap(params.items())
    bad = {"fine": [1.0, 2.0], "inf": [INF, 1.0], "nan": [1.0, NAN], "both": [NAN, INF]}
    loss = sum(
        (params[name].float() * torch.tensor(factors)).sum()
        for name, factors in bad.items()
    )
    optimizer.backward(loss)  # type: ignore[arg-type]
    report = optimizer.gradient_report()
    assert [(c.name, c.inf_count, c.nan_count) for c in report.culprits()] == [
        ("inf", 1, 0),
        ("nan", 0, 1),
        ("both", 1, 1),
    ]
    assert [t.name for t in report.tensors] == ["fine", "inf", "nan", "both"]
    offender = report.first_offender()
    assert offender is not None and offender.name == "inf"
    # A report is what was found then.
    optimizer.zero_grad()
    optimizer.backward(params["fine"].float().sum())
    assert len(report.culprits()) == 3
    assert optimizer.gradient_report().culprits() == []
