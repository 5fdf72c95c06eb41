"""BufferGuard: a skipped step takes back what its forward passes did to buffers."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.nn.parameter import is_lazy

from fp16core.fp16_optimizer import FP16_Optimizer


class BufferGuard:
    """Keeps the buffers of a model clean of batches whose step is skipped.

    A forward pass in training mode writes buffers, as the running statistics of a
    BatchNorm, and skipping the step does not undo that: one batch with an inf in it
    leaves NaN behind for validation. With a guard the buffers have the values of before
    the batch again, bit for bit, when the step of an optimizer was skipped::

        optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        guard = BufferGuard(model, optimizer)

    It copies all buffers, of every dtype, when the first forward pass of ``model``
    since the last step begins in training mode, and so several passes for one step are
    taken back together. A buffer that a forward pass replaced is put back as the
    object that it was. An evaluation of a closure that is repeated starts from the
    buffers of before the step. Steps that are applied change nothing.

    It costs a copy of the buffers in memory and in time for each step; restrict it to
    a submodule by passing that one. On CUDA it reads ``optimizer.overflow`` after every
    step, which waits for the device, and does not go with CUDA graphs.

    The guard works through hooks, until :meth:`remove` is called or its ``with`` block
    ends. It does not keep the model alive, and copies of the model have no guard. Hand
    over the model that is called, with ``torch.compile`` the compiled one: a forward
    pass of a submodule alone is not seen.

    Args:
        model: the module whose buffers are guarded.
        optimizer: the optimizer whose skipped steps are taken back.
        others: more of them, where several optimizers train the model. If one of them
            skips its step, the buffers go back to before the last forward passes.

    Raises:
        TypeError: if ``model`` is not a module or an optimizer not an
            ``FP16_Optimizer``.
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: FP16_Optimizer, *others: FP16_Optimizer
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(
                "BufferGuard: model must be a torch.nn.Module, "
                f"but got {type(model).__name__}"
            )
        optimizers = (optimizer, *others)
        for given in optimizers:
            if not isinstance(given, FP16_Optimizer):
                raise TypeError(
                    "BufferGuard: optimizers must be FP16_Optimizers, "
                    f"but got {type(given).__name__}"
                )
        # The hooks hold the guard, so it holds neither the model nor the optimizers.
        self._model = weakref.ref(model)
        self._buffers: list[_Buffer] = []
        self._copies = _Copies()
        self._is_stale = True
        self._handles: list[Any] = [
            model.register_forward_pre_hook(_BeforeForward(self), prepend=True)
        ]
        for given in optimizers:
            self._handles.append(given.register_step_post_hook(self._after_step))
            self._handles.append(given._register_repeat_hook(self._put_back))

    def restore(self) -> None:
        """Put the buffers back by hand, to before the last forward passes.

        For a step that raised, as under ``on_min_scale="raise"``: torch runs no hooks
        after it. Nothing happens if there was no forward pass.
        """
        self._put_back()
        self._is_stale = True

    def remove(self) -> None:
        """End the guard, with the buffers as they are. May be called again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._buffers = []
        self._copies = _Copies()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def _before_forward(self) -> None:
        model = self._model()
        if model is not None and model.training and self._is_stale:
            self._buffers = list(_buffers_of(model))
            self._copies.take([b.tensor for b in self._buffers if b.tensor is not None])
            self._is_stale = False

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if optimizer.overflow:
            self._put_back()
        # Kept until the next forward pass: another optimizer may skip yet.
        self._is_stale = True

    def _put_back(self) -> None:
        for buffer in self._buffers:
            buffer.put_back()
        self._copies.write_back()


class _BeforeForward:
    """The hook on the model. A copied or unpickled model has one that does nothing."""

    def __init__(self, guard: BufferGuard | None = None) -> None:
        self._guard = guard

    def __reduce__(self) -> tuple[Any, ...]:
        return _BeforeForward, ()

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        if self._guard is not None:
            self._guard._before_forward()


@dataclass
class _Buffer:
    """A place for a buffer, and the tensor in it."""

    module: weakref.ref[torch.nn.Module]
    name: str
    tensor: torch.Tensor | None

    def put_back(self) -> None:
        module = self.module()
        if module is not None and module._buffers.get(self.name) is not self.tensor:
            module._buffers[self.name] = self.tensor


def _buffers_of(model: torch.nn.Module) -> Iterator[_Buffer]:
    for module in model.modules():
        for name, tensor in module._buffers.items():
            if tensor is None or not is_lazy(tensor):
                yield _Buffer(weakref.ref(module), name, tensor)


class _Copies:
    """Copies of a list of tensors, in storage that is used again."""

    def __init__(self) -> None:
        self._originals: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []

    @torch.no_grad()
    def take(self, tensors: list[torch.Tensor]) -> None:
        # Nothing writes to an expanded tensor, and nothing can.
        tensors = [t for t in tensors if not _is_expanded(t)]
        known = len(tensors) == len(self._originals) and all(
            old is new
            and (new.shape, new.dtype, new.device)
            == (copy.shape, copy.dtype, copy.device)
            for old, new, copy in zip(
                self._originals, tensors, self._copies, strict=True
            )
        )
        self._originals = tensors
        if known:
            torch._foreach_copy_(self._copies, tensors)
        else:
            self._copies = [tensor.clone() for tensor in tensors]

    @torch.no_grad()
    def write_back(self) -> None:
        if self._originals:
            torch._foreach_copy_(self._originals, self._copies)


def _is_expanded(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and any(
        size > 1 and stride == 0
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
