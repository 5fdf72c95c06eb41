"""C++ and Python train alike, and go on with each other's checkpoints.

The same network, weights and batches in both languages, 200 steps with overflows on
the way. The C++ side is cpp/tests/cross_language, built as an outside project.
"""

import copy
import pathlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp16core import FP16_Optimizer

STEPS = 200
SPLIT = 90

OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda p: torch.optim.SGD(
        p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, weight_decay=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, lr_decay=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.005, momentum=0.5),
    "centered RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.005, centered=True),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2, history_size=4),
}
FUSED = [name for name in OPTIMIZERS if name != "LBFGS"]
# torch's own loops have the same bits in both languages. Those of Adam, LBFGS and a
# centered RMSprop have not.
GENERIC = ["SGD", "Adagrad", "RMSprop"]

# Name of a run: which optimizer, and how its steps are made.
RUNS = {
    **{name: (name, {}) for name in FUSED},
    **{f"{name}, lean": (name, {"lean": True}) for name in FUSED},
    **{f"{name}, generic": (name, {"generic": True}) for name in GENERIC},
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(6, 16)
        self.out = nn.Linear(16, 3)
        self.scale = nn.Parameter(torch.ones(3))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        def wide(layer: nn.Linear, x: Tensor) -> Tensor:
            return x.mm(layer.weight.float().t()).add(layer.bias.float())

        z = wide(self.out, wide(self.hidden, x).relu()).mul(self.scale)
        return z.sub(y).square().mean()


def half_net(state: dict[str, Tensor]) -> Net:
    net = Net()
    net.load_state_dict(state)
    net.hidden.half()
    net.out.half()
    return net


def wrap(net: Net, name: str, how: dict[str, bool]) -> FP16_Optimizer:
    return FP16_Optimizer(
        OPTIMIZERS[name](net.parameters()),
        dynamic_loss_scale=True,
        dynamic_loss_args={
            "init_scale": 2.0**20,
            "scale_window": 30,
            "delayed_shift": 2,
        },
        verbose=False,
        fused=False if how.get("generic") else None,
        materialize_master_grads=not how.get("lean", False),
    )


def train(
    net: Net,
    optimizer: FP16_Optimizer,
    data: dict[str, Any],
    first: int,
    last: int,
) -> dict[str, Any]:
    """What the C++ side does with a job."""
    losses, scales = [], []
    for step in range(first, last):
        x, y = data["inputs"][step], data["targets"][step]
        evaluated: list[Tensor] = []

        def evaluate(
            x: Tensor = x, y: Tensor = y, evaluated: list[Tensor] = evaluated
        ) -> Tensor:
            optimizer.zero_grad(set_to_none=True)
            loss = net.loss(x, y)
            optimizer.backward(loss)
            optimizer.clip_master_grads(0.5)
            evaluated.append(loss.detach())
            return loss

        if isinstance(optimizer.optimizer, torch.optim.LBFGS):
            optimizer.step(evaluate)
        else:
            evaluate()
            optimizer.step()
        losses.append(evaluated)
        scales.append(optimizer.loss_scale)
    # The state dict holds live tensors.
    return copy.deepcopy(
        {
            "losses": losses,
            "scales": scales,
            "model": {k: v.detach() for k, v in net.state_dict().items()},
            "optimizer": optimizer.state_dict(),
        }
    )


def assert_same(cpp: Any, python: Any, place: str = "") -> None:
    """Compares values of checkpoints, tensors by their bits."""
    if isinstance(python, Tensor):
        assert isinstance(cpp, Tensor) and cpp.dtype == python.dtype, place
        assert torch.equal(cpp.reshape(-1), python.detach().reshape(-1)), place
    elif isinstance(python, dict):
        assert set(cpp) == set(python), place
        for key in python:
            assert_same(cpp[key], python[key], f"{place}.{key}")
    elif isinstance(python, list | tuple):
        assert len(cpp) == len(python), place
        for i, pair in enumerate(zip(cpp, python, strict=True)):
            assert_same(*pair, f"{place}[{i}]")
    else:
        assert cpp == python, place


# What a GradScaler lives through in Python, and then in C++; an x overflows.
BEFORE = "....x.."
AFTER = "....xx......x.."


def torch_scaler(
    iterations: str, state: dict[str, Any] | None = None
) -> tuple[dict[str, Any], list[float], Tensor]:
    """Returns state, scales and weight of torch's own scaler after ``iterations``."""
    weight = torch.zeros(2, requires_grad=True)
    sgd = torch.optim.SGD([weight], 0.5)
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=1024.0, growth_factor=4.0, growth_interval=3
    )
    if state is not None:
        scaler.load_state_dict(state)
    scales = []
    for iteration in iterations:
        sgd.zero_grad()
        loss = weight.sum() * (torch.inf if iteration == "x" else 1.0)
        scaler.scale(loss).backward()
        scaler.step(sgd)
        scaler.update()
        scales.append(scaler.get_scale())
    return scaler.state_dict(), scales, weight.detach()


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    """Weights and batches. A target of one batch in 25 is too large for half."""
    torch.manual_seed(3)
    inputs = torch.randn(STEPS, 32, 6)
    targets = torch.stack([inputs[..., i : i + 2].prod(-1) for i in range(3)], -1)
    targets[7::25] *= 1e9
    return {"model": Net().state_dict(), "inputs": inputs, "targets": targets}


