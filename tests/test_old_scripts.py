"""Small training scripts in the styles that old repositories have, unchanged but for
their imports of apex and Megatron-LM, which are ours."""

import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from fp16core import compat
from helpers import HALF_DTYPES


@pytest.fixture(autouse=True)
def old_modules() -> Iterator[None]:
    compat.install("apex")
    compat.install("megatron")
    yield
    compat.uninstall()


Optimizers = Callable[[list[torch.Tensor]], torch.optim.Optimizer]


class Task:
    """A model whose gradients are exact in half precision, and its fp32 twin.

    Inputs, targets and weights are small multiples of powers of two, so the gradient
    of each batch is the same number whatever precision it is computed in, as long as
    the weights are. Weights move by multiples of 2^-6, which half precision holds.
    """

    def __init__(self, dtype: torch.dtype = torch.float16) -> None:
        torch.manual_seed(0)
        weight = torch.randint(-4, 5, (3, 4)) / 4
        self.weight = torch.nn.Parameter(weight.to(dtype))
        self.scale = torch.nn.Parameter(torch.ones(3))
        self.slopes = torch.randint(-3, 4, (20, 3, 4)) / 4
        self.steps = 0

    def params(self) -> list[torch.nn.Parameter]:
        return [self.weight, self.scale]

    def loss(self, factor: float = 1.0) -> torch.Tensor:
        """Its gradient is the slope of this step, and for the scale a constant."""
        slope = self.slopes[self.steps % 20] * factor
        return (self.weight.float() * slope).sum() + self.scale.sum() * factor / 4

    def gradients(self, step: int, factor: float = 1.0) -> list[torch.Tensor]:
        return [self.slopes[step % 20] * factor, torch.full((3,), factor / 4)]


def twin(
    task: Task,
    make: Optimizers,
    steps: int,
    factors: Callable[[int], float] = lambda step: 1.0,
    clip: float | None = None,
    before: Callable[[torch.optim.Optimizer], Any] | None = None,
) -> list[torch.Tensor]:
    """Train fp32 copies with a plain optimizer; return them."""
    weights = [p.detach().float().clone().requires_grad_() for p in task.params()]
    optimizer = make(weights)
    hook = before(optimizer) if before is not None else None
    for step in range(steps):
        for weight, grad in zip(
            weights, task.gradients(step, factors(step)), strict=True
        ):
            weight.grad = grad.clone()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(weights, clip)
        optimizer.step()
        if hook is not None:
            hook.step()
    return [w.detach() for w in weights]


def check(
    task: Task, optimizer: Any, wanted: list[torch.Tensor], atol: float = 0.0
) -> None:
    """Compare masters and native weights with the fp32 twin, and model with masters."""
    masters = [p.detach() for p in optimizer.param_groups[0]["params"]]
    for got, want in zip(masters, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=atol)
    assert torch.equal(task.weight.detach(), masters[0].to(task.weight.dtype))


def sgd(params: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=2**-4, momentum=0.5)


# Accumulation.


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("naive", [True, False])
def test_two_losses(dtype: torch.dtype, naive: bool) -> None:
    from apex.fp16_utils import FP16_Optimizer

    task = Task(dtype)
    wanted = twin(task, sgd, 5, lambda _: 1.5)
    optimizer = FP16_Optimizer(
        sgd(task.params()), static_loss_scale=128.0, verbose=False
    )
    for task.steps in range(5):
        optimizer.zero_grad()
        if naive:
            optimizer.backward(task.loss())
            optimizer.backward(task.loss(0.5))
        else:
            optimizer.backward(task.loss(), update_master_grads=False)
            optimizer.backward(task.loss(0.5), update_master_grads=False)
            optimizer.update_master_grads()
        optimizer.step()
    check(task, optimizer, wanted)


def test_micro_batches_with_an_update_and_a_clip_each() -> None:
    # As GLM does: only the last update and clip count.
    from fp16 import FP16_Optimizer

    task = Task()
    wanted = twin(task, sgd, 4, lambda _: 1.0, clip=0.5)
    optimizer = FP16_Optimizer(sgd(task.params()), static_loss_scale=64.0)
    for task.steps in range(4):
        optimizer.zero_grad(set_grads_to_None=True)
        for _ in range(4):
            optimizer.backward(task.loss(0.25), update_master_grads=False)
            optimizer.update_master_grads()
            norm = optimizer.clip_master_grads(0.5)
        assert norm > 0.5
        optimizer.step()
    # The clipping coefficients are float64 here and float32 in torch.
    check(task, optimizer, wanted, atol=1e-7)


