"""The history of the steps: what a record says, and who is told of skipped steps."""

import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fp16core import FP16_Optimizer
from helpers import HALF_DTYPES, INF, NAN, half, masters, single, train


def wrap(*params: torch.nn.Parameter, **kwargs: Any) -> FP16_Optimizer:
    inner = torch.optim.SGD(list(params), lr=0.5, momentum=0.5)
    return FP16_Optimizer(inner, verbose=False, **kwargs)


def wrap_dynamic(*params: torch.nn.Parameter, **kwargs: Any) -> FP16_Optimizer:
    arguments = {"init_scale": 16.0, "scale_window": 2}
    return wrap(*params, dynamic_loss_scale=True, dynamic_loss_args=arguments, **kwargs)


def records(optimizer: FP16_Optimizer) -> list[tuple[Any, ...]]:
    return [
        (r.step, r.scale, r.overflow, r.skipped_in_a_row) for r in optimizer.history
    ]


def closure_of(
    optimizer: FP16_Optimizer, make_loss: Callable[[], torch.Tensor]
) -> Callable[[], torch.Tensor]:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = make_loss()
        optimizer.backward(loss)
        return loss

    return closure


# Records.


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("kwargs", [{}, {"materialize_master_grads": False}])
def test_each_step_is_recorded_with_the_scale_of_its_gradients(
    dtype: torch.dtype, kwargs: dict[str, Any]
) -> None:
    param, native = half(1.0, 2.0, dtype=dtype), single(1.0)
    optimizer = wrap_dynamic(param, native, **kwargs)
    assert optimizer.history == []
    for factor in (1.0, 1.0, INF, NAN, 2.0):
        loss = (param.float() * factor * torch.tensor([3.0, 4.0])).sum()
        optimizer.zero_grad()
        optimizer.backward(loss + 12 * native.sum())
        optimizer.clip_master_grads(0.5)
        optimizer.step()
    assert records(optimizer) == [
        (1, 16.0, False, 0),
        (2, 16.0, False, 0),
        (3, 32.0, True, 1),
        (4, 16.0, True, 2),
        (5, 8.0, False, 0),
    ]
    first, second, infinite, nan, last = optimizer.history
    # Before clipping.
    assert first.norm == second.norm == 13.0
    assert last.norm == math.sqrt(6**2 + 8**2 + 12**2)
    assert not math.isfinite(infinite.norm) and not math.isfinite(nan.norm)
    assert first.culprits == second.culprits == last.culprits == []
    (culprit,) = infinite.culprits
    assert (culprit.inf_count, culprit.nan_count) == (2, 0)
    assert culprit.parameter is param
    (culprit,) = nan.culprits
    assert (culprit.inf_count, culprit.nan_count) == (0, 2)


def test_a_record_is_a_line_for_people() -> None:
    param = half(1.0)
    optimizer = FP16_Optimizer(
        torch.optim.SGD([("weight", param)], lr=0.5), 4.0, verbose=False
    )
    train(optimizer, param.float().sum() * 2)
    train(optimizer, param.float().sum() * INF)
    assert [str(r) for r in optimizer.history] == [
        "StepRecord(step=1, scale=4, overflow=False, norm=2)",
        "StepRecord(step=2, scale=4, overflow=True, norm=inf, culprit group 0, "
        "index 0, weight: shape [1], float16, cpu, with 1 inf and 0 NaN)",
    ]


@pytest.mark.parametrize("update_first", [False, True])
def test_a_scale_set_meanwhile_is_not_that_of_the_gradients(update_first: bool) -> None:
    param = half(1.0)
    optimizer = wrap(param, static_loss_scale=8.0)
    optimizer.backward(param.float().sum(), update_master_grads=update_first)
    optimizer.loss_scale = 32.0
    optimizer.update_master_grads()
    optimizer.step()
    train(optimizer, param.float().sum())
    assert records(optimizer) == [(1, 8.0, False, 0), (2, 32.0, False, 0)]


def test_an_overflow_set_by_hand_has_no_culprits() -> None:
    param = half(1.0)
    optimizer = wrap(param, static_loss_scale=8.0)
    optimizer.backward(param.float().sum())
    optimizer.overflow = True
    optimizer.step()
    (record,) = optimizer.history
    assert (record.overflow, record.norm, record.culprits) == (True, 1.0, [])


def test_without_the_check_an_overflow_is_a_step() -> None:
    param = half(1.0)
    optimizer = wrap(param, check_overflow=False)
    train(optimizer, param.float().sum() * INF)
    (record,) = optimizer.history
    assert (record.overflow, record.norm) == (False, INF)


