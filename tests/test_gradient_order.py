"""No order of backward, update, clip and step gives a wrong gradient."""

import re
from typing import Any

import pytest
import torch

from fp16core import FP16_Optimizer
from helpers import HALF_DTYPES, assert_same, copy_of, half, masters, single, train

SCALES = [1.0, 8.0, 1024.0]


class Setup:
    """A half and a native parameter under SGD, which moves them by -lr * grad."""

    def __init__(
        self, scale: float = 8.0, dtype: torch.dtype = torch.float16, **kwargs: Any
    ) -> None:
        self.half = half(0.0, dtype=dtype)
        self.native = single(0.0)
        self.optimizer = FP16_Optimizer(
            torch.optim.SGD([self.half, self.native], lr=1.0),
            static_loss_scale=scale,
            verbose=False,
            **kwargs,
        )

    def loss(self, gradient: float) -> torch.Tensor:
        return ((self.half.float() + self.native) * gradient).sum()

    def backward(self, gradient: float, update: bool = True) -> None:
        self.optimizer.backward(self.loss(gradient), update_master_grads=update)

    def gradients(self) -> list[float | None]:
        grads = [masters(self.optimizer)[0].grad, self.native.grad]
        return [None if grad is None else grad.item() for grad in grads]

    def weights(self) -> list[float]:
        return [self.half.item(), self.native.item()]


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
@pytest.mark.parametrize("scale", SCALES)
def test_naive_accumulation_adds_up(scale: float, dtype: torch.dtype) -> None:
    s = Setup(scale, dtype)
    for count in (1, 2, 3, 4):
        s.backward(1.0)
        assert s.gradients() == [count, count]


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
@pytest.mark.parametrize("scale", SCALES)
def test_delayed_accumulation_adds_up(scale: float, dtype: torch.dtype) -> None:
    s = Setup(scale, dtype)
    for _ in range(4):
        s.backward(1.0, update=False)
    s.optimizer.update_master_grads()
    assert s.gradients() == [4.0, 4.0]


def test_delayed_and_naive_accumulation_mix() -> None:
    s = Setup()
    s.backward(1.0)
    s.backward(2.0, update=False)
    s.backward(4.0, update=False)
    s.optimizer.update_master_grads()
    s.backward(8.0)
    assert s.gradients() == [15.0, 15.0]


def test_accumulation_goes_on_after_a_step_without_zero_grad() -> None:
    s = Setup()
    s.backward(1.0)
    s.optimizer.step()
    s.backward(2.0)
    assert s.gradients() == [3.0, 3.0]
    s.optimizer.step()
    assert s.weights() == [-4.0, -4.0]


def test_gradients_of_an_earlier_scale_are_brought_to_the_new_one() -> None:
    s = Setup(
        dynamic_loss_scale=True,
        dynamic_loss_args={"init_scale": 8.0, "scale_window": 1},
    )
    s.backward(1.0)
    s.optimizer.step()
    assert s.optimizer.loss_scale == 16.0
    s.backward(2.0)
    assert s.gradients() == [3.0, 3.0]


@pytest.mark.parametrize("scale", SCALES)
def test_updating_again_changes_nothing(scale: float) -> None:
    s = Setup(scale)
    s.backward(3.0)
    for _ in range(3):
        s.optimizer.update_master_grads()
        assert s.gradients() == [3.0, 3.0]


def test_odd_scales_stay_right_to_the_last_bits() -> None:
    s = Setup(3.0)
    for _ in range(4):
        s.backward(1.0)
        s.optimizer.update_master_grads()
    # Each of the updates may round twice.
    tolerance = 16 * torch.finfo(torch.float32).eps
    assert s.gradients() == pytest.approx([4.0, 4.0], rel=tolerance)


@pytest.mark.parametrize("scale", SCALES)
def test_an_update_undoes_a_clip(scale: float) -> None:
    s = Setup(scale)
    s.backward(4.0)
    s.optimizer.clip_master_grads(0.5)
    clipped = s.gradients()
    assert all(g is not None and 0 < g < 0.5 for g in clipped)
    s.optimizer.update_master_grads()
    # Undoing divides by the coefficient, which is no power of two.
    assert s.gradients() == pytest.approx([4.0, 4.0], rel=2**-22)


