"""Lion as a plain torch optimizer; its fused rule is in test_update_rules.py."""

import copy
import re
from typing import Any

import pytest
import torch

from fp16core.optim import Lion
from helpers import HALF_DTYPES, NAN, assert_same, half, single


def double(*values: float) -> torch.nn.Parameter:
    return half(*values, dtype=torch.float64)


def step_on(optimizer: Lion, *gradients: torch.Tensor) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = gradient
    optimizer.step()


# The rule.


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.25])
@pytest.mark.parametrize("betas", [(0.9, 0.99), (0.0, 0.5), (0.95, 0.0)])
def test_follows_the_paper(
    betas: tuple[float, float], weight_decay: float, maximize: bool
) -> None:
    lr = 0.125
    weights, moments = [1.5, -0.75, 0.5, 3.0], [0.0] * 4
    param = double(*weights)
    optimizer = Lion(
        [param], lr, betas=betas, weight_decay=weight_decay, maximize=maximize
    )
    generator = torch.Generator().manual_seed(3)
    for _ in range(20):
        gradient = torch.randn(4, generator=generator, dtype=torch.float64)
        step_on(optimizer, gradient)
        for i, g in enumerate(gradient.tolist()):
            g = -g if maximize else g
            update = betas[0] * moments[i] + (1 - betas[0]) * g
            sign = (update > 0) - (update < 0)
            weights[i] -= lr * (sign + weight_decay * weights[i])
            moments[i] = betas[1] * moments[i] + (1 - betas[1]) * g
    # A few roundings of float64 in each of the steps.
    assert param.tolist() == pytest.approx(weights, rel=1e-13, abs=1e-13)
    moment = optimizer.state[param]["exp_avg"]
    assert moment.tolist() == pytest.approx(moments, rel=1e-13, abs=1e-13)


def test_defaults_are_the_papers() -> None:
    assert Lion([single(1.0)]).defaults == {
        "lr": 1e-4,
        "betas": (0.9, 0.99),
        "weight_decay": 0.0,
        "maximize": False,
    }


def test_every_weight_moves_by_the_learning_rate_or_not_at_all() -> None:
    param = single(1.0, 1.0, 1.0, 1.0)
    step_on(Lion([param], lr=0.25), torch.tensor([1e-30, -1e30, 0.0, -0.0]))
    assert param.tolist() == [0.75, 1.25, 1.0, 1.0]


def test_the_decay_stays_out_of_the_moment() -> None:
    plain, decayed = single(2.0, -4.0), single(2.0, -4.0)
    gradient = torch.tensor([0.5, 0.25])
    for param, weight_decay in ((plain, 0.0), (decayed, 0.5)):
        optimizer = Lion([param], lr=0.5, weight_decay=weight_decay)
        step_on(optimizer, gradient)
        assert_same(optimizer.state[param]["exp_avg"], 0 + (1 - 0.99) * gradient)
    assert plain.tolist() == [1.5, -4.5]
    assert decayed.tolist() == [1.0, -3.5]


@pytest.mark.parametrize("dtype", [*HALF_DTYPES, torch.float32, torch.float64], ids=str)
def test_the_moment_has_the_dtype_and_layout_of_its_parameter(
    dtype: torch.dtype,
) -> None:
    param = torch.nn.Parameter(torch.ones(3, 2, dtype=dtype).t())
    optimizer = Lion([param], lr=0.5)
    step_on(optimizer, torch.ones(2, 3, dtype=dtype))
    assert list(optimizer.state[param]) == ["exp_avg"]
    moment = optimizer.state[param]["exp_avg"]
    assert moment.dtype == dtype
    assert moment.stride() == param.stride() == (1, 2)
    assert_same(param.data, torch.full((2, 3), 0.5, dtype=dtype))


def test_learns_a_line() -> None:
    x = torch.linspace(-1, 1, 64)
    model = torch.nn.Linear(1, 1)
    optimizer = Lion(model.parameters(), lr=1.0 / 256)
    for _ in range(1000):
        optimizer.zero_grad()
        loss = (model(x[:, None])[:, 0] - (2 * x - 0.5)).square().mean()
        loss.backward()
        optimizer.step()
    # Each of the two weights ends within some steps of its value.
    assert loss.item() < 1e-3


