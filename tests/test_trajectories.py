"""FP16_Optimizer trains bit for bit like a hand-written loop with fp32 masters.

Every optimizer of torch takes part with every variant that torch's own tests give
for the CPU: with its own step, and with the core's where the core has one. Overflows
happen on the way, planted ones and too high scales.
"""

from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from itertools import count
from operator import is_
from typing import Any

import pytest
import torch
from torch.testing._internal.common_optimizers import (
    OptimizerInput,
    _get_optim_inputs_including_global_cliquey_kwargs,
    optim_db,
)

from fp16core import FP16_Optimizer
from helpers import HALF_DTYPES, INF, NAN, ExactRoots, ScaleModel, assert_same

# High enough for real overflows of float16 at the start, and a window so short that
# the scale grows into overflows again later.
INIT_SCALE = 2.0**17
WINDOW = 4
APPLIED_STEPS = 7
MOST_ITERATIONS = 40

# What the core's rules are equal to: torch's fused kernels, or its default loop with
# correctly rounded roots.
ORACLE_OF_RULE = {
    torch.optim.SGD: {"foreach": False, "fused": True},
    torch.optim.Adam: {"foreach": False, "fused": True},
    torch.optim.AdamW: {"foreach": False, "fused": True},
    torch.optim.Adagrad: {"foreach": False, "fused": True},
    torch.optim.RMSprop: {"foreach": False},
    torch.optim.NAdam: {"foreach": False},
    torch.optim.Adamax: {"foreach": False},
}

Groups = list[dict[str, Any]]

own_step_or_default = pytest.mark.parametrize(
    "fused", [False, None], ids=["own_step", "default"]
)


pytestmark = pytest.mark.usefixtures("one_thread")


def inputs(differentiable: bool = False, closure: bool | None = None) -> list[Any]:
    """Return (optimizer class, variant) for the variants of the optimizers."""
    return [
        pytest.param(
            info.optim_cls,
            variant,
            id=f"{info.optim_cls.__name__}-{variant.desc}".replace(" ", "_"),
        )
        for info in optim_db
        if closure is None or info.step_requires_closure == closure
        for variant in _get_optim_inputs_including_global_cliquey_kwargs(
            "cpu", torch.float32, info
        )
        if bool(variant.kwargs.get("differentiable")) == differentiable
    ]


def make_groups(optimizer_class: type, dtype: torch.dtype) -> Groups:
    """Return param groups with all kinds of parameters that the optimizer takes."""
    generator = torch.Generator().manual_seed(7)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    def parameter(data: torch.Tensor, requires_grad: bool = True) -> torch.nn.Parameter:
        return torch.nn.Parameter(data, requires_grad)

    matrix = parameter(values(4, 9).to(dtype))
    native = parameter(values(6, 3))
    if optimizer_class is torch.optim.SparseAdam:
        return [{"params": [matrix]}, {"params": [native]}]
    frozen = parameter(values(2, 3).to(dtype), requires_grad=False)
    if optimizer_class is torch.optim.LBFGS:
        # It takes one group, and gradients only that `view(-1)` takes.
        scalar = parameter(torch.tensor(0.75, dtype=dtype))
        return [{"params": [matrix, frozen, native, scalar]}]
    transposed = parameter(values(5, 7).to(dtype).t())
    first = [matrix, transposed]
    second = [frozen, native]
    if optimizer_class is not torch.optim.Muon:
        # Muon is for matrices.
        first.append(parameter(torch.tensor(0.75, dtype=dtype)))
        second.append(parameter(values(21).to(dtype)))
    return [{"params": first}, {"params": second}]


def trainable(groups: Groups) -> list[torch.Tensor]:
    return [p for group in groups for p in group["params"] if p.requires_grad]


