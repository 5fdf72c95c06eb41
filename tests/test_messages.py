"""What is printed, what is logged, and what happens at the floor of the scale."""

import logging
import re
from typing import Any

import pytest
import torch

from fp16core import FP16_Optimizer, LossScaleError
from helpers import HALF_DTYPES, INF, NAN, half, masters, single, train

Log = pytest.LogCaptureFixture


def make(
    param: torch.Tensor,
    on_min_scale: str = "warn",
    max_consecutive_skips: int | None = None,
    **scaler: Any,
) -> Any:
    return FP16_Optimizer(
        torch.optim.SGD([param], lr=0.5),
        dynamic_loss_scale=True,
        dynamic_loss_args=scaler,
        verbose=False,
        on_min_scale=on_min_scale,
        max_consecutive_skips=max_consecutive_skips,
    )


def overflow(optimizer: FP16_Optimizer, factor: float = INF) -> None:
    """Run an iteration that overflows."""
    train(optimizer, (optimizer.fp16_groups[0][0].float() * factor).sum())


def clean(optimizer: FP16_Optimizer) -> None:
    """Run an iteration that does not overflow."""
    train(optimizer, optimizer.fp16_groups[0][0].float().sum() * 2**-8)


@pytest.fixture(autouse=True)
def all_levels(caplog: Log) -> None:
    caplog.set_level(logging.DEBUG, "fp16core")


def test_verbose_prints_what_is_ingested(capsys: pytest.CaptureFixture[str]) -> None:
    frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    weight = torch.nn.Parameter(torch.ones(2000, 2).half())
    groups = [
        {"params": [weight, single(1.0), frozen]},
        {"params": [half(1.0, dtype=torch.bfloat16)]},
    ]
    FP16_Optimizer(torch.optim.SGD(groups, lr=0.1))
    assert capsys.readouterr().out.splitlines() == [
        "FP16_Optimizer: group 0: 1 half parameters "
        "(4,000 elements, 16,000 bytes of masters), 1 native, 1 frozen",
        "  0: [2000, 2] float16, master float32",
        "  1: [1] float32, native",
        "  2: [3] float32, frozen",
        "FP16_Optimizer: group 1: 1 half parameters "
        "(1 elements, 4 bytes of masters), 0 native, 0 frozen",
        "  0: [1] bfloat16, master float32",
    ]


def test_without_verbose_nothing_is_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    optimizer = make(half(1.0), init_scale=4.0)
    overflow(optimizer)
    clean(optimizer)
    assert capsys.readouterr().out == ""


def test_a_lowered_scale_is_a_warning(caplog: Log) -> None:
    overflow(make(half(1.0), init_scale=16.0))
    assert caplog.record_tuples == [
        (
            "fp16core",
            logging.WARNING,
            "FP16_Optimizer.step: gradient overflow, the step is skipped, "
            "loss scale 16 -> 8",
        )
    ]


def test_a_grown_scale_is_a_warning_too(caplog: Log) -> None:
    clean(make(half(1.0), init_scale=16.0, scale_window=1))
    assert caplog.record_tuples == [
        (
            "fp16core",
            logging.WARNING,
            "FP16_Optimizer.step: loss scale grows, 16 -> 32",
        )
    ]


def test_tolerated_overflows_are_said_to_be_tolerated(caplog: Log) -> None:
    optimizer = make(half(1.0), init_scale=64.0, delayed_shift=3)
    for _ in range(3):
        overflow(optimizer)
    prefix = "FP16_Optimizer.step: gradient overflow, the step is skipped, "
    assert caplog.messages == [
        prefix + "tolerated: loss scale stays at 64, and so it will for 1 more",
        prefix + "tolerated: loss scale stays at 64, and so it will for 0 more",
        prefix + "loss scale 64 -> 32",
    ]


