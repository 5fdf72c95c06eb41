"""Several processes: what they agree on, what clipping counts, and what fails.

Functions that take ``ranks`` run in each of the processes of the pool.
"""

import functools
import importlib
import math
import os
import random
import re
import sys
import time
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fp16core import FP16_Optimizer, LossScaleError, compat
from helpers import HALF_DTYPES, INF, NAN, ScaleModel, copy_of, half, single
from process_pool import SECONDS, ProcessPool, Ranks

P_NORMS = [2.0, 1.0, 3.0, 0.0, INF, -INF]


def sgd(
    params: list[torch.nn.Parameter], momentum: float = 0.5, **kwargs: Any
) -> FP16_Optimizer:
    inner = torch.optim.SGD(params, lr=2.0**-4, momentum=momentum)
    return FP16_Optimizer(inner, verbose=False, **kwargs)


def loss_of(
    params: list[torch.nn.Parameter], gradients: list[torch.Tensor | None]
) -> torch.Tensor:
    """Return a loss whose gradients are those, as far as the dtype goes."""
    loss = torch.zeros(())
    for param, gradient in zip(params, gradients, strict=True):
        if gradient is not None:
            loss = loss + (param.double() * gradient).sum().float()
    return loss


def all_weights(optimizer: FP16_Optimizer) -> list[Any]:
    """Return masters, native parameters and the model's weights as plain lists."""
    return [
        p.tolist()
        for params in (
            optimizer.all_fp32_from_fp16_params,
            optimizer.all_fp32_from_fp32_params,
            optimizer.all_fp16_params,
        )
        for p in params
    ]


