"""The names of parameters in their module."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch


def parameter_names(
    groups: Iterable[dict[str, Any]],
    params: Iterable[Sequence[torch.Tensor]],
    model: torch.nn.Module | None,
) -> list[list[str]]:
    """Return the names of ``params``, which are those of the model, by group.

    They are those in ``model``, or else those that the groups were made with from
    ``named_parameters()``. An empty name stands for a parameter without one.
    """
    named: dict[torch.Tensor, str] = {}
    if model is not None:
        named = {p: n for n, p in model.named_parameters()}
    names = []
    for group, own in zip(groups, params, strict=True):
        told = group.get("param_names", [])
        if len(told) != len(own):
            told = [""] * len(own)
        names.append([named.get(p, n) for p, n in zip(own, told, strict=True)])
    return names
