"""Weights between two hosts that are two network namespaces: the benchmark's road, with a small model."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(120),
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces are made by root"),
]
BENCHMARK = Path(__file__).parents[2] / "benchmarks/bench_weight_network.py"


def namespaces() -> str:
    return subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True, check=True
    ).stdout


def test_weights_cross_from_one_network_to_another_sealed_and_nothing_stays_behind():
    """Right numbers are asserted in the benchmark, and that a second server fetches nothing."""
    words = [sys.executable, str(BENCHMARK), "--mib", "32", "--rounds", "1"]
    ran = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        told, wrong = ran.communicate(timeout=100)
    finally:
        ran.kill()
    assert ran.returncode == 0, wrong[-2000:]
    ways = [line.split(" | ")[0].strip("| ") for line in told.splitlines()[2:]]
    assert ways == ["bare TCP", "channel", "fetch", "publish and fetch", "a second server"]
    assert f"realsys-{ran.pid}-" not in namespaces()  # other tests make some at the same time