def loss_of(params: list[torch.Tensor], evaluation: int, sparse: bool) -> torch.Tensor:
    """Return the loss of one evaluation: random, bowl-shaped, now and then broken."""
    generator = torch.Generator().manual_seed(evaluation)
    planted = {2: (0, INF), 5: (-1, NAN), 8: (1, -INF)}.get(evaluation)
    total = torch.zeros(())
    for index, param in enumerate(params):
        weights = torch.randn(param.shape, generator=generator)
        if planted and planted[0] % len(params) == index:
            weights.view(-1)[-1] = planted[1]
        if sparse:
            rows = torch.tensor([2, 0, 2, len(param) - 1])
            looked_up = torch.nn.functional.embedding(rows, param, sparse=True)
            total = total + (looked_up.float() * weights[rows]).sum()
        else:
            total = total + (param.float() * weights + param.float() ** 2 / 2).sum()
    return total


class MasterLoop:
    """The hand-written loop: masters, a scale, and the inner optimizer, in torch."""

    def __init__(
        self,
        optimizer_class: type,
        groups: Groups,
        kwargs: dict[str, Any],
        roots: AbstractContextManager[Any],
    ) -> None:
        self.roots = roots
        self.params = trainable(groups)
        self.masters = {
            param: param.detach().float().requires_grad_()
            for param in self.params
            if param.dtype in HALF_DTYPES
        }
        self.optimizer = optimizer_class(
            [
                {**group, "params": [self.masters.get(p, p) for p in group["params"]]}
                for group in groups
            ],
            **deepcopy(kwargs),
        )
        # What an optimizer makes in its constructor it makes in half precision
        # when it is given half parameters.
        over_half = optimizer_class([dict(g) for g in groups], **deepcopy(kwargs))
        for param, master in self.masters.items():
            for name, value in over_half.state.get(param, {}).items():
                is_half = value.dtype in HALF_DTYPES
                self.optimizer.state[master][name] = (
                    value.float() if is_half else value.clone()
                )
        self.scaler = ScaleModel(INIT_SCALE, window=WINDOW)

    def write_model(self) -> None:
        with torch.no_grad():
            for param, master in self.masters.items():
                param.copy_(master)

    def gradients_are_finite(self, loss: torch.Tensor) -> bool:
        """Run backward; put unscaled gradients where the inner optimizer looks."""
        for param in self.params:
            param.grad = None
        (loss * self.scaler.scale).backward()
        # Rows that come twice in a sparse gradient are added up in float32.
        grads = {
            p: p.grad.float().coalesce() if p.grad.is_sparse else p.grad.float()
            for p in self.params
        }
        for grad in grads.values():
            values = grad.values() if grad.is_sparse else grad
            if not torch.isfinite(values).all():
                return False
        for param, grad in grads.items():
            self.masters.get(param, param).grad = grad * (1.0 / self.scaler.scale)
        return True

    def step(self, loss: torch.Tensor) -> bool:
        """Run one iteration and return whether it was applied."""
        finite = self.gradients_are_finite(loss)
        self.scaler.update(not finite)
        if finite:
            with self.roots:
                self.optimizer.step()
            self.write_model()
        return finite

    def step_with_closure(self, make_loss: Any) -> Any:
        """Run one step, repeating every evaluation that overflows."""
        self.scaler.update(False)

        def closure() -> torch.Tensor:
            self.write_model()
            while not self.gradients_are_finite(loss := make_loss()):
                self.scaler.update(True)
            return loss

        result = self.optimizer.step(closure)
        self.write_model()
        return result


def oracle(
    optimizer_class: type, groups: Groups, kwargs: dict[str, Any], fused: bool | None
) -> MasterLoop:
    """Return the loop around the optimizer that the wrapped one has to equal."""
    if fused is False or optimizer_class not in ORACLE_OF_RULE:
        return MasterLoop(optimizer_class, deepcopy(groups), kwargs, nullcontext())
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("torch has no fma without AVX2, and so other bits than the rules")
    kwargs = {**kwargs, **ORACLE_OF_RULE[optimizer_class]}
    return MasterLoop(optimizer_class, deepcopy(groups), kwargs, ExactRoots())


def wrap(
    optimizer_class: type, groups: Groups, kwargs: dict[str, Any], fused: bool | None
) -> Any:
    optimizer = FP16_Optimizer(
        optimizer_class([dict(g) for g in groups], **deepcopy(kwargs)),
        dynamic_loss_scale=True,
        dynamic_loss_args={"init_scale": INIT_SCALE, "scale_window": WINDOW},
        verbose=False,
        fused=fused,
    )
    has_rule = fused is None and optimizer_class in ORACLE_OF_RULE
    assert optimizer.step_mode.startswith("fused " if has_rule else "generic (")
    return optimizer


