"""Measures the command line's start-up cost, as ratios to `python -c pass`.

    python benchmarks/bench_cli_startup.py [--rounds 40]

The commands alternate within one run and medians are compared, so that other load on the machine
affects all equally. Goals: `realsys --help` and a Tab under 6, `realsys plan` under about 1 s.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from launcher.sites.places import user_name


def commands() -> dict[str, list[str]]:
    """What is measured, by the name in the table."""
    program = shutil.which("realsys", path=sysconfig.get_path("scripts")) or "realsys"
    return {
        "python -c pass": [sys.executable, "-c", "pass"],
        "realsys --help": [program, "--help"],
        "Tab: verb": [program, "__complete", "la"],
        "Tab: trial": [program, "__complete", "status", "ppo"],
        "Tab: worker": [program, "__complete", "logs", "ppo-math/run1", ""],
        "import typer": [sys.executable, "-c", "import typer"],
        "realsys launch --help": [program, "launch", "--help"],
        "realsys ls": [program, "ls"],
        "realsys plan ppo-math": [program, "plan", "ppo-math"],
    }


def main() -> None:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    rounds: int = parser.parse_args().rounds
    seconds: dict[str, list[float]] = {name: [] for name in commands()}
    with tempfile.TemporaryDirectory() as root:
        logs = Path(root, "runs", user_name(), "ppo-math", "run1")
        logs.mkdir(parents=True)
        environment = {**os.environ, "REALSYS_FILE_ROOT": root}
        for _ in range(rounds + 1):
            for name, command in commands().items():
                start = time.perf_counter()
                subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
                seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(found[1:]) for name, found in seconds.items()}
    base = medians["python -c pass"]
    load = os.getloadavg()[0]
    sys.stdout.write(
        f"Python {platform.python_version()}, {os.cpu_count()} cores, load {load:.1f}, "
        f"medians of {rounds} rounds\n\n| command | ms | times `python -c pass` |\n|---|---|---|\n"
    )
    for name, median in medians.items():
        sys.stdout.write(f"| `{name}` | {median * 1e3:.1f} | {median / base:.2f} |\n")


if __name__ == "__main__":
    main()