@pytest.mark.parametrize("scale", SCALES)
def test_accumulating_onto_clipped_gradients_undoes_the_clip(scale: float) -> None:
    s = Setup(scale)
    s.backward(4.0)
    s.optimizer.clip_master_grads(0.5)
    s.backward(1.0)
    # Undoing divides by the coefficient, which is no power of two.
    assert s.gradients() == pytest.approx([5.0, 5.0], rel=2**-22)


def test_accumulating_after_a_clip_to_zero_gives_no_nan() -> None:
    s = Setup()
    s.backward(4.0)
    s.optimizer.clip_master_grads(0.0)
    s.backward(1.0)
    assert s.optimizer.overflow is False
    # What was clipped to zero is lost where the gradient is the accumulator.
    assert s.gradients() == [5.0, 1.0]


def test_zero_grad_forgets_clip_and_scale() -> None:
    s = Setup()
    s.backward(4.0)
    s.optimizer.clip_master_grads(0.5)
    s.optimizer.zero_grad()
    s.optimizer.update_master_grads()
    assert s.gradients() == [0.0, 0.0]
    s.backward(1.0)
    assert s.gradients() == [1.0, 1.0]


# What users do to gradients themselves.


def test_edits_between_backward_and_update_count() -> None:
    s = Setup()
    s.backward(2.0, update=False)
    for param in (s.half, s.native):
        assert param.grad is not None
        param.grad.mul_(2)
    s.optimizer.update_master_grads()
    assert s.gradients() == [4.0, 4.0]


def test_edits_after_the_update_reach_the_step() -> None:
    s = Setup()
    s.backward(2.0)
    for param in (masters(s.optimizer)[0], s.native):
        assert param.grad is not None
        param.grad.mul_(2)
    s.optimizer.step()
    assert s.weights() == [-4.0, -4.0]


def test_edits_of_native_gradients_survive_the_next_update() -> None:
    s = Setup()
    s.backward(2.0)
    assert s.native.grad is not None
    s.native.grad.mul_(2)
    s.optimizer.update_master_grads()
    assert s.gradients() == [2.0, 4.0]
    s.backward(1.0)
    assert s.gradients() == [3.0, 5.0]


def test_replaced_gradients_are_scaled_accumulators() -> None:
    s = Setup()
    s.backward(2.0)
    s.half.grad = torch.tensor([8.0]).half()
    s.native.grad = torch.tensor([8.0])
    s.optimizer.update_master_grads()
    assert s.gradients() == [1.0, 1.0]


def test_accumulating_onto_a_copy_of_a_gradient_adds_up() -> None:
    s = Setup(8.0)
    s.backward(1.0)
    assert s.native.grad is not None
    s.native.grad = s.native.grad.clone()
    s.backward(1.0)
    assert s.gradients() == [2.0, 2.0]


def test_gradients_set_by_hand_are_enough() -> None:
    s = Setup(1.0)
    s.half.grad = torch.tensor([0.5]).half()
    s.native.grad = torch.tensor([0.25])
    s.optimizer.update_master_grads()
    s.optimizer.step()
    assert s.weights() == [-0.5, -0.25]


def test_none_stays_none_and_the_inner_optimizer_skips_it() -> None:
    used, unused = half(1.0), half(1.0)
    inner = torch.optim.SGD([used, unused], lr=0.5, momentum=0.5, weight_decay=0.5)
    optimizer = FP16_Optimizer(inner, verbose=False)
    train(optimizer, used.float().sum() + unused.float().sum())
    before = unused.item()
    optimizer.zero_grad(set_to_none=True)
    optimizer.backward(used.float().sum())
    assert masters(optimizer)[1].grad is None
    optimizer.step()
    assert unused.item() == before


def test_zeros_stay_zeros_and_the_inner_optimizer_sees_them() -> None:
    used, unused = half(1.0), half(1.0)
    inner = torch.optim.SGD([used, unused], lr=0.5, weight_decay=0.5)
    optimizer = FP16_Optimizer(inner, verbose=False)
    train(optimizer, used.float().sum() + unused.float().sum() * 0)
    assert_same(masters(optimizer)[1].grad, torch.zeros(1))
    assert unused.item() == 0.75


def test_a_gradient_dropped_by_hand_is_dropped_for_the_master() -> None:
    s = Setup()
    s.backward(1.0)
    s.half.grad = None
    s.optimizer.update_master_grads()
    assert s.gradients() == [None, 1.0]