# As an optimizer.


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_tensor_learning_rate_may_be_edited_in_place(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    param = single(1.0)
    lr = torch.full(shape, 0.5, dtype=dtype)
    optimizer = Lion([param], lr, weight_decay=0.5)
    step_on(optimizer, torch.ones(1))
    assert param.item() == 1.0 * 0.75 - 0.5
    lr.mul_(0.5)
    step_on(optimizer, torch.ones(1))
    assert param.item() == 0.25 * 0.875 - 0.25
    assert optimizer.param_groups[0]["lr"] is lr


def test_a_closure_runs_with_gradients_and_its_loss_is_returned() -> None:
    param = single(1.0)
    optimizer = Lion([param], lr=0.5)

    def closure() -> torch.Tensor:
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss

    with torch.no_grad():
        loss = optimizer.step(closure)
    assert loss.item() == 1.0
    assert param.item() == 0.5
    assert optimizer.step() is None


def test_hooks_and_schedulers_work() -> None:
    param = single(1.0)
    optimizer = Lion([param], lr=0.5)
    log: list[Any] = []
    optimizer.register_step_pre_hook(lambda *_: log.append(param.item()))
    optimizer.register_step_post_hook(lambda *_: log.append(param.item()))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for _ in range(2):
        step_on(optimizer, torch.ones(1))
        scheduler.step()
    assert log == [1.0, 0.5, 0.5, 0.25]


def test_groups_have_options_of_their_own() -> None:
    first, second, idle = single(1.0), single(1.0), single(1.0)
    optimizer = Lion(
        [
            {"params": [first]},
            {"params": [second, idle], "lr": 0.25, "maximize": True},
        ],
        lr=0.5,
    )
    first.grad, second.grad = torch.ones(1), torch.ones(1)
    optimizer.step()
    assert [p.item() for p in (first, second, idle)] == [0.5, 1.25, 1.0]
    assert idle not in optimizer.state


@pytest.mark.parametrize("duplicate", [copy.deepcopy, None], ids=["copy", "state_dict"])
def test_a_copy_goes_on_with_the_same_bits(duplicate: Any) -> None:
    param = torch.nn.Parameter(torch.randn(9))
    optimizer = Lion([param], lr=1e-2, weight_decay=0.1)
    gradients = torch.randn(4, 9)
    for gradient in gradients[:2]:
        step_on(optimizer, gradient)
    if duplicate:
        other = duplicate(optimizer)
        (copied,) = other.param_groups[0]["params"]
    else:
        copied = torch.nn.Parameter(param.detach().clone())
        other = Lion([copied], lr=1.0)
        other.load_state_dict(optimizer.state_dict())
    for gradient in gradients[2:]:
        step_on(optimizer, gradient)
        step_on(other, gradient)
    assert_same(copied.data, param.data)
    assert_same(other.state_dict(), optimizer.state_dict())


# Errors.


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"lr": -1.0}, "lr must be at least 0, but got -1.0"),
        ({"lr": NAN}, "lr must be at least 0, but got nan"),
        ({"lr": torch.tensor(-0.5)}, "lr must be at least 0, but got -0.5"),
        ({"lr": torch.ones(2)}, "a tensor lr must have one element, but got 2"),
        ({"betas": (1.0, 0.9)}, r"betas[0] must be in [0, 1), but got 1.0"),
        ({"betas": (0.9, -0.1)}, r"betas[1] must be in [0, 1), but got -0.1"),
        ({"betas": (0.9, NAN)}, r"betas[1] must be in [0, 1), but got nan"),
        ({"weight_decay": -1.0}, "weight_decay must be at least 0, but got -1.0"),
        ({"weight_decay": NAN}, "weight_decay must be at least 0, but got nan"),
    ],
)
def test_refuses_arguments_without_sense(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^Lion: {re.escape(message)}$"):
        Lion([single(1.0)], **kwargs)


def test_refuses_sparse_gradients() -> None:
    param = single(1.0, 2.0)
    optimizer = Lion([param])
    message = "Lion: gradients must be dense, but got one of layout torch.sparse_coo"
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}$"):
        step_on(optimizer, torch.ones(2).to_sparse())
    assert param.tolist() == [1.0, 2.0]
    assert param not in optimizer.state
