"""What a checkpoint brought along, to read and to print."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class LoadReport:
    """What ``FP16_Optimizer.load_state_dict`` restored, and what it did not.

    ``print(optimizer.load_report)`` shows all of it.

    Attributes:
        format: what the state dict was recognised as.
        restored: from "masters", "moments", "steps", "hyper-parameters", "scale",
            "counters" and the like to what was restored.
        not_restored: likewise, to why it was not, and what stands in its place.
    """

    format: str
    restored: Mapping[str, str]
    not_restored: Mapping[str, str]

    def __str__(self) -> str:
        lines = [f"Loaded a checkpoint of {self.format}."]
        for title, items in (
            ("Restored:", self.restored),
            ("Not restored:", self.not_restored),
        ):
            if items:
                lines.append(title)
                lines += [f"  {name}: {text}" for name, text in items.items()]
        return "\n".join(lines)
