"""step(closure): repeated evaluations, overflows in them, and the way out."""

from typing import Any

import pytest
import torch

from fp16core import FP16_Optimizer, LossScaleError
from helpers import HALF_DTYPES, INF, NAN, assert_same, copy_of, half, masters, single


def closure_of(optimizer: FP16_Optimizer, make_loss: Any) -> Any:
    """Return the closure that a user would write."""

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = make_loss()
        optimizer.backward(loss)
        return loss

    return closure


def lbfgs(*params: torch.Tensor, **kwargs: Any) -> FP16_Optimizer:
    inner = torch.optim.LBFGS(list(params), lr=0.5, max_iter=4)
    return FP16_Optimizer(inner, verbose=False, **kwargs)


@pytest.mark.parametrize("dynamic", [False, True])
def test_an_optimizer_that_evaluates_once_steps_once(dynamic: bool) -> None:
    param, native = half(1.0), single(1.0)
    optimizer = FP16_Optimizer(
        torch.optim.SGD([param, native], lr=0.5),
        static_loss_scale=8.0,
        dynamic_loss_scale=dynamic,
        dynamic_loss_args={"init_scale": 8.0},
        verbose=False,
    )
    loss = optimizer.step(
        closure_of(optimizer, lambda: (param.float() * 0.5 + native).sum())
    )
    assert loss.item() == 1.5
    assert (param.item(), native.item()) == (0.75, 0.5)
    assert optimizer.steps_applied == 1


def test_overflowing_evaluations_are_repeated_down_from_the_default_scale() -> None:
    param = half(1.0)
    optimizer = lbfgs(param, dynamic_loss_scale=True)
    evaluations = []

    def loss() -> torch.Tensor:
        evaluations.append(param.item())
        return (param.float() ** 2).sum()

    first = optimizer.step(closure_of(optimizer, loss))
    # 2 * 2**14 is the first scaled gradient of 2 that float16 holds.
    assert optimizer.loss_scale == 2.0**14
    assert first.item() == 1.0
    overflows = 32 - 14
    assert evaluations[: overflows + 1] == [1.0] * (overflows + 1)
    # One clean iteration for the step, and one overflow a repetition.
    assert optimizer.loss_scaler.cur_iter == 1 + overflows
    assert (optimizer.steps_applied, optimizer.steps_skipped) == (1, 0)
    assert optimizer.overflow is False
    assert abs(param.item()) < 0.5


def test_the_model_follows_the_masters_between_evaluations() -> None:
    param = half(1.0)
    optimizer = lbfgs(param)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def loss() -> torch.Tensor:
        seen.append((param.detach().clone(), masters(optimizer)[0].detach().clone()))
        return ((param.float() - 0.1) ** 2).sum()

    optimizer.step(closure_of(optimizer, loss))
    assert len(seen) == 4
    assert len({model.item() for model, _ in seen}) > 2
    for model, master in seen:
        assert_same(model, master.half())
    assert_same(param.detach(), masters(optimizer)[0].detach().half())


def test_the_closure_sees_its_flag_for_the_first_call() -> None:
    param = half(1.0)
    optimizer = lbfgs(param)
    flags = []

    def loss() -> torch.Tensor:
        flags.append(optimizer.first_closure_call_this_step)
        return (param.float() ** 2).sum()

    optimizer.step(closure_of(optimizer, loss))
    assert flags[0] is True
    assert not any(flags[1:])
    assert optimizer.first_closure_call_this_step is True


def test_a_clean_step_counts_once_however_often_it_evaluates() -> None:
    param = half(1.0)
    optimizer = lbfgs(
        param, dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 8.0}
    )
    optimizer.step(closure_of(optimizer, lambda: (param.float() ** 2).sum()))
    assert optimizer.loss_scaler.cur_iter == 1