def test_a_second_step_after_an_overflow_is_not_recorded() -> None:
    param = half(1.0)
    optimizer = wrap(param)
    train(optimizer, param.float().sum() * INF)
    optimizer.step()
    assert records(optimizer) == [(1, 1.0, True, 1)]


def test_steps_go_on_counting_after_a_resume() -> None:
    param = half(1.0)
    first = wrap(param)
    for factor in (1.0, INF, 1.0):
        train(first, param.float().sum() * factor)
    second = wrap(again := half(1.0))
    second.load_state_dict(first.state_dict())
    assert second.history == []
    train(second, again.float().sum() * INF)
    assert records(second) == [(4, 1.0, True, 1)]


@pytest.mark.parametrize("size", [0, 1, 3])
def test_the_history_has_a_bound(size: int) -> None:
    param = half(1.0)
    skipped = []
    optimizer = wrap(
        param, history_size=size, on_skip=lambda record: skipped.append(record.step)
    )
    for step in range(1, 8):
        train(optimizer, param.float().sum() * (INF if step % 3 == 0 else 0.0))
    assert [r.step for r in optimizer.history] == [5, 6, 7][3 - size :]
    assert skipped == [3, 6]


@pytest.mark.parametrize("size", [-1, 1.5, None, "3"])
def test_another_size_is_refused(size: Any) -> None:
    with pytest.raises(
        ValueError,
        match="^FP16_Optimizer: history_size must be an integer of at least 0, but got",
    ):
        wrap(half(1.0), history_size=size)


def test_a_list_that_was_read_stays() -> None:
    param = half(1.0)
    optimizer = wrap(param)
    train(optimizer, param.float().sum())
    read = optimizer.history
    train(optimizer, param.float().sum())
    assert len(read) == 1 and len(optimizer.history) == 2
    with pytest.raises(AttributeError):
        optimizer.history = []  # type: ignore[misc]


def test_steps_that_nothing_was_taken_for_are_counted_too() -> None:
    param = half(1.0)
    optimizer = wrap(param)
    optimizer.step()
    optimizer.step()
    train(optimizer, param.float().sum())
    assert optimizer.steps_applied == 3
    assert records(optimizer) == [(3, 1.0, False, 0)]


def test_a_step_that_raised_is_not_counted() -> None:
    param = half(1.0)
    optimizer = wrap(param)

    def fail(*args: Any) -> None:
        raise KeyError("of the hook")

    handle = optimizer.optimizer.register_step_pre_hook(fail)
    with pytest.raises(KeyError, match="of the hook"):
        train(optimizer, param.float().sum())
    handle.remove()
    train(optimizer, param.float().sum())
    assert optimizer.steps_applied == 1
    assert records(optimizer)[-1] == (1, 1.0, False, 0)


def test_a_closure_that_raised_is_no_step() -> None:
    param = half(1.0)
    optimizer = wrap(param)

    def fail() -> torch.Tensor:
        raise KeyError("of the closure")

    with pytest.raises(KeyError, match="of the closure"):
        optimizer.step(fail)
    optimizer.step(closure_of(optimizer, lambda: param.float().sum()))
    assert records(optimizer) == [(1, 1.0, False, 0)]


def test_an_overflow_that_was_resumed_has_its_scale() -> None:
    param = half(1.0)
    first = wrap(param, static_loss_scale=8.0)
    first.backward(param.float().sum() * INF)
    second = wrap(half(1.0), static_loss_scale=2.0)
    second.load_state_dict(first.state_dict())
    second.step()
    assert records(second) == [(1, 8.0, True, 1)]


def test_gradients_taken_by_the_original_methods_are_recorded_unscaled() -> None:
    param = half(1.0)
    optimizer = wrap(param, static_loss_scale=8.0)
    optimizer.backward(param.float().sum() * 4, update_master_grads=False)
    optimizer._check_overflow()
    optimizer._model_grads_to_master_grads()
    optimizer._downscale_master()
    optimizer.step()
    (record,) = optimizer.history
    assert (record.scale, record.norm) == (8.0, 4.0)


def test_a_load_ends_a_streak() -> None:
    param = half(1.0)
    optimizer = wrap(param)
    train(optimizer, param.float().sum())
    state = optimizer.state_dict()
    train(optimizer, param.float().sum() * INF)
    optimizer.load_state_dict(state)
    train(optimizer, param.float().sum() * INF)
    assert records(optimizer)[-1] == (2, 1.0, True, 1)


# Closures.


