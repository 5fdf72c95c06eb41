"""What every test session shares: the option --slow, seeds, a header line, and an
environment with the wheel under test."""

import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch

from commands import configure, program, run
from fp16core import _core
from process_pool import ProcessPool


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the slow tests too")


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    if config.getoption("--slow"):
        return
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="slow: runs with --slow"))


def pytest_report_header() -> str:
    return (
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, "
        f"fp16core uses {_core.cpu_capability()}"
    )


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """Makes torch's random numbers the same in every run and order of tests."""
    torch.manual_seed(0)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tensors this small gain nothing from threads, which only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPool]:
    """Four processes in one group of gloo, which stay from test to test."""
    pool = ProcessPool(4, tmp_path_factory.mktemp("processes"))
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def wheel() -> pathlib.Path:
    """The wheel under test."""
    if "FP16CORE_WHEEL" not in os.environ:
        assert "CI" not in os.environ, "FP16CORE_WHEEL must name the wheel in CI"
        pytest.skip("FP16CORE_WHEEL does not name a wheel; 'make test' sets it")
    return pathlib.Path(os.environ["FP16CORE_WHEEL"]).resolve()


@pytest.fixture(scope="session")
def environment(
    wheel: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> pathlib.Path:
    """The interpreter of a fresh environment with the wheel in it.

    torch and the rest of this environment are linked in rather than installed
    again, at the place that pip would have put them.
    """
    folder = tmp_path_factory.mktemp("environment")
    result = run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    assert result.returncode == 0, result.stdout
    python = folder / "bin" / "python"
    site = next(folder.glob("lib/python*/site-packages"))
    for entry in pathlib.Path(torch.__file__).resolve().parents[1].iterdir():
        if not entry.name.startswith(("fp16core", "_fp16core", "__pycache__")):
            (site / entry.name).symlink_to(entry)
    # The environment has no pip of its own, so this one's installs into it.
    result = run(
        sys.executable,
        "-m",
        "pip",
        f"--python={python}",
        "install",
        "--no-deps",
        "--no-index",
        wheel,
        cwd=folder,
    )
    assert result.returncode == 0, result.stdout
    return python


@pytest.fixture(scope="session")
def prefix(environment: pathlib.Path) -> pathlib.Path:
    """What the fresh environment's ``--cmake-prefix`` says."""
    result = run(
        environment, "-m", "fp16core", "--cmake-prefix", cwd=environment.parent
    )
    assert result.returncode == 0, result.stdout
    return pathlib.Path(result.stdout.strip())


@pytest.fixture(scope="session")
def cross_language(
    prefix: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[pathlib.Path, pathlib.Path], subprocess.CompletedProcess[str]]:
    """The C++ program that trains as the jobs in a file say, built against the wheel
    as an outside project, with warnings as errors."""
    source = pathlib.Path(__file__).parents[1] / "cpp" / "tests" / "cross_language"
    build = tmp_path_factory.mktemp("cross_language") / "build"
    result = configure(source, build, prefix)
    assert result.returncode == 0, result.stdout
    result = run(program("cmake"), "--build", build, cwd=build)
    assert result.returncode == 0, result.stdout

    def run_jobs(
        jobs: pathlib.Path, results: pathlib.Path
    ) -> subprocess.CompletedProcess[str]:
        # One thread, as what it is compared with.
        one = ("env", "OMP_NUM_THREADS=1")
        return run(*one, build / "cross_language", jobs, results, cwd=build)

    return run_jobs