def test_ordinary_logging_configuration_silences_the_messages(caplog: Log) -> None:
    caplog.set_level(logging.ERROR, "fp16core")
    overflow(make(half(1.0), init_scale=16.0))
    assert caplog.records == []


def test_a_closure_says_that_it_is_evaluated_again(caplog: Log) -> None:
    param = half(1.0)
    optimizer = make(param, init_scale=16.0)
    optimizer.backward((param.float() * INF).sum())
    factors = [INF, 1.0]

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (param.float() * factors.pop(0)).sum()
        optimizer.backward(loss)
        return loss

    optimizer.step(closure)
    prefix = "FP16_Optimizer.step: gradient overflow, "
    assert caplog.messages == [
        prefix + "its gradients are dropped, loss scale 16 -> 8",
        prefix + "the closure is evaluated again, loss scale 8 -> 4",
    ]


# The floor.

AT_FLOOR = (
    r"FP16_Optimizer\.step: gradient overflow with the loss scale at its floor {}, "
    r"the step is skipped; first at group 0, index 0: shape \[1\], float16, cpu, "
    r"with {} inf and {} NaN"
)


def at_floor(messages: list[str]) -> list[str]:
    return [text for text in messages if "at its floor" in text]


def test_a_skip_at_the_floor_warns_once_a_streak(caplog: Log) -> None:
    optimizer = make(half(1.0), init_scale=1.0)
    for _ in range(3):
        overflow(optimizer)
    clean(optimizer)
    for _ in range(3):
        overflow(optimizer, NAN)
    first, second = caplog.messages
    assert re.fullmatch(AT_FLOOR.format(1, 1, 0), first)
    assert re.fullmatch(AT_FLOOR.format(1, 0, 1), second)
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


def test_a_static_scale_is_always_at_its_floor(caplog: Log) -> None:
    param = half(1.0)
    optimizer = FP16_Optimizer(
        torch.optim.SGD([param], lr=0.5), static_loss_scale=16.0, verbose=False
    )
    overflow(optimizer)
    [message] = caplog.messages
    assert re.fullmatch(AT_FLOOR.format(16, 1, 0), message)


def test_continue_says_nothing_at_the_floor(caplog: Log) -> None:
    optimizer = make(half(1.0), on_min_scale="continue", init_scale=1.0)
    for _ in range(3):
        overflow(optimizer)
    assert caplog.messages == []
    assert optimizer.steps_skipped == 3


def test_raise_raises_at_the_floor_with_the_step_skipped() -> None:
    param = half(1.0)
    optimizer = make(param, on_min_scale="raise", init_scale=1.0)
    for skipped in (1, 2):
        with pytest.raises(LossScaleError, match=f"^{AT_FLOOR.format(1, 1, 0)}$"):
            overflow(optimizer)
        assert optimizer.steps_skipped == skipped
        assert optimizer.overflow is True
    assert param.item() == 1.0
    clean(optimizer)
    assert param.item() < 1.0


def test_a_scale_that_just_reached_its_floor_has_not_failed_there_yet(
    caplog: Log,
) -> None:
    optimizer = make(half(1.0), on_min_scale="raise", init_scale=4.0)
    overflow(optimizer)
    overflow(optimizer)
    assert optimizer.loss_scale == 1.0
    with pytest.raises(LossScaleError, match="at its floor 1"):
        overflow(optimizer)


def test_raise_in_a_closure_raises_for_the_first_evaluation_too() -> None:
    param = half(1.0)
    optimizer = make(param, on_min_scale="raise", init_scale=2.0)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (param.float() * INF).sum()
        optimizer.backward(loss)
        return loss

    with pytest.raises(LossScaleError, match=f"^{AT_FLOOR.format(1, 1, 0)}$"):
        optimizer.step(closure)
    assert optimizer.steps_skipped == 1
    assert param.item() == 1.0


# Skips in a row.

