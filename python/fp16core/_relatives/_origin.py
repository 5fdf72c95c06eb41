"""What the registry knows about the origin of a state dict."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fp16core._receiver import Checkpoint, Receiver


@dataclass(frozen=True)
class Origin:
    """A format of state dicts.

    Attributes:
        name: as errors and reports call it.
        recognises: whether a dict looks like one, complete or not. It may look at
            keys and types only.
        read: translates a dict that does. Raises ValueError where it does not fit
            the receiver, and changes nothing.
    """

    name: str
    recognises: Callable[[Mapping[str, Any]], bool]
    read: Callable[[Mapping[str, Any], Receiver], Checkpoint]