def error_of(function: Callable[[], Any]) -> str:
    """Return the class and the text of what ``function`` raises."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


# Overflow.


def own_overflow(rank: int, step: int) -> float | None:
    """Return what a process finds in a step: inf, NaN or nothing of the kind."""
    drawn = random.Random(1000 * rank + step).random()
    return INF if drawn < 0.02 else NAN if drawn < 0.04 else None


def lockstep_gradients(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    draw = torch.randint(-8, 9, (6,), generator=generator).double() / 1024
    return [draw[:3], draw[3:5], draw[5:]]


def lockstep_params(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    return [half(1.0, -2.0, 0.5, dtype=dtype), single(3.0, 4.0), half(1.0)]


def lockstep(
    ranks: Ranks, steps: int, dtype: torch.dtype, kwargs: dict[str, Any]
) -> dict[str, Any]:
    params = lockstep_params(dtype)
    optimizer = sgd(params, process_group=ranks.all, **kwargs)
    scales, clipped = [], []
    for step in range(steps):
        gradients = [g.clone() for g in lockstep_gradients(step)]
        bad = own_overflow(ranks.rank, step)
        if bad is not None:
            gradients[step % 3][-1] = bad
        optimizer.zero_grad()
        optimizer.backward(loss_of(params, gradients))
        clipped.append(optimizer.clip_master_grads(1.0).item())
        optimizer.step()
        scales.append(optimizer.loss_scale)
    scaler = optimizer.loss_scaler
    return {
        "common": {
            "scales": scales,
            "clipped": clipped,
            "counts": (optimizer.steps_applied, optimizer.steps_skipped),
            "counters": [
                getattr(scaler, name, None)
                for name in ("cur_iter", "last_overflow_iter", "cur_hysteresis")
            ],
            "history": [
                (r.step, r.scale, r.overflow, r.skipped_in_a_row)
                for r in optimizer.history
            ],
            "weights": all_weights(optimizer),
        },
        "culprits": [
            [(c.index, c.inf_count, c.nan_count) for c in r.culprits]
            for r in optimizer.history
        ],
    }


@pytest.mark.parametrize(
    ("dtype", "kwargs"),
    [
        (torch.float16, {"static_loss_scale": 64.0}),
        (torch.float16, {"scale_window": 7}),
        (torch.bfloat16, {"scale_window": 5, "scale_factor": 4.0}),
        (torch.float16, {"scale_window": 9, "delayed_shift": 2}),
        (
            torch.float16,
            {"scale_window": 9, "delayed_shift": 2, "consecutive_hysteresis": True},
        ),
    ],
)
def test_an_overflow_in_one_process_skips_the_step_in_all(
    pool: ProcessPool, dtype: torch.dtype, kwargs: dict[str, Any]
) -> None:
    steps = 200
    model: ScaleModel | None = None
    if "static_loss_scale" not in kwargs:
        model = ScaleModel(
            64.0,
            factor=kwargs.get("scale_factor", 2.0),
            window=kwargs["scale_window"],
            shift=kwargs.get("delayed_shift", 1),
            consecutive=kwargs.get("consecutive_hysteresis", False),
        )
        arguments = {"init_scale": 64.0, **kwargs}
        kwargs = {"dynamic_loss_scale": True, "dynamic_loss_args": arguments}
    found = pool.run(lockstep, steps, dtype, kwargs)
    common = found[0]["common"]
    for other in found[1:]:
        assert other["common"] == common

    # One process alone, in which every overflow of any of the four happens. The
    # replicated parameters of each count once, so it has the very same norms too.
    params = lockstep_params(dtype)
    alone = sgd(params, **kwargs)
    streak = 0
    for step in range(steps):
        gradients = [g.clone() for g in lockstep_gradients(step)]
        own = [own_overflow(rank, step) for rank in range(4)]
        overflow = any(bad is not None for bad in own)
        streak = streak + 1 if overflow else 0
        scale = alone.loss_scale
        if overflow:
            gradients[0][0] = INF
        alone.zero_grad()
        alone.backward(loss_of(params, gradients))
        assert common["clipped"][step] == alone.clip_master_grads(1.0).item()
        alone.step()
        assert common["history"][step] == (step + 1, scale, overflow, streak)
        assert common["scales"][step] == alone.loss_scale
        if model is not None:
            assert alone.loss_scale == model.update(overflow)
        for bad, other in zip(own, found, strict=True):
            culprit = (step % 3, int(bad == INF), int(bad != INF))
            assert other["culprits"][step] == ([] if bad is None else [culprit])
    assert common["counts"] == (alone.steps_applied, alone.steps_skipped)
    assert 10 < alone.steps_skipped < 60
    assert common["weights"] == all_weights(alone)


def overflow_of_every_kind(ranks: Ranks) -> list[Any]:
    """Overflow in one process and one kind of parameter after another."""
    kinds = [
        half(1.0, dtype=torch.float16),
        half(1.0, dtype=torch.bfloat16),
        half(1.0, dtype=torch.float32),
        half(1.0, dtype=torch.float64),
    ]
    table = torch.nn.Embedding(3, 2, sparse=True).half()
    torch.nn.init.ones_(table.weight)
    optimizer = FP16_Optimizer(
        torch.optim.SGD([*kinds, table.weight], lr=0.5),
        static_loss_scale=4.0,
        verbose=False,
        process_group=ranks.neighbours,
    )
    found = []
    for bad in (INF, -INF, NAN):
        for kind in range(len(kinds) + 1):
            factors = [1.0] * (len(kinds) + 1)
            if ranks.rank % 2 == 1:
                factors[kind] = bad
            loss = sum(
                (p.double() * f).sum() for p, f in zip(kinds, factors, strict=False)
            )
            loss = loss + (table(torch.tensor([2, 2])).float() * factors[-1]).sum()
            optimizer.zero_grad(set_to_none=True)
            optimizer.backward(loss)
            clipped = optimizer.clip_master_grads(1.0).item()
            optimizer.step()
            found.append((optimizer.overflow, clipped))
    return [
        found,
        optimizer.steps_applied,
        optimizer.steps_skipped,
        table.weight[2, 0].item(),
    ]


def test_every_kind_of_overflow_is_told_to_the_others(pool: ProcessPool) -> None:
    for found, applied, skipped, weight in pool.run(overflow_of_every_kind):
        assert found == [(True, -1.0)] * 15
        assert (applied, skipped, weight) == (0, 15, 1.0)


def by_hand(ranks: Ranks) -> list[Any]:
    """Take gradients by the private methods that old subclasses call."""
    param = half(1.0)
    optimizer = sgd([param], static_loss_scale=8.0, process_group=ranks.all)
    found = []
    for bad in (1.0, INF):
        optimizer.zero_grad()
        factor = bad if ranks.rank == 2 else 1.0
        optimizer.backward((param.float() * factor).sum(), update_master_grads=False)
        optimizer._check_overflow()
        found.append(optimizer.overflow)
        optimizer._model_grads_to_master_grads()
        optimizer._downscale_master()
        found.append((optimizer.overflow, optimizer.clip_master_grads(4.0).item()))
        optimizer.step()
    return [found, optimizer.steps_applied, optimizer.steps_skipped]


def test_the_original_methods_tell_the_others_too(pool: ProcessPool) -> None:
    want = [[False, (False, 1.0), True, (True, -1.0)], 1, 1]
    assert pool.run(by_hand) == [want] * 4


def unchecked(ranks: Ranks) -> list[Any]:
    param = half(1.0)
    optimizer = FP16_Optimizer(
        torch.optim.SGD([param], lr=0.5),
        verbose=False,
        check_overflow=False,
        process_group=ranks.neighbours,
    )
    factor = INF if ranks.rank == 1 else 1.0
    optimizer.backward((param.float() * factor).sum())
    optimizer.step()
    return [optimizer.overflow, optimizer.steps_applied, param.item()]


def test_without_the_check_every_process_steps(pool: ProcessPool) -> None:
    want = [[False, 1, value] for value in (0.5, -INF, 0.5, 0.5)]
    assert pool.run(unchecked) == want


# Norms.


def parts(
    rank: int, layout: str
) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    """Return what one process has alone and what all have."""
    generator = torch.Generator().manual_seed(rank)

    def draw(*shape: int, dtype: torch.dtype) -> torch.nn.Parameter:
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        return torch.nn.Parameter(values.to(dtype))

    own: list[torch.nn.Parameter] = []
    if rank != 1 or layout == "even":
        own = [
            draw(rank + 1, 5, dtype=torch.float16),
            draw(3, rank + 2, dtype=torch.bfloat16),
            draw(7, dtype=torch.float32),
        ]
    generator.manual_seed(99)
    common = [
        draw(6, 3, dtype=torch.float16),
        draw(5, dtype=torch.float32),
        draw(2, dtype=torch.float64),
    ]
    return own, common


def gradients_for(
    params: list[torch.nn.Parameter], seed: int, exact: bool
) -> list[torch.Tensor | None]:
    """Return gradients, of whose powers float64 holds the sums exactly if wanted."""
    generator = torch.Generator().manual_seed(seed)
    gradients: list[torch.Tensor | None] = []
    for param in params:
        if exact:
            drawn = torch.randint(-7, 8, param.shape, generator=generator).double()
        else:
            drawn = torch.randn(param.shape, generator=generator, dtype=torch.float64)
        gradients.append(drawn)
    return gradients


def mark(
    own: list[torch.nn.Parameter], common: list[torch.nn.Parameter], how: str
) -> dict[str, Any]:
    """Tell in one of the ways which parameters a process has alone."""
    if how == "norm_filter":
        counted = {id(p) for p in own}
        first = dist.get_rank() == 0
        return {"norm_filter": lambda p: id(p) in counted or first}
    for param in own:
        setattr(param, how, True)
    for param in common[:2]:
        setattr(param, how, False)
    return {}


def clip_parts(
    ranks: Ranks,
    layout: str,
    exact: bool,
    how: str,
    max_norm: float,
    kwargs: dict[str, Any],
) -> dict[float, Any]:
    found = {}
    for p in P_NORMS:
        own, common = parts(ranks.rank, layout)
        marked = mark(own, common, how)
        optimizer = sgd(
            [*own, *common],
            static_loss_scale=8.0,
            process_group=ranks.all,
            **marked,
            **kwargs,
        )
        gradients = gradients_for(own, ranks.rank, exact)
        gradients += gradients_for(common, 99, exact)
        optimizer.backward(loss_of([*own, *common], gradients))
        # Clipping again is harmless.
        norms = [optimizer.clip_master_grads(max_norm, p).item() for _ in range(2)]
        optimizer.step()
        count = len(optimizer.all_fp32_from_fp16_params)
        found[p] = (norms, all_weights(optimizer), count)
    return found


def clip_alone(
    layout: str, exact: bool, max_norm: float, p: float
) -> tuple[list[float], FP16_Optimizer, list[torch.Tensor | None]]:
    """Clip the whole model in this process; return norms, optimizer, gradients."""
    params: list[torch.nn.Parameter] = []
    gradients: list[torch.Tensor | None] = []
    for rank in range(4):
        own, common = parts(rank, layout)
        params += own
        gradients += gradients_for(own, rank, exact)
    params += common
    gradients += gradients_for(common, 99, exact)
    optimizer = sgd(params, static_loss_scale=8.0)
    optimizer.backward(loss_of(params, gradients))
    norms = [optimizer.clip_master_grads(max_norm, p).item() for _ in range(2)]
    optimizer.step()
    return norms, optimizer, gradients


@pytest.mark.parametrize(
    ("layout", "exact", "how", "max_norm", "kwargs"),
    [
        ("even", True, "model_parallel", 1.0, {}),
        ("uneven", True, "tensor_model_parallel", 1e9, {}),
        ("uneven", False, "norm_filter", 0.5, {}),
        ("uneven", True, "model_parallel", 0.25, {"materialize_master_grads": False}),
        ("even", False, "tensor_model_parallel", 2.0, {"fused": False}),
    ],
)
def test_the_norm_is_that_of_the_whole_model(
    pool: ProcessPool,
    layout: str,
    exact: bool,
    how: str,
    max_norm: float,
    kwargs: dict[str, Any],
) -> None:
    found = pool.run(clip_parts, layout, exact, how, max_norm, kwargs)
    for p in P_NORMS:
        norms, whole, gradients = clip_alone(layout, exact, max_norm, p)
        flat = torch.cat([g.flatten() for g in gradients if g is not None])
        truth = torch.linalg.vector_norm(flat, p).item()
        if exact:
            # Sums of small integers, of which no order of adding loses anything.
            assert norms[0] == pytest.approx(truth, rel=2.0**-24)
        else:
            # Each half gradient is rounded to bfloat16 at worst.
            assert norms[0] == pytest.approx(truth, rel=2.0**-8)
        weights = [
            [p.tolist() for p in params]
            for params in (
                whole.all_fp32_from_fp16_params,
                whole.all_fp32_from_fp32_params,
                whole.all_fp16_params,
            )
        ]
        owned = [0, 0, 0]
        for rank in range(4):
            own_norms, own_weights, halves = found[rank][p]
            assert own_norms[0] == found[0][p][0][0], "processes disagree"
            if exact:
                assert own_norms == norms
            else:
                # The sums of four processes are added in another order, which moves
                # the float64 sum by some 2^-53 and so the float32 norm by an ulp.
                assert own_norms == pytest.approx(norms, rel=2.0**-23)
            natives = len(own_weights) - 2 * halves
            own = parts(rank, layout)[0]
            splits = (
                own_weights[:halves],
                own_weights[halves : halves + natives],
                own_weights[halves + natives :],
            )
            of_own = sum(q.dtype in HALF_DTYPES for q in own)
            for kind, (got, want, count) in enumerate(
                zip(
                    splits,
                    weights,
                    (of_own, len(own) - of_own, of_own),
                    strict=True,
                )
            ):
                wanted = want[owned[kind] : owned[kind] + count]
                owned[kind] += count
                wanted += want[len(want) - len(got) + count :]
                if exact:
                    assert got == wanted
                else:
                    for a, b in zip(got, wanted, strict=True):
                        torch.testing.assert_close(
                            torch.tensor(a), torch.tensor(b), rtol=2.0**-10, atol=1e-6
                        )


def sparse_parts(ranks: Ranks) -> list[Any]:
    """Clip where one process has no gradients, one an empty group, one nothing."""
    common = half(3.0, 4.0)
    own = half(2.0, 4.0, 4.0)
    own.model_parallel = True  # type: ignore[attr-defined]
    groups = [{"params": [common]}, {"params": [own] if ranks.rank != 1 else []}]
    if ranks.rank == 3:
        common.requires_grad_(False)
        own.requires_grad_(False)
    optimizer = FP16_Optimizer(
        torch.optim.SGD(groups, lr=0.5, momentum=0.5),
        static_loss_scale=4.0,
        verbose=False,
        process_group=ranks.all,
    )
    loss = torch.zeros((), requires_grad=True) * 1.0
    if ranks.rank in (0, 1):
        loss = loss + (common.float() * torch.tensor([3.0, 4.0])).sum()
    if ranks.rank == 0:
        loss = loss + (own.float() * torch.tensor([2.0, 4.0, 4.0])).sum()
    found: list[Any] = []
    for p in P_NORMS:
        optimizer.zero_grad(set_to_none=True)
        if ranks.rank == 2:
            optimizer.update_master_grads()  # without a backward pass
        else:
            optimizer.backward(loss, retain_graph=True)
        found.append(optimizer.clip_master_grads(0.5, p).item())
    optimizer.step()
    return [found, optimizer.steps_applied, common.tolist(), own.tolist()]


def test_a_process_without_gradients_takes_part(pool: ProcessPool) -> None:
    truth = [(9 + 16 + 4 + 16 + 16) ** 0.5, 17.0, (27 + 64 + 8 + 64 + 64) ** (1 / 3)]
    truth += [5.0, 4.0, 2.0]
    found = pool.run(sparse_parts)
    for norms, applied, _, _ in found:
        assert norms == pytest.approx(truth, rel=2.0**-24)
        assert norms == found[0][0]
        assert applied == 1
    # The last clipping: by 0.5 / 2.
    assert [common for _, _, common, _ in found] == [
        [3 - 0.5 * 0.25 * 3, 4 - 0.5 * 0.25 * 4],
        [3 - 0.5 * 0.25 * 3, 4 - 0.5 * 0.25 * 4],
        [3.0, 4.0],
        [3.0, 4.0],
    ]
    assert [own for _, _, _, own in found] == [[1.75, 3.5, 3.5]] + [[2.0, 4.0, 4.0]] * 3


def no_finite_norm(ranks: Ranks) -> list[float]:
    """Clip where one process has a NaN, and where one has an infinite gradient."""
    found = []
    for bad in (NAN, INF):
        for p in P_NORMS:
            param = half(1.0, 2.0)
            param.model_parallel = True  # type: ignore[attr-defined]
            optimizer = sgd([param], check_overflow=False, process_group=ranks.all)
            factor = torch.tensor([1.0, bad if ranks.rank == 1 else 1.0])
            optimizer.backward((param.float() * factor).sum())
            found.append(optimizer.clip_master_grads(1.0, p).item())
    return found


def test_processes_agree_on_norms_that_are_not_finite(pool: ProcessPool) -> None:
    first, *others = pool.run(no_finite_norm)
    for other in others:
        assert repr(other) == repr(first)
    # Nowhere may what is not finite be lost.
    nan, infinite = first[:6], first[6:]
    assert not any(math.isfinite(n) for p, n in zip(P_NORMS, nan, strict=True) if p > 0)
    assert infinite == [INF, INF, INF, 8.0, INF, 1.0]


def test_a_nan_is_not_lost_in_the_smallest_magnitude(pool: ProcessPool) -> None:
    for found in pool.run(no_finite_norm):
        assert not math.isfinite(found[5])


# Models that are split.


class _ToAll(torch.autograd.Function):
    """Hands on what all processes have; sums what they know of its gradient."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _FromAll(torch.autograd.Function):
    """Sums what each process has."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: Any) -> torch.Tensor:
        value = value.clone()
        dist.all_reduce(value, group=group)
        return value

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


class Perceptron(torch.nn.Module):
    """Two layers, of whose hidden units this process has a part."""

    def __init__(self, part: int, count: int, group: Any) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)

        def draw(*shape: int) -> torch.Tensor:
            values = torch.randn(shape, generator=generator).half()
            return values.chunk(count, dim=shape.index(8))[part].clone()

        self.before = torch.nn.Parameter(torch.ones(5).half())
        self.first = torch.nn.Parameter(draw(8, 5))
        self.first_bias = torch.nn.Parameter(draw(8))
        self.second = torch.nn.Parameter(draw(3, 8))
        self.second_bias = torch.nn.Parameter(torch.zeros(3))
        self.group = group
        for split in (self.first, self.first_bias, self.second):
            split.model_parallel = True  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # In float64, so that only the weights and the gradients are rounded.
        scaled = x * self.before.double()
        if self.group is not None:
            scaled = _ToAll.apply(scaled, self.group)
        hidden = scaled @ self.first.double().t() + self.first_bias.double()
        out = torch.tanh(hidden) @ self.second.double().t()
        if self.group is not None:
            out = _FromAll.apply(out, self.group)
        return out + self.second_bias.double()


def perceptron_data(step: int, replica: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * step + replica)
    x = torch.randn(6, 5, generator=generator, dtype=torch.float64)
    return x, x[:, :3] * x[:, 1:4]


def wrap_perceptron(model: Perceptron, **kwargs: Any) -> FP16_Optimizer:
    return FP16_Optimizer(
        torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1),
        dynamic_loss_scale=True,
        dynamic_loss_args={"init_scale": 2.0**20, "scale_window": 8},
        verbose=False,
        model=model,
        **kwargs,
    )


def train_split(
    ranks: Ranks, steps: int, data_parallel: bool, kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Train a perceptron that is split over two processes; with two replicas of it,
    reduce the gradients over these by hand."""
    model = Perceptron(ranks.rank % 2, 2, ranks.neighbours)
    optimizer = wrap_perceptron(model, process_group=ranks.neighbours, **kwargs)
    replica = ranks.rank // 2 if data_parallel else 0
    norms, scales = [], []
    for step in range(steps):
        x, y = perceptron_data(step, replica)
        optimizer.zero_grad()
        loss = ((model(x) - y) ** 2).mean()
        optimizer.backward(loss, update_master_grads=False)
        if data_parallel:
            for param in model.parameters():
                assert param.grad is not None
                dist.all_reduce(param.grad, group=ranks.strangers)
                param.grad /= 2
        optimizer.update_master_grads()
        norms.append(optimizer.clip_master_grads(0.5).item())
        optimizer.step()
        scales.append(optimizer.loss_scale)
    named = {name: p for name, p in model.named_parameters()}
    masters = iter(optimizer.all_fp32_from_fp16_params)
    weights = {
        name: (next(masters) if p.dtype == torch.float16 else p).tolist()
        for name, p in named.items()
    }
    return {
        "norms": norms,
        "scales": scales,
        "loss": loss.item(),
        "weights": weights,
        "skipped": optimizer.steps_skipped,
    }