def without_kernel(optimizer: Any) -> dict[str, Any]:
    """Return the state dict without the options that choose one of torch's kernels."""
    state_dict: dict[str, Any] = optimizer.state_dict()
    for group in state_dict["param_groups"]:
        group.pop("foreach", None)
        group.pop("fused", None)
    return state_dict


def assert_equal_training(
    optimizer: Any, loop: MasterLoop, params: list[torch.Tensor]
) -> None:
    assert_same(params, loop.params, "model")
    inner = optimizer.optimizer
    assert_same(
        [group["params"] for group in inner.param_groups],
        [group["params"] for group in loop.optimizer.param_groups],
        "masters",
    )
    assert_same(without_kernel(inner), without_kernel(loop.optimizer), "inner state")
    assert optimizer.loss_scale == loop.scaler.scale


@own_step_or_default
@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
@pytest.mark.parametrize("optimizer_class, variant", inputs(closure=False))
def test_equals_a_hand_written_loop_bit_for_bit(
    optimizer_class: type,
    variant: OptimizerInput,
    dtype: torch.dtype,
    fused: bool | None,
) -> None:
    groups = make_groups(optimizer_class, dtype)
    loop = oracle(optimizer_class, groups, variant.kwargs, fused)
    params = trainable(groups)
    optimizer = wrap(optimizer_class, groups, variant.kwargs, fused)
    assert_equal_training(optimizer, loop, params)

    sparse = optimizer_class is torch.optim.SparseAdam
    for iteration in range(MOST_ITERATIONS):
        optimizer.zero_grad(set_to_none=iteration % 2 == 0)
        optimizer.backward(loss_of(params, iteration, sparse))
        optimizer.step()
        applied = loop.step(loss_of(loop.params, iteration, sparse))
        assert optimizer.overflow is not applied
        if optimizer.steps_applied == APPLIED_STEPS:
            break
    assert optimizer.steps_applied == APPLIED_STEPS
    assert optimizer.steps_skipped == iteration + 1 - APPLIED_STEPS >= 3
    assert_equal_training(optimizer, loop, params)


@own_step_or_default
@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
@pytest.mark.parametrize("optimizer_class, variant", inputs(closure=True))
def test_equals_a_hand_written_loop_with_a_closure(
    optimizer_class: type,
    variant: OptimizerInput,
    dtype: torch.dtype,
    fused: bool | None,
) -> None:
    groups = make_groups(optimizer_class, dtype)
    loop = oracle(optimizer_class, groups, variant.kwargs, fused)
    params = trainable(groups)
    optimizer = wrap(optimizer_class, groups, variant.kwargs, fused)
    evaluations, evaluations_of_loop = count(), count()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(params, next(evaluations), sparse=False)
        optimizer.backward(loss)
        return loss

    for _ in range(APPLIED_STEPS):
        got = optimizer.step(closure)
        want = loop.step_with_closure(
            lambda: loss_of(loop.params, next(evaluations_of_loop), sparse=False)
        )
        assert_same(got, want, "loss")
    assert optimizer.steps_applied == APPLIED_STEPS
    assert next(evaluations) == next(evaluations_of_loop) > APPLIED_STEPS + 3
    assert_equal_training(optimizer, loop, params)


@pytest.mark.parametrize("optimizer_class, variant", inputs(differentiable=True))
def test_refuses_differentiable_optimizers(
    optimizer_class: type, variant: OptimizerInput
) -> None:
    groups = make_groups(optimizer_class, torch.float16)
    inner = optimizer_class([dict(g) for g in groups], **deepcopy(variant.kwargs))
    with pytest.raises(
        ValueError,
        match="^FP16_Optimizer: init_optimizer must not be differentiable, "
        "but got differentiable=True in group 0$",
    ):
        FP16_Optimizer(inner, verbose=False)
    for group, given in zip(inner.param_groups, groups, strict=True):
        assert all(map(is_, group["params"], given["params"]))
