"""Runs every kernel of the CUDA backend a few times, for tools that watch them.

compute-sanitizer python tests/gpu/exercise.py
"""

import argparse
import math
from collections.abc import Sequence
from typing import Any

import torch

from fp16core import FP16_Optimizer
from fp16core.optim import Lion

OPTIMIZERS: dict[type[Any], dict[str, Any]] = {
    torch.optim.SGD: {"momentum": 0.5, "nesterov": True},
    torch.optim.Adam: {"amsgrad": True},
    torch.optim.AdamW: {},
    torch.optim.Adagrad: {},
    torch.optim.RMSprop: {"momentum": 0.5, "centered": True},
    torch.optim.NAdam: {},
    torch.optim.Adamax: {},
    Lion: {},
}

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Below, at and beyond a block's share of one tensor, and none at all.
SIZES = (0, 1, 33, 4096, 9_001)


def parameters(device: str) -> list[torch.nn.Parameter]:
    """Returns parameters of all dtypes and sizes, some at odd addresses."""
    params = []
    for dtype in DTYPES:
        for size in SIZES:
            whole = torch.full((size + 1,), 0.5, dtype=dtype, device=device)
            params.append(torch.nn.Parameter(whole[1:]))
    return params


def iteration(
    optimizer: FP16_Optimizer, params: Sequence[torch.nn.Parameter], factor: float
) -> None:
    optimizer.zero_grad()
    loss = torch.stack([(p.float() * factor).sum() for p in params]).sum()
    optimizer.backward(loss)
    for norm in (2.0, math.inf):
        optimizer.clip_master_grads(1.0, norm)
    optimizer.step()


def exercise(optimizer_class: type[Any], device: str, lean: bool) -> None:
    """Trains with an overflow on the way, and asks for all that can be asked for."""
    params = parameters(device)
    optimizer = FP16_Optimizer(
        optimizer_class(params, lr=0.01, **OPTIMIZERS[optimizer_class]),
        dynamic_loss_scale=True,
        dynamic_loss_args={"init_scale": 16.0, "scale_window": 2},
        verbose=False,
        fused=True,
        materialize_master_grads=not lean,
    )
    for factor in (1.0, math.inf, 0.5, 2.0):
        iteration(optimizer, params, factor)
    counts = (optimizer.steps_applied, optimizer.steps_skipped)
    assert counts == (3, 1), counts
    optimizer.backward(params[1].float().sum())
    optimizer.clip_master_grads(1.0, 3.0)
    assert not optimizer.gradient_report().overflow
    with torch.no_grad():
        for param in params:
            param.mul_(2.0)  # which the masters adopt
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert all(bool(p.isfinite().all()) for p in params)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    device: str = parser.parse_args().device
    for optimizer_class in OPTIMIZERS:
        for lean in (False, True):
            exercise(optimizer_class, device, lean)
    print(f"{len(OPTIMIZERS)} optimizers ran on {device}")


if __name__ == "__main__":
    main()