def test_each_evaluation_is_recorded() -> None:
    param = half(1.0, -2.0)
    inner = torch.optim.LBFGS([param], lr=0.5, max_iter=3)
    skipped = []
    optimizer = FP16_Optimizer(
        inner,
        dynamic_loss_scale=True,
        dynamic_loss_args={"init_scale": 16.0},
        verbose=False,
        on_skip=lambda record: skipped.append((record.step, record.scale)),
    )
    factors = iter([1.0, INF, INF, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    loss = closure_of(optimizer, lambda: (param.float() ** 2).sum() * next(factors))
    optimizer.step(loss)
    optimizer.step(loss)
    found = records(optimizer)
    assert found[:4] == [
        (1, 16.0, False, 0),
        (1, 16.0, True, 0),
        (1, 8.0, True, 0),
        (1, 4.0, False, 0),
    ]
    assert {record[0] for record in found[5:]} == {2}
    # What is repeated skips nothing.
    assert skipped == []
    assert not any(record.skipped for record in optimizer.history)


# Who is told.


def test_the_callback_is_told_of_each_skip_when_it_is_done() -> None:
    param, native = half(1.0), single(1.0)
    optimizer = wrap_dynamic(param, native)
    told: list[Any] = []

    def tell(record: Any) -> None:
        last = optimizer.history[-1]
        assert (last.step, last.overflow) == (record.step, True)
        told.append((record.step, record.scale, optimizer.loss_scale))
        assert optimizer.steps_skipped == len(told)
        assert [c.parameter for c in record.culprits] == [native]

    optimizer.on_skip = tell
    for factor in (1.0, INF, 1.0, NAN, INF):
        train(optimizer, param.float().sum() * 0.5 + native.sum() * factor)
    assert told == [(2, 16.0, 8.0), (4, 8.0, 4.0), (5, 4.0, 2.0)]
    optimizer.on_skip = None
    train(optimizer, native.sum() * INF)
    assert len(told) == 3


@pytest.mark.parametrize("scheduled", [False, True])
def test_an_error_of_the_callback_comes_out_and_training_goes_on(
    scheduled: bool, recwarn: pytest.WarningsRecorder
) -> None:
    param = half(1.0)
    optimizer = wrap_dynamic(param)
    if scheduled:
        schedule = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1)

    def fail(record: Any) -> None:
        raise KeyError("of the callback")

    optimizer.on_skip = fail
    with pytest.raises(KeyError, match="of the callback"):
        train(optimizer, param.float().sum() * INF)
    assert param.item() == masters(optimizer)[0].item() == 1.0
    assert (optimizer.loss_scale, optimizer.steps_skipped) == (8.0, 1)
    assert optimizer.overflow is True
    if scheduled:
        # The schedule does not warn that it came before a step.
        schedule.step()
        assert [str(w.message) for w in recwarn if "scheduler" in str(w.message)] == []
        schedule.optimizer.param_groups[0]["lr"] = 0.5
    optimizer.step()  # skipped, and told before
    train(optimizer, param.float().sum())
    assert records(optimizer) == [(1, 16.0, True, 1), (2, 8.0, False, 0)]
    assert param.item() == 0.5


def test_an_error_of_the_callback_in_a_closure_ends_the_step() -> None:
    param = half(1.0)
    optimizer = wrap(param)

    def fail(record: Any) -> None:
        assert record.skipped and record.skipped_in_a_row == 1
        raise KeyError("of the callback")

    optimizer.on_skip = fail
    factors = iter([INF, 1.0])
    closure = closure_of(optimizer, lambda: param.float().sum() * next(factors))
    with pytest.raises(KeyError, match="of the callback"):
        optimizer.step(closure)
    assert param.item() == masters(optimizer)[0].item() == 1.0
    assert optimizer.steps_skipped == 1
    optimizer.step(closure)
    assert param.item() == 0.5
    assert records(optimizer) == [(1, 1.0, True, 1), (2, 1.0, False, 0)]


@pytest.mark.parametrize("name", ["on_skip", "norm_filter"])
def test_callbacks_must_be_callable(name: str) -> None:
    with pytest.raises(
        TypeError,
        match=f"^FP16_Optimizer: {name} must be callable or None, but got 3$",
    ):
        wrap(half(1.0), **{name: 3})


# Memory.


def test_the_history_ends_with_the_optimizer() -> None:
    param = half(1.0)
    optimizer = wrap(param)
    for _ in range(5):
        train(optimizer, param.float().sum() * INF)
    kept = optimizer.history[0]
    watched = [weakref.ref(optimizer), weakref.ref(param)]
    gc.disable()
    try:
        del optimizer, param
        # The record that is left holds its culprit alone.
        assert watched[0]() is None
        assert watched[1]() is kept.culprits[0].parameter
        del kept
        assert watched[1]() is None
    finally:
        gc.enable()