def test_gradients_reduced_by_hand_between_backward_and_update() -> None:
    from megatron.fp16 import FP16_Optimizer

    task = Task()
    wanted = twin(task, sgd, 3, lambda _: 0.5)
    optimizer = FP16_Optimizer(
        sgd(task.params()),
        dynamic_loss_scale=True,
        dynamic_loss_args={"init_scale": 16},
    )
    for task.steps in range(3):
        optimizer.zero_grad()
        optimizer.backward(task.loss(), update_master_grads=False)
        for group in optimizer.fp16_groups + optimizer.fp32_from_fp32_groups:
            for param in group:
                param.grad.data.div_(2)
        optimizer.update_master_grads()
        optimizer.step()
    check(task, optimizer, wanted)


def test_clip_and_skip_by_the_flag() -> None:
    from apex.fp16_utils import FP16_Optimizer

    task = Task()
    # The third loss overflows at every scale, the fourth step goes on.
    kept = [s for s in range(6) if s != 2]
    optimizer = FP16_Optimizer(
        sgd(task.params()),
        dynamic_loss_scale=True,
        dynamic_loss_args={"init_scale": 2.0**10, "scale_window": 100},
        verbose=False,
    )
    applied = []
    for task.steps in range(6):
        optimizer.zero_grad()
        optimizer.backward(task.loss(1e30 if task.steps == 2 else 1.0))
        if not optimizer.overflow:
            optimizer.clip_master_grads(100.0)
        optimizer.step()
        if not optimizer.overflow:
            applied.append(task.steps)
    assert applied == kept
    assert optimizer.loss_scale == 2.0**9
    reference = Task()
    reference.slopes = reference.slopes[kept]
    check(task, optimizer, twin(reference, sgd, 5))


# Schedulers.


