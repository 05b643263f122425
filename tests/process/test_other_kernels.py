"""Tolerances hold with other kernels than this processor's best: those of float32 add in another order.

A third of them; all by hand (tests/by_hand/acceptance/other_kernels.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tolerance_marks import MARK, OLDEST_KERNELS

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("algorithms", "interfaces", "backends", "generation")

pytestmark = pytest.mark.process


def test_what_holds_a_tolerance_holds_with_the_oldest_kernels() -> None:
    words = ["-m", MARK, "--every", "3", *(f"tests/unit/{room}" for room in ROOMS)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words],
        cwd=ROOT,
        env={**os.environ, **OLDEST_KERNELS},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    num_passed = int(done.stdout.splitlines()[-1].partition(" passed")[0].rpartition(" ")[2])
    assert num_passed > 170  # the mark is found by names: it must not find none