IN_A_ROW = (
    r"FP16_Optimizer.step: skipped steps in a row must be fewer than "
    r"max_consecutive_skips={0}, but got {1}; first at "
    r"group 0, index 0: shape \[1\], {2}, cpu, with 1 inf and 0 NaN"
)


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=lambda t: str(t)[6:])
def test_so_many_skips_in_a_row_are_an_error(dtype: torch.dtype, dynamic: bool) -> None:
    param = half(1.0, dtype=dtype)
    optimizer = FP16_Optimizer(
        torch.optim.SGD([param], lr=2.0**-3),
        dynamic_loss_scale=dynamic,
        dynamic_loss_args={"init_scale": 4.0},
        max_consecutive_skips=3,
        verbose=False,
    )
    for _ in range(2):
        overflow(optimizer)
        overflow(optimizer)
        clean(optimizer)
    weight = masters(optimizer)[0].item()
    overflow(optimizer)
    overflow(optimizer)
    for skips in (3, 4):
        message = IN_A_ROW.format(3, skips, str(dtype)[6:])
        with pytest.raises(LossScaleError, match=f"^{message}$"):
            overflow(optimizer)
        assert (optimizer.overflow, optimizer.steps_skipped) == (True, 4 + skips)
    assert masters(optimizer)[0].item() == weight == 1.0 - 2.0**-10
    clean(optimizer)
    assert masters(optimizer)[0].item() == 1.0 - 2.0**-10 - 2.0**-11
    optimizer.max_consecutive_skips = None
    for _ in range(4):
        overflow(optimizer)


def test_a_second_step_after_a_skip_is_no_second_skip() -> None:
    optimizer = make(half(1.0), max_consecutive_skips=2)
    overflow(optimizer)
    optimizer.step()
    optimizer.step()
    with pytest.raises(
        LossScaleError, match="fewer than max_consecutive_skips=2, but got 2"
    ):
        overflow(optimizer)


def test_evaluations_that_are_repeated_are_no_skips() -> None:
    param = half(1.0)
    factors = [INF] * 5 + [1.0] + [INF] * 40
    optimizer = make(param, max_consecutive_skips=1, init_scale=2.0**8)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = param.float().sum() * factors.pop(0)
        optimizer.backward(loss)
        return loss

    optimizer.step(closure)
    assert (optimizer.steps_applied, optimizer.loss_scale) == (1, 8.0)
    with pytest.raises(LossScaleError, match="fewer than max_consecutive_skips=1"):
        optimizer.step(closure)
    assert optimizer.steps_skipped == 1
    assert param.item() == 0.5
    assert optimizer.first_closure_call_this_step


# Saturation.


def test_a_master_beyond_the_half_range_is_told_once_a_parameter(caplog: Log) -> None:
    first, second = half(60000.0), half(1.0)
    optimizer = FP16_Optimizer(torch.optim.SGD([first, second], lr=1.0), verbose=False)
    for _ in range(3):
        train(optimizer, (first.float() * -8000 + second.float()).sum())
    assert first.item() == INF
    assert masters(optimizer)[0].item() == 84000.0
    assert caplog.record_tuples == [
        (
            "fp16core",
            logging.WARNING,
            "FP16_Optimizer.step: a master weight is beyond the range of the model's "
            "dtype and was stored as inf, in group 0, index 0: shape [1], float16, cpu",
        )
    ]


def test_a_saturated_weight_comes_back_with_its_master() -> None:
    param = half(60000.0)
    optimizer = FP16_Optimizer(torch.optim.SGD([param], lr=1.0), verbose=False)
    train(optimizer, (param.float() * -8000).sum())
    assert param.item() == INF
    optimizer.zero_grad()
    optimizer.backward((param.float().clamp(max=1e4) * 0).sum() + 0 * param.sum())
    masters(optimizer)[0].grad = torch.tensor([8000.0])
    optimizer.overflow = False
    optimizer.step()
    assert param.item() == 60000.0
