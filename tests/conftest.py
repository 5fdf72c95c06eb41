"""What every test session shares: the option --slow, seeds, and a header line."""

from collections.abc import Iterator

import pytest
import torch

from fp16core import _core


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
