"""Arrays and scalars of NumPy in pickles, rebuilt from their bytes alone.

Training checkpoints hold NumPy's random state. What stands in for NumPy's own
functions here accepts booleans and numbers only: no objects, no records.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

try:
    import numpy as np
except ImportError:  # torch runs without it
    REPLACEMENTS: dict[str, Callable[..., Any]] = {}
else:

    class _Dtype:
        """A dtype in the making; its byte order comes with the state."""

        def __init__(self, code: str, align: bool = False, copy: bool = False) -> None:
            if not isinstance(code, str) or not re.fullmatch("[?biufc][0-9]*", code):
                raise ValueError(f"an array of {code!r}, which are no numbers")
            self.dtype = np.dtype(code)

        def __setstate__(self, state: Any) -> None:
            self.dtype = self.dtype.newbyteorder(state[1])

    class SavedArray(np.ndarray):
        """An array from a checkpoint."""

        def __new__(cls, *_: Any) -> SavedArray:
            return super().__new__(cls, (0,), "u1")

        def __setstate__(self, state: Any) -> None:
            _, shape, dtype, fortran, data = state
            if not isinstance(dtype, _Dtype) or not isinstance(data, bytes):
                raise ValueError("an array of something else than numbers")
            checked: Any = (1, shape, dtype.dtype, bool(fortran), data)
            super().__setstate__(checked)

        def __reduce__(self) -> Any:
            # Saved again it is NumPy's own.
            return np.asarray(self).view(np.ndarray).__reduce__()

    def _reconstruct(kind: Any, shape: Any, code: Any) -> SavedArray:
        return SavedArray()

    def _scalar(dtype: Any, data: Any) -> Any:
        if not isinstance(dtype, _Dtype) or not isinstance(data, bytes):
            raise ValueError("a scalar that is no number")
        return np.frombuffer(data, dtype.dtype, count=1)[0]

    def _encode(text: str, encoding: str) -> bytes:
        # How pickles of protocol 2 write bytes.
        if encoding != "latin1":
            raise ValueError(f"bytes in {encoding!r}")
        return text.encode("latin1")

    def _no_bytes() -> bytes:
        return b""

    REPLACEMENTS = {
        "_codecs.encode": _encode,
        "__builtin__.bytes": _no_bytes,
        "builtins.bytes": _no_bytes,
        "numpy.dtype": _Dtype,
        "numpy.ndarray": SavedArray,
        "numpy.core.multiarray._reconstruct": _reconstruct,
        "numpy._core.multiarray._reconstruct": _reconstruct,
        "numpy.core.multiarray.scalar": _scalar,
        "numpy._core.multiarray.scalar": _scalar,
    }
