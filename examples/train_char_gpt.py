"""Trains a small character-level GPT on Python's own documentation, once in fp32 and
once in fp16 with FP16_Optimizer, and compares the two."""

import argparse
import logging
import math
import sys
from pathlib import Path
from pydoc_data.topics import topics
from time import perf_counter

import torch
from char_gpt_model import CharGPT, UpcastProduct, time_product
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR
from tqdm import trange
from training_picture import draw
from training_report import (
    Run,
    activation_bytes,
    optimizer_bytes,
    power_of_two,
    print_table,
    tensor_bytes,
)

from fp16core import FP16_Optimizer

CONTEXT = 64
BATCH = 16
LEARNING_RATE = 4e-3
MAX_NORM = 1.0


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
    """Trains `model`, whose parameters are half where `half` is true. What else fp16
    changes stands under `if half`, and in the wait of the schedule."""
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
    for _ in bar:
        starts = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=sampler)
        batch = text[starts + torch.arange(CONTEXT + 1)]
        scale = optimizer.loss_scale if half else 1.0

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

        run.note(loss.item(), scale, skipped, started, differentiated, finished)
        progress = {"loss": f"{loss.item():.3f}"}
        if half:
            progress["scale"] = power_of_two(optimizer.loss_scale)
            progress["skipped"] = str(optimizer.steps_skipped)
        bar.set_postfix(progress, refresh=False)
    if half:
        run.final_scale = optimizer.loss_scale
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000, help="of each run")
    parser.add_argument(
        "--out", type=Path, default=Path("train_char_gpt.png"), help="the picture"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches")
    parser.add_argument(
        "--threads",
        type=int,
        default=torch.get_num_threads(),
        help="that torch computes on",
    )
    parser.add_argument(
        "--allowed-gap",
        type=float,
        default=0.02,
        help="how far the two validation losses may be apart, as a fraction",
    )
    options = parser.parse_args()
    for name in ("steps", "threads"):
        if getattr(options, name) < 1:
            parser.error(
                f"--{name}: must be at least 1, but got {getattr(options, name)}"
            )
    options.out.parent.mkdir(parents=True, exist_ok=True)
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
        run.activation_bytes = activation_bytes(
            model, text[: BATCH * (CONTEXT + 1)].view(BATCH, CONTEXT + 1)
        )
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
