"""Metadata provider: which torch a distribution of fp16core requires.

A wheel requires the minor version of the torch it was built with, because
LibTorch's C++ interface changes between minor versions. The source distribution
requires the range that the sources hold for.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from typing import Any

SUPPORTED = "torch>=2.11,<2.16"


class TorchPin:
    """Provides the field ``dependencies``; scikit-build-core calls its methods."""

    def __init__(self) -> None:
        self._state = ""

    def build_state(self, state: str) -> None:
        """Takes what is being built: ``sdist``, ``wheel``, ``editable``, ..."""
        self._state = state

    def dynamic_metadata(
        self, settings: Mapping[str, Any], project: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Returns the dependencies of the distribution being built."""
        if self._state == "sdist":
            return {"dependencies": [SUPPORTED]}
        major, minor = importlib.metadata.version("torch").split(".")[:2]
        return {"dependencies": [f"torch=={major}.{minor}.*"]}

    def dynamic_wheel(self, settings: Mapping[str, Any]) -> dict[str, bool]:
        """Says that a wheel's dependencies may differ from its source's."""
        return {"dependencies": True}