def train_whole(steps: int, replicas: int) -> tuple[FP16_Optimizer, Any, list[float]]:
    model = Perceptron(0, 1, None)
    optimizer = wrap_perceptron(model)
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        for replica in range(replicas):
            x, y = perceptron_data(step, replica)
            loss = ((model(x) - y) ** 2).mean()
            optimizer.backward(loss, update_master_grads=False)
        for param in model.parameters():
            assert param.grad is not None
            param.grad /= replicas
        optimizer.update_master_grads()
        norms.append(optimizer.clip_master_grads(0.5).item())
        optimizer.step()
    return optimizer, model, norms


@pytest.mark.parametrize("data_parallel", [False, True])
@pytest.mark.parametrize("kwargs", [{}, {"materialize_master_grads": False}])
def test_a_split_model_trains_like_a_whole_one(
    pool: ProcessPool, data_parallel: bool, kwargs: dict[str, Any]
) -> None:
    steps = 40
    found = pool.run(train_split, steps, data_parallel, kwargs)
    optimizer, model, norms = train_whole(steps, 2 if data_parallel else 1)
    assert 0 < optimizer.steps_skipped < steps / 2
    for part, other in enumerate(found):
        assert other["skipped"] == optimizer.steps_skipped
        assert other["scales"] == found[0]["scales"]
        assert other["norms"] == found[part - part % 2]["norms"]
        # Sums in another order differ by 2^-53, which is seen after rounding to
        # float16 once in some 2^40 elements; the norm itself by an ulp of float32.
        assert other["norms"] == pytest.approx(norms, rel=2.0**-23)
        masters = iter(optimizer.all_fp32_from_fp16_params)
        for name, whole in model.named_parameters():
            want = next(masters) if whole.dtype == torch.float16 else whole
            if 8 in want.shape:
                want = want.chunk(2, dim=want.shape.index(8))[part % 2]
            # An ulp in the clipping coefficient, passed through forty steps of Adam.
            torch.testing.assert_close(
                torch.tensor(other["weights"][name]),
                want.detach(),
                rtol=1e-5,
                atol=1e-6,
                msg=name,
            )


