"""Trains a small character-level GPT on Python's own documentation, once in fp32 and
once in fp16 with FP16_Optimizer, and compares the two."""

import argparse
import logging
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from statistics import median
from time import perf_counter

import torch
from char_gpt_model import CharGPT, UpcastProduct, time_product
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR
from tqdm import trange
from training_picture import draw

from fp16core import FP16_Optimizer

CONTEXT = 64
BATCH = 16
LEARNING_RATE = 4e-3
MAX_NORM = 1.0


@dataclass
class Run:
    """What one training run left behind."""

    losses: list[float] = field(default_factory=list)
    # The loss scale of every step, and last the one that the next step would use.
    scales: list[float] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    step_times: list[float] = field(default_factory=list)
    optimizer_times: list[float] = field(default_factory=list)
    validation_loss: float = math.nan
    parameter_bytes: int = 0
    optimizer_bytes: int = 0
    activation_bytes: int = 0


def read_text() -> tuple[Tensor, Tensor, int]:
    """Returns training and validation text as character numbers, and the number of
    different characters."""
    text = "\n".join(topics.values())
    number = {character: i for i, character in enumerate(sorted(set(text)))}
    numbers = torch.tensor([number[character] for character in text])
    train, validation = numbers.tensor_split([len(numbers) * 9 // 10])
    return train, validation, len(number)


def learning_rate_factor(step: int, steps: int) -> float:
    """Linear warm-up over a tenth of the run, then a cosine down to a tenth."""
    warm_up = min(1.0, (step + 1) / max(1.0, 0.1 * steps))
    return warm_up * (0.55 + 0.45 * math.cos(math.pi * step / steps))


def train(
    text: Tensor, model: CharGPT, half: bool, steps: int, seed: int
) -> tuple[Run, torch.optim.Optimizer]:
    """Trains `model`: the lines under `if half` are all that fp16 changes."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    if half:
        # A short run: try a larger scale after 100 good steps, not after 1000.
        optimizer = FP16_Optimizer(
            optimizer,
            dynamic_loss_scale=True,
            dynamic_loss_args={"scale_window": 100},
            verbose=False,
        )
    scheduler = LambdaLR(optimizer, lambda step: learning_rate_factor(step, steps))
    sampler = torch.Generator().manual_seed(seed)
    run = Run()
    bar = trange(steps, desc="fp16" if half else "fp32", unit="step")
    for step in bar:
        starts = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=sampler)
        batch = text[starts + torch.arange(CONTEXT + 1)]
        if half:
            run.scales.append(optimizer.loss_scale)

        started = perf_counter()
        loss = model.loss(batch)
        # `optimizer.backward(loss)` alone would update the master gradients as well;
        # here the clock stands between the two.
        if half:
            optimizer.backward(loss, update_master_grads=False)
        else:
            loss.backward()
        differentiated = perf_counter()
        if half:
            optimizer.update_master_grads()
            optimizer.clip_master_grads(MAX_NORM)
        else:
            clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        skipped = half and optimizer.overflow
        if not skipped:
            # The schedule waits too: no part of the warm-up is spent on skipped steps.
            scheduler.step()
        optimizer.zero_grad()
        finished = perf_counter()

        run.losses.append(loss.item())
        run.step_times.append(finished - started)
        run.optimizer_times.append(finished - differentiated)
        if skipped:
            run.skipped.append(step)
        progress = {"loss": f"{loss.item():.3f}"}
        if half:
            progress["scale"] = power_of_two(optimizer.loss_scale)
            progress["skipped"] = str(optimizer.steps_skipped)
        bar.set_postfix(progress, refresh=False)
    if half:
        run.scales.append(optimizer.loss_scale)
    return run, optimizer


@torch.no_grad()
def validate(model: CharGPT, text: Tensor) -> float:
    """Returns the mean loss over the whole of `text`, in rows that do not overlap."""
    rows = text[: len(text) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)
    total = sum(model.loss(part).item() * len(part) for part in rows.split(64))
    return total / len(rows)


def unigram_entropy(text: Tensor) -> float:
    """Returns the best loss, in nats, of a guess that knows only how often each
    character occurs."""
    share = text.bincount() / len(text)
    return torch.special.entr(share).sum().item()


def tensor_bytes(tensors) -> int:
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


def activation_bytes(model: CharGPT, text: Tensor) -> int:
    """Returns the bytes that one forward pass over a batch keeps for the backward
    pass, parameters aside."""
    kept = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    batch = text[: BATCH * (CONTEXT + 1)].view(BATCH, CONTEXT + 1)
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
            ("skipped steps", lambda r: str(len(r.skipped)) if r.scales else "-"),
            (
                "final loss scale",
                lambda r: power_of_two(r.scales[-1]) if r.scales else "-",
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=Path("train_char_gpt.png"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--allowed-gap",
        type=float,
        default=0.02,
        help="how far the two validation losses may be apart, as a fraction",
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    # The progress bar shows every change of the loss scale.
    logging.getLogger("fp16core").setLevel(logging.ERROR)

    single, half = time_product(torch.float32), time_product(torch.float16)
    fast = half <= single
    print(
        f"torch {torch.__version__}, {options.threads} threads. Measured on one: a "
        f"256 x 256 matrix product takes {1e3 * single:.2f} ms in fp32, "
        f"{1e3 * half:.2f} ms in fp16."
    )
    print(
        "fp16 products are fast on this processor: the fp16 run uses them."
        if fast
        else "fp16 products are slow on this processor: the fp16 run multiplies in "
        "fp32 over fp16 tensors."
    )
    text, validation_text, characters = read_text()

    runs = []
    for is_half in (False, True):
        torch.manual_seed(options.seed)
        product = UpcastProduct.apply if is_half and not fast else torch.matmul
        model = CharGPT(characters, CONTEXT, product)
        if is_half:
            model.half()
        run, optimizer = train(text, model, is_half, options.steps, options.seed)
        run.validation_loss = validate(model, validation_text)
        run.parameter_bytes = tensor_bytes(model.parameters())
        run.optimizer_bytes = optimizer_bytes(optimizer)
        run.activation_bytes = activation_bytes(model, text)
        runs.append(run)

    fp32, fp16 = runs
    unigram = unigram_entropy(validation_text)
    print_table(fp32, fp16, unigram)
    draw(options.out, fp32, fp16, unigram)
    print(f"The picture is in {options.out}.")
    gap = fp16.validation_loss / fp32.validation_loss - 1
    # Written so that a NaN fails too.
    if not abs(gap) <= options.allowed_gap:
        sys.exit(
            f"train_char_gpt: the fp16 run must end within {options.allowed_gap:.0%} "
            f"of the fp32 validation loss, but got {fp16.validation_loss:.4f} against "
            f"{fp32.validation_loss:.4f} ({gap:+.2%})"
        )
    print(
        f"The fp16 run ends {gap:+.2%} from the fp32 validation loss, within the "
        f"allowed {options.allowed_gap:.0%}."
    )


if __name__ == "__main__":
    main()
