"""Weights that others write to the model are noticed and lose no bit."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fp16core import FP16_Optimizer
from helpers import HALF_DTYPES, assert_same, half, masters, train

EPS = 2.0**-20


def tiny_step(*params: torch.Tensor, **kwargs: Any) -> FP16_Optimizer:
    """Wrap SGD so slow that a step shows in the master only, and take a step."""
    optimizer = FP16_Optimizer(
        torch.optim.SGD(list(params), lr=EPS), verbose=False, **kwargs
    )
    train(optimizer, sum_of(*params))
    return optimizer


def sum_of(*params: torch.Tensor) -> torch.Tensor:
    return torch.stack([p.float().sum() for p in params]).sum()


def copy_under_no_grad(param: torch.Tensor, values: torch.Tensor) -> None:
    with torch.no_grad():
        param.copy_(values)


def load_into_module(param: torch.Tensor, values: torch.Tensor) -> None:
    module = torch.nn.Module()
    module.weight = param
    module.load_state_dict({"weight": values})


def assign_item(param: torch.Tensor, values: torch.Tensor) -> None:
    with torch.no_grad():
        for index, value in enumerate(values):
            param[index] = value


def point_elsewhere(param: torch.Tensor, values: torch.Tensor) -> None:
    param.data = values.clone()


def through_detach(param: torch.Tensor, values: torch.Tensor) -> None:
    param.detach().copy_(values)


def through_an_initializer(param: torch.Tensor, values: torch.Tensor) -> None:
    torch.nn.init.constant_(param, 0.0)
    torch.nn.utils.vector_to_parameters(values, [param])


VISIBLE = [
    copy_under_no_grad,
    load_into_module,
    assign_item,
    point_elsewhere,
    through_detach,
    through_an_initializer,
]


def through_data(param: torch.Tensor, values: torch.Tensor) -> None:
    param.data.copy_(values)


def through_numpy(param: torch.Tensor, values: torch.Tensor) -> None:
    param.detach().numpy()[:] = values.numpy()


def through_dlpack(param: torch.Tensor, values: torch.Tensor) -> None:
    np.from_dlpack(param.detach())  # an exporter that others may write through
    torch.from_dlpack(param.detach()).data.copy_(values)


INVISIBLE = [through_data, through_numpy, through_dlpack]

Write = Callable[[torch.Tensor, torch.Tensor], None]


@pytest.mark.parametrize("write", VISIBLE, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
@pytest.mark.parametrize("track", ["version", "values"])
def test_only_elements_that_differ_are_taken_over(
    write: Write, dtype: torch.dtype, track: str
) -> None:
    param = half(1.0, 2.0, 4.0, dtype=dtype)
    optimizer = tiny_step(param, track_model_writes=track)
    write(param, torch.tensor([1.0, 8.0, 4.0], dtype=dtype))
    train(optimizer, sum_of(param))
    want = torch.tensor([1.0 - EPS, 8.0, 4.0 - EPS]) - EPS
    assert_same(masters(optimizer)[0].detach(), want)
    assert_same(param.detach(), want.to(dtype))


@pytest.mark.parametrize("write", INVISIBLE, ids=lambda f: f.__name__)
def test_writes_that_no_counter_sees_are_seen_by_value(write: Write) -> None:
    param = half(1.0, 2.0, 4.0)
    optimizer = tiny_step(param, track_model_writes="values")
    write(param, torch.tensor([1.0, 8.0, 4.0]).half())
    train(optimizer, sum_of(param))
    want = torch.tensor([1.0 - EPS, 8.0, 4.0 - EPS]) - EPS
    assert_same(masters(optimizer)[0].detach(), want)


@pytest.mark.parametrize("write", INVISIBLE, ids=lambda f: f.__name__)
def test_writes_that_no_counter_sees_can_be_told(write: Write) -> None:
    param = half(1.0, 2.0, 4.0)
    optimizer = tiny_step(param)
    write(param, torch.tensor([1.0, 8.0, 4.0]).half())
    optimizer._model_params_to_master_params()
    assert_same(masters(optimizer)[0].detach(), torch.tensor([1.0, 8.0, 4.0]))


def test_overwriting_all_masters_drops_their_extra_bits() -> None:
    param = half(1.0)
    optimizer = tiny_step(param)
    [master] = masters(optimizer)
    assert master.item() == 1.0 - EPS
    optimizer._model_params_to_master_params()
    assert master.item() == 1.0


def test_a_write_is_in_the_masters_that_are_read_and_saved() -> None:
    param = half(1.0, 2.0)
    optimizer = tiny_step(param)
    copy_under_no_grad(param, torch.tensor([1.0, 8.0]).half())
    want = torch.tensor([1.0 - EPS, 8.0])
    assert_same(optimizer.state_dict()["fp32_from_fp16"][0][0].detach(), want)
    copy_under_no_grad(param, torch.tensor([4.0, 8.0]).half())
    want = torch.tensor([4.0, 8.0])
    assert_same(optimizer.fp32_from_fp16_groups[0][0].detach(), want)


def test_loading_equal_weights_loses_no_bit() -> None:
    model = torch.nn.Linear(7, 5).half()
    optimizer = tiny_step(*model.parameters())
    before = [m.detach().clone() for m in masters(optimizer)]
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})
    optimizer.step()  # the same gradients once more
    for master, old in zip(masters(optimizer), before, strict=True):
        assert_same(master.detach(), old - EPS)


def test_weights_loaded_after_wrapping_are_trained() -> None:
    model = torch.nn.Linear(1, 1, bias=False).half()
    optimizer = FP16_Optimizer(
        torch.optim.SGD(model.parameters(), lr=0.5), verbose=False
    )
    model.load_state_dict({"weight": torch.tensor([[0.125]]).half()})
    train(optimizer, model.weight.float().sum())
    assert model.weight.item() == -0.375


def test_averaged_weights_swapped_in_and_out_cost_no_bit() -> None:
    param, twin = half(*torch.randn(50).tolist()), half(*[0.0] * 50)
    twin.data.copy_(param.data)
    with_swap, without = tiny_step(param), tiny_step(twin)
    kept = param.detach().clone()
    copy_under_no_grad(param, kept / 2)  # evaluate with other weights
    copy_under_no_grad(param, kept)
    train(with_swap, sum_of(param))
    train(without, sum_of(twin))
    assert_same(masters(with_swap)[0].detach(), masters(without)[0].detach())


def test_an_embedding_with_max_norm_changes_its_own_rows_only() -> None:
    embedding = torch.nn.Embedding(3, 2, max_norm=1.0).half()
    embedding.weight.data = torch.tensor([[0.5, 0.5], [3.0, 4.0], [0.25, 0.5]]).half()
    optimizer = tiny_step(embedding.weight)
    [master] = masters(optimizer)
    before = master.detach().clone()
    optimizer.zero_grad()
    output = embedding(torch.tensor([0, 1]))
    shrunk = embedding.weight.detach()[1].float()
    assert shrunk.norm() < 1.01
    optimizer.backward(output.float().sum())
    optimizer.step()
    # Row 1 was rescaled by the forward pass; rows 0 and 2 keep every bit.
    assert_same(master.detach()[0], before[0] - EPS)
    assert_same(master.detach()[1], shrunk - EPS)
    assert_same(master.detach()[2], before[2])


def test_a_write_in_a_skipped_step_is_taken_over_by_the_next() -> None:
    param = half(1.0, 2.0)
    optimizer = tiny_step(param)
    copy_under_no_grad(param, torch.tensor([1.0, 8.0]).half())
    train(optimizer, sum_of(param) * float("inf"))
    assert_same(param.detach(), torch.tensor([1.0, 8.0]).half())
    train(optimizer, sum_of(param))
    want = torch.tensor([1.0 - 2 * EPS, 8.0 - EPS])
    assert_same(masters(optimizer)[0].detach(), want)


def test_a_write_before_a_closure_step_is_taken_over() -> None:
    param = half(1.0, 2.0)
    optimizer = tiny_step(param)
    copy_under_no_grad(param, torch.tensor([1.0, 8.0]).half())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = sum_of(param)
        optimizer.backward(loss)
        return loss

    assert optimizer.step(closure).item() == 9.0
    want = torch.tensor([1.0 - 2 * EPS, 8.0 - EPS])
    assert_same(masters(optimizer)[0].detach(), want)


class Shrinking(torch.optim.SGD):
    """Has a method that moves the weights."""

    @torch.no_grad()
    def shrink(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.mul_(0.5)


def test_a_write_before_a_method_that_moves_the_masters_is_moved_too() -> None:
    param = half(1.0, 2.0)
    optimizer = FP16_Optimizer(Shrinking([param], lr=EPS), verbose=False)
    train(optimizer, sum_of(param))
    copy_under_no_grad(param, torch.tensor([1.0, 8.0]).half())
    optimizer.shrink()
    want = torch.tensor([1.0 - EPS, 8.0]) / 2
    assert_same(masters(optimizer)[0].detach(), want)
    assert_same(param.detach(), torch.tensor([0.5, 4.0]).half())


def test_two_optimizers_over_one_parameter_see_each_other() -> None:
    param = half(1.0, 2.0)
    slow = tiny_step(param)
    fast = FP16_Optimizer(torch.optim.SGD([param], lr=0.5), verbose=False)
    train(fast, param[:1].float().sum())
    train(slow, sum_of(param))
    # The second element kept its bits, the first was moved by the other one.
    want = torch.tensor([0.5 - EPS, 2.0 - 2 * EPS])
    assert_same(masters(slow)[0].detach(), want)


def test_nan_and_inf_are_taken_over_like_other_values() -> None:
    param = half(1.0, 2.0, 4.0)
    optimizer = tiny_step(param)
    copy_under_no_grad(param, torch.tensor([float("nan"), -float("inf"), 4.0]).half())
    optimizer.zero_grad(set_to_none=True)
    optimizer.step()
    [master] = masters(optimizer)
    assert master[0].isnan()
    assert_same(master.detach()[1:], torch.tensor([-float("inf"), 4.0 - EPS]))


def test_our_own_writes_are_seen_by_others() -> None:
    param = half(1.0)
    version = param._version
    tiny_step(param)
    assert param._version > version


def test_a_write_inside_a_closure_reaches_the_master() -> None:
    weight = half(4.0, 0.25)
    optimizer = FP16_Optimizer(torch.optim.SGD([weight], lr=0.5), verbose=False)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        with torch.no_grad():
            weight.clamp_(max=1.0)
        loss = weight.float().sum()
        optimizer.backward(loss)
        return loss

    optimizer.step(closure)
    assert weight.tolist() == [0.5, -0.25]
    assert masters(optimizer)[0].tolist() == [0.5, -0.25]
