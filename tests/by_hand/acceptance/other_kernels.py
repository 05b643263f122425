"""Does what tests compute in float32 hold with another processor's kernels? By hand; three minutes.

    python tests/by_hand/acceptance/other_kernels.py [--before REVISION]

Runs algorithms, interfaces, backends and generation with the oldest kernels that torch, MKL and oneDNN have
for this kind of processor: they add in another order. ``--before`` runs those of another revision as well,
to see that its tolerances do not hold. Writes results/other_kernels.json.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from by_hand import HandCheck  # noqa: E402
from tolerance_marks import MARK, OLDEST_KERNELS  # noqa: E402

ROOMS = tuple(
    f"tests/unit/{room}" for room in ("algorithms", "interfaces", "backends", "generation")
)


def ran(checkout: Path, *options: str) -> dict[str, Any]:
    """What the rooms of a checkout came to with those kernels."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, *ROOMS],
        cwd=checkout,
        env={**os.environ, **OLDEST_KERNELS},
        capture_output=True,
        text=True,
        check=False,
    )
    counts = re.findall(r"(\d+) (passed|failed|error)", done.stdout.splitlines()[-1])
    found: dict[str, Any] = {what: int(number) for number, what in counts}
    return {
        "passed": found.get("passed", 0),
        "failed": sorted(set(re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M))),
        "exit": done.returncode,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", metavar="REVISION")
    args = parser.parse_args()
    check = HandCheck(__file__)
    now = ran(ROOT)
    marked = ran(ROOT, "-m", MARK)
    before: dict[str, Any] | None = None
    if args.before:
        with tempfile.TemporaryDirectory() as folder:
            git = ["git", "-C", str(ROOT), "worktree"]
            subprocess.run([*git, "add", "--detach", folder, args.before], check=True)
            try:
                before = {"revision": args.before, **ran(Path(folder))}
            finally:
                subprocess.run([*git, "remove", "--force", folder], check=True)
    problems = [f"failed: {name}" for name in now["failed"]]
    if now["exit"] or not now["passed"]:
        problems.append(f"pytest ended with {now['exit']}")
    if before is not None and not before["failed"]:
        problems.append(
            f"the tolerances of {args.before} hold here too: this shows nothing of them"
        )
    return check.write(
        "tests that compare float32 results hold with the oldest kernels of this processor",
        problems,
        args=f"--before {args.before}" if args.before else "",
        kernels=OLDEST_KERNELS,
        processor=platform.processor() or platform.machine(),
        now=now,
        of_them_with_a_tolerance=marked["passed"],
        before=before,
    )


if __name__ == "__main__":
    sys.exit(main())