def test_clip_sees_edits_of_gradients() -> None:
    s = Setup()
    s.backward(3.0)
    for param in (masters(s.optimizer)[0], s.native):
        assert param.grad is not None
        param.grad.mul_(2)
    assert s.optimizer.clip_master_grads(100.0, float("inf")).item() == 6.0
    assert s.gradients() == [6.0, 6.0]


def test_model_gradients_may_be_freed_before_the_step() -> None:
    s = Setup()
    s.backward(1.0)
    s.half.grad = None
    s.optimizer.step()
    assert s.weights() == [-1.0, -1.0]


@pytest.mark.parametrize("set_to_none", [False, True])
def test_clearing_gradients_through_the_model_is_as_good(set_to_none: bool) -> None:
    def run(clear: Any) -> Any:
        torch.manual_seed(1)
        model = torch.nn.ModuleList(
            [torch.nn.Linear(3, 4).half(), torch.nn.LayerNorm(4)]
        )
        optimizer = FP16_Optimizer(
            torch.optim.Adam(model.parameters(), lr=0.1),
            dynamic_loss_scale=True,
            dynamic_loss_args={"init_scale": 8.0, "scale_window": 2},
            verbose=False,
        )
        for iteration in range(7):
            clear(model, optimizer)
            hidden = model[0](torch.randn(2, 3).half()).float()
            factor = float("inf") if iteration == 3 else 1.0
            optimizer.backward(model[1](hidden).pow(2).sum() * factor)
            optimizer.step()
        assert optimizer.steps_skipped == 1
        return copy_of([dict(model.state_dict()), optimizer.state_dict()])

    assert_same(
        run(lambda model, optimizer: model.zero_grad(set_to_none=set_to_none)),
        run(lambda model, optimizer: optimizer.zero_grad()),
    )


# The latched scale.


def test_a_scale_set_between_backward_and_update_does_not_reach_back() -> None:
    s = Setup(8.0)
    s.backward(1.0, update=False)
    s.optimizer.loss_scale = 2.0
    s.backward(1.0, update=False)
    s.optimizer.update_master_grads()
    assert s.gradients() == [2.0, 2.0]
    assert s.optimizer.loss_scale == 2.0


def test_a_scale_set_by_hand_takes_effect_with_the_next_backward() -> None:
    s = Setup(8.0)
    s.backward(1.0)
    s.optimizer.loss_scale = 2.0
    s.optimizer.step()
    s.optimizer.zero_grad()
    s.backward(1.0)
    assert s.half.grad is not None
    assert s.half.grad.item() == 2.0
    assert s.gradients() == [1.0, 1.0]


def test_a_scale_set_between_naive_losses_keeps_both_right() -> None:
    s = Setup(8.0)
    s.backward(1.0)
    s.optimizer.loss_scale = 2.0
    s.backward(2.0)
    assert s.gradients() == [3.0, 3.0]
    assert s.half.grad is not None
    assert s.half.grad.item() == 6.0


def test_updating_again_after_the_scale_changed_uses_the_old_one() -> None:
    s = Setup(8.0)
    s.backward(1.0)
    s.optimizer.loss_scale = 2.0
    s.optimizer.update_master_grads()
    assert s.gradients() == [1.0, 1.0]


def test_zero_grad_after_scale_loss_keeps_the_scale_of_the_loss() -> None:
    s = Setup(8.0)
    scaled = s.optimizer.scale_loss(s.loss(1.0))
    s.optimizer.zero_grad()
    scaled.backward()
    s.optimizer.update_master_grads()
    assert s.gradients() == [1.0, 1.0]


def test_losses_scaled_early_add_up() -> None:
    s = Setup(8.0)
    for scaled in [s.optimizer.scale_loss(s.loss(1.0)) for _ in range(3)]:
        scaled.backward()
        s.optimizer.update_master_grads()
    assert s.gradients() == [3.0, 3.0]


def test_a_scaled_loss_run_twice_counts_twice() -> None:
    s = Setup(8.0)
    scaled = s.optimizer.scale_loss(s.loss(1.0))
    for count in (1, 2, 3):
        scaled.backward(retain_graph=True)
        s.optimizer.update_master_grads()
        assert s.gradients() == [count, count]


