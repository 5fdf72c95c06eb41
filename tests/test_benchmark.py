"""Runs the benchmark in its smallest form, and shows that its checks can fail. Times
are not tested."""

import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from itertools import takewhile
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"

needs_compiler = pytest.mark.skipif(
    not (os.environ.get("CXX") or shutil.which("c++")),
    reason="the bare passes are compiled by the system's compiler, and there is none",
)

SETS = ["GPT", "small", "embedding", "ResNet-50"]
INNERS = ["AdamW", "SGD"]
PARTS = {"torch parts, foreach clip", "torch parts, loop clip"}
# What each is measured against.
MOVES = {
    "original loops": "masters",
    "GradScaler": "fp32",
    "GradScaler, foreach": "fp32",
    "GradScaler, fused": "fp32",
    "torch parts, foreach clip": "masters",
    "torch parts, loop clip": "masters",
    "fp16core generic": "masters",
    "fp16core fused": "fused",
    "fp16core lean": "lean",
}
# Bytes an element with AdamW and with SGD, whose update reads and writes 4 less.
BYTES = {"masters": (54, 46), "fp32": (48, 40), "fused": (50, 42), "lean": (32, 24)}
TASKS = {"check+unscale": 6, "masters to model": 6, "iteration, no inner step": 26}


@pytest.fixture(scope="module")
def quick_run(tmp_path_factory):
    """The printed output, the numbers and the folder of one quick run."""
    out = tmp_path_factory.mktemp("benchmark") / "new" / "folder"
    completed = subprocess.run(
        [
            sys.executable,
            BENCHMARKS / "run.py",
            "--quick",
            "--threads",
            "1",
            "2",
            f"--out={out}",
        ],
        capture_output=True,
        text=True,
        timeout=300,
        # Threads that wait for each other without spinning: the suite may share its
        # processors with other work.
        env={**os.environ, "OMP_WAIT_POLICY": "passive"},
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return completed.stdout, json.loads((out / "bench.json").read_text()), out


def case_of(row):
    return row["tensors"], row["inner"], row["threads"], row["task"]


@needs_compiler
def test_numbers_hold_every_contestant_of_every_case(quick_run):
    _, numbers, _ = quick_run
    found = [(*case_of(row), row["contestant"]) for row in numbers["rows"]]
    bare = {f"bare pass, {moves}" for moves in BYTES}
    expected = {
        (tensors, inner, threads, "iteration", contestant)
        for tensors in SETS
        for inner in INNERS
        for threads in (1, 2)
        for contestant in MOVES.keys() | bare | {"copy"}
    }
    some = {"original loops", "torch parts, foreach clip", "fp16core generic"}
    for task in TASKS:
        every = some | PARTS if task == "iteration, no inner step" else some
        expected |= {
            (tensors, "AdamW", 2, task, contestant)
            for tensors in ("GPT", "small")
            for contestant in every | {f"bare pass, {task}"}
        }
    assert len(found) == len(expected)
    assert set(found) == expected
    assert numbers["machine"]["threads"] == "1, 2"
    assert numbers["machine"]["torch"] == torch.__version__
    assert numbers["tensors"]["small"]["count"] == 50


@needs_compiler
def test_rows_follow_from_their_medians(quick_run):
    _, numbers, _ = quick_run
    seconds = {(case_of(r), r["contestant"]): r["seconds"] for r in numbers["rows"]}
    for row in numbers["rows"]:
        case, name, own = case_of(row), row["contestant"], row["seconds"]
        low, high = row["quartiles"]
        assert 0 < low <= own <= high
        assert row["rounds"] >= 1
        task = row["task"]
        moves = MOVES.get(name, name.removeprefix("bare pass, "))
        if name == "copy":
            assert row["bytes_per_element"] == 8
        elif task == "iteration":
            wanted = BYTES[moves][INNERS.index(row["inner"])]
            assert row["bytes_per_element"] == wanted
        else:
            assert row["bytes_per_element"] == TASKS[task]
        moved = (
            row["bytes_per_element"] * numbers["tensors"][row["tensors"]]["elements"]
        )
        assert row["bytes_per_second"] * own == pytest.approx(moved)
        assert row["over_loops"] * own == pytest.approx(seconds[case, "original loops"])
        best = min(seconds[case, p] for p in PARTS if (case, p) in seconds)
        assert row["over_parts"] * own == pytest.approx(best)
        if name in MOVES:
            against = moves if task == "iteration" else task
            bare = seconds[case, f"bare pass, {against}"]
            assert row["to_bare"] * bare == pytest.approx(own)
        else:
            assert row["to_bare"] is None


@needs_compiler
def test_output_has_a_table_a_case_and_the_wanted_figures(quick_run):
    output, numbers, _ = quick_run
    lines = output.splitlines()
    for row in numbers["rows"]:
        tensors, inner, threads, task = case_of(row)
        plural = "s" if threads > 1 else ""
        title = f"{tensors}, {inner}, {threads} thread{plural}, {task}  "
        (heading,) = (i for i, line in enumerate(lines) if line.startswith(title))
        table = takewhile(str.strip, lines[heading + 1 :])
        (line,) = (t for t in table if t.startswith(row["contestant"] + "  "))
        cells = re.split(r" {2,}", line.rstrip())
        assert float(cells[1]) == pytest.approx(row["seconds"] * 1e3, abs=5e-4)
        assert int(cells[4]) == row["bytes_per_element"]
    verdicts = lines[lines.index("Wanted") + 1 :]
    assert len(verdicts) == len(numbers["wanted"]) == 16
    for line, figure in zip(verdicts, numbers["wanted"], strict=True):
        below = figure["value"] <= figure["limit"]
        above = figure["value"] >= figure["limit"]
        assert figure["met"] == (below if figure["at_most"] else above)
        verdict = "met " if figure["met"] else "not met "
        assert line.startswith(verdict)
        assert figure["text"] in line


@needs_compiler
def test_figures_are_about_the_most_threads(quick_run):
    _, numbers, _ = quick_run
    seconds = {
        row["contestant"]: row["seconds"]
        for row in numbers["rows"]
        if case_of(row) == ("GPT", "AdamW", 2, "iteration")
    }
    values = [figure["value"] for figure in numbers["wanted"]]
    lean, best = seconds["fp16core lean"], min(seconds[part] for part in PARTS)
    assert values[0] == pytest.approx(lean / seconds["bare pass, lean"])
    assert values[1] == pytest.approx(seconds["original loops"] / lean)
    assert values[2] == pytest.approx(best / lean)
    assert values[3] == pytest.approx(best / seconds["fp16core fused"])


@needs_compiler
def test_lean_adam_takes_sixteen_bytes_a_parameter(quick_run):
    _, numbers, _ = quick_run
    held = {(m["inner"], m["contestant"]): m for m in numbers["memory"]}
    assert held.keys() == {(inner, name) for inner in INNERS for name in MOVES}
    tensors = numbers["tensors"]["GPT"]
    # Besides, a count of the steps for each tensor, and a few scalars in all.
    besides = (4 * tensors["count"] + 64) / tensors["elements"]
    for (inner, name), memory in held.items():
        wanted = 16 if name == "fp16core lean" or "GradScaler" in name else 20
        wanted -= 4 if inner == "SGD" else 0
        assert wanted <= memory["held"] <= wanted + besides
        assert memory["held"] <= memory["peak"]
        if name.startswith("fp16core"):
            assert memory["peak"] <= memory["held"] + besides
        if Path("/proc/self/status").exists():
            assert memory["resident"] > 0


@needs_compiler
def test_wrapping_adds_four_bytes_an_element(quick_run):
    _, numbers, _ = quick_run
    assert numbers["wrapping"]["bytes_per_element"] == 4.0
    assert numbers["wrapping"]["peak_above_masters"] <= 1.0


@needs_compiler
def test_growth_is_by_element(quick_run):
    _, numbers, _ = quick_run
    assert [size["elements"] for size in numbers["growth"]] == [10_000, 200_000]
    for size in numbers["growth"]:
        seconds = size["nanoseconds_per_element"] * size["elements"] / 1e9
        assert seconds == pytest.approx(size["seconds"])


@needs_compiler
def test_chart_is_drawn_where_matplotlib_is(quick_run):
    output, _, out = quick_run
    if importlib.util.find_spec("matplotlib") is None:
        assert "no chart: No module named 'matplotlib'" in output
        assert not (out / "bench.png").exists()
    else:
        assert (out / "bench.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def load(monkeypatch):
    """Imports a module of the benchmark by name."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


def test_sets_have_the_sizes_of_what_they_are_named_after(load):
    tensors = load("tensors")
    resnet = tensors.resnet_set(64, 1000)
    assert (len(resnet.shapes), resnet.elements) == (161, 25_557_032)
    gpt = tensors.gpt_set(layers=8, width=512, vocabulary=8192, context=512)
    assert (len(gpt.shapes), gpt.elements) == (100, 29_676_544)
    small = tensors.small_set(1000)
    assert (len(small.shapes), small.elements) == (1000, 349_998)


@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize(
    ("phase", "fault"),
    [
        ("take", "masters differ|the step moved no master"),
        ("clip", "the clipped norm is off"),
        ("step", "the step moved no master"),
        ("write_model", "the model is stale"),
        ("zero_grad", "a gradient is not zeroed"),
    ],
)
@pytest.mark.parametrize("exact", [True, False])
def test_a_contestant_that_leaves_something_out_is_found(
    load, monkeypatch, phase, fault, inner, exact
):
    by_hand, tensors = load("by_hand"), load("tensors").small_set(3)
    how = load("inner").INNERS[inner]
    honest = by_hand.TorchParts(tensors, how, fused=True, foreach_clip=True)
    lazy = by_hand.OriginalLoops(tensors, how, fused=exact)
    for master in lazy.masters:
        master.grad.zero_()
    monkeypatch.setattr(lazy, phase, lambda: None)
    names = {"honest", "lazy"} if exact else {"honest"}
    # Gradients that are not clipped leave the masters exactly the same.
    given = tensors.gradients(0.1 if phase == "clip" else 1e-3)
    with pytest.raises(AssertionError, match=f"lazy: ({fault})"):
        load("agreement").check_iteration(
            {"honest": honest, "lazy": lazy}, given, names
        )


@pytest.mark.parametrize("inner", INNERS)
def test_a_clip_that_the_step_ignores_is_found(load, inner):
    lineup, tensors = load("lineup"), load("tensors").small_set(3)
    how = load("inner").INNERS[inner]
    names = (lineup.PARTS, lineup.LEAN)
    contestants = {name: lineup.LINEUP[name].build(tensors, how) for name in names}
    check = load("agreement").check_iteration
    check(contestants, tensors.gradients(1e-5), names)
    check(contestants, tensors.gradients(0.1))
    lean = contestants[lineup.LEAN]
    step = lean.step

    def take_again_and_step():
        lean.take()
        step()

    lean.step = take_again_and_step
    with pytest.raises(AssertionError, match="fp16core lean: masters differ"):
        check(contestants, tensors.gradients(0.1))


@pytest.fixture(scope="module")
def passes(tmp_path_factory):
    """The compiled bare passes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        module = importlib.import_module("bare_pass")
        return module.load(tmp_path_factory.mktemp("passes"))


@pytest.fixture
def all_passes(load):
    """Every bare pass that is timed."""
    plans = [load("passes").iteration(inner) for inner in load("inner").INNERS.values()]
    found = {one for plan in plans for moves in plan.values() for one in moves}
    return sorted(found, key=lambda one: (one.function, one.operands))


@needs_compiler
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(
    "sizes", [[0], [1], [7, 8, 9], [65536, 65537, 3, 200001], [9_000_011]]
)
def test_bare_passes_move_every_element(load, passes, all_passes, sizes, threads):
    shapes = [(size,) for size in sizes]
    tensors = load("tensors").TensorSet("x", shapes)
    scratch = load("scratch").Scratch(tensors, all_passes, passes)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        scratch.check()
    finally:
        torch.set_num_threads(before)


@needs_compiler
def test_a_bare_pass_that_leaves_out_an_element_is_found(load, passes, all_passes):
    bare_pass, agreement = load("bare_pass"), load("agreement")
    tensors = load("tensors").TensorSet("x", [(70_000,), (5,)])
    for one in all_passes:
        whole = load("scratch").Scratch(tensors, [one], passes).operands(one)
        parts = [[*operand[:-1], operand[-1][:-1]] for operand in whole]
        prepared = bare_pass.prepare(getattr(passes, one.function), parts, 0)
        with pytest.raises(AssertionError, match="an element was not (moved|read)"):
            agreement.check_bare_pass(one.function, prepared, whole)


def test_what_a_pass_moves_is_what_it_reads_and_writes(load):
    plans = load("passes").iteration(load("inner").ADAMW)
    check, lean, zero = plans["lean"]
    assert (check.bytes, lean.bytes, zero.bytes) == (2, 28, 2)
    assert lean.bytes_only_written == 2
    take, _, fused, _ = plans["fused"]
    assert (take.bytes, take.bytes_only_written) == (6, 4)
    assert (fused.bytes, fused.bytes_only_written) == (30, 2)
