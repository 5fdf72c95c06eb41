"""What a training run leaves behind, and the table that compares two of them."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

import torch
from char_gpt_model import CharGPT
from torch import Tensor


@dataclass
class Run:
    """What one training run left behind."""

    losses: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    step_times: list[float] = field(default_factory=list)
    optimizer_times: list[float] = field(default_factory=list)
    final_scale: float | None = None
    validation_loss: float = math.nan
    parameter_bytes: int = 0
    optimizer_bytes: int = 0
    activation_bytes: int = 0

    def note(
        self,
        loss: float,
        scale: float,
        skipped: bool,
        started: float,
        differentiated: float,
        finished: float,
    ) -> None:
        """Takes down one step: the scale it used, and the clock at its start, after
        the backward pass and at its end."""
        if skipped:
            self.skipped.append(len(self.losses))
        self.losses.append(loss)
        self.scales.append(scale)
        self.step_times.append(finished - started)
        self.optimizer_times.append(finished - differentiated)


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Returns the bytes of the optimizer's state, fp32 masters included."""
    state = [
        value
        for entry in optimizer.state.values()
        for value in entry.values()
        if isinstance(value, Tensor)
    ]
    masters = getattr(optimizer, "fp32_from_fp16_groups", [])
    return tensor_bytes(state) + tensor_bytes(m for group in masters for m in group)


def activation_bytes(model: CharGPT, batch: Tensor) -> int:
    """Returns the bytes that a forward pass over `batch` keeps for the backward pass,
    parameters aside."""
    kept = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model.loss(batch)
    for parameter in model.parameters():
        kept.pop(parameter.untyped_storage().data_ptr(), None)
    del loss  # The graph keeps every storage alive, so that no address comes twice.
    return sum(kept.values())


def power_of_two(scale: float) -> str:
    return f"2^{math.log2(scale):.0f}"


def print_table(fp32: Run, fp16: Run, unigram: float) -> None:
    rows = [("", "fp32", "fp16")]
    rows += [
        (label, show(fp32), show(fp16))
        for label, show in (
            ("validation loss, nats a character", lambda r: f"{r.validation_loss:.4f}"),
            ("  unigram entropy, for comparison", lambda r: f"{unigram:.4f}"),
            ("parameters, bytes", lambda r: f"{r.parameter_bytes:,}"),
            ("optimizer state with masters, bytes", lambda r: f"{r.optimizer_bytes:,}"),
            ("activations kept, bytes", lambda r: f"{r.activation_bytes:,}"),
            ("skipped steps", lambda r: str(len(r.skipped)) if r.final_scale else "-"),
            (
                "final loss scale",
                lambda r: power_of_two(r.final_scale) if r.final_scale else "-",
            ),
            ("time per step, ms", lambda r: f"{1e3 * median(r.step_times):.1f}"),
            (
                "  of it in the optimizer, ms",
                lambda r: f"{1e3 * median(r.optimizer_times):.1f}",
            ),
        )
    ]
    print()
    for label, left, right in rows:
        print(f"{label:<36}{left:>14}{right:>14}")
    print()
