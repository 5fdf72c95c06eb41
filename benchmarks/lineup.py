"""Who runs an iteration, and which bare pass each is measured against."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from by_hand import OriginalLoops, TorchParts
from contestant import Contestant
from grad_scaler import ScaledFloats
from inner import Inner
from ours import Ours
from tensors import TensorSet

LOOPS = "original loops"
PARTS = "torch parts, foreach clip"
PARTS_LOOP_CLIP = "torch parts, loop clip"
GENERIC = "fp16core generic"
FUSED = "fp16core fused"
LEAN = "fp16core lean"


@dataclass(frozen=True)
class Entrant:
    """A contestant that can be built. Those that are ``exact`` must agree bit for bit:
    their update has the roundings of torch's ``fused=True`` kernels."""

    build: Callable[[TensorSet, Inner], Contestant]
    # A name of `passes.iteration`.
    moves: str
    exact: bool = False


def entrant(
    kind: Callable[..., Contestant], moves: str, exact: bool = False, **how: Any
) -> Entrant:
    return Entrant(partial(kind, **how), moves, exact)


# "fp16core fused" is the default mode around a default optimizer.
LINEUP = {
    LOOPS: entrant(OriginalLoops, "masters"),
    "GradScaler": entrant(ScaledFloats, "fp32"),
    "GradScaler, foreach": entrant(ScaledFloats, "fp32", foreach=True),
    "GradScaler, fused": entrant(ScaledFloats, "fp32", exact=True, fused=True),
    PARTS: entrant(TorchParts, "masters", exact=True, fused=True, foreach_clip=True),
    PARTS_LOOP_CLIP: entrant(
        TorchParts, "masters", exact=True, fused=True, foreach_clip=False
    ),
    GENERIC: entrant(Ours, "masters", exact=True, fused=True, options={"fused": False}),
    FUSED: entrant(Ours, "fused", exact=True, options={}),
    LEAN: entrant(
        Ours, "lean", exact=True, options={"materialize_master_grads": False}
    ),
}