# Closures.


def step_with_closures(ranks: Ranks, kind: str) -> dict[str, Any]:
    return run_closures(kind, ranks.rank, process_group=ranks.neighbours)


def bad_evaluation(kind: str, evaluation: int, rank: int | None) -> bool:
    """Return whether a process, or with None any of two, overflows there."""
    plan = {
        "sgd": [(1, 0), (3, 1)],
        "lbfgs": [(2, 1), (5, 0), (6, 1)],
        "first for good": [(e, 0) for e in range(4, 99)],
        "later for good": [(e, 1) for e in range(2, 99)],
    }[kind]
    return any(evaluation == e and rank in (None, r) for e, r in plan)


def run_closures(kind: str, rank: int | None, **kwargs: Any) -> dict[str, Any]:
    param, native = half(1.0, -2.0), single(3.0)
    inner: Any
    if kind == "sgd":
        inner = torch.optim.SGD([param, native], lr=0.25)
    else:
        inner = torch.optim.LBFGS([param, native], lr=0.5, max_iter=4)
    floor = 2.0**-20 if kind in ("sgd", "lbfgs") else 4.0
    optimizer = FP16_Optimizer(
        inner,
        dynamic_loss_scale=True,
        dynamic_loss_args={"init_scale": 8.0, "scale_window": 3, "min_scale": floor},
        verbose=False,
        **kwargs,
    )
    evaluations, losses, errors, skips = 0, [], [], []
    optimizer.on_skip = lambda record: skips.append((record.step, record.scale))

    def closure() -> torch.Tensor:
        nonlocal evaluations
        optimizer.zero_grad()
        loss = ((param.float() - 0.5) ** 2).sum() + (native**2).sum()
        bad = bad_evaluation(kind, evaluations, None if rank is None else rank % 2)
        optimizer.backward(loss + (param.float().sum() * INF if bad else 0.0))
        evaluations += 1
        return loss

    for _ in range(3):
        try:
            loss = optimizer.step(closure)
            losses.append(None if loss is None else loss.item())
        except LossScaleError as error:
            errors.append(str(error).split(";")[0])
    return {
        "evaluations": evaluations,
        "losses": losses,
        "errors": errors,
        "skips": skips,
        "scale": optimizer.loss_scale,
        "counts": (optimizer.steps_applied, optimizer.steps_skipped),
        "history": [
            (r.step, r.scale, r.overflow, r.skipped_in_a_row) for r in optimizer.history
        ],
        "weights": all_weights(optimizer),
    }


