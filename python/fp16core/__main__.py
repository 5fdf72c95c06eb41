"""The command ``python -m fp16core``: what is installed, and where."""

import argparse
import pathlib
import platform
from collections.abc import Sequence

import torch

import fp16core
from fp16core import _build_info, _core


def cmake_prefix() -> pathlib.Path:
    """Returns the folder to put on CMAKE_PREFIX_PATH to build against fp16core."""
    # In an editable install the Python files lie in the source tree, and only
    # the extension lies with the headers and the library.
    return pathlib.Path(_core.__file__).resolve().parent


def info() -> str:
    """Returns what is installed, one fact a line."""
    cuda = f"{_build_info.cuda_version} on" if _core.built_with_cuda() else "off"
    facts = {
        "fp16core": fp16core.__version__,
        "torch": f"{torch.__version__} (built against {_build_info.torch_version})",
        "python": platform.python_version(),
        "compiler": f"{_build_info.compiler}, {_build_info.build_type}",
        "backends": f"CPU on, CUDA {cuda}",
        "instruction set": _core.cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "fused steps": ", ".join(_core.update_rules()),
    }
    width = max(map(len, facts))
    return "\n".join(f"{name:<{width}}  {fact}" for name, fact in facts.items())


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command with ``arguments``, by default those of the process."""
    parser = argparse.ArgumentParser(
        prog="python -m fp16core", description="Says what of fp16core is installed."
    )
    choice = parser.add_mutually_exclusive_group(required=True)
    choice.add_argument(
        "--info", action="store_true", help="print versions, backends and threads"
    )
    choice.add_argument(
        "--cmake-prefix",
        action="store_true",
        help="print the folder to put on CMAKE_PREFIX_PATH",
    )
    options = parser.parse_args(arguments)
    print(info() if options.info else cmake_prefix())


if __name__ == "__main__":
    main()