@pytest.fixture(scope="module")
def python_runs(data: dict[str, Any]) -> dict[str, Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    runs = {}
    for run, (name, how) in RUNS.items():
        net = half_net(data["model"])
        runs[run] = train(net, wrap(net, name, how), data, 0, STEPS)
    torch.set_num_threads(threads)
    return runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("cross_language")


@pytest.fixture(scope="module")
def cpp_runs(
    cross_language: Any, data: dict[str, Any], folder: pathlib.Path
) -> dict[str, Any]:
    """What C++ makes of all runs: whole ones, first halves that are saved, and second
    halves that begin with what Python saved."""
    jobs: dict[str, Any] = {}
    for number, (run, (name, how)) in enumerate(RUNS.items()):
        net = half_net(data["model"])
        optimizer = wrap(net, name, how)
        train(net, optimizer, data, 0, SPLIT)
        saved = folder / f"python_{number}.pt"
        torch.save(
            {"model": net.state_dict(), "optimizer": optimizer.state_dict()}, saved
        )
        job = {"optimizer": name, **how}
        cpp_saved = str(folder / f"cpp_{number}.pt")
        jobs[run] = {**job, "first": 0, "last": STEPS}
        jobs[f"{run}, saved"] = {**job, "first": 0, "last": SPLIT, "save": cpp_saved}
        jobs[f"{run}, loaded"] = {
            **job,
            "first": SPLIT,
            "last": STEPS,
            "load": str(saved),
        }
    # LBFGS has state of its own kind, which is only passed on.
    net = half_net(data["model"])
    optimizer = wrap(net, "LBFGS", {})
    train(net, optimizer, data, 0, SPLIT)
    torch.save(
        {"model": net.state_dict(), "optimizer": optimizer.state_dict()},
        folder / "lbfgs.pt",
    )
    jobs["LBFGS"] = {
        "optimizer": "LBFGS",
        "first": SPLIT,
        "last": SPLIT,
        "load": str(folder / "lbfgs.pt"),
        "save": str(folder / "cpp_lbfgs.pt"),
    }
    scaler = {"state": torch_scaler(BEFORE)[0], "iterations": AFTER}
    torch.save({**data, "jobs": jobs, "grad_scaler": scaler}, folder / "jobs.pt")
    result = cross_language(folder / "jobs.pt", folder / "results.pt")
    assert result.returncode == 0, result.stdout
    results: dict[str, Any] = torch.load(folder / "results.pt")
    return results


def compare(cpp: dict[str, Any], python: dict[str, Any], first: int) -> None:
    assert cpp["scales"] == python["scales"][first:]
    assert_same(cpp["losses"], python["losses"][first:], "losses")
    assert_same(cpp["model"], python["model"], "model")
    assert_same(cpp["optimizer"], python["optimizer"], "optimizer")


@pytest.mark.parametrize("run", RUNS)
def test_both_languages_have_the_same_bits(
    run: str, cpp_runs: dict[str, Any], python_runs: dict[str, Any]
) -> None:
    cpp, python = cpp_runs[run], python_runs[run]
    assert cpp["mode"].startswith("generic" if "generic" in run else "fused")
    assert python["optimizer"]["steps_skipped"] > 8
    assert python["optimizer"]["steps_applied"] > 150
    assert len(set(python["scales"])) > 3
    compare(cpp, python, 0)


@pytest.mark.parametrize("run", RUNS)
def test_cpp_goes_on_with_a_checkpoint_of_python(
    run: str, cpp_runs: dict[str, Any], python_runs: dict[str, Any]
) -> None:
    compare(cpp_runs[f"{run}, loaded"], python_runs[run], SPLIT)


@pytest.mark.parametrize(("number", "run"), list(enumerate(RUNS)))
@pytest.mark.usefixtures("one_thread")
def test_python_goes_on_with_a_checkpoint_of_cpp(
    number: int,
    run: str,
    data: dict[str, Any],
    folder: pathlib.Path,
    cpp_runs: dict[str, Any],
    python_runs: dict[str, Any],
) -> None:
    name, how = RUNS[run]
    net = half_net(data["model"])
    optimizer = wrap(net, name, how)
    checkpoint = torch.load(folder / f"cpp_{number}.pt")
    net.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    resumed = train(net, optimizer, data, SPLIT, STEPS)
    compare(resumed, python_runs[run], SPLIT)


@pytest.mark.usefixtures("cpp_runs")
def test_the_state_of_lbfgs_passes_through_cpp(
    data: dict[str, Any], folder: pathlib.Path
) -> None:
    python = torch.load(folder / "lbfgs.pt")
    cpp = torch.load(folder / "cpp_lbfgs.pt")
    state = python["optimizer"]["optimizer_state_dict"]["state"][0]
    assert len(state["old_dirs"]) == 4
    # Scratch memory, which a step fills before it reads it.
    del state["al"]
    assert_same(cpp, python)
    net = half_net(data["model"])
    optimizer = wrap(net, "LBFGS", {})
    optimizer.load_state_dict(cpp["optimizer"])
    net.load_state_dict(cpp["model"])
    resumed = train(net, optimizer, data, SPLIT, SPLIT + 5)
    net = half_net(data["model"])
    optimizer = wrap(net, "LBFGS", {})
    optimizer.load_state_dict(torch.load(folder / "lbfgs.pt")["optimizer"])
    net.load_state_dict(python["model"])
    assert_same(resumed, train(net, optimizer, data, SPLIT, SPLIT + 5))


def test_a_grad_scaler_goes_on_in_the_other_language(cpp_runs: dict[str, Any]) -> None:
    before, _, _ = torch_scaler(BEFORE)
    state, scales, weight = torch_scaler(AFTER, before)
    cpp = cpp_runs["grad_scaler"]
    assert cpp["scales"] == scales
    assert cpp["state"] == state
    assert torch.equal(cpp["weight"], weight)
    assert torch_scaler(AFTER, cpp["state"])[1] == torch_scaler(AFTER, state)[1]