@pytest.mark.parametrize("kind", ["sgd", "lbfgs", "first for good", "later for good"])
def test_closures_are_evaluated_alike(pool: ProcessPool, kind: str) -> None:
    alone = run_closures(kind, None)
    assert pool.run(step_with_closures, kind) == [alone] * 4
    assert (
        alone["counts"]
        == {
            "sgd": (3, 0),
            "lbfgs": (3, 0),
            "first for good": (1, 2),
            "later for good": (0, 2),
        }[kind]
    )
    assert len(alone["errors"]) == (kind == "later for good")


# Checkpoints.


def resume(ranks: Ranks, restart: bool) -> dict[str, Any]:
    """Train a split model for 12 steps; with ``restart`` by two optimizers."""

    def make() -> tuple[list[torch.nn.Parameter], FP16_Optimizer]:
        own = half(*[0.25 * (ranks.rank + i) for i in range(5)])
        own.model_parallel = True  # type: ignore[attr-defined]
        params = [own, single(1.0, 2.0)]
        inner = torch.optim.AdamW(params, lr=0.1)
        optimizer = FP16_Optimizer(
            inner,
            dynamic_loss_scale=True,
            dynamic_loss_args={"init_scale": 64.0, "scale_window": 2},
            verbose=False,
            process_group=ranks.all,
        )
        return params, optimizer

    params, optimizer = make()
    clipped = []
    for step in range(12):
        factor = INF if (step, ranks.rank) in ((1, 2), (5, 0), (6, 3)) else 1.0
        optimizer.zero_grad()
        own = (params[0].float() ** 2).sum() * factor
        optimizer.backward(own + (params[1] * torch.tensor([1.0, -2.0])).sum())
        if restart and step == 6:
            # Between an overflow of process 3 and the step that it skips.
            state = {"model": [p.detach() for p in params], "o": optimizer.state_dict()}
            saved = copy_of(state)
            params, optimizer = make()
            with torch.no_grad():
                for param, value in zip(params, saved["model"], strict=True):
                    param.copy_(value)
            optimizer.load_state_dict(saved["o"])
        clipped.append(optimizer.clip_master_grads(1.0).item())
        optimizer.step()
    return {
        "clipped": clipped,
        "scale": optimizer.loss_scale,
        "counts": (optimizer.steps_applied, optimizer.steps_skipped),
        "last": [(r.step, r.scale, r.overflow) for r in optimizer.history[-5:]],
        "weights": all_weights(optimizer),
    }


