"""BufferGuard: buffers of a model after steps that were skipped, and those that were
not."""

import copy
import gc
import io
import pickle
import re
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from fp16core import BufferGuard, FP16_Optimizer, LossScaleError
from helpers import HALF_DTYPES, INF, NAN, assert_same, copy_of, half, train


class Net(torch.nn.Module):
    """Half layers around a BatchNorm, and buffers of other kinds."""

    constant: torch.Tensor
    average: torch.Tensor
    first_batch: torch.Tensor | None

    def __init__(self, dtype: torch.dtype = torch.float16) -> None:
        super().__init__()
        self.last = torch.nn.Linear(3, 1).to(dtype)
        self.inner = torch.nn.Sequential(
            torch.nn.Linear(2, 3).to(dtype), torch.nn.BatchNorm1d(3).to(dtype)
        )
        self.register_buffer("constant", torch.ones(1).expand(4))
        self.register_buffer("average", torch.zeros(2, dtype=torch.float64), False)
        self.register_buffer("first_batch", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            # Replaced rather than written, as many write it.
            self.average = 0.5 * self.average + 0.5 * x.double().mean(0)
            if self.first_batch is None:
                self.first_batch = x.clone()
        y: torch.Tensor = self.last(self.inner(x.to(self.last.weight.dtype)))
        return y


def wrap(model: torch.nn.Module, **kwargs: Any) -> FP16_Optimizer:
    inner = torch.optim.SGD(model.parameters(), lr=2.0**-4)
    return FP16_Optimizer(inner, static_loss_scale=4.0, verbose=False, **kwargs)


def buffers(model: torch.nn.Module) -> Any:
    """Return a copy of all buffers, those that are not saved among them."""
    return copy_of(
        {
            f"{prefix}.{name}": buffer
            for prefix, module in model.named_modules()
            for name, buffer in module._buffers.items()
        }
    )


def batch(factor: float = 1.0) -> torch.Tensor:
    return torch.randn(4, 2) * factor


def run(model: torch.nn.Module, optimizer: FP16_Optimizer, factor: float = 1.0) -> None:
    train(optimizer, model(batch(factor)).float().pow(2).sum())


@pytest.fixture
def net() -> Net:
    return Net()


@pytest.mark.parametrize("bad", [INF, NAN])
@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
def test_a_skipped_step_leaves_buffers_as_before(
    dtype: torch.dtype, bad: float
) -> None:
    net = Net(dtype)
    optimizer = wrap(net)
    BufferGuard(net, optimizer)
    for _ in range(3):
        run(net, optimizer)
    before = buffers(net)
    for _ in range(2):
        run(net, optimizer, bad)
        assert optimizer.overflow
        assert_same(buffers(net), before)
    assert before[".average"].isfinite().all()


def test_a_skipped_first_step_takes_back_what_was_not_there() -> None:
    net = Net()
    optimizer = wrap(net)
    BufferGuard(net, optimizer)
    before = buffers(net)
    assert before[".first_batch"] is None
    run(net, optimizer, INF)
    assert_same(buffers(net), before)


def test_applied_steps_are_those_without_a_guard() -> None:
    results = []
    for guarded in (False, True):
        torch.manual_seed(3)
        net = Net()
        optimizer = wrap(net)
        if guarded:
            BufferGuard(net, optimizer)
        for _ in range(4):
            run(net, optimizer)
        results.append([copy_of(list(net.parameters())), buffers(net)])
    assert_same(results[1], results[0])
    assert results[0][1]["inner.1.num_batches_tracked"] == 4


def test_training_with_skips_is_training_without_the_bad_batches(net: Net) -> None:
    twin = copy.deepcopy(net)
    optimizer, other = wrap(net), wrap(twin)
    BufferGuard(net, optimizer)
    for factor in (1.0, INF, 2.0, NAN, NAN, 0.5):
        x = batch()
        train(optimizer, net(x * factor).float().pow(2).sum())
        if not optimizer.overflow:
            train(other, twin(x * factor).float().pow(2).sum())
    assert_same(buffers(net), buffers(twin))
    assert_same(list(net.parameters()), list(twin.parameters()))


@pytest.mark.parametrize("bad_at", range(3))
@pytest.mark.parametrize("taken", [True, False], ids=["naive", "delayed"])
def test_all_passes_of_a_step_are_taken_back(
    net: Net, taken: bool, bad_at: int
) -> None:
    optimizer = wrap(net)
    BufferGuard(net, optimizer)
    run(net, optimizer)
    before = buffers(net)
    optimizer.zero_grad()
    for micro_batch in range(3):
        factor = INF if micro_batch == bad_at else 1.0
        optimizer.backward(net(batch(factor)).float().sum(), taken)
    optimizer.update_master_grads()
    optimizer.step()
    assert optimizer.overflow
    assert_same(buffers(net), before)


def test_buffers_keep_their_identity(net: Net) -> None:
    optimizer = wrap(net)
    BufferGuard(net, optimizer)
    average, mean = net.average, net.inner[1].running_mean
    run(net, optimizer, INF)
    assert net.average is average
    assert net.inner[1].running_mean is mean


def test_writes_between_steps_are_kept(net: Net) -> None:
    optimizer = wrap(net)
    BufferGuard(net, optimizer)
    run(net, optimizer)
    run(net, optimizer, INF)
    net.inner[1].load_state_dict(
        {k: v + 1 for k, v in net.inner[1].state_dict().items()}
    )
    before = buffers(net)
    run(net, optimizer, INF)
    assert_same(buffers(net), before)


def test_a_model_of_another_dtype_is_copied_anew(net: Net) -> None:
    optimizer = wrap(net)
    BufferGuard(net, optimizer)
    run(net, optimizer)
    net.inner[1].running_mean.data = net.inner[1].running_mean.data.double()
    net.inner[1].running_var.data = net.inner[1].running_var.data + 2.0**-8
    net.inner[1].running_mean.data = net.inner[1].running_mean.data.half()
    net.average = net.average.float()
    before = buffers(net)
    run(net, optimizer, INF)
    assert_same(buffers(net), before)


def test_evaluation_takes_no_copy(net: Net) -> None:
    optimizer = wrap(net)
    BufferGuard(net, optimizer)
    net.eval()
    net(batch())
    # Changed by hand after the pass, which is not the guard's business.
    net.average.fill_(2.0)
    optimizer.overflow = True
    optimizer.step()
    assert_same(net.average, torch.full((2,), 2.0, dtype=torch.float64))


def test_evaluation_between_passes_changes_nothing(net: Net) -> None:
    optimizer = wrap(net)
    BufferGuard(net, optimizer)
    before = buffers(net)
    loss = net(batch(INF)).float().sum()
    net.eval()
    net(batch())
    net.train()
    train(optimizer, loss)
    assert_same(buffers(net), before)


@pytest.mark.parametrize("skipped", range(2))
def test_any_of_several_optimizers_may_skip(net: Net, skipped: int) -> None:
    optimizers = [wrap(net.inner), wrap(net.last)]
    BufferGuard(net, *optimizers)
    for _ in range(2):
        before = buffers(net)
        net(batch())
        for number, optimizer in enumerate(optimizers):
            optimizer.overflow = number == skipped
            optimizer.step()
        assert_same(buffers(net), before)
    assert optimizers[1 - skipped].steps_applied == 2


def test_two_models_have_guards_of_their_own() -> None:
    first, second = Net(), Net()
    optimizers = wrap(first), wrap(second)
    BufferGuard(first, optimizers[0])
    BufferGuard(second, optimizers[1])
    before = buffers(first)
    run(first, optimizers[0], INF)
    run(second, optimizers[1])
    assert_same(buffers(first), before)
    assert second.inner[1].num_batches_tracked == 1


def test_a_part_of_a_model_may_be_guarded(net: Net) -> None:
    optimizer = wrap(net)
    BufferGuard(net.inner, optimizer)
    before = buffers(net.inner)
    run(net, optimizer, INF)
    assert_same(buffers(net.inner), before)
    assert not net.average.isfinite().all()


@pytest.fixture
def process_group() -> Iterator[None]:
    """A group of this process alone."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("outside", [True, False], ids=["wrapper", "module"])
@pytest.mark.usefixtures("process_group")
def test_data_parallel_models(net: Net, outside: bool) -> None:
    net.constant = torch.ones(4)  # no collective writes to an expanded tensor
    parallel = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = wrap(net)
    BufferGuard(parallel if outside else net, optimizer)
    run(parallel, optimizer)
    before = buffers(net)
    run(parallel, optimizer, INF)
    assert_same(buffers(net), before)


def test_compiled_models(net: Net) -> None:
    compiled: Any = torch.compile(net, backend="eager")
    compiled(batch())  # before there is a guard
    optimizer = wrap(net)
    BufferGuard(compiled, optimizer)
    for factor in (1.0, INF, 1.0, INF):
        before = buffers(net)
        run(compiled, optimizer, factor)
        assert optimizer.overflow is (factor == INF)
        if optimizer.overflow:
            assert_same(buffers(net), before)
        else:
            assert not torch.equal(net.average, before[".average"])


def closure_of(
    net: Net, optimizer: FP16_Optimizer, x: torch.Tensor, factors: Iterator[float]
) -> Callable[[], torch.Tensor]:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(x * next(factors)).float().pow(2).sum()
        optimizer.backward(loss)
        return loss

    return closure


def test_a_repeated_evaluation_starts_from_clean_buffers(net: Net) -> None:
    twin = copy.deepcopy(net)
    optimizer, other = (
        FP16_Optimizer(
            torch.optim.SGD(model.parameters(), lr=0.25),
            dynamic_loss_scale=True,
            dynamic_loss_args={"init_scale": 16.0},
            verbose=False,
        )
        for model in (net, twin)
    )
    BufferGuard(net, optimizer)
    x = batch()
    optimizer.step(closure_of(net, optimizer, x, iter([INF, NAN, 1.0])))
    assert (optimizer.steps_applied, optimizer.loss_scale) == (1, 4.0)
    other.step(closure_of(twin, other, x, iter([1.0])))
    assert_same(buffers(net), buffers(twin))


def test_a_closure_that_skips_leaves_buffers_as_before(net: Net) -> None:
    optimizer = wrap(net)
    BufferGuard(net, optimizer)
    before = buffers(net)
    optimizer.step(closure_of(net, optimizer, batch(), iter([INF])))
    assert optimizer.steps_skipped == 1
    assert_same(buffers(net), before)


def test_a_step_that_raised_is_taken_back_by_hand(net: Net) -> None:
    optimizer = wrap(net, on_min_scale="raise")
    guard = BufferGuard(net, optimizer)
    guard.restore()  # there was no pass yet
    before = buffers(net)
    with pytest.raises(LossScaleError):
        run(net, optimizer, INF)
    guard.restore()
    assert_same(buffers(net), before)
    # The next pass counts as a first one.
    net.average.fill_(3.0)
    before = buffers(net)
    with pytest.raises(LossScaleError):
        run(net, optimizer, INF)
    guard.restore()
    assert_same(buffers(net), before)


@pytest.mark.parametrize("by", ["remove", "with"])
def test_once_removed_it_does_nothing(net: Net, by: str) -> None:
    optimizer = wrap(net)
    if by == "with":
        with BufferGuard(net, optimizer) as guard:
            assert isinstance(guard, BufferGuard)
            run(net, optimizer)
    else:
        guard = BufferGuard(net, optimizer)
        run(net, optimizer)
        guard.remove()
    guard.remove()
    run(net, optimizer, INF)
    assert not net.average.isfinite().all()
    assert not net._forward_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_removed_between_a_pass_and_its_step_it_leaves_buffers_alone(net: Net) -> None:
    optimizer = wrap(net)
    guard = BufferGuard(net, optimizer)
    loss = net(batch(INF)).float().sum()
    guard.remove()
    guard.restore()
    train(optimizer, loss)
    assert not net.average.isfinite().all()


def test_it_keeps_neither_model_nor_optimizer_alive() -> None:
    gc.disable()
    try:
        net = Net()
        optimizer = wrap(net)
        guard = BufferGuard(net, optimizer)
        run(net, optimizer, INF)
        ends = weakref.ref(net), weakref.ref(optimizer)
        del net, optimizer
        assert [end() for end in ends] == [None, None]
        guard.remove()
    finally:
        gc.enable()


@pytest.mark.parametrize("copier", ["deepcopy", "pickle", "average", "save"])
def test_copies_of_the_model_have_no_guard(net: Net, copier: str) -> None:
    optimizer = wrap(net)
    BufferGuard(net, optimizer)
    run(net, optimizer)
    if copier == "deepcopy":
        twin: Any = copy.deepcopy(net)
    elif copier == "pickle":
        twin = pickle.loads(pickle.dumps(net))
    elif copier == "average":
        twin = torch.optim.swa_utils.AveragedModel(net).module
    else:
        file = io.BytesIO()
        torch.save(net, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    assert_same(buffers(twin), buffers(net))
    before = buffers(net)
    run(net, optimizer, INF)
    twin(batch(INF))
    assert_same(buffers(net), before)
    assert not twin.average.isfinite().all()


def test_storage_of_the_copies_is_used_again(net: Net) -> None:
    class Kept(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.norm(x)
            return y

    model = Kept()
    guard = BufferGuard(model, wrap(model))
    addresses = []
    for _ in range(2):
        guard._is_stale = True
        model(batch())
        addresses.append([c.data_ptr() for c in guard._copies._copies])
    assert len(addresses[0]) == 3
    assert addresses[0] == addresses[1]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            lambda: ([half(1.0)], wrap(Net())),
            "model must be a torch.nn.Module, but got list",
        ),
        (
            lambda: (Net(), torch.optim.SGD([half(1.0)])),
            "optimizers must be FP16_Optimizers, but got SGD",
        ),
        (
            lambda: (Net(), wrap(Net()), None),
            "optimizers must be FP16_Optimizers, but got NoneType",
        ),
    ],
)
def test_what_cannot_be_guarded_is_refused(arguments: Any, message: str) -> None:
    given = arguments()
    with pytest.raises(TypeError, match=f"^BufferGuard: {re.escape(message)}$"):
        BufferGuard(*given)
    model = given[0]
    assert not getattr(model, "_forward_pre_hooks", None)
