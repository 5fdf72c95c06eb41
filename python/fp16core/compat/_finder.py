"""Finds the modules of old packages where nothing else does."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType

_APEX, _MEGATRON = "fp16core.compat._apex", "fp16core.compat._megatron"
_UTILS, _LISTS = "fp16core.fp16_utils", "fp16core.multi_tensor"

# For each family the modules by name, and the modules of ours whose names they have.
# A package without names of its own has none.
_MODULES: dict[str, dict[str, tuple[str, ...]]] = {
    "apex": {
        "apex": (),
        "apex.fp16_utils": (_UTILS, _APEX),
        "apex.fp16_utils.fp16_optimizer": (_APEX,),
        "apex.fp16_utils.fp16util": (_UTILS,),
        "apex.fp16_utils.loss_scaler": (_APEX,),
        "apex.multi_tensor_apply": (_LISTS,),
        "apex.multi_tensor_apply.multi_tensor_apply": (_LISTS,),
        "amp_C": (_LISTS,),
    },
    "megatron": {
        package: names
        for root in ("fp16", "megatron.fp16")
        for package, names in {
            root: (_UTILS, _MEGATRON),
            f"{root}.fp16": (_UTILS, _MEGATRON),
            f"{root}.fp16util": (_UTILS,),
            f"{root}.loss_scaler": (_MEGATRON,),
        }.items()
    }
    | {"megatron": ()},
}

#: The families that :func:`install` knows.
FAMILIES = tuple(_MODULES)


class _Loader(importlib.abc.Loader):
    def __init__(self, sources: Sequence[str]) -> None:
        self._sources = sources

    def exec_module(self, module: ModuleType) -> None:
        # Names what made the module where a name is missing in it.
        module.__file__ = __file__
        for name in self._sources:
            source = importlib.import_module(name)
            for public in source.__all__:
                setattr(module, public, getattr(source, public))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self) -> None:
        self.families: list[str] = []

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        for family in self.families:
            modules = _MODULES[family]
            if fullname in modules:
                package = any(name.startswith(f"{fullname}.") for name in modules)
                return importlib.util.spec_from_loader(
                    fullname, _Loader(modules[fullname]), is_package=package
                )
        return None


_finder = _Finder()


def install(family: str) -> None:
    """Let the modules of a family be imported, where there are no real ones.

    Args:
        family: "apex" (``apex.fp16_utils``, ``apex.multi_tensor_apply``, ``amp_C``) or
            "megatron" (``fp16`` and ``megatron.fp16``, as packages).

    Modules that are imported already stay as they are; to install twice does no harm.
    Raises ValueError for another family.
    """
    if family not in _MODULES:
        raise ValueError(
            f"install: family must be one of {', '.join(FAMILIES)}, but got {family!r}"
        )
    if family not in _finder.families:
        _finder.families.append(family)
    if _finder not in sys.meta_path:
        # The last of all, so that whatever is really there is found before.
        sys.meta_path.append(_finder)
    importlib.invalidate_caches()


def uninstall() -> None:
    """Undo :func:`install`: modules of ours are forgotten, and found no more."""
    for name in provided():
        del sys.modules[name]
    _finder.families.clear()
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)


def provided() -> list[str]:
    """Return the names of the modules that scripts have got from us so far."""
    return sorted(
        name
        for name, module in sys.modules.items()
        if isinstance(getattr(module, "__loader__", None), _Loader)
    )