def test_all_processes_resume_where_they_were(pool: ProcessPool) -> None:
    straight = pool.run(resume, False)
    assert pool.run(resume, True) == straight
    assert straight[0]["counts"] == (9, 3)
    for other in straight[1:]:
        assert other["scale"] == straight[0]["scale"]
        assert other["clipped"] == straight[0]["clipped"]


# Failures.


class _Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        raise ValueError("of the backward pass")


def fail_and_go_on(ranks: Ranks, how: str, closure: bool) -> dict[str, Any]:
    """Train, fail in process 1, and train on."""
    param, native = half(1.0, 2.0), single(1.0)
    optimizer = FP16_Optimizer(
        torch.optim.SGD([param, native], lr=2.0**-4, momentum=0.5),
        dynamic_loss_scale=True,
        dynamic_loss_args={"init_scale": 64.0, "scale_window": 3},
        verbose=False,
        process_group=ranks.all,
    )
    fails = False

    def iterate() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        native.grad_dtype = torch.float64 if fails and how == "update" else None
        loss = (param.float() ** 2).sum() + native.sum()
        if fails and how == "backward":
            loss = _Breaks.apply(loss)
        if fails and how == "loss":
            optimizer.backward(loss.long())
        optimizer.backward(loss)
        optimizer.clip_master_grads(1.0)
        return loss

    def step() -> None:
        if closure:
            optimizer.step(iterate)
        else:
            iterate()
            optimizer.step()

    for _ in range(4):
        step()
    before = all_weights(optimizer), optimizer.loss_scale
    fails = ranks.rank == 1
    error = error_of(step)
    fails = False
    overflow = optimizer.overflow
    native.grad_dtype = None
    unchanged = (all_weights(optimizer), optimizer.loss_scale) == before
    for _ in range(4):
        step()
    return {
        "error": error,
        "overflow": overflow,
        "unchanged": unchanged,
        "scale": optimizer.loss_scale,
        "counts": (optimizer.steps_applied, optimizer.steps_skipped),
        "weights": all_weights(optimizer),
    }


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize(
    ("how", "own_error"),
    [
        ("backward", "ValueError: of the backward pass"),
        ("update", "TypeError: FP16_Optimizer.update_master_grads: gradients must be"),
        ("loss", "TypeError: FP16_Optimizer.backward: loss must be a floating point"),
    ],
)
def test_an_error_in_one_process_is_one_in_all(
    pool: ProcessPool, how: str, own_error: str, closure: bool
) -> None:
    found = pool.run(fail_and_go_on, how, closure)
    for rank, answer in enumerate(found):
        error = answer.pop("error")
        if rank == 1:
            assert error.startswith(own_error)
        else:
            assert error == (
                "RuntimeError: FP16_Optimizer.update_master_grads: all processes must "
                "take their gradients, but got an error in another one"
            )
        assert answer == found[0]
    # Nothing happened, and the group works again.
    assert found[0]["unchanged"]
    assert found[0]["counts"] == (8, 0)
    # A step with a closure counts for the scale when it starts, as one that failed.
    assert found[0]["scale"] == 64.0 * (8 if closure else 4)


