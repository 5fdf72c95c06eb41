"""Embeddings with sparse COO gradients, through whole iterations.

The values are small multiples of powers of two, so all sums are exact in float16,
bfloat16 and float32 and equal those of dense gradients, which are the oracle.
"""

from typing import Any

import pytest
import torch
from torch.nn import functional

from fp16core import FP16_Optimizer
from helpers import HALF_DTYPES, INF, NAN, assert_same, copy_of, half, masters, train

ROWS = 6
LISTS = ([4, 0, 4, 4], [1, 4], [0, 0, 5, 1])

each_dtype = pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
# torch 2.13 does not add sparse tensors of float16 on the CPU.
each_dtype_that_accumulates = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float32], ids=str
)


class Table:
    """An embedding, its optimizer, and a native parameter beside it."""

    def __init__(
        self, dtype: torch.dtype, sparse: bool, inner: Any = None, **kwargs: Any
    ) -> None:
        values = torch.arange(ROWS * 2.0).view(ROWS, 2) / 8
        self.weight = torch.nn.Parameter(values.to(dtype))
        self.native = torch.nn.Parameter(torch.ones(2))
        self.sparse = sparse
        inner = inner or (lambda params: torch.optim.SGD(params, lr=0.25))
        self.optimizer = FP16_Optimizer(
            inner([self.weight, self.native]), verbose=False, **kwargs
        )

    def loss(self, rows: list[int], factor: float = 1.0) -> torch.Tensor:
        looked_up = functional.embedding(
            torch.tensor(rows), self.weight, sparse=self.sparse
        )
        # Every row that is looked up has a gradient of its own.
        weights = torch.arange(1.0, len(rows) + 1).view(-1, 1) / 4
        loss: torch.Tensor = (looked_up.float() * weights * factor).sum()
        return loss + self.native.sum() / 2

    def gradient(self) -> torch.Tensor:
        """Return the master gradient, dense."""
        groups = self.optimizer.inspect_master_grad_data()
        assert groups is not None and groups[0][0] is not None
        grad = groups[0][0]
        assert grad.is_sparse is self.sparse and grad.dtype == torch.float32
        return grad.to_dense() if grad.is_sparse else grad

    def everything(self) -> Any:
        return copy_of(
            [
                self.weight.detach(),
                self.native.detach(),
                [m.detach() for m in masters(self.optimizer)],
                self.optimizer.loss_scale,
                self.optimizer.steps_skipped,
            ]
        )


def pair(dtype: torch.dtype, inner: Any = None, **kwargs: Any) -> list[Table]:
    """Return a table with sparse gradients and its dense twin."""
    return [Table(dtype, sparse, inner, **kwargs) for sparse in (True, False)]


@each_dtype_that_accumulates
@pytest.mark.parametrize("drop", [True, False], ids=["drop", "zero"])
@pytest.mark.parametrize("taken", [True, False], ids=["naive", "delayed"])
def test_accumulated_gradients_are_those_of_dense_ones(
    dtype: torch.dtype, taken: bool, drop: bool
) -> None:
    tables = pair(dtype, static_loss_scale=8.0)
    for _ in range(2):
        for table in tables:
            table.optimizer.zero_grad(drop)
            for rows in LISTS:
                table.optimizer.backward(table.loss(rows), taken)
            table.optimizer.update_master_grads()
            table.optimizer.update_master_grads()  # harmless
        assert_same(tables[0].gradient(), tables[1].gradient())
        for table in tables:
            table.optimizer.step()
        assert_same(tables[0].everything(), tables[1].everything())


