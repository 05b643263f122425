"""Measures how long a sandbox's box takes, beside a plain `python -c pass`.

    python benchmarks/bench_sandbox.py [--boxes 1000] [--at-once 32]

The kinds alternate within one run, so that other load on the machine affects all equally; compare
the ratios. A box is complete: namespaces, mounts, limits, the program, its end and the kill.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from realsys.rewards.programs.code_tests import grade
from realsys.rewards.sandbox.box_limits import BoxLimits
from realsys.rewards.sandbox.sandbox import Sandbox, python_argv

PLAIN = "python -c pass, without a box"
RESPONSE = "```python\nprint(sum(map(int, input().split())))\n```"
TESTS = [{"stdin": f"{n} 1", "stdout": f"{n + 1}"} for n in range(10)]
LIMITS = BoxLimits(wall_s=120, cpu_s=60)


def kinds(sandbox: Sandbox) -> dict[str, Callable[[], object]]:
    """What is measured, by the name in the table."""

    def box(argv: list[str]) -> Callable[[], object]:
        def run() -> None:
            outcome = sandbox.run(argv)
            assert outcome.succeeded, outcome

        return run

    return {
        PLAIN: lambda: subprocess.run([sys.executable, "-c", "pass"], check=True),
        "box, warm Python": box(python_argv("pass")),
        "box, `python -c pass`": box(["python", "-c", "pass"]),
        "box, `/bin/true`": box(["/bin/true"]),
        "a program on 10 tests, one box": lambda: grade(RESPONSE, TESTS, sandbox, LIMITS),
    }


def quantile(values: list[float], share: float) -> float:
    """Returns the smallest value that at least ``share`` of all do not exceed."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def main() -> None:
    """Measures and prints the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--boxes", type=int, default=1000)
    parser.add_argument("--at-once", type=int, default=32)
    options = parser.parse_args()
    start_s = time.perf_counter()
    with Sandbox(LIMITS, boxes_at_once=options.at_once) as sandbox:
        first_s = time.perf_counter() - start_s
        measured = kinds(sandbox)
        seconds: dict[str, list[float]] = {name: [] for name in measured}
        for _ in range(options.boxes):
            for name, call in measured.items():
                began_s = time.perf_counter()
                call()
                seconds[name].append(time.perf_counter() - began_s)
        began_s = time.perf_counter()
        with ThreadPoolExecutor(options.at_once) as pool:
            list(pool.map(lambda _: measured["box, warm Python"](), range(options.boxes)))
        together_s = time.perf_counter() - began_s
    base = statistics.median(seconds[PLAIN])
    write = sys.stdout.write
    write(f"Python {platform.python_version()}, {os.cpu_count()} cores, ")
    write(f"load {os.getloadavg()[0]:.1f}, {options.boxes} of each, one after another\n\n")
    write("| | p50 ms | p99 ms | p50, times plain |\n|---|---:|---:|---:|\n")
    for name, values in seconds.items():
        median = statistics.median(values)
        late = quantile(values, 0.99)
        write(f"| {name} | {median * 1e3:.1f} | {late * 1e3:.1f} | {median / base:.2f} |\n")
    write(f"\n{options.boxes} warm boxes, {options.at_once} at once: {together_s:.1f} s, ")
    write(f"{options.boxes / together_s:.0f} a second; the sandbox's start: {first_s:.2f} s\n")


if __name__ == "__main__":
    main()
