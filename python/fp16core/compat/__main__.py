"""``python -m fp16core.compat SCRIPT ARGS...``: run an old script as it is."""

from __future__ import annotations

import os
import runpy
import sys

from fp16core.compat import FAMILIES, install

_USAGE = "usage: python -m fp16core.compat (SCRIPT | -m MODULE) [ARGS...]"


def main(arguments: list[str]) -> None:
    """Run a script or a module with the modules of all families installed."""
    as_module = arguments[:1] == ["-m"]
    arguments = arguments[as_module:]
    if not arguments or arguments[0].startswith("-"):
        raise SystemExit(_USAGE)
    for family in FAMILIES:
        install(family)
    sys.argv = arguments
    # As python itself does. Under -P it has put nothing in front.
    if not sys.flags.safe_path:
        script = os.path.dirname(os.path.realpath(arguments[0]))
        sys.path[0] = os.getcwd() if as_module else script
    if as_module:
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