@each_dtype_that_accumulates
@pytest.mark.parametrize("norm_type", [1.0, 2.0, INF])
def test_clipping_counts_rows_that_come_twice_once(
    dtype: torch.dtype, norm_type: float
) -> None:
    tables = pair(dtype, static_loss_scale=8.0)
    norms = []
    for table in tables:
        for rows in LISTS[:2]:
            table.optimizer.backward(table.loss(rows), False)
        table.optimizer.update_master_grads()
        norms.append(table.optimizer.clip_master_grads(0.5, norm_type))
        # Asking again is harmless, and the norm is then the bound.
        again = table.optimizer.clip_master_grads(1.0, norm_type)
        torch.testing.assert_close(again, torch.tensor(0.5), rtol=1e-5, atol=0)
    # The chunks of the sums are others, so the last bits may be.
    torch.testing.assert_close(norms[0], norms[1], rtol=2**-22, atol=0)
    torch.testing.assert_close(
        tables[0].gradient(), tables[1].gradient(), rtol=2**-21, atol=0
    )


@each_dtype_that_accumulates
@pytest.mark.parametrize("bad", [INF, NAN])
@pytest.mark.parametrize("bad_at", range(len(LISTS)))
def test_an_overflow_in_any_of_the_accumulated_skips(
    dtype: torch.dtype, bad_at: int, bad: float
) -> None:
    table = Table(
        dtype,
        sparse=True,
        dynamic_loss_scale=True,
        dynamic_loss_args={"init_scale": 4.0},
    )
    optimizer = table.optimizer
    before = table.everything()
    for number, rows in enumerate(LISTS):
        optimizer.backward(table.loss(rows, bad if number == bad_at else 1.0))
    assert optimizer.clip_master_grads(1.0) == -1.0
    [culprit] = optimizer.gradient_report().culprits()
    assert (culprit.group, culprit.index) == (0, 0)
    assert culprit.inf_count + culprit.nan_count > 0
    optimizer.step()
    assert_same(table.everything(), [*before[:3], 2.0, 1])
    train(optimizer, table.loss(LISTS[0]))
    assert optimizer.steps_applied == 1


def test_accumulation_that_torch_refuses_leaves_the_optimizer_usable() -> None:
    tables = pair(torch.float16, static_loss_scale=4.0)
    optimizer = tables[0].optimizer
    optimizer.backward(tables[0].loss(LISTS[0]))
    try:
        optimizer.backward(tables[0].loss(LISTS[1]))
    except NotImplementedError as error:
        assert "sparse" in str(error)
    optimizer.zero_grad(set_to_none=True)
    # What is wanted of it goes in one look-up.
    for table in tables:
        train(table.optimizer, table.loss(LISTS[0] + LISTS[1]))
    assert_same(tables[0].everything(), tables[1].everything())


@each_dtype
def test_rows_that_nobody_looked_up_keep_every_bit(dtype: torch.dtype) -> None:
    table = Table(dtype, sparse=True)
    train(table.optimizer, table.loss(LISTS[0]))
    before = masters(table.optimizer)[0].detach().clone()
    train(table.optimizer, table.loss([3]))
    changed = (masters(table.optimizer)[0] != before).any(1)
    assert changed.nonzero().view(-1).tolist() == [3]


@each_dtype
def test_a_gradient_may_turn_dense_and_sparse_again(dtype: torch.dtype) -> None:
    tables = pair(dtype, static_loss_scale=4.0)
    for table in tables:
        optimizer = table.optimizer
        train(optimizer, table.loss(LISTS[0]))
        # A weight that is tied to a dense layer.
        tied = table.loss(LISTS[1]) + table.weight.float().sum()
        train(optimizer, tied)
        assert table.weight.grad is not None and not table.weight.grad.is_sparse
        optimizer.zero_grad(set_to_none=True)
        optimizer.backward(table.loss(LISTS[2]))
        assert table.weight.grad.is_sparse is table.sparse
        optimizer.step()
    assert_same(tables[0].everything(), tables[1].everything())


@each_dtype
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_embedding_bags(dtype: torch.dtype, mode: str) -> None:
    def run(sparse: bool) -> Any:
        bag = torch.nn.EmbeddingBag(5, 3, sparse=sparse, mode=mode, dtype=dtype)
        with torch.no_grad():
            bag.weight.copy_(torch.arange(15).view(5, 3) / 8)
        inner = torch.optim.SGD(bag.parameters(), lr=0.25)
        optimizer = FP16_Optimizer(inner, static_loss_scale=8.0, verbose=False)
        for rows in ([[1, 1, 3, 0], [0, 1, 2, 1]], [[4, 4, 4, 4], [0, 0, 1, 1]]):
            train(optimizer, bag(torch.tensor(rows)).float().sum())
            assert bag.weight.grad is not None
            assert bag.weight.grad.is_sparse is sparse
        return copy_of([bag.weight.detach(), masters(optimizer)])

    assert_same(run(sparse=True), run(sparse=False))


