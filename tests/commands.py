"""Programs that tests run in processes of their own."""

import os
import pathlib
import shutil
import subprocess
import sysconfig


def run(
    *words: object, cwd: pathlib.Path, path: pathlib.Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a command with PYTHONPATH set to ``path`` only."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    return subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def program(name: str) -> str:
    """Returns the path of a program, this environment's before the system's."""
    found = shutil.which(name, path=sysconfig.get_path("scripts"))
    found = found or shutil.which(name)
    assert found, f"{name} is needed, but was not found"
    return found


def configure(
    source: pathlib.Path,
    build: pathlib.Path,
    prefix: pathlib.Path | None,
    *definitions: str,
) -> subprocess.CompletedProcess[str]:
    """Configures the CMake project in ``source``, against the package in ``prefix``
    if it needs one."""
    return run(
        program("cmake"),
        "-G",
        "Ninja",
        f"-DCMAKE_MAKE_PROGRAM={program('ninja')}",
        "-S",
        source,
        "-B",
        build,
        *([] if prefix is None else [f"-DCMAKE_PREFIX_PATH={prefix}"]),
        *definitions,
        cwd=build.parent,
    )
