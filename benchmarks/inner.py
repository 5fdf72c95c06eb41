"""The inner optimizers that the contestants run or replace."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer


@dataclass(frozen=True)
class Inner:
    """An optimizer of torch with its options."""

    name: str
    kind: type[Optimizer]
    options: dict[str, Any]
    # The bare passes that move what its update rule moves, and the state tensors of
    # a parameter.
    passes: str
    moments: int

    def build(self, params: Iterable[Tensor], **how: Any) -> Optimizer:
        """Returns an optimizer; ``how`` chooses among torch's implementations."""
        return self.kind(params, **self.options, **how)


ADAMW = Inner("AdamW", AdamW, {"lr": 1e-4}, "adam", moments=2)
MOMENTUM = Inner("SGD", SGD, {"lr": 0.1, "momentum": 0.9}, "sgd", moments=1)
INNERS = {inner.name: inner for inner in (ADAMW, MOMENTUM)}