def forget_an_update(ranks: Ranks) -> list[Any]:
    """Step after a failure without another update."""
    param = half(1.0)
    optimizer = sgd([param], process_group=ranks.all)
    loss = _Breaks.apply(param.float().sum()) if ranks.rank == 0 else param.sum()
    errors = [error_of(lambda: optimizer.backward(loss))]
    result = optimizer.step()
    return [errors, result, param.item(), optimizer.steps_applied, optimizer.overflow]


def test_a_step_after_a_failure_does_nothing(pool: ProcessPool) -> None:
    for rank, (errors, result, weight, applied, overflow) in enumerate(
        pool.run(forget_an_update)
    ):
        assert (rank == 0) == ("of the backward pass" in errors[0])
        assert (result, weight, applied, overflow) == (None, 1.0, 0, True)


def be_refused(ranks: Ranks) -> list[str]:
    groups = [*ranks.others, dist.GroupMember.NON_GROUP_MEMBER, "gloo"]
    params = [half(1.0)]
    return [
        error_of(functools.partial(sgd, params, process_group=group))
        for group in groups
    ]


def test_a_group_of_others_is_refused(pool: ProcessPool) -> None:
    for errors in pool.run(be_refused):
        for error in errors:
            assert error.startswith(
                "ValueError: FP16_Optimizer: process_group must be a group that this "
                "process belongs to, but got "
            )


def test_a_group_without_torch_distributed_is_refused() -> None:
    param = half(1.0)
    with pytest.raises(
        RuntimeError,
        match="^FP16_Optimizer: process_group needs torch.distributed to be "
        "initialized, but got a process that has not called init_process_group$",
    ):
        sgd([param], process_group=object())
    sgd([param])  # and nothing was changed


# DistributedDataParallel. What it reduces here are small integers, so that sums in
# any order are those of one process.


