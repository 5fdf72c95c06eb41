"""Write the checkpoint files of Python that the C++ tests read.

python tests/data/make_checkpoints.py tests/data/checkpoints
"""

import collections
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler


class Model(nn.Module):
    """A model with tied weights, buffers and parameters of three dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.half_scale = nn.Parameter(torch.tensor([0.5, -2.0]).half())
        self.bfloat16_scale = nn.Parameter(torch.tensor([0.5, -2.0]).bfloat16())
        self.embedding = nn.Embedding(4, 2)
        self.head = nn.Linear(2, 4)
        self.head.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(4)
        nn.init.constant_(self.embedding.weight, 0.25)
        nn.init.constant_(self.head.bias, -1.0)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens) * self.half_scale * self.bfloat16_scale
        return self.norm(self.head(hidden))


def training() -> dict[str, Any]:
    """Return the states of everything that a training has."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125, eps=0.5)
    schedulers = {
        "cosine": lr_scheduler.CosineAnnealingLR(optimizer, 10),
        "linear": lr_scheduler.LinearLR(optimizer, total_iters=3),
        "steps": lr_scheduler.MultiStepLR(optimizer, [2, 2, 5]),
        "cycle": lr_scheduler.OneCycleLR(optimizer, 1.0, 10),
        "sequence": lr_scheduler.SequentialLR(
            optimizer,
            [lr_scheduler.ConstantLR(optimizer), lr_scheduler.StepLR(optimizer, 2)],
            [4],
        ),
        "plateau": lr_scheduler.ReduceLROnPlateau(optimizer),
    }
    model(torch.arange(4)).square().sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scaler": torch.amp.GradScaler("cpu", init_scale=1024.0).state_dict(),
        "schedulers": {name: s.state_dict() for name, s in schedulers.items()},
    }


def values() -> dict[Any, Any]:
    """Return a value of each kind."""
    base = torch.arange(12.0)
    shared = [1]
    return {
        "none": None,
        "bools": [True, False],
        "integers": [0, 255, 256, 65536, -1, 2**31, 2**40, -(2**63), 2**63 - 1],
        "doubles": [0.1, float("inf")],
        "strings": ["", "h\u00e9llo", "x" * 300],
        "tuples": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)],
        "lists": [[], [[[1]]]],
        "long": list(range(1500)),
        "shared": [shared, shared],
        "set": {7},
        "ordered": collections.OrderedDict(b=1, a=2),
        "counter": collections.Counter("aab"),
        "size": torch.Size([2, 3]),
        "dtype": torch.float16,
        "devices": [torch.device("cpu"), torch.device("cuda", 1)],
        "base": base,
        "slice": base[3:7:2],
        "transposed": base.view(3, 4).t(),
        "expanded": base[2:3].expand(2, 3),
        "scalar": torch.tensor(7),
        "empty": torch.zeros(5, 5)[5:, 3:],
        "half": torch.tensor([1.5]).half(),
        "bfloat16": torch.tensor([1.5]).bfloat16(),
        "double": torch.tensor([0.1], dtype=torch.float64),
        "bool": torch.tensor([True, False]),
        "complex": torch.tensor([1 + 2j]),
        "uint16": torch.tensor([65535], dtype=torch.uint16),
        "float8": torch.tensor([1.5]).to(torch.float8_e4m3fn),
        "parameter": nn.Parameter(torch.ones(2)),
        3: {0: "zero"},
    }


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(1)
    with_attribute = nn.Parameter(torch.ones(2))
    with_attribute.note = "mine"
    torch.save(training(), folder / "training.pt")
    for protocol in (2, 3, 4, 5):
        torch.save(values(), folder / f"values_{protocol}.pt", pickle_protocol=protocol)
    torch.save({"parameter": with_attribute}, folder / "attribute.pt")
    torch.save({"integer": 2**63}, folder / "integer.pt")
    torch.save(collections.defaultdict(list), folder / "defaultdict.pt")
    torch.save([1], folder / "list.pt")
    torch.save(nn.Linear(1, 1), folder / "module.pt")
    torch.save({"integer": 1}, folder / "old.pt", _use_new_zipfile_serialization=False)
    torch.jit.save(torch.jit.script(nn.Identity()), folder / "script.pt")


if __name__ == "__main__":
    main()
