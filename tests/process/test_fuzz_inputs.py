"""Bad inputs of all kinds are refused with a reason: a thirtieth of those of benchmarks/fuzz_inputs.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import realsys

ROOT = Path(realsys.__file__).parent.parent
SCRIPT = ROOT / "benchmarks" / "fuzz_inputs.py"


def test_no_bad_input_ends_in_a_traceback_or_gives_a_wrong_value() -> None:
    """In a process of its own: it forks once for each input, and has threads in none of them."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--every", "28"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert int(done.stdout.split(" inputs")[0].rsplit("\n", 1)[-1]) >= 10
    for kind in ("site", "many", "yaml", "data", "model", "word"):
        assert f"'{kind}'" in done.stdout
