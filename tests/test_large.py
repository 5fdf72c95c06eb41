"""A tensor with more elements than 32 bits can count."""

import math
import mmap
import re
from pathlib import Path

import pytest
import torch

from fp16core import FP16_Optimizer

ELEMENTS = 2**31 + 17

# Both sides of where a signed 32-bit index ends, and the ends of the tensor.
PLACES = [0, 2**31 - 1, 2**31, ELEMENTS - 1]

# Master and master gradient at once, 8 GiB each, and room to breathe; of the half
# tensors only the pages that are written.
NEEDED = 17 * 2**30


def available_memory() -> int:
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return 0
    found = re.search(r"MemAvailable:\s+(\d+) kB", text)
    return int(found[1]) * 1024 if found else 0


def lazy_zeros() -> torch.Tensor:
    """Zeros that take memory only where they are written."""
    pages = mmap.mmap(-1, 2 * ELEMENTS, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)  # for the time that many small pages take
    return torch.frombuffer(pages, dtype=torch.bfloat16)


@pytest.mark.slow
def test_more_than_2_to_the_31_elements() -> None:
    if available_memory() < NEEDED:
        pytest.skip(
            f"needs {NEEDED >> 30} GiB of free memory, "
            f"{available_memory() >> 30} GiB are there"
        )
    param = torch.nn.Parameter(lazy_zeros())
    gradient = lazy_zeros()
    optimizer = FP16_Optimizer(
        torch.optim.SGD([param], lr=1.0), static_loss_scale=4.0, verbose=False
    )
    (master,) = optimizer.fp32_from_fp16_groups[0]

    # Gradients: every planted value arrives, and nothing else does.
    planted = {place: 8.0 * 2**i for i, place in enumerate(PLACES)}
    for place, value in planted.items():
        gradient[place] = value
    param.grad = gradient
    optimizer.update_master_grads()
    assert not optimizer.overflow
    for place, value in planted.items():
        assert master.grad[place].item() == value / 4
    assert int(master.grad.count_nonzero()) == len(PLACES)
    norm = optimizer.clip_master_grads(math.inf)
    # Few powers of two: their squares are summed exactly, the root is rounded.
    exact = math.sqrt(sum((v / 4) ** 2 for v in planted.values()))
    assert float(norm) == pytest.approx(exact, rel=2.0**-24)

    # Overflow, in the last element.
    gradient[-1] = math.inf
    optimizer.update_master_grads()
    assert optimizer.overflow
    (found,) = optimizer.gradient_report().tensors
    assert (found.inf_count, found.nan_count) == (1, 0)
    gradient[-1] = 0.0
    optimizer.zero_grad(set_to_none=True)
    del gradient

    # Weights: written from the masters, rounded.
    with torch.no_grad():
        for i, place in enumerate(PLACES):
            master[place] = (1 + 2.0**-9) * 2**i  # a tie, whose even side is below
    optimizer._master_params_to_model_params()
    for i, place in enumerate(PLACES):
        assert param[place].item() == 2.0**i
    assert int(param.count_nonzero()) == len(PLACES)

    # And back, where they were written by somebody else.
    with torch.no_grad():
        param[-1] = 3.0
    (master,) = optimizer.fp32_from_fp16_groups[0]
    assert master[-1].item() == 3.0
    assert master[2**31].item() == (1 + 2.0**-9) * 4
