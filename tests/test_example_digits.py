"""The C++ example: builds as an outside project, trains, resumes exactly, refuses bad
arguments, and leaves a checkpoint with which Python ends where C++ did."""

import math
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from commands import configure, program, run
from fp16core import FP16_Optimizer

SOURCE = Path(__file__).resolve().parents[1] / "examples" / "cpp"
EPOCHS = 4
TRAINING_IMAGES = 1397
# The last of 44 batches an epoch is a smaller one.
STEPS = EPOCHS * 44
PARAMETERS = sum(
    outputs * (inputs * size * size + 1)
    for inputs, outputs, size in [(1, 16, 3), (16, 32, 3), (32, 64, 3), (64, 10, 4)]
)


@pytest.fixture(scope="session")
def example(prefix: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, built against the wheel with warnings as errors."""
    build = tmp_path_factory.mktemp("digits") / "build"
    result = configure(
        SOURCE,
        build,
        prefix,
        # What runs long is torch's.
        "-DCMAKE_CXX_FLAGS_RELEASE=-O0",
        "-DCMAKE_CXX_FLAGS=-Wall -Wextra -Werror",
    )
    assert result.returncode == 0, result.stdout
    result = run(program("cmake"), "--build", build, cwd=build)
    assert result.returncode == 0, result.stdout
    return build / "train_digits"


def run_example(example: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    # Threads that wait for each other without spinning: the suite may share its
    # processors with other work.
    passive = ("env", "OMP_WAIT_POLICY=passive")
    return run(*passive, example, "--threads", 2, *arguments, cwd=example.parent)


@dataclass
class Trained:
    output: str
    checkpoint: Path

    def row(self, label: str) -> list[str]:
        """Returns the fp32 and the fp16 cell of one row of the table."""
        pattern = rf"^{re.escape(label)} +(\S+) +(\S+)$"
        match = re.search(pattern, self.output, re.MULTILINE)
        assert match, self.output
        return list(match.groups())

    def numbers(self, label: str) -> list[float]:
        return [float(cell) for cell in self.row(label)]


@pytest.fixture(scope="session")
def trained(example: Path) -> Trained:
    """A short run of the program."""
    checkpoint = example.parent / "digits.pt"
    result = run_example(
        example, "--epochs", EPOCHS, "--checkpoint", checkpoint, "--allowed-gap", 10
    )
    assert result.returncode == 0, result.stdout
    return Trained(result.stdout, checkpoint)


def test_the_table_tells_of_both_runs(trained: Trained) -> None:
    # Guessing is right for one digit in ten.
    assert min(trained.numbers("test accuracy, %")) > 80
    assert max(trained.numbers("test loss")) < math.log(10) / 3
    assert min(trained.numbers("time per step, ms")) > 0

    assert trained.numbers("parameters, bytes") == [4 * PARAMETERS, 2 * PARAMETERS]
    # Two moments in fp32, and the masters.
    state = trained.numbers("optimizer state with masters, bytes")
    assert state == [8 * PARAMETERS, 12 * PARAMETERS]

    # The scale of 2^32 overflows at once and is halved at every skip. A hundred good
    # steps in a row double it, and may be followed by a skip.
    nothing, skipped = trained.row("skipped steps")
    assert nothing == "-"
    assert 10 < int(skipped) < 30
    nothing, scale = trained.row("final loss scale")
    assert nothing == "-"
    halved = 32 - int(skipped)
    assert scale in {f"2^{halved}", f"2^{halved + 1}"}


def test_progress_is_a_few_lines_where_nobody_looks_on(trained: Trained) -> None:
    assert "\r" not in trained.output
    for name, lines in (("fp32", 4), ("fp16", 4 + 2)):
        found = re.findall(
            rf"^{name}: step (\d+) of {STEPS}, loss \d+\.\d+"
            + (r", scale 2\^\d+$" if name == "fp16" else "$"),
            trained.output,
            re.MULTILINE,
        )
        assert len(found) == lines, trained.output
        assert found[-1] == str(STEPS)


def test_the_resumed_run_is_exact(trained: Trained) -> None:
    middle = f"Resuming the fp16 run from {trained.checkpoint}, after epoch 2 of 4."
    assert middle in trained.output
    assert (
        "The resumed run ends with the same weights, masters and loss scale, bit for "
        "bit."
    ) in trained.output


def test_too_large_a_gap_fails(example: Path, tmp_path: Path) -> None:
    # Seven steps an epoch: the fp16 run spends all of them on finding its scale.
    lines = (SOURCE / "digits.txt").read_text().splitlines(keepends=True)
    data = tmp_path / "few.txt"
    data.write_text("".join(lines[:200] + lines[-400:]))
    result = run_example(
        example, "--epochs", 2, "--data", data, "--checkpoint", tmp_path / "few.pt"
    )
    assert result.returncode == 1, result.stdout
    assert re.search(
        r"^train_digits: the test accuracy in fp16 must be at most 2 points below that "
        r"in fp32, but is \d+\.\d\d below$",
        result.stdout,
        re.MULTILINE,
    ), result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--epochs", "1"], "--epochs must be a whole number of at least 2, but got"),
        (["--epochs", "3x"], "of at least 2, but got '3x'"),
        (["--epochs"], "--epochs needs a value"),
        (["--seed", "-1"], "--seed must be a whole number of at least 0, but got '-1'"),
        (["--threads", "0"], "--threads must be a whole number of at least 1"),
        (["--allowed-gap", "nan"], "must be a number from 0 to 100, but got 'nan'"),
        (["--speed", "9"], "unknown option '--speed'; --help lists them"),
        (["--data", "/nowhere"], "cannot read the digits in /nowhere"),
    ],
)
def test_a_bad_argument_is_an_error(
    example: Path, arguments: list[str], message: str
) -> None:
    result = run_example(example, *arguments)
    assert result.returncode == 1
    (line,) = result.stdout.splitlines()
    assert line.startswith("train_digits: ")
    assert message in line


def test_a_damaged_line_is_named(example: Path, tmp_path: Path) -> None:
    data = tmp_path / "bad.txt"
    data.write_text(f"3 {'0' * 64}\n3 {'0' * 63}h\n")
    result = run_example(example, "--data", data)
    assert result.returncode == 1
    assert f"{data}, line 2: must be a digit, a space and 64 pixels" in result.stdout


def test_help_lists_the_options(example: Path) -> None:
    result = run_example(example, "--help")
    assert result.returncode == 0
    options = set(re.findall(r"^  (--[a-z-]+)", result.stdout, re.MULTILINE))
    assert options == {
        "--epochs",
        "--seed",
        "--threads",
        "--checkpoint",
        "--data",
        "--allowed-gap",
        "--help",
    }


# The same in Python, from the checkpoint on.


class Network(nn.Module):
    def __init__(self, upcast: bool) -> None:
        super().__init__()
        self.upcast = upcast
        self.edges = nn.Conv2d(1, 16, 3, padding=1)
        self.strokes = nn.Conv2d(16, 32, 3, padding=1)
        self.shapes = nn.Conv2d(32, 64, 3, padding=1)
        self.digits = nn.Conv2d(64, 10, 4)

    def convolve(self, layer: nn.Conv2d, x: Tensor) -> Tensor:
        if not self.upcast:
            return layer(x)
        weight, bias = layer.weight.float(), layer.bias.float()
        return F.conv2d(x.float(), weight, bias, padding=layer.padding).half()

    def forward(self, x: Tensor) -> Tensor:
        x = self.convolve(self.edges, x).relu()
        x = F.max_pool2d(self.convolve(self.strokes, x).relu(), 2)
        x = self.convolve(self.shapes, x).relu()
        return self.convolve(self.digits, x).flatten(1)


def read_digits() -> tuple[Tensor, Tensor]:
    lines = (SOURCE / "digits.txt").read_text().splitlines()
    pixels = [[int(pixel, 17) for pixel in line[2:]] for line in lines]
    images = torch.tensor(pixels).div(16).half().view(-1, 1, 8, 8)
    return images, torch.tensor([int(line[0]) for line in lines])


def test_python_goes_on_from_the_checkpoint(trained: Trained) -> None:
    checkpoint = torch.load(trained.checkpoint)
    network = Network("convolves in fp32" in trained.output).half()
    optimizer = FP16_Optimizer(
        torch.optim.AdamW(network.parameters()),
        dynamic_loss_scale=True,
        verbose=False,
    )
    network.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    sampler = torch.Generator()
    sampler.set_state(checkpoint["sampler"])
    assert checkpoint["epoch"] == EPOCHS // 2
    assert optimizer.steps_applied + optimizer.steps_skipped == STEPS // 2
    for group, masters in zip(
        optimizer.fp16_groups, optimizer.fp32_from_fp16_groups, strict=True
    ):
        for weight, master in zip(group, masters, strict=True):
            assert torch.equal(weight, master.half())

    images, labels = read_digits()
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    for epoch in range(checkpoint["epoch"], EPOCHS):
        factor = 0.55 + 0.45 * math.cos(math.pi * epoch / EPOCHS)
        optimizer.param_groups[0]["lr"] = 2e-3 * factor
        for batch in torch.randperm(TRAINING_IMAGES, generator=sampler).split(32):
            loss = F.cross_entropy(network(images[batch]).float(), labels[batch])
            optimizer.zero_grad()
            optimizer.backward(loss)
            optimizer.clip_master_grads(1.0)
            optimizer.step()
    with torch.no_grad():
        scores = network(images[TRAINING_IMAGES:]).float()
    torch.set_num_threads(threads)

    # Python's run is C++'s, so it ends with the numbers of the table.
    labels = labels[TRAINING_IMAGES:]
    accuracy = scores.argmax(1).eq(labels).double().mean().item()
    loss = F.cross_entropy(scores, labels).item()
    assert [
        f"{100 * accuracy:.2f}",
        f"{loss:.4f}",
        str(optimizer.steps_skipped),
        f"2^{math.log2(optimizer.loss_scale):.0f}",
    ] == [
        trained.row(label)[1]
        for label in (
            "test accuracy, %",
            "test loss",
            "skipped steps",
            "final loss scale",
        )
    ]