@each_dtype
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize(
    "make",
    [
        lambda params: torch.optim.SGD(params, lr=0.25, momentum=0.5),
        lambda params: torch.optim.Adagrad(params, lr=0.25),
    ],
    ids=["SGD", "Adagrad"],
)
def test_optimizers_that_take_both_kinds(dtype: torch.dtype, make: Any) -> None:
    tables = pair(dtype, make, static_loss_scale=4.0)
    for rows in LISTS:
        for table in tables:
            train(table.optimizer, table.loss(rows))
    # torch's sparse formulas round elsewhere than the dense ones.
    torch.testing.assert_close(
        masters(tables[0].optimizer)[0],
        masters(tables[1].optimizer)[0],
        rtol=2**-20,
        atol=2**-20,
    )


@each_dtype
def test_resuming_with_sparse_adam(dtype: torch.dtype) -> None:
    def make() -> tuple[torch.nn.Parameter, FP16_Optimizer]:
        weight = torch.nn.Parameter(torch.ones(ROWS, 2).to(dtype))
        inner = torch.optim.SparseAdam([weight], lr=2.0**-10)
        return weight, FP16_Optimizer(
            inner,
            dynamic_loss_scale=True,
            dynamic_loss_args={"init_scale": 4.0, "scale_window": 2},
            verbose=False,
        )

    def run(weight: torch.Tensor, optimizer: Any, lists: Any) -> None:
        for rows in lists:
            looked_up = functional.embedding(torch.tensor(rows), weight, sparse=True)
            train(optimizer, looked_up.float().pow(2).sum())

    weight, optimizer = make()
    run(weight, optimizer, LISTS[:2])
    saved = copy_of(optimizer.state_dict())
    run(weight, optimizer, LISTS)
    resumed_weight, resumed = make()
    resumed.load_state_dict(saved)
    run(resumed_weight, resumed, LISTS)
    assert_same(resumed.state_dict(), optimizer.state_dict())
    assert_same(resumed_weight.detach(), weight.detach())


@each_dtype
def test_a_closure_with_sparse_gradients(dtype: torch.dtype) -> None:
    table = Table(
        dtype,
        sparse=True,
        dynamic_loss_scale=True,
        dynamic_loss_args={"init_scale": 16.0},
    )
    factors = [INF, NAN, 1.0]

    def closure() -> torch.Tensor:
        table.optimizer.zero_grad()
        loss = table.loss(LISTS[0], factors.pop(0))
        table.optimizer.backward(loss)
        return loss

    table.optimizer.step(closure)
    other = Table(dtype, sparse=False)
    train(other.optimizer, other.loss(LISTS[0]))
    assert_same(table.everything()[:3], other.everything()[:3])
    assert table.optimizer.loss_scale == 4.0


@each_dtype
def test_two_tables_of_one_optimizer_and_a_frozen_one(dtype: torch.dtype) -> None:
    tables = [torch.nn.Parameter(torch.ones(3, 1).to(dtype)) for _ in range(3)]
    tables[1].requires_grad_(False)
    inner = torch.optim.SGD([*tables, half(1.0, dtype=dtype)], lr=0.5)
    optimizer = FP16_Optimizer(inner, static_loss_scale=2.0, verbose=False)
    rows = torch.tensor([2, 2, 0])
    loss = sum(functional.embedding(rows, t, sparse=t.requires_grad) for t in tables)
    train(optimizer, loss.float().sum())  # type: ignore[union-attr]
    want = torch.tensor([[0.5], [1.0], [0.0]]).to(dtype)
    assert_same([t.detach() for t in tables], [want, torch.ones_like(want), want])
