"""All that is asked of a GPU, unattended, in at most eight minutes: ``make gpu-kit``.

    python tests/by_hand/gpu/kit.py [--device cuda|cpu] [--out FOLDER] [--only PART …] [PROBE …]

Its parts, the most telling first, are processes of their own with their time (PARTS). What each found, or
its error, goes to FOLDER/<GPU>.json at once, with the revision; what it printed, metrics and logs of its
trials go to FOLDER/<GPU>.logs (docs/gpu.md says what is known). Needs torch, transformers and what
pyproject.toml names; no network. In a folder made by ``pack`` it takes the wheels that lie there.
``--device cpu`` measures nothing: CUDA's calls are stood in for, which only shows that the kit reaches its
end; ``--slow 4`` gives it four times as long.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
PACKED = ROOT.parent  # of a folder made by pack: with wheels, and the revision
TOTAL_S, LEAST_S = 470.0, 15.0


@dataclass(frozen=True)
class KitPart:
    """``program`` of this folder, asked for ``names``, for at most ``seconds``."""

    program: str
    names: str
    seconds: float


PARTS = {
    # Is the machine as expected, and are its numbers those of a CPU?
    "machine": KitPart("probes", "machine", 40),
    "against_cpu": KitPart("probes", "gpu_against_cpu", 60),
    # How fast, and of what?
    "speed": KitPart("probes", "train_speed decode_speed", 120),
    # What a user types first.
    "grpo": KitPart("runs", "grpo_half_a_billion", 120),
    # Where calculation says that something is wrong, or could be faster.
    "suspects": KitPart("probes", "sampling_memory room_of_a_share attention_calls publish", 60),
    "correctness": KitPart(
        "probes",
        "sampled_against_trained masters step_memory megatron_against_fsdp offload out_of_memory "
        "decode prefill attention_shapes",
        100,
    ),
    "async": KitPart("runs", "async_server_on_the_gpu", 100),
    "two_processes": KitPart("two_processes", "", 60),
    "ppo_math": KitPart("runs", "ppo_math", 90),
}


def main() -> int:
    """Runs the parts; 0 if each reached its end and found nothing wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--out", type=Path, default=HERE / "results", metavar="FOLDER")
    parser.add_argument("--only", action="append", choices=list(PARTS), help="this part")
    parser.add_argument("--slow", type=float, default=1.0, help="times as long")
    parser.add_argument("probes", nargs="*", help="only these of what the parts ask")
    asked = parser.parse_args()
    device = gpu_name() if asked.device == "cuda" else "stand-in"
    asked.out.mkdir(parents=True, exist_ok=True)
    out = asked.out.resolve() / device.replace(" ", "_")
    result = {
        "command": "python tests/by_hand/gpu/kit.py",
        "device": device,
        **revision(),
        "at": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    found: list[dict[str, Any]] = []
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kit-") as folder:
        environment = environment_of_parts(Path(folder))
        for name in asked.only or PARTS:
            part = PARTS[name]
            names = [n for n in part.names.split() if not asked.probes or n in asked.probes]
            if asked.probes and not names:
                continue
            left = TOTAL_S * asked.slow - (time.monotonic() - begin)
            if left < LEAST_S:
                rows = [{"part": name, "ok": False, "error": "no time left", "seconds": 0}]
            else:
                limit = min(part.seconds * asked.slow, left)
                logs = out.with_suffix(".logs") / name
                rows = rows_of(part.program, asked.device, names, limit, logs, environment)
            for row in rows:
                words = json.dumps(row.get("figures")) if row["ok"] else row["error"]
                said = f"{'ok    ' if row['ok'] else 'FAILED'} {row['part']}: {words}\n"
                sys.stdout.write(said)
            sys.stdout.flush()
            found += rows
            seconds, ok = round(time.monotonic() - begin), all(row["ok"] for row in found)
            whole = {**result, "seconds": seconds, "ok": ok, "rows": found}
            out.with_suffix(".json").write_text(json.dumps(whole, indent=1) + "\n")
    good = sum(row["ok"] for row in found)
    sys.stdout.write(f"{out.with_suffix('.json')}: {good} of {len(found)} ok\n")
    return 0 if good == len(found) else 1


def environment_of_parts(folder: Path) -> dict[str, str]:
    """With this tree, and the wheels of a packed one, on the path; what is temporary is in ``folder``."""
    path = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    if wheels := sorted((PACKED / "wheels").glob("*.whl")):
        site = folder / "site"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
        pip += ["--no-compile", "--no-cache-dir", "--target", str(site), *map(str, wheels)]
        subprocess.run(pip, check=True)
        path.insert(1, str(site))
    return {
        "HOME": str(folder),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",  # as workers have it
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "PYTHONUNBUFFERED": "1",
        "TMPDIR": str(folder),
    }


def rows_of(
    program: str,
    device: str,
    names: list[str],
    seconds: float,
    logs: Path,
    environment: dict[str, str],
) -> list[dict[str, Any]]:
    """What a program found; where it did not end, what it had by then and a row that says so."""
    logs.mkdir(parents=True, exist_ok=True)
    file = logs / "found.json"
    file.unlink(missing_ok=True)
    command = [sys.executable, str(HERE / f"{program}.py"), device, str(file), *names]
    environment = {**environment, "KIT_UNTIL_S": str(time.time() + seconds)}
    begin = time.monotonic()
    with (
        (logs / "printed.txt").open("w") as printed,
        subprocess.Popen(
            command, env=environment, stdout=printed, stderr=printed, start_new_session=True
        ) as process,
    ):
        try:
            code = process.wait(seconds)
            problem = f"ended with {code}" if code else ""
        except subprocess.TimeoutExpired:
            problem = f"not done after {seconds:g} s"
        finally:
            end_group(process)
    found: list[dict[str, Any]] = json.loads(file.read_text()) if file.exists() else []
    if problem or not found:
        words = (logs / "printed.txt").read_text(errors="replace")[-300:]
        error = f"{problem or 'wrote nothing'}; printed last: {words}"
        taken = round(time.monotonic() - begin, 1)
        found.append({"part": program, "ok": False, "error": error, "seconds": taken})
    return found


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends the part and all that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def revision() -> dict[str, Any]:
    """Of the checkout, or of what was packed; empty where neither says."""
    if (packed := PACKED / "revision").exists():
        said, _, changed = packed.read_text().partition(" ")
        return {"revision": said.strip(), "changed": bool(changed.strip())}
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    status = subprocess.run(
        [*git, "status", "--porcelain"], capture_output=True, text=True, check=False
    )
    return {"revision": head.stdout.strip(), "changed": bool(status.stdout.strip())}


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
