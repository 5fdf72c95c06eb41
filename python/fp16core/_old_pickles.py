"""Files of ``torch.save`` that name classes which are not installed."""

from __future__ import annotations

import argparse
import os
import pickle
import pickletools
import sys
import threading
import zipfile
from _compat_pickle import IMPORT_MAPPING
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, BinaryIO, NoReturn

import torch
from torch.serialization import (
    get_safe_globals,
    get_unsafe_globals_in_checkpoint,
    safe_globals,
)

from fp16core import _numpy_pickles, loss_scaler

# Classes of loss scalers in projects that pickle the object.
_SCALERS = frozenset(
    (
        "ConstantGradScaler",
        "DynamicGradScaler",
        "DynamicLossScaler",
        "LossScaler",
        "LossScalerBase",
        "MegatronGradScaler",
    )
)
# Our own, which do nothing but hold numbers.
_OWN = {
    f"{loss_scaler.__name__}.{name}": getattr(loss_scaler, name)
    for name in ("DynamicLossScaler", "LossScaler", "_restore")
}
_OWNER = "load_checkpoint"
# The number that files of before torch 1.6 begin with.
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C

# torch's list of safe globals belongs to the process.
_lock = threading.Lock()


class PickledObject:
    """An object of a class that was not loaded: its name and its attributes.

    Attributes:
        module, name: of the class, as the file has them.
        arguments: what its constructor was to be called with; mostly nothing.
        attributes: what the object had, also to be read as attributes of this one.

    It cannot be changed, and has none of the methods of its class.
    """

    module = ""
    name = ""
    arguments: tuple[Any, ...]
    attributes: Mapping[str, Any]

    def __new__(cls, *arguments: Any) -> PickledObject:
        self = object.__new__(cls)
        object.__setattr__(self, "arguments", arguments)
        object.__setattr__(self, "attributes", MappingProxyType({}))
        return self

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, dict) or self.attributes:
            raise pickle.UnpicklingError(
                f"{_OWNER}: the state of a {self.module}.{self.name} must be a dict, "
                f"but got {type(state).__name__}"
            )
        object.__setattr__(self, "attributes", MappingProxyType(dict(state)))

    def __getattr__(self, name: str) -> Any:
        # Not before the object has its state.
        attributes = self.__dict__.get("attributes", {})
        if name in attributes:
            return attributes[name]
        raise AttributeError(
            f"the pickled {self.module}.{self.name} has no attribute {name!r}"
        )

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(
            f"a pickled {self.module}.{self.name} cannot be changed, so neither can "
            f"its {name!r}"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        made = _restore, (self.module, self.name, self.arguments)
        return *made, dict(self.attributes)

    def __repr__(self) -> str:
        parts = [*map(repr, self.arguments)]
        parts += [f"{name}={value!r}" for name, value in self.attributes.items()]
        return f"<pickled {self.module}.{self.name}({', '.join(parts)})>"


def load_checkpoint(
    path: str | os.PathLike[str] | BinaryIO,
    map_location: Any = None,
    *,
    as_data: Iterable[str] = (),
) -> Any:
    """Read a file of ``torch.save``, also an old one, without executing anything.

    Checkpoints of apex and Megatron-LM hold their loss scaler as an object, which
    ``torch.load`` reads only where the package is installed and with
    ``weights_only=False``, which executes whatever the file says. This function puts
    a :class:`PickledObject` in the place of loss scalers, whether or not their
    package is installed: it keeps their attributes, which is all that
    :meth:`FP16_Optimizer.load_state_dict` needs. Beyond what ``torch.load`` reads
    with its defaults, it reads ``argparse.Namespace`` and arrays of numbers of NumPy.

    Zip files and those of before torch 1.6 are read, of any program.

    Args:
        path: of the file, or a binary file that can seek.
        map_location: as in ``torch.load``: files that a GPU wrote need one where
            there is none.
        as_data: full names of further classes whose objects are to be read as
            :class:`PickledObject`, such as enums among the arguments of a run.

    Returns:
        What was saved.

    Raises:
        pickle.UnpicklingError: if the file names something else, which is told.
        ValueError: if it is none of ``torch.save``, or damaged.
        OSError: if it cannot be read.
    """
    if isinstance(path, str | os.PathLike):
        with open(path, "rb") as file:
            return _load(file, os.fspath(path), map_location, frozenset(as_data))
    label = getattr(path, "name", type(path).__name__)
    return _load(path, label, map_location, frozenset(as_data))


def _load(
    file: BinaryIO, label: Any, map_location: Any, as_data: frozenset[str]
) -> Any:
    start = file.tell()
    # While another thread loads, its names are on the list and seem allowed.
    with _lock:
        names = _unsafe_globals(file, label)
        file.seek(start)
        replacements = [(_replacement(n, label, as_data), n) for n in sorted(names)]
        return _load_with(file, label, map_location, replacements)


def _load_with(
    file: BinaryIO, label: Any, map_location: Any, replacements: list[Any]
) -> Any:
    try:
        with safe_globals(replacements):
            return torch.load(file, map_location=map_location, weights_only=True)
    except pickle.UnpicklingError as error:
        raise pickle.UnpicklingError(
            f"{_OWNER}: {label!r} must hold nothing but data, but got: {error}"
        ) from error
    except (
        AttributeError,
        EOFError,
        IndexError,
        KeyError,
        TypeError,
        ValueError,
    ) as error:
        raise _damaged(label, error) from error
    except RuntimeError as error:
        # torch's own words tell what to do where a device is missing.
        if "deserialize" in str(error) and "map_location" in str(error):
            raise
        raise _damaged(label, error) from error


def _unsafe_globals(file: BinaryIO, label: Any) -> set[str]:
    """Return the names that the file refers to and torch does not allow."""
    start = file.tell()
    try:
        is_zip = file.read(4) == b"PK\x03\x04"
        file.seek(start)
        if is_zip:
            return set(get_unsafe_globals_in_checkpoint(file))
        return {name for name in _legacy_globals(file) if not _is_safe(name)}
    except pickle.UnpicklingError as error:
        raise pickle.UnpicklingError(
            f"{_OWNER}: {label!r} must hold nothing but data, but got: {error}"
        ) from error
    except (
        EOFError,
        IndexError,
        RuntimeError,
        UnicodeDecodeError,
        ValueError,
        zipfile.BadZipFile,
    ) as error:
        raise _damaged(label, error) from error


def _legacy_globals(file: BinaryIO) -> Iterator[str]:
    """Yield the names in a file of before torch 1.6.

    Pickles of a number, a version and the system come before that of the object;
    keys of storages and their bytes follow.
    """
    magic = [argument for _, argument, _ in pickletools.genops(file)]
    if _LEGACY_MAGIC not in magic:
        raise ValueError("it does not begin as files of torch.save do")
    for _ in range(3):
        for opcode, argument, _ in pickletools.genops(file):
            if opcode.name == "GLOBAL":
                yield str(argument).replace(" ", ".")


def _is_safe(name: str) -> bool:
    """Return whether torch reads ``name`` with its defaults, or was told to."""
    # torch has no function for its own list, so a file that uses it is refused by
    # torch itself, a moment later.
    user = {
        entry[1]
        if isinstance(entry, tuple)
        else f"{entry.__module__}.{entry.__qualname__}"
        for entry in get_safe_globals()
    }
    return name in user or name.startswith(("torch.", "collections."))


def _replacement(name: str, label: Any, as_data: frozenset[str]) -> Any:
    """Return what stands for a name that torch does not allow, or raise."""
    if name in _OWN:
        return _OWN[name]
    if name in _numpy_pickles.REPLACEMENTS:
        return _numpy_pickles.REPLACEMENTS[name]
    if name == "argparse.Namespace":
        return argparse.Namespace
    module, _, short = name.rpartition(".")
    if short in _SCALERS or name in as_data:
        return _stand_in(module, short)
    # Pickles of protocol 2 call some modules by their names in Python 2.
    module = IMPORT_MAPPING.get(module, module)
    hint = (
        ""
        if module.partition(".")[0] in sys.stdlib_module_names
        else f". If it is a class whose objects hold data, as_data=[{name!r}] reads "
        "their attributes"
    )
    raise pickle.UnpicklingError(
        f"{_OWNER}: {label!r} must refer to nothing but tensors, plain data and loss "
        f"scalers, but got {module}.{short}; nothing was executed{hint}"
    )


def _stand_in(module: str, name: str) -> type[PickledObject]:
    return type(name, (PickledObject,), {"module": module, "name": name})


def _restore(module: str, name: str, arguments: tuple[Any, ...]) -> PickledObject:
    return _stand_in(module, name)(*arguments)


def _damaged(label: Any, error: Exception) -> ValueError:
    return ValueError(
        f"{_OWNER}: path must lead to a whole file of torch.save, "
        f"but got {label!r}: {error}"
    )
