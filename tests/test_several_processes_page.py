"""The code of the page on several processes runs as it stands, in four processes."""

import pathlib
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fp16core import FP16_Optimizer
from process_pool import ProcessPool, Ranks

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "several_processes.md"


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        value = value.clone()
        dist.all_reduce(value)
        return value

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient


class Split(torch.nn.Module):
    """A part of the hidden units in each process, and a bias in all."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.first = torch.nn.Parameter(torch.randn(4, 3).half())
        self.second = torch.nn.Parameter(torch.randn(2, 4).half())
        self.bias = torch.nn.Parameter(torch.zeros(2).half())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(x @ self.first.float().t())
        out: torch.Tensor = _Sum.apply(hidden @ self.second.float().t())
        return out + self.bias.float()


def run_page(ranks: Ranks) -> list[Any]:
    ddp, join, split, filtered = re.findall(
        r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL
    )
    torch.manual_seed(0)
    data = [(torch.randn(8, 3), torch.randn(8, 2)) for _ in range(40)]
    names: dict[str, Any] = {
        "torch": torch,
        "dist": dist,
        "DistributedDataParallel": DistributedDataParallel,
        "FP16_Optimizer": FP16_Optimizer,
        "criterion": torch.nn.functional.mse_loss,
        "net": torch.nn.Linear(3, 2).half(),
        "data": [(x + ranks.rank, y) for x, y in data],
        "own_data": data[: 3 + 2 * ranks.rank],
    }

    def weights() -> list[Any]:
        optimizer = names["optimizer"]
        return [m.tolist() for m in optimizer.all_fp32_from_fp16_params]

    exec(ddp, names)
    found = [names["optimizer"].steps_applied > 0, weights()]
    exec(join, names)
    found += [names["longest"], weights(), names["optimizer"].steps_skipped > 0]

    names["net"] = net = Split(ranks.rank)
    names["data"] = data
    exec(split, names)
    optimizer = names["optimizer"]
    found += [optimizer.steps_applied, optimizer.loss_scale, weights()[-1]]

    exec(filtered, names)
    optimizer = names["optimizer"]
    optimizer.backward(net(data[0][0]).sum())
    squares = sum(
        (p.grad.double() ** 2).sum()
        for p in (net.first, net.second)
        if p.grad is not None
    )
    assert isinstance(squares, torch.Tensor)
    dist.all_reduce(squares)
    assert net.bias.grad is not None
    squares += (net.bias.grad.double() ** 2).sum()
    norm = optimizer.clip_master_grads(1.0).item()
    # The square sum of half gradients is float32, its root rounded once more.
    assert norm == pytest.approx(squares.sqrt().item(), rel=2.0**-20)
    return [*found, norm]


def test_the_code_of_the_page_runs(pool: ProcessPool) -> None:
    first, *others = pool.run(run_page)
    for other in others:
        assert other == first
    assert first[0] is True and first[2] == 3 and first[4] is True
    assert 0 < first[5] < 40
