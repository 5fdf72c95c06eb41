"""What many tests use: small parameters, one iteration, and exact comparisons."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

HALF_DTYPES = [torch.float16, torch.bfloat16]

INF = float("inf")
NAN = float("nan")


def half(*values: float, dtype: torch.dtype = torch.float16) -> torch.nn.Parameter:
    """Return a parameter with these values."""
    return torch.nn.Parameter(torch.tensor(values, dtype=dtype))


def single(*values: float) -> torch.nn.Parameter:
    """Return a float32 parameter with these values."""
    return half(*values, dtype=torch.float32)


def train(optimizer: Any, loss: torch.Tensor) -> Any:
    """Run one ordinary iteration and return what the step returned."""
    optimizer.zero_grad()
    optimizer.backward(loss)
    return optimizer.step()


def masters(optimizer: Any) -> list[torch.Tensor]:
    """Return the masters of all groups in one list."""
    return [m for group in optimizer.fp32_from_fp16_groups for m in group]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of a dense tensor as integers."""
    size = tensor.element_size()
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}.get(size)
    data = tensor.detach()
    return data.view(kind) if kind and data.is_floating_point() else data


def assert_same(got: Any, want: Any, where: str = "value") -> None:
    """Assert that two nests of plain data are equal, tensors bit for bit."""
    if isinstance(want, torch.Tensor):
        assert isinstance(got, torch.Tensor), f"{where}: got {type(got).__name__}"
        assert got.dtype == want.dtype, f"{where}: {got.dtype} is not {want.dtype}"
        assert got.shape == want.shape, f"{where}: {got.shape} is not {want.shape}"
        assert got.layout == want.layout, f"{where}: {got.layout}"
        assert torch.equal(bits(got), bits(want)), f"{where}: {got} is not {want}"
    elif isinstance(want, Mapping):
        assert set(got) == set(want), f"{where}: keys {list(got)}"
        for key in want:
            assert_same(got[key], want[key], f"{where}[{key!r}]")
    elif isinstance(want, list | tuple):
        assert type(got) is type(want), f"{where}: got {type(got).__name__}"
        assert len(got) == len(want), f"{where}: {len(got)} items"
        for index, (a, b) in enumerate(zip(got, want, strict=True)):
            assert_same(a, b, f"{where}[{index}]")
    else:
        assert got == want, f"{where}: {got!r} is not {want!r}"


def copy_of(value: Any) -> Any:
    """Return a deep copy of plain data; its tensors share nothing with the old."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: copy_of(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(copy_of(item) for item in value)
    return value


@dataclass
class ScaleModel:
    """The rule of the dynamic loss scale, written once more for the tests.

    It counts clean iterations in a row, where the product compares the numbers of
    iterations.
    """

    scale: float
    factor: float = 2.0
    window: float = 1000
    floor: float = 1.0
    shift: int = 1
    consecutive: bool = False

    def __post_init__(self) -> None:
        self.tolerance = self.shift - 1
        self.clean_run = 0

    def update(self, overflow: bool) -> float:
        """Take in one iteration and return the scale after it."""
        if overflow:
            self.clean_run = 0
            if self.tolerance > 0:
                self.tolerance -= 1
            else:
                self.scale = max(self.scale / self.factor, self.floor)
        else:
            self.clean_run += 1
            grows = self.clean_run % self.window == 0
            if self.consecutive or grows:
                self.tolerance = self.shift - 1
            if grows and self.scale * self.factor < INF:
                self.scale *= self.factor
        return self.scale


class ExactRoots(TorchFunctionMode):
    """Rounds square roots correctly, as the rules and torch's fused kernels do.

    `torch.sqrt` calls MKL, whose roots are off by an ulp now and then.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func not in (torch.Tensor.sqrt, torch.Tensor.sqrt_):
            return func(*args, **(kwargs or {}))
        with np.errstate(invalid="ignore"):
            root = torch.as_tensor(np.sqrt(args[0].detach().numpy()))
        return root if func is torch.Tensor.sqrt else args[0].copy_(root)
