"""Checkpoints that other projects wrote, and the optimizers to read them into."""

import json
import pathlib
from typing import Any

import torch

from fp16core import DynamicLossScaler, FP16_Optimizer, LossScaler, load_checkpoint
from helpers import copy_of

FOLDER = pathlib.Path(__file__).parent / "data" / "relatives"
EXPECTED = json.loads((FOLDER / "expected.json").read_text())
ENTRIES: dict[str, Any] = EXPECTED["checkpoints"]

Names = dict[str, torch.Tensor]


def read(name: str) -> Any:
    """Return what a checkpoint holds, on the CPU."""
    return load_checkpoint(FOLDER / name, map_location="cpu")


def named(value: dict[str, Any]) -> Names:
    """Return float32 tensors for nested lists."""
    return {name: torch.tensor(v, dtype=torch.float32) for name, v in value.items()}


class Target:
    """A model and an optimizer like those of an entry, with other numbers in them."""

    def __init__(self, entry: dict[str, Any], by_name: bool = False) -> None:
        torch.manual_seed(3)
        parts = entry["model"]
        self.model = torch.nn.ModuleDict(
            {
                "linear": torch.nn.Linear(*parts["linear"]),
                "norm": torch.nn.LayerNorm(*parts["norm"]),
            }
        )
        parameters = dict(self.model.named_parameters())
        for said in parts["parameters"]:
            parameter = parameters[said["name"]]
            parameter.data = parameter.data.to(getattr(torch, said["dtype"]))
            parameter.requires_grad_(said["requires_grad"])
        inner = entry["inner_optimizer"]
        groups = [
            {
                "params": [
                    (name, parameters[name]) if by_name else parameters[name]
                    for name in group["params"]
                ],
                "lr": 0.5,
            }
            for group in inner["param_groups"]
        ]
        kind = getattr(torch.optim, inner["class"].rpartition(".")[2])
        self.optimizer = FP16_Optimizer(kind(groups), verbose=False)
        self.optimizer.loss_scaler = self.scaler(entry["scaler"])

    @staticmethod
    def scaler(said: dict[str, Any]) -> LossScaler | DynamicLossScaler:
        """Return a scaler that has only what the checkpoint lacks of an entry's."""
        missing = {
            name: value
            for name, value in said["parameters"].items()
            if name in said["not_in_checkpoint"]
        }
        if said["policy"] is None:
            return LossScaler(128.0)
        if said["policy"] == "static":
            return LossScaler(missing.get("scale", 2.0))
        return DynamicLossScaler.preset(said["policy"], **missing)

    def masters(self) -> Names:
        """Return the masters by name of their parameter."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        halves = self.optimizer.all_fp16_params
        masters = self.optimizer.all_fp32_from_fp16_params
        return {
            names[id(half)]: master.detach().clone()
            for half, master in zip(halves, masters, strict=True)
        }

    def state(self) -> dict[str, Any]:
        """Return the inner state by name, of parameters that have one."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        masters = {
            id(m): names[id(p)]
            for p, m in zip(
                self.optimizer.all_fp16_params,
                self.optimizer.all_fp32_from_fp16_params,
                strict=True,
            )
        }
        return {
            (masters | names)[id(key)]: entry
            for key, entry in self.optimizer.state.items()
            if entry
        }

    def everything(self) -> Any:
        """Return a copy of all weights and all state."""
        return copy_of([dict(self.model.state_dict()), self.optimizer.state_dict()])

    def step(self, gradients: Names) -> None:
        """Run an iteration with these true gradients."""
        self.optimizer.zero_grad()
        terms = [
            (parameter.float() * gradients[name]).sum()
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        ]
        self.optimizer.backward(torch.stack(terms).sum())
        self.optimizer.step()