def test_a_scaled_loss_keeps_its_scale_through_zero_grad() -> None:
    s = Setup(8.0)
    scaled = s.optimizer.scale_loss(s.loss(1.0))
    s.optimizer.zero_grad()
    s.optimizer.loss_scale = 2.0
    scaled.backward()
    s.optimizer.update_master_grads()
    assert s.gradients() == [1.0, 1.0]


def test_gradients_set_by_hand_after_zero_grad_are_of_the_present_scale() -> None:
    s = Setup(8.0)
    s.backward(1.0)
    s.optimizer.step()
    s.optimizer.zero_grad(set_to_none=True)
    s.optimizer.loss_scale = 2.0
    s.half.grad = torch.tensor([2.0]).half()
    s.native.grad = torch.tensor([2.0])
    s.optimizer.update_master_grads()
    assert s.gradients() == [1.0, 1.0]


# The forgotten update.

FORGOTTEN = (
    "FP16_Optimizer.step: gradients must be taken before the step by "
    "update_master_grads() or by backward(loss), which calls it unless told not to "
    "(neither backward(loss, update_master_grads=False) nor loss.backward() does), "
    "but got a gradient that waits at group 0, index "
)


def test_a_forgotten_update_is_an_error_and_changes_nothing() -> None:
    s = Setup(dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 8.0})
    s.backward(1.0, update=False)
    with pytest.raises(
        RuntimeError,
        match="^" + re.escape(FORGOTTEN + "0: shape [1], float16, cpu") + "$",
    ):
        s.optimizer.step()
    assert s.weights() == [0.0, 0.0]
    assert s.optimizer.loss_scaler.cur_iter == 0
    assert (s.optimizer.steps_applied, s.optimizer.steps_skipped) == (0, 0)
    s.optimizer.update_master_grads()
    s.optimizer.step()
    assert s.weights() == [-1.0, -1.0]


def test_a_plain_backward_is_an_error_too() -> None:
    s = Setup()
    s.loss(1.0).backward()
    with pytest.raises(RuntimeError, match=re.escape(FORGOTTEN)):
        s.optimizer.step()


def test_a_backward_on_top_of_taken_gradients_is_noticed() -> None:
    s = Setup()
    s.backward(1.0)
    s.backward(1.0, update=False)
    with pytest.raises(RuntimeError, match=re.escape(FORGOTTEN)):
        s.optimizer.step()


def test_native_gradients_alone_need_an_update_after_our_backward() -> None:
    native = single(1.0)
    optimizer = FP16_Optimizer(
        torch.optim.SGD([native], lr=0.5), static_loss_scale=8.0, verbose=False
    )
    optimizer.backward(native.sum(), update_master_grads=False)
    with pytest.raises(RuntimeError, match=re.escape(FORGOTTEN)):
        optimizer.step()
    optimizer.zero_grad()
    # Unscaled gradients of a plain backward are as good as torch's.
    native.sum().backward()
    optimizer.step()
    assert native.item() == 0.5


def test_a_closure_that_forgets_the_update_is_an_error() -> None:
    s = Setup()

    def closure() -> torch.Tensor:
        s.optimizer.zero_grad()
        loss = s.loss(1.0)
        s.optimizer.backward(loss, update_master_grads=False)
        return loss

    with pytest.raises(RuntimeError, match=re.escape(FORGOTTEN)):
        s.optimizer.step(closure)
    assert s.weights() == [0.0, 0.0]


def test_waiting_zeros_and_cleared_gradients_are_no_error() -> None:
    s = Setup()
    s.backward(0.0, update=False)
    s.optimizer.step()
    s.backward(1.0, update=False)
    s.optimizer.zero_grad()
    s.optimizer.step()
    assert s.weights() == [0.0, 0.0]


def test_a_clip_that_gives_nan_leaves_no_trap() -> None:
    # Without the overflow check NaN reaches the gradients; going on must not hang.
    native = single(1.0)
    optimizer = FP16_Optimizer(
        torch.optim.SGD([native], lr=1.0),
        static_loss_scale=8.0,
        verbose=False,
        check_overflow=False,
    )
    optimizer.backward((native * float("nan")).sum())
    optimizer.clip_master_grads(1.0)
    optimizer.backward(native.sum())
    assert native.grad is not None and native.grad.isnan().all()
    optimizer.zero_grad()
    optimizer.backward(native.sum())
    assert native.grad.item() == 1.0