def snapshot(optimizer: FP16_Optimizer) -> Any:
    inner = optimizer.optimizer
    return copy_of([optimizer.fp16_groups, inner.param_groups, inner.state_dict()])


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("bad", [INF, NAN])
def test_an_incurable_first_evaluation_is_a_skipped_step(
    dynamic: bool, bad: float, dtype: torch.dtype
) -> None:
    param, native = half(1.0, 2.0, dtype=dtype), single(3.0)
    optimizer = lbfgs(
        param,
        native,
        static_loss_scale=8.0,
        dynamic_loss_scale=dynamic,
        dynamic_loss_args={"init_scale": 8.0},
    )

    def good() -> torch.Tensor:
        return (param.float() ** 2).sum() + (native**2).sum()

    optimizer.step(closure_of(optimizer, good))
    before = snapshot(optimizer)
    evaluations = []

    def loss() -> torch.Tensor:
        evaluations.append(optimizer.loss_scale)
        return good() * bad

    assert optimizer.step(closure_of(optimizer, loss)) is None
    assert evaluations == ([8.0, 4.0, 2.0, 1.0] if dynamic else [8.0])
    assert optimizer.overflow is True
    assert (optimizer.steps_applied, optimizer.steps_skipped) == (1, 1)
    assert_same(snapshot(optimizer), before)

    optimizer.step(closure_of(optimizer, good))
    assert optimizer.overflow is False
    assert (optimizer.steps_applied, optimizer.steps_skipped) == (2, 1)


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_an_incurable_later_evaluation_is_an_error_with_the_weights_put_back(
    dynamic: bool, dtype: torch.dtype
) -> None:
    fine, param, native = half(1.0), half(1.0, 2.0, dtype=dtype), single(3.0)
    optimizer = lbfgs(
        fine,
        param,
        native,
        static_loss_scale=2.0,
        dynamic_loss_scale=dynamic,
        dynamic_loss_args={"init_scale": 2.0},
    )
    calls = []

    def loss_with(factor: float) -> torch.Tensor:
        weights = torch.tensor([1.0, factor])
        total = (param.float() * weights).pow(2).sum() + (native**2).sum()
        return total + fine.float().pow(2).sum()

    def loss() -> torch.Tensor:
        calls.append(1)
        return loss_with(NAN if len(calls) >= 3 else 1.0)

    # torch's LBFGS itself cannot go on where its very first step did not end.
    optimizer.step(closure_of(optimizer, lambda: loss_with(1.0)))
    before = copy_of([optimizer.fp16_groups, optimizer.param_groups])

    floor = "1" if dynamic else "2"
    dtype_name = str(dtype).removeprefix("torch.")
    with pytest.raises(
        LossScaleError,
        match="^FP16_Optimizer.step: an evaluation of the closure overflows with the "
        rf"loss scale at its floor {floor}; first at group 0, index 1: shape \[2\], "
        rf"{dtype_name}, cpu, with 0 inf and 1 NaN$",
    ):
        optimizer.step(closure_of(optimizer, loss))
    assert_same([optimizer.fp16_groups, optimizer.param_groups], before)
    assert optimizer.first_closure_call_this_step is True
    assert issubclass(LossScaleError, RuntimeError)

    assert optimizer.steps_applied == 1
    optimizer.step(closure_of(optimizer, lambda: loss_with(1.0)))
    assert optimizer.steps_applied == 2


def test_an_overflow_in_a_later_evaluation_is_cured_by_a_lower_scale() -> None:
    param = half(1.0)
    optimizer = lbfgs(
        param, dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 8.0}
    )
    calls = []

    def loss() -> torch.Tensor:
        calls.append(param.item())
        factor = INF if len(calls) == 3 else 1.0
        return (param.float() ** 2 * factor).sum()

    optimizer.step(closure_of(optimizer, loss))
    assert calls[2] == calls[3]
    assert optimizer.loss_scale == 4.0
    assert (optimizer.steps_applied, optimizer.steps_skipped) == (1, 0)


def test_an_exception_in_the_closure_comes_out_and_leaves_a_clean_optimizer() -> None:
    param = half(1.0)
    optimizer = lbfgs(param, static_loss_scale=8.0)
    calls = []

    def loss() -> torch.Tensor:
        calls.append(1)
        if len(calls) == 6:
            raise KeyError("the user's own")
        return (param.float() ** 2).sum()

    optimizer.step(closure_of(optimizer, loss))
    with pytest.raises(KeyError, match="the user's own"):
        optimizer.step(closure_of(optimizer, loss))
    assert len(calls) == 6
    assert optimizer.first_closure_call_this_step is True
    assert optimizer.steps_applied == 1
    optimizer.step(closure_of(optimizer, loss))
    assert optimizer.steps_applied == 2
    assert_same(param.detach(), masters(optimizer)[0].detach().half())


