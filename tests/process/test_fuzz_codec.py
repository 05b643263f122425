"""Five seconds of the fuzzer, and that it finds what is there to be found."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

FUZZER = Path(__file__).parents[2] / "benchmarks" / "fuzz_codec.py"
BLIND = """
import sys
sys.path.insert(0, {folder!r})
from realsys.transport import codec
codec._DECODE_ERRORS = ()  # whatever msgspec raises comes out
import fuzz_codec
sys.argv = ["fuzz_codec", "--minutes", "0.02", "--only", "reply"]
sys.exit(fuzz_codec.main())
"""


def fuzzer(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=100)


def test_nothing_but_our_own_errors_comes_out_of_broken_messages() -> None:
    done = fuzzer(str(FUZZER), "--minutes", str(5 / 60), "--seed", "7")
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"executions=(\d+) .*kinds_of_crashes=0", done.stdout)
    assert found, done.stdout
    assert int(found[1]) > 1000


def test_a_crash_tells_seed_and_bytes_and_can_be_replayed() -> None:
    done = fuzzer("-c", BLIND.format(folder=str(FUZZER.parent)))
    assert done.returncode == 1, done.stderr
    found = re.search(r"CRASH target=reply seed=0 case=\d+\n .*Error.*\n  bytes=(\w+)", done.stdout)
    assert found, done.stdout
    again = fuzzer(str(FUZZER), "--replay", "reply", found[1])
    assert again.returncode == 0, again.stdout + again.stderr  # with the codec as it is
