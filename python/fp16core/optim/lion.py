"""Lion as a plain torch optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    r"""Lion, the evolved sign momentum of Chen et al.: one moment, steps of one size.

    The optimizer of `Symbolic Discovery of Optimization Algorithms
    <https://arxiv.org/abs/2302.06675>`_, with decoupled weight decay as there:

    .. code-block:: text

        weight  = weight * (1 - lr * weight_decay)
        weight  = weight - lr * sign(lerp(exp_avg, grad, 1 - betas[0]))
        exp_avg = lerp(exp_avg, grad, 1 - betas[1])

    ``exp_avg`` is the only state and begins at zero. Every weight moves by ``lr``
    in every step, so the paper takes a learning rate 3 to 10 times smaller than
    AdamW's, and a weight decay larger by the same factor.

    It runs alone, on parameters of any floating point dtype. Inside an
    :class:`fp16core.FP16_Optimizer` the core's rule does the same in one pass.

    Args:
        params: parameters, ``(name, parameter)`` pairs or param groups.
        lr: the learning rate, at least 0; a number or a tensor of one element.
        betas: how much of the moment stays in the update and in the moment itself,
            each in [0, 1).
        weight_decay: the decay of the weights, times ``lr``, at least 0.
        maximize: whether to climb instead of to descend.

    Raises:
        ValueError: for arguments outside these ranges.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        if isinstance(lr, torch.Tensor) and lr.numel() != 1:
            raise ValueError(
                f"Lion: a tensor lr must have one element, but got {lr.numel()}"
            )
        if not lr >= 0:
            raise ValueError(f"Lion: lr must be at least 0, but got {float(lr)}")
        for index, beta in enumerate(betas):
            if not 0 <= beta < 1:
                raise ValueError(
                    f"Lion: betas[{index}] must be in [0, 1), but got {beta}"
                )
        if not weight_decay >= 0:
            raise ValueError(
                f"Lion: weight_decay must be at least 0, but got {weight_decay}"
            )
        defaults = {
            "lr": lr,
            "betas": betas,
            "weight_decay": weight_decay,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient.

        Args:
            closure: a function that computes the loss and its gradients anew.

        Returns:
            What the closure returns, or None without one.

        Raises:
            RuntimeError: for a sparse gradient.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad, group)
        return loss

    def _update(
        self, param: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]
    ) -> None:
        if grad.layout is not torch.strided:
            raise RuntimeError(
                f"Lion: gradients must be dense, but got one of layout {grad.layout}"
            )
        state = self.state[param]
        if not state:
            state["exp_avg"] = torch.zeros_like(
                param, memory_format=torch.preserve_format
            )
        exp_avg = state["exp_avg"]
        lr = float(group["lr"])
        beta1, beta2 = group["betas"]
        if group["maximize"]:
            grad = -grad
        if group["weight_decay"] != 0:
            param.mul_(1 - lr * group["weight_decay"])
        param.add_(exp_avg.lerp(grad, 1 - beta1).sign_(), alpha=-lr)
        exp_avg.lerp_(grad, 1 - beta2)
