"""State dicts that other projects wrote, and plain ones of torch.optim.

A module for each origin says how its dicts are recognised and translates them into a
:class:`fp16core._receiver.Checkpoint`. The first that recognises a dict reads it.
"""

from __future__ import annotations

from fp16core._relatives._origin import Origin
from fp16core._relatives.deepspeed import DEEPSPEED
from fp16core._relatives.fairseq import FAIRSEQ
from fp16core._relatives.fp16_utils import FP16_UTILS
from fp16core._relatives.megatron_core import MEGATRON_CORE
from fp16core._relatives.torch_optim import TORCH_OPTIM
from fp16core._relatives.training_checkpoint import training_checkpoint

# One line an origin; the more particular first.
RELATIVES = (
    FP16_UTILS,
    MEGATRON_CORE,
    DEEPSPEED,
    FAIRSEQ,
    TORCH_OPTIM,
)

__all__ = ["RELATIVES", "Origin", "training_checkpoint"]
