"""Runs the benchmark in its smallest form, and shows that its checks can fail. Times
are not tested."""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"

needs_compiler = pytest.mark.skipif(
    not (os.environ.get("CXX") or shutil.which("c++")),
    reason="the bare passes are compiled by the system's compiler, and there is none",
)

PASS_CONTESTANTS = {"original loops", "torch lists", "fp16core", "bare pass"}
LIST_CONTESTANTS = {"torch lists", "torch lists, loop clip"}
INNER_CONTESTANTS = {"inner step alone", "default AdamW alone"}
CONTESTANTS = {
    "check+unscale": PASS_CONTESTANTS,
    "masters to model": PASS_CONTESTANTS,
    "whole step": {"original loops", "loops, default AdamW", "fp16core"}
    | LIST_CONTESTANTS
    | INNER_CONTESTANTS,
    "step, no inner": {"original loops", "fp16core"} | LIST_CONTESTANTS,
}


@pytest.fixture(scope="module")
def quick_run(tmp_path_factory):
    """The printed output and the numbers of one quick run."""
    numbers = tmp_path_factory.mktemp("benchmark") / "numbers.json"
    completed = subprocess.run(
        [
            sys.executable,
            BENCHMARKS / "run.py",
            "--quick",
            "--threads=2",
            f"--json={numbers}",
        ],
        capture_output=True,
        text=True,
        timeout=120,
        # Threads that wait for each other without spinning: the suite may share its
        # processors with other work.
        env={**os.environ, "OMP_WAIT_POLICY": "passive"},
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return completed.stdout, json.loads(numbers.read_text())


@needs_compiler
def test_numbers_hold_every_contestant_of_every_task(quick_run):
    _, numbers = quick_run
    found = [(r["tensors"], r["task"], r["contestant"]) for r in numbers["rows"]]
    expected = {
        (tensors, task, contestant)
        for tensors in ("GPT", "small")
        for task, contestants in CONTESTANTS.items()
        for contestant in contestants
    }
    assert len(found) == len(expected)
    assert set(found) == expected
    assert numbers["machine"]["threads"] == 2
    assert numbers["machine"]["torch"] == torch.__version__
    assert numbers["tensors"]["small"]["count"] == 50


@needs_compiler
def test_rows_follow_from_their_medians(quick_run):
    _, numbers = quick_run
    seconds = {
        (r["tensors"], r["task"], r["contestant"]): r["seconds"]
        for r in numbers["rows"]
    }
    for row in numbers["rows"]:
        name, task, own = row["tensors"], row["task"], row["seconds"]
        low, high = row["quartiles"]
        assert 0 < low <= own <= high
        elements = numbers["tensors"][name]["elements"]
        moved = row["bytes_per_element"] * elements
        assert row["bytes_per_second"] * own == pytest.approx(moved)
        loops = seconds[name, task, "original loops"]
        assert row["to_loops"] * loops == pytest.approx(own)
        best = min(
            seconds[name, task, lists]
            for lists in LIST_CONTESTANTS
            if (name, task, lists) in seconds
        )
        assert row["to_lists"] * best == pytest.approx(own)
        if "bare pass" in CONTESTANTS[task]:
            bare = seconds[name, task, "bare pass"]
            assert row["to_bare"] * bare == pytest.approx(own)
        else:
            assert row["to_bare"] is None


@needs_compiler
def test_output_is_one_table_and_the_wanted_figures(quick_run):
    output, numbers = quick_run
    lines = output.splitlines()
    heading = next(i for i, line in enumerate(lines) if line.startswith("tensors "))
    rows = lines[heading + 1 : heading + 1 + len(numbers["rows"])]
    assert {len(line) for line in rows} == {len(lines[heading])}
    for line, row in zip(rows, numbers["rows"], strict=True):
        cells = re.split(r" {2,}", line)
        assert cells[:3] == [row["tensors"], row["task"], row["contestant"]]
        assert float(cells[3]) == pytest.approx(row["seconds"] * 1e3, abs=5e-4)
    verdicts = lines[lines.index("Wanted") + 1 :]
    assert len(verdicts) == len(numbers["wanted"]) == 7
    for line, figure in zip(verdicts, numbers["wanted"], strict=True):
        below = figure["value"] <= figure["limit"]
        above = figure["value"] >= figure["limit"]
        assert figure["met"] == (below if figure["at_most"] else above)
        verdict = "met " if figure["met"] else "not met "
        assert line.startswith(verdict)
        assert figure["text"] in line


@needs_compiler
def test_wrapping_adds_four_bytes_an_element(quick_run):
    _, numbers = quick_run
    assert numbers["wrapping"]["bytes_per_element"] == 4.0
    assert numbers["wrapping"]["peak_above_masters"] <= 1.0


@pytest.fixture
def load(monkeypatch):
    """Imports a module of the benchmark by name."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


def leave_out(monkeypatch, contestant, phase):
    monkeypatch.setattr(contestant, phase, lambda: None)


@pytest.mark.parametrize(
    ("phase", "fault"),
    [
        ("take", "masters differ"),
        ("step", "the step moved no master"),
        ("write_model", "the model is stale"),
        ("zero_grad", "a gradient is not zeroed"),
    ],
)
def test_a_contestant_that_leaves_something_out_is_found(
    load, monkeypatch, phase, fault
):
    contestants, tensors = load("contestants"), load("tensors").small_set(3)
    gradients = tensors.gradients(1e-5)
    honest = contestants.TorchLists(tensors, gradients, fused=True)
    lazy = contestants.OriginalLoops(tensors, gradients, fused=True)
    for master in lazy.masters:
        master.grad.zero_()
    leave_out(monkeypatch, lazy, phase)
    with pytest.raises(AssertionError, match=f"lazy: {fault}"):
        load("agreement").check_iteration({"honest": honest, "lazy": lazy})


def test_a_contestant_that_does_not_clip_is_found(load, monkeypatch):
    contestants, tensors = load("contestants"), load("tensors").small_set(3)
    lazy = contestants.Ours(tensors, tensors.gradients(0.05), fused=True)
    load("agreement").check_clipping({"honest": lazy})
    leave_out(monkeypatch, lazy, "clip")
    with pytest.raises(AssertionError, match="lazy: the clipped norm is off"):
        load("agreement").check_clipping({"lazy": lazy})


@pytest.fixture(scope="module")
def passes(tmp_path_factory):
    """The compiled bare passes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        module = importlib.import_module("bare_pass")
        return module.load(tmp_path_factory.mktemp("passes"))


@needs_compiler
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(
    "sizes", [[0], [1], [7, 8, 9], [65536, 65537, 3, 200001], [5_000_011]]
)
def test_bare_passes_move_every_element(load, passes, sizes, threads):
    prepare = load("bare_pass").prepare
    check = load("agreement").check_bare_pass
    halves = [torch.randn(size).half() for size in sizes]
    singles = [torch.zeros(size) for size in sizes]
    copies = [torch.zeros_like(half) for half in halves]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        prepare(passes.widen, halves, singles)()
        prepare(passes.narrow, singles, copies)()
    finally:
        torch.set_num_threads(before)
    check(halves, singles)
    check(singles, copies)
    assert all(map(torch.equal, halves, copies))
    if halves[-1].numel() > 0:
        copies[-1][-1] += 1
        with pytest.raises(AssertionError, match="an element was not moved"):
            check(singles, copies)
