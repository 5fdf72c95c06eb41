"""Equal bits under every instruction set and number of threads.

Run as a program, the file prints the digests of one seeded run as JSON.
"""

import functools
import hashlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fp16core import FP16_Optimizer, _core

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]

# A scalar, the remainder of a vector, and several chunks that share out unevenly
# among threads.
SIZES = [1, 37, 65536 + 4096 + 21, 200_003]

# 24 MB of master gradients take the streaming stores.
LARGE = 6_000_017


def digest(*tensors: torch.Tensor | None) -> str:
    sha = hashlib.sha256()
    for tensor in tensors:
        if tensor is not None:
            values = tensor.detach().contiguous().flatten()
            sha.update(values.view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def noise(*shape: int | torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Return numbers between -2 and 2, the same under every instruction set.

    Those of ``torch.randn`` are not: its logarithms and cosines are vectorized.
    """
    size = shape[0] if isinstance(shape[0], torch.Size) else shape
    return torch.rand(size, generator=generator) * 4 - 2


def filled(params: list[torch.nn.Parameter], generator: torch.Generator) -> None:
    for param in params:
        gradient = noise(param.shape, generator=generator)
        param.grad = gradient.to(param.dtype)


def parameters(generator: torch.Generator) -> list[torch.nn.Parameter]:
    return [
        torch.nn.Parameter(noise(size, generator=generator).to(dtype))
        for size in SIZES
        for dtype in DTYPES
    ]


def wrap(params: list[torch.nn.Parameter], scale: float) -> FP16_Optimizer:
    # Powers of two: products are exact, so it is no matter whether torch's own
    # kernels fuse them with additions.
    inner = torch.optim.SGD(params, lr=0.25, momentum=0.5)
    return FP16_Optimizer(inner, static_loss_scale=scale, verbose=False)


def kernels() -> dict[str, str]:
    """Digests of what every kernel writes and returns, by name."""
    digests = {}
    generator = torch.Generator().manual_seed(1)
    params = parameters(generator)
    optimizer = wrap(params, scale=3.0)
    visible = optimizer.param_groups[0]["params"]
    filled(params, generator)
    optimizer.update_master_grads()
    report = optimizer.gradient_report()
    measured = [(found.norm, found.largest) for found in report.tensors]
    digests["take"] = digest(*(p.grad for p in visible))
    digests["report"] = digest(torch.tensor(measured, dtype=torch.float64))
    optimizer.step()
    digests["write"] = digest(*params)

    with torch.no_grad():
        for param in params:
            other = noise(param.shape, generator=generator).to(param.dtype)
            param.copy_(torch.where(other > 0, other, param))
    digests["adopt"] = digest(*optimizer.fp32_from_fp16_groups[0])

    # The scale changes between two backward passes: gradients are rescaled.
    optimizer.update_master_grads()
    optimizer.loss_scale = 7.0
    optimizer.scale_loss(torch.zeros((), requires_grad=True)).backward()
    digests["rescale"] = digest(*(p.grad for p in params))
    optimizer.zero_grad()

    for norm_type in (2.0, math.inf, 1.0, 3.0, 0.5):
        filled(params, generator)
        optimizer.update_master_grads()
        norm = optimizer.clip_master_grads(0.7, norm_type)
        digests[f"norm {norm_type}"] = digest(norm)
        digests[f"clip {norm_type}"] = digest(*(p.grad for p in visible))
    return digests


def streams() -> dict[str, str]:
    """Digests of passes that write more than the caches hold."""
    generator = torch.Generator().manual_seed(3)
    large = torch.nn.Parameter(noise(LARGE, generator=generator).half())
    optimizer = wrap([large], scale=3.0)
    filled([large], generator)
    optimizer.update_master_grads()
    (master,) = optimizer.param_groups[0]["params"]
    norm = torch.tensor(optimizer.gradient_report().norm, dtype=torch.float64)
    digests = {"streamed take": digest(master.grad), "large norm": digest(norm)}
    optimizer.step()
    digests["streamed write"] = digest(large)
    return digests


def training() -> str:
    """Digest of a short training with skipped steps and growing scale."""
    generator = torch.Generator().manual_seed(2)
    params = parameters(generator)
    targets = [noise(p.shape, generator=generator).to(p.dtype) for p in params]
    optimizer = FP16_Optimizer(
        torch.optim.SGD(params, lr=0.25, momentum=0.5),
        dynamic_loss_scale=True,
        dynamic_loss_args={"init_scale": 2.0**17, "scale_window": 4},
        verbose=False,
    )
    norms = []
    for _ in range(10):
        optimizer.zero_grad()
        # Element by element: no sum whose order could differ takes part in the
        # gradients.
        loss = sum(
            ((p - t).float() ** 2).sum() for p, t in zip(params, targets, strict=True)
        )
        optimizer.backward(loss)
        norms.append(optimizer.clip_master_grads(100.0))
        optimizer.step()
    assert optimizer.steps_skipped > 0 and optimizer.steps_applied > 0
    return digest(*params, *optimizer.param_groups[0]["params"], *norms)


@functools.cache
def run(capability: str, threads: int) -> dict[str, str]:
    """Run this file as a program and return what it prints."""
    environment = dict(os.environ, ATEN_CPU_CAPABILITY=capability)
    result = subprocess.run(
        [sys.executable, Path(__file__).resolve(), str(threads)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return dict(json.loads(result.stdout))


def processor_flags() -> set[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return set()
    lines = [line for line in text.splitlines() if line.startswith("flags")]
    return set(lines[0].split()) if lines else set()


def require(capability: str) -> None:
    needed = {"avx2": {"avx2", "fma"}, "avx512": {"avx512f", "avx512vl", "avx512bw"}}
    if not needed.get(capability, set()) <= processor_flags():
        pytest.skip(f"this processor has no {capability}")


@pytest.mark.parametrize("capability", ["default", "avx2", "avx512"])
def test_capability_is_the_one_asked_for(capability: str) -> None:
    require(capability)
    assert run(capability, 1)["capability"] == capability.upper()


@pytest.mark.parametrize("capability", ["avx2", "avx512"])
def test_bits_do_not_depend_on_the_instruction_set(capability: str) -> None:
    require(capability)
    expected, got = dict(run("default", 1)), dict(run(capability, 1))
    assert expected.pop("capability") != got.pop("capability")
    assert got == expected


def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    # Three share out chunks unevenly.
    best = _core.cpu_capability().lower()
    expected, got = dict(run(best, 1)), dict(run(best, 3))
    assert expected.pop("threads") != got.pop("threads")
    assert got == expected


def test_digests_tell_runs_apart() -> None:
    digests = run("default", 1)
    values = [v for k, v in digests.items() if k not in ("capability", "threads")]
    assert len(set(values)) == len(values)


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[1]))
    print(
        json.dumps(
            {
                "capability": _core.cpu_capability(),
                "threads": str(torch.get_num_threads()),
                "training": training(),
                **kernels(),
                **streams(),
            }
        )
    )
