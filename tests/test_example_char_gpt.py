"""Runs the character GPT example with few steps, as a user would from a shell."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

EXAMPLE = Path(__file__).parents[1] / "examples" / "train_char_gpt.py"
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def run_example(*arguments):
    return subprocess.run(
        [sys.executable, EXAMPLE, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        # Threads that wait for each other without spinning: the suite may share its
        # processors with other work.
        env={**os.environ, "OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "2"},
    )


def table_row(output, label):
    """Returns the fp32 and the fp16 cell of one row of the table."""
    match = re.search(rf"^ *{re.escape(label)} +(\S+) +(\S+)$", output, re.MULTILINE)
    assert match, output
    return match.groups()


def table_numbers(output, label):
    return [float(cell.replace(",", "")) for cell in table_row(output, label)]


def test_a_short_run_prints_the_table_and_draws_the_picture(tmp_path):
    picture = tmp_path / "picture.png"
    result = run_example("--steps", "30", "--out", picture, "--allowed-gap", "10")
    assert result.returncode == 0, result.stderr
    assert "256 x 256 matrix product takes" in result.stdout

    # An untrained model starts near log(103) = 4.6; in thirty steps both must have
    # learnt more than how often each character occurs.
    unigram, _ = table_numbers(result.stdout, "unigram entropy, for comparison")
    losses = table_numbers(result.stdout, "validation loss, nats a character")
    assert max(losses) < unigram

    # Half parameters take half the bytes. The state of AdamW is the same in both runs,
    # in fp32; the masters come on top, as large as the fp32 parameters.
    parameters = table_numbers(result.stdout, "parameters, bytes")
    state = table_numbers(result.stdout, "optimizer state with masters, bytes")
    assert parameters[0] == 2 * parameters[1]
    assert state[1] - state[0] == parameters[0]

    # The default scale of 2^32 overflows at once and is halved at every skip.
    _, skipped = table_row(result.stdout, "skipped steps")
    _, scale = table_row(result.stdout, "final loss scale")
    assert 0 < int(skipped) < 30
    assert scale == f"2^{32 - int(skipped)}"

    assert picture.read_bytes().startswith(PNG_SIGNATURE)
    assert "loss=" in result.stderr
    assert f"scale={scale}, skipped={skipped}" in result.stderr


def test_a_gap_between_the_losses_fails_and_says_so(tmp_path):
    picture = tmp_path / "picture.png"
    # Both fp16 steps are skipped, so that only the fp32 model learns.
    result = run_example("--steps", "2", "--out", picture)
    assert result.returncode == 1
    assert re.search(
        r"train_char_gpt: the fp16 run must end within 2% of the fp32 validation "
        r"loss, but got \d\.\d+ against \d\.\d+ \(\+\d+\.\d+%\)",
        result.stderr,
    )
    assert picture.read_bytes().startswith(PNG_SIGNATURE)
