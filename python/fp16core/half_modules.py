"""Modules in half precision, under the names that NVIDIA's fp16 utilities gave them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch.nn.modules.batchnorm import _BatchNorm

#: The kinds of tensors that the conversions know.
FLOAT_TYPES = (torch.FloatTensor, torch.cuda.FloatTensor)  # type: ignore[attr-defined]
HALF_TYPES = (torch.HalfTensor, torch.cuda.HalfTensor)  # type: ignore[attr-defined]


def conversion_helper(val: Any, conversion: Callable[[Any], Any]) -> Any:
    """Apply ``conversion`` to everything in ``val`` that is no container.

    Tuples, lists, mappings and dataclasses are entered, however deeply nested, and
    made anew in their own class (named tuples too); a mapping keeps its keys.
    """
    if isinstance(val, tuple) and hasattr(val, "_fields"):
        return type(val)(*(conversion_helper(v, conversion) for v in val))
    if isinstance(val, tuple):
        return tuple(conversion_helper(v, conversion) for v in val)
    if isinstance(val, list):
        return [conversion_helper(v, conversion) for v in val]
    if dataclasses.is_dataclass(val) and not isinstance(val, type):
        fields = [f for f in dataclasses.fields(val) if f.init]
        changed = {
            f.name: conversion_helper(getattr(val, f.name), conversion) for f in fields
        }
        return dataclasses.replace(val, **changed)
    if isinstance(val, Mapping):
        items = {key: conversion_helper(v, conversion) for key, v in val.items()}
        return items if type(val) is dict else _mapping_like(val, items)
    return conversion(val)


def _mapping_like(val: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if isinstance(val, dict):
        # A default factory and attributes come along. Only where the items lie in
        # the object itself does a shallow copy have its own.
        made = copy.copy(val)
        for key, item in items.items():
            made[key] = item
        return made
    try:
        return type(val)(items)  # type: ignore[call-arg]
    except TypeError:  # a class with a constructor of its own
        return items


def _cast(val: Any, source: torch.dtype, target: torch.dtype) -> Any:
    return (
        val.to(target) if isinstance(val, torch.Tensor) and val.dtype == source else val
    )


def fp32_to_fp16(val: Any) -> Any:
    """Cast the float32 tensors in ``val`` to float16; all else stays as it is."""
    return conversion_helper(val, lambda v: _cast(v, torch.float32, torch.float16))


def fp16_to_fp32(val: Any) -> Any:
    """Cast the float16 tensors in ``val`` to float32; all else stays as it is."""
    return conversion_helper(val, lambda v: _cast(v, torch.float16, torch.float32))


class tofp16(torch.nn.Module):  # noqa: N801 - the name that scripts use
    """Casts its input to float16."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input.half()


def BN_convert_float(module: torch.nn.Module) -> torch.nn.Module:  # noqa: N802
    """Cast the affine BatchNorm layers in ``module`` to float32, in place.

    cuDNN wants their parameters so. Returns ``module``. BatchNorm layers without
    parameters, and other kinds of norms, are left as they are.
    """
    if isinstance(module, _BatchNorm) and module.affine is True:
        module.float()
    for child in module.children():
        BN_convert_float(child)
    return module


def network_to_half(network: torch.nn.Module) -> torch.nn.Sequential:
    """Cast ``network`` to float16, affine BatchNorm layers apart, in place.

    Returns a ``Sequential`` of :class:`tofp16` and the network, so keys of its state
    dict begin with ``1.``.
    """
    return torch.nn.Sequential(tofp16(), BN_convert_float(network.half()))


def convert_module(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Cast the floating point parameters and buffers that belong to ``module`` itself.

    Not those of its children. Parameters stay the objects they are; gradients that
    are there are cast with them.
    """
    for param in module.parameters(recurse=False):
        if param.is_floating_point():
            param.data = param.data.to(dtype)
            if param.grad is not None and param.grad.is_floating_point():
                param.grad.data = param.grad.data.to(dtype)
    for buffer in module.buffers(recurse=False):
        if buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)


def convert_network(network: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """Cast all of ``network``, its affine BatchNorm layers apart, in place.

    Weights of recurrent layers are laid out for cuDNN again. Returns ``network``.
    """
    for module in network.modules():
        if isinstance(module, _BatchNorm) and module.affine is True:
            continue
        convert_module(module, dtype)
        if isinstance(module, torch.nn.RNNBase):
            module.flatten_parameters()
    return network


class FP16Model(torch.nn.Module):
    """Runs ``network`` in float16, affine BatchNorm layers apart.

    The network is cast in place and is the child ``network``. Floating point tensors
    among the arguments are cast to float16, nested ones and keyword arguments too;
    what the network returns stays float16.
    """

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.network = convert_network(network, dtype=torch.half)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        def to_half(val: Any) -> Any:
            floating = isinstance(val, torch.Tensor) and val.is_floating_point()
            return val.half() if floating else val

        args = conversion_helper(inputs, to_half)
        return self.network(*args, **conversion_helper(kwargs, to_half))


class FP16_Module(torch.nn.Module):  # noqa: N801 - the name that scripts use
    """Runs ``module`` in float16 among modules in float32.

    The module is cast in place, all of it, and is the child ``module``. Float32
    tensors among the arguments become float16, and float16 tensors among the results
    float32, nested ones and keyword arguments too. State dicts are those of the
    module, without a prefix.
    """

    module: torch.nn.Module

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module.half()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        args = fp32_to_fp16(inputs)
        return fp16_to_fp32(self.module(*args, **fp32_to_fp16(kwargs)))

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        return self.module.load_state_dict(state_dict, strict, assign)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any
    ) -> None:
        # As a part of another module it is loaded by torch, which looks for the
        # child's keys under the child's name.
        own = [key for key in state_dict if key.startswith(prefix)]
        for key in own:
            state_dict[f"{prefix}module.{key[len(prefix) :]}"] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def half(self) -> Self:
        return super().half()