@pytest.mark.parametrize("style", ["wrapper", "inner", "before wrapping"])
def test_schedulers(style: str) -> None:
    from apex.fp16_utils import FP16_Optimizer

    def schedule(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    task = Task()
    wanted = twin(task, sgd, 4, before=schedule)
    inner = sgd(task.params())
    scheduler = schedule(inner) if style == "before wrapping" else None
    optimizer = FP16_Optimizer(inner, static_loss_scale=32.0, verbose=False)
    if scheduler is None:
        target = optimizer if style == "wrapper" else optimizer.optimizer
        scheduler = schedule(target)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for task.steps in range(4):
            optimizer.zero_grad()
            optimizer.backward(task.loss())
            optimizer.step()
            scheduler.step()
    check(task, optimizer, wanted)


# Habits.


def test_a_subclass_with_a_step_and_attributes_of_its_own() -> None:
    from apex.fp16_utils import FP16_Optimizer

    class Counting(FP16_Optimizer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.calls = 0

        def step(self, closure: Any = None) -> Any:
            self.calls += 1
            return super().step(closure)

    task = Task()
    optimizer = Counting(sgd(task.params()), static_loss_scale=8.0, verbose=False)
    for task.steps in range(3):
        optimizer.zero_grad()
        optimizer.backward(task.loss())
        optimizer.step()
    optimizer.note = "anything"
    assert optimizer.calls == 3
    check(task, optimizer, twin(Task(), sgd, 3))


def test_the_signature_of_backward_tells_whose_it_is() -> None:
    from apex.fp16_utils import FP16_Optimizer

    task = Task()
    optimizer = FP16_Optimizer(sgd(task.params()), verbose=False)
    parameters = list(inspect.signature(optimizer.backward).parameters)
    assert parameters[:3] == ["loss", "update_master_grads", "retain_graph"]
    # As fairseq-like trainers do.
    kwargs = (
        {"update_master_grads": False} if "update_master_grads" in parameters else {}
    )
    optimizer.backward(task.loss(), **kwargs)
    optimizer.update_master_grads()
    optimizer.step()
    check(task, optimizer, twin(Task(), sgd, 1))


def test_masters_edited_through_the_state_dict() -> None:
    from fp16 import FP16_Optimizer

    task = Task()
    optimizer = FP16_Optimizer(sgd(task.params()))
    for group in optimizer.state_dict()["fp32_from_fp16"]:
        for master in group:
            master.data.mul_(2)
    optimizer._master_params_to_model_params()
    assert torch.equal(task.weight.detach(), Task().weight.detach() * 2)
    assert torch.equal(optimizer.fp32_from_fp16_groups[0][0], task.weight.float())


def test_the_inner_optimizer_is_read_and_written() -> None:
    from fp16 import FP16_Optimizer

    task = Task()
    optimizer = FP16_Optimizer(sgd(task.params()), static_loss_scale=4.0)
    for group in optimizer.optimizer.param_groups:
        group["lr"] = 2**-3
    optimizer.backward(task.loss())
    optimizer.step()
    check(task, optimizer, twin(Task(), lambda p: torch.optim.SGD(p, lr=2**-3), 1))
    assert len(optimizer.optimizer.state_dict()["state"]) == 2
    params = [p for g in optimizer.param_groups for p in g["params"]]
    assert sum(p.numel() for p in params) == 15


def test_wrapped_before_the_model_turns_half() -> None:
    # As sparse_learning does; its originals trained pure fp16 without a word.
    from apex.fp16_utils import FP16_Optimizer

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3, bias=False)
    model.weight.data = (torch.randint(-4, 5, (3, 4)) / 4).float()
    start = model.weight.detach().clone()
    optimizer = FP16_Optimizer(
        torch.optim.SGD(model.parameters(), lr=2**-13),
        static_loss_scale=16.0,
        verbose=False,
    )
    model.half()
    for _ in range(8):
        optimizer.zero_grad()
        optimizer.backward(model.weight.float().sum())
        optimizer.step()
    master = optimizer.param_groups[0]["params"][0]
    assert master.dtype == torch.float32
    # Half precision near 1 would have lost every step of 2^-13.
    assert torch.equal(master.detach(), start - 2**-10)
    assert torch.equal(model.weight.detach(), (start - 2**-10).half())


def test_lbfgs_with_dynamic_scale() -> None:
    from apex.fp16_utils import FP16_Optimizer

    weight = torch.nn.Parameter(torch.tensor([4.0, -2.0]).half())
    optimizer = FP16_Optimizer(
        torch.optim.LBFGS([weight], lr=1.0, max_iter=6),
        dynamic_loss_scale=True,
        verbose=False,
    )

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (weight.float() - 1.0).pow(2).sum()
        optimizer.backward(loss)
        return loss

    loss = optimizer.step(closure)
    assert loss.item() == 18.0  # of the first evaluation that counts
    assert weight.tolist() == [1.0, 1.0]
    assert optimizer.loss_scale <= 2.0**16


def test_two_optimizers_on_one_graph() -> None:
    from apex.fp16_utils import FP16_Optimizer

    task = Task()
    other = torch.nn.Parameter(torch.ones(2).half())
    first = FP16_Optimizer(sgd(task.params()), static_loss_scale=32.0, verbose=False)
    second = FP16_Optimizer(
        torch.optim.SGD([other], lr=0.25), static_loss_scale=32.0, verbose=False
    )
    for task.steps in range(2):
        first.zero_grad()
        second.zero_grad()
        first.backward(task.loss() + other.float().sum(), update_master_grads=False)
        first.update_master_grads()
        second.update_master_grads()
        first.step()
        second.step()
    check(task, first, twin(Task(), sgd, 2))
    assert other.tolist() == [0.5, 0.5]


def test_scalers_are_asked_and_set_by_hand() -> None:
    from fp16 import FP16_Optimizer
    from fp16.loss_scaler import DynamicLossScaler

    task = Task()
    assert DynamicLossScaler._has_inf_or_nan(torch.tensor([1.0, float("nan")]))
    optimizer = FP16_Optimizer(
        sgd(task.params()), dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 4}
    )
    optimizer.loss_scaler.cur_scale = 64.0
    assert optimizer.loss_scale == 64.0
    optimizer.backward(task.loss())
    optimizer.step()
    check(task, optimizer, twin(Task(), sgd, 1))
    # A checkpoint whose scaler is replaced by the present one, as ParlAI does.
    state = optimizer.state_dict()
    fresh = Task()
    again = FP16_Optimizer(
        sgd(fresh.params()),
        dynamic_loss_scale=True,
        dynamic_loss_args={"init_scale": 8},
    )
    state["loss_scaler"] = again.state_dict()["loss_scaler"]
    again.load_state_dict(state)
    assert again.loss_scale == 8.0
    assert torch.equal(fresh.weight, task.weight)
