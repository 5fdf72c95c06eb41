"""The public headers: each can be included alone, and none brings all of torch."""

import os
import pathlib
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
HEADERS = sorted((ROOT / "cpp" / "include" / "fp16core").glob("*.h"))
TORCH_INCLUDE = pathlib.Path(torch.__file__).resolve().parent / "include"


def compiler(*options: str, source: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            "c++",
            "-std=c++20",
            *options,
            f"-I{ROOT / 'cpp' / 'include'}",
            f"-isystem{TORCH_INCLUDE}",
            f"-isystem{TORCH_INCLUDE / 'torch' / 'csrc' / 'api' / 'include'}",
            "-xc++",
            "-",
        ],
        input=source,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture(scope="module")
def alone() -> dict[pathlib.Path, subprocess.CompletedProcess[str]]:
    """What the compiler says of each header, asked on all processors."""

    def check(header: pathlib.Path) -> subprocess.CompletedProcess[str]:
        flags = ("-fsyntax-only", "-Wall", "-Wextra", "-Wpedantic", "-Werror")
        return compiler(*flags, source=f"#include <fp16core/{header.name}>\n" * 2)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(HEADERS, pool.map(check, HEADERS), strict=True))


@pytest.mark.parametrize("header", HEADERS, ids=lambda header: header.stem)
def test_a_header_can_be_included_alone(
    header: pathlib.Path,
    alone: dict[pathlib.Path, subprocess.CompletedProcess[str]],
) -> None:
    assert alone[header].returncode == 0, alone[header].stdout


def test_one_header_brings_all_others() -> None:
    text = (ROOT / "cpp" / "include" / "fp16core" / "fp16core.h").read_text()
    included = re.findall(r"#include <fp16core/(.*)>", text)
    assert included == sorted(included)
    names = {header.name for header in HEADERS} - {"fp16core.h"}
    # The macros of the former come with every other header, and the latter with
    # those whose functions take one.
    assert names - set(included) == {"api.h", "device_number.h"}


def test_headers_leave_the_whole_of_torch_to_who_wants_it() -> None:
    result = compiler("-M", source="#include <fp16core/fp16core.h>\n")
    assert result.returncode == 0, result.stdout
    assert "ATen/core/Tensor.h" in result.stdout
    for heavy in ("torch/torch.h", "torch/all.h", "ATen/ATen.h", "torch/extension.h"):
        assert heavy not in result.stdout
    # A dict of values is declared only, except for files of them.
    for light in ("fp16_optimizer", "grad_scaler", "tensor_lists"):
        result = compiler("-M", source=f"#include <fp16core/{light}.h>\n")
        assert "ATen/core/ivalue.h" not in result.stdout