def test_an_overflow_in_a_closure_counts_once() -> None:
    param = half(1.0)
    optimizer = lbfgs(
        param, dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 2.0}
    )
    factors = [INF, INF]

    def loss() -> torch.Tensor:
        return (param.float() ** 2 * factors.pop()).sum()

    # 2 -> 1 by the first evaluation, and the second one cannot be cured.
    assert optimizer.step(closure_of(optimizer, loss)) is None
    counters = (optimizer.loss_scaler.cur_iter, optimizer.steps_skipped)
    assert optimizer.step() is None
    assert (optimizer.loss_scaler.cur_iter, optimizer.steps_skipped) == counters
    assert optimizer.overflow is True


def test_an_overflow_that_was_stepped_does_not_count_in_a_closure_again() -> None:
    param = half(1.0)
    optimizer = lbfgs(
        param, dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 8.0}
    )
    optimizer.backward((param.float() * INF).sum())
    optimizer.step()
    assert optimizer.loss_scale == 4.0
    optimizer.step(closure_of(optimizer, lambda: (param.float() ** 2).sum()))
    assert optimizer.loss_scale == 4.0


def test_an_exception_after_an_overflow_does_not_lower_the_scale_again() -> None:
    param = half(1.0)
    optimizer = lbfgs(
        param, dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 8.0}
    )
    factors = [INF]

    def loss() -> torch.Tensor:
        return (param.float() ** 2 * factors.pop()).sum()

    with pytest.raises(IndexError):
        optimizer.step(closure_of(optimizer, loss))
    assert optimizer.loss_scale == 4.0
    optimizer.step(closure_of(optimizer, lambda: (param.float() ** 2).sum()))
    assert optimizer.loss_scale == 4.0


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_an_old_overflow_on_entry_is_no_dead_end(dynamic: bool) -> None:
    param = half(1.0)
    optimizer = FP16_Optimizer(
        torch.optim.SGD([param], lr=0.5),
        static_loss_scale=8.0,
        dynamic_loss_scale=dynamic,
        dynamic_loss_args={"init_scale": 8.0},
        verbose=False,
    )
    optimizer.backward((param.float() * INF).sum())
    assert optimizer.overflow is True
    optimizer.step(closure_of(optimizer, lambda: param.float().sum()))
    assert optimizer.overflow is False
    assert param.item() == 0.5
    # The overflow still counts.
    assert optimizer.loss_scale == (4.0 if dynamic else 8.0)


def test_tolerated_overflows_repeat_the_evaluation_at_the_same_scale() -> None:
    param = half(1.0)
    optimizer = lbfgs(
        param,
        dynamic_loss_scale=True,
        dynamic_loss_args={"init_scale": 8.0, "delayed_shift": 3},
    )
    scales = []

    def loss() -> torch.Tensor:
        scales.append(optimizer.loss_scale)
        factor = INF if len(scales) <= 3 else 1.0
        return (param.float() ** 2 * factor).sum()

    optimizer.step(closure_of(optimizer, loss))
    assert scales[:4] == [8.0, 8.0, 8.0, 4.0]


def test_closures_may_be_given_by_name() -> None:
    param = half(1.0)
    optimizer = FP16_Optimizer(torch.optim.SGD([param], lr=0.5), verbose=False)
    optimizer.step(closure=closure_of(optimizer, lambda: param.float().sum()))
    assert param.item() == 0.5


def test_a_line_search_finds_the_minimum_in_half_precision() -> None:
    param = half(3.0, -2.0)
    inner = torch.optim.LBFGS([param], max_iter=20, line_search_fn="strong_wolfe")
    optimizer = FP16_Optimizer(inner, dynamic_loss_scale=True, verbose=False)
    target = torch.tensor([0.5, 0.25])
    loss = closure_of(optimizer, lambda: ((param.float() - target) ** 2).sum())
    for _ in range(3):
        optimizer.step(loss)
    # The model can be no nearer to the minimum than its precision.
    torch.testing.assert_close(param.detach().float(), target, rtol=2**-10, atol=0)
