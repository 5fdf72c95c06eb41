"""The README's example runs as it stands and learns."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"


def test_example_runs_and_learns() -> None:
    code = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert code is not None
    result = subprocess.run(
        [sys.executable, "-c", "import torch; torch.manual_seed(0)\n" + code[1]],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    loss, scale, skipped = map(float, result.stdout.splitlines()[-1].split())
    # It starts at about 8, the variance of a sum of eight normal numbers.
    assert loss < 0.1
    assert scale < 2**32
    assert 15 <= skipped < 30
