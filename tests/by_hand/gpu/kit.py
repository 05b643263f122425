"""All that is asked of a GPU, unattended, in at most eight minutes: ``make gpu-kit``.

    python tests/by_hand/gpu/kit.py [--device cuda|cpu] [--out FILE] [--only PART …] [PROBE …]

Three parts, each a process of its own with its time: probes.py, two_processes.py, runs.py. What each found,
or its error, goes to a JSON file with the revision (docs/gpu.md says what is known). Needs torch,
transformers and what pyproject.toml names; no network. ``--device cpu`` measures nothing: CUDA's calls are
stood in for, which only shows that the kit reaches its end.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
PARTS = {"probes": 150.0, "two_processes": 90.0, "runs": 240.0}  # seconds at most


def main() -> int:
    """Runs the parts; 0 if each reached its end and found nothing wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--out", type=Path, help="default: tests/by_hand/gpu/results/<GPU>.json")
    parser.add_argument("--only", action="append", choices=list(PARTS), help="this part")
    parser.add_argument("probes", nargs="*", help="only these probes of part probes")
    asked = parser.parse_args()
    found, begin = [], time.monotonic()
    for part in asked.only or PARTS:
        names = asked.probes if part == "probes" else []
        found += rows_of(part, asked.device, names, PARTS[part])
    ok = all(row["ok"] for row in found)
    result = {
        "command": "python tests/by_hand/gpu/kit.py",
        "device": gpu_name() if asked.device == "cuda" else "stand-in",
        **revision(),
        "at": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "seconds": round(time.monotonic() - begin),
        "ok": ok,
        "rows": found,
    }
    file = asked.out or HERE / "results" / f"{str(result['device']).replace(' ', '_')}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(result, indent=1) + "\n")
    for row in found:
        words = json.dumps(row.get("figures")) if row["ok"] else row["error"]
        sys.stdout.write(f"{'ok    ' if row['ok'] else 'FAILED'} {row['part']}: {words}\n")
    sys.stdout.write(f"{file}: {sum(row['ok'] for row in found)} of {len(found)} ok\n")
    return 0 if ok else 1


def rows_of(part: str, device: str, names: list[str], seconds: float) -> list[dict[str, Any]]:
    """What a part found; where it did not end, what it had by then and a row that says so."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "found.json")
        command = [sys.executable, str(HERE / f"{part}.py"), device, str(file), *names]
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
        begin = time.monotonic()
        with subprocess.Popen(command, env=environment, start_new_session=True) as process:
            try:
                code = process.wait(seconds)
                problem = f"ended with {code}" if code else ""
            except subprocess.TimeoutExpired:
                problem = f"not done after {seconds:g} s"
            finally:
                end_group(process)
        found: list[dict[str, Any]] = json.loads(file.read_text()) if file.exists() else []
    if problem or not found:
        taken = round(time.monotonic() - begin, 1)
        found.append(
            {"part": part, "ok": False, "error": problem or "wrote nothing", "seconds": taken}
        )
    return found


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends the part and all that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def revision() -> dict[str, Any]:
    """Of the checkout; empty where there is no git, as in a copy of the tree."""
    git = ["git", "-C", str(ROOT)]
    said = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    changed = subprocess.run(
        [*git, "status", "--porcelain"], capture_output=True, text=True, check=False
    )
    return {"revision": said.stdout.strip(), "changed": bool(changed.stdout.strip())}


def gpu_name() -> str:
    """As the driver calls it."""
    asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        said = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "no GPU"
    return said.stdout.splitlines()[0].strip() if said.stdout.strip() else "no GPU"


if __name__ == "__main__":
    sys.exit(main())