class Linears(torch.nn.Module):
    """Parameters of all kinds whose gradients are the sums of the inputs."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 3).to(dtype)
        self.second = torch.nn.Linear(4, 3, bias=False)
        self.last = torch.nn.Parameter(torch.zeros(5, 4).t().to(dtype))
        for param in self.parameters():
            torch.nn.init.constant_(param, 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        halves = x.to(self.first.weight.dtype)
        out = self.first(halves).float().sum() + self.second(x).sum()
        return out + (halves @ self.last).float().sum()


def batch(step: int, part: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + part)
    return 4.0 * torch.randint(-4, 5, (2, 4), generator=generator).float()


def wrap_linears(model: torch.nn.Module, **kwargs: Any) -> FP16_Optimizer:
    inner = torch.optim.AdamW(model.parameters(), lr=2.0**-6)
    arguments = {"init_scale": 2.0**6, "scale_window": 4}
    return FP16_Optimizer(
        inner,
        dynamic_loss_scale=True,
        dynamic_loss_args=arguments,
        verbose=False,
        **kwargs,
    )


def train_linears(
    optimizer: FP16_Optimizer,
    backward: Callable[[int, int], None],
    micro_batches: int,
    set_to_none: bool,
) -> dict[str, Any]:
    """Train for eight steps; ``backward`` runs one pass of a step."""
    norms = []
    for step in range(8):
        optimizer.zero_grad(set_to_none=set_to_none)
        for micro in range(micro_batches):
            backward(step, micro)
        optimizer.update_master_grads()
        norms.append(optimizer.clip_master_grads(8.0).item())
        optimizer.step()
    return {
        "norms": norms,
        "scale": optimizer.loss_scale,
        "counts": (optimizer.steps_applied, optimizer.steps_skipped),
        "weights": all_weights(optimizer),
    }


def train_ddp(
    ranks: Ranks, dtype: torch.dtype, kwargs: dict[str, Any], how: dict[str, Any]
) -> dict[str, Any]:
    model = Linears(dtype)
    parallel = DistributedDataParallel(model, **kwargs)
    group = ranks.all if how.get("grouped") else None
    lean = not how.get("lean", False)
    optimizer = wrap_linears(model, process_group=group, materialize_master_grads=lean)
    count = how.get("micro_batches", 1)

    def backward(step: int, micro: int) -> None:
        # One process overflows; the reduction tells the others.
        factor = INF if step == 2 and ranks.rank == 1 else 1.0
        x = batch(step, ranks.rank + ranks.size * micro)

        def run() -> None:
            loss = parallel(x) * factor
            optimizer.backward(loss, update_master_grads=micro == count - 1)

        if micro < count - 1:
            with parallel.no_sync():
                run()
        else:
            run()

    return train_linears(optimizer, backward, count, how.get("set_to_none", True))


@pytest.mark.parametrize(
    ("dtype", "kwargs", "how"),
    [
        (torch.float16, {}, {}),
        (torch.float16, {"gradient_as_bucket_view": True}, {"set_to_none": False}),
        (torch.bfloat16, {"gradient_as_bucket_view": True}, {"lean": True}),
        (torch.float16, {"static_graph": True}, {"grouped": True}),
        (torch.float16, {}, {"micro_batches": 3, "set_to_none": False}),
        (torch.bfloat16, {"gradient_as_bucket_view": True}, {"micro_batches": 2}),
    ],
)
def test_ddp_trains_like_one_process(
    pool: ProcessPool,
    dtype: torch.dtype,
    kwargs: dict[str, Any],
    how: dict[str, Any],
) -> None:
    found = pool.run(train_ddp, dtype, kwargs, how)
    model = Linears(dtype)
    optimizer = wrap_linears(model)
    count = how.get("micro_batches", 1)

    def backward(step: int, micro: int) -> None:
        whole = torch.cat([batch(step, part + 4 * micro) for part in range(4)])
        factor = INF if step == 2 else 1.0
        optimizer.backward(model(whole) * 0.25 * factor, update_master_grads=False)

    alone = train_linears(optimizer, backward, count, how.get("set_to_none", True))
    assert found == [alone] * 4
    assert alone["counts"] == (7, 1)


def join_uneven(ranks: Ranks, momentum: float) -> dict[str, Any]:
    """Train on as many batches as the rank says, then send the state around as the
    documentation says."""
    model = Linears(torch.float16)
    parallel = DistributedDataParallel(model)
    optimizer = sgd(list(model.parameters()), momentum, static_loss_scale=8.0)
    with parallel.join():
        for step in range(2 + ranks.rank):
            optimizer.zero_grad()
            optimizer.backward(parallel(batch(step, ranks.rank) / 32))
            optimizer.step()
    after_join = [p.tolist() for p in model.parameters()]
    steps = torch.tensor(optimizer.steps_applied + optimizer.steps_skipped)
    everyone = [torch.zeros_like(steps) for _ in range(ranks.size)]
    dist.all_gather(everyone, steps)
    source = int(torch.stack(everyone).argmax())
    state = [optimizer.state_dict()]
    dist.broadcast_object_list(state, src=source)
    optimizer.load_state_dict(state[0])
    for step in range(3):
        optimizer.zero_grad()
        optimizer.backward(parallel(batch(step, ranks.rank) / 32))
        optimizer.step()
    return {
        "source": source,
        "after_join": after_join,
        "applied": optimizer.steps_applied,
        "weights": all_weights(optimizer),
    }


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_uneven_inputs_end_with_equal_processes(
    pool: ProcessPool, momentum: float
) -> None:
    found = pool.run(join_uneven, momentum)
    assert found == [found[0]] * 4
    assert (found[0]["source"], found[0]["applied"]) == (3, 8)


# The end of a process. These come last, since the pool starts anew after them.


def megatron(ranks: Ranks) -> list[Any]:
    """Train as a script of Megatron-LM does, whose mpu makes pairs of processes."""
    mpu = types.ModuleType("mpu")
    mpu.get_model_parallel_group = lambda: ranks.neighbours  # type: ignore[attr-defined]
    sys.modules["mpu"] = mpu
    compat.install("megatron")
    fp16 = importlib.import_module("fp16")
    try:
        split, whole = half(0.0), half(0.0)
        split.model_parallel = True  # type: ignore[attr-defined]
        whole.model_parallel = False  # type: ignore[attr-defined]
        optimizer = fp16.FP16_Optimizer(
            torch.optim.SGD([split, whole], lr=1.0),
            dynamic_loss_scale=True,
            dynamic_loss_args={"init_scale": 8},
        )
        # The parts of the split weight have 3 and 4 as gradients, the whole one 12.
        slope = 3.0 + ranks.rank % 2
        loss = split.float().sum() * slope + whole.float().sum() * 12
        optimizer.backward(loss)
        norm = optimizer.clip_master_grads(100.0).item()
        optimizer.step()
        optimizer.zero_grad()
        bad = INF if ranks.rank == 1 else 1.0
        optimizer.backward(split.float().sum() * bad)
        optimizer.step()
        scaler = optimizer.loss_scaler
        found = scaler.has_overflow([split]), scaler.has_overflow_serial([split])
        return [norm, optimizer.overflow, optimizer.loss_scale, *found]
    finally:
        del sys.modules["mpu"]
        compat.uninstall()


def test_scripts_of_megatron_take_part_in_model_parallelism(pool: ProcessPool) -> None:
    # An overflow in one process skips the step in its pair, and in no other.
    assert pool.run(megatron) == [
        [13.0, True, 4.0, True, False],
        [13.0, True, 4.0, True, True],
        [13.0, False, 8.0, False, False],
        [13.0, False, 8.0, False, False],
    ]


def die(ranks: Ranks, where: str) -> list[Any]:
    param = half(1.0)
    optimizer = sgd([param], process_group=ranks.all)
    optimizer.backward(param.float().sum())
    optimizer.step()
    begin = time.monotonic()

    def go_on() -> None:
        if ranks.rank == 2 and where == "before the update":
            os._exit(1)
        optimizer.backward(param.float().sum())
        if ranks.rank == 2:
            os._exit(1)
        optimizer.clip_master_grads(1.0)

    return [error_of(go_on), time.monotonic() - begin, param.item()]


@pytest.mark.parametrize("where", ["before the update", "before the clipping"])
def test_a_process_that_dies_ends_the_others(pool: ProcessPool, where: str) -> None:
    found = pool.run_last(die, where)
    assert found.pop(2) is None
    for error, seconds, weight in found:
        # It is gloo's. Whoever waits for one that waited for the dead learns of it
        # when that one ends in turn.
        assert re.match(r"RuntimeError: .*[Cc]onnection", error, re.DOTALL)
        assert seconds < SECONDS / 2
        assert weight == 1 - 2.0**-4
