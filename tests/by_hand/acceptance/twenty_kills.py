"""Is each record trained as often as its source's weight says, whatever is killed? By hand; 10 minutes.

    python tests/by_hand/acceptance/twenty_kills.py        writes results/twenty_kills.json beside this file

A run of three sources (weights 2, 1, 1) is killed 20 times at random moments, with SIGKILL to all of its
processes at once, and resumed each time; once it is stopped by `realsys stop` and resumed. Then its
ledger is counted. Synchronous and asynchronous; the synchronous run must also equal one that nobody
disturbed, bit for bit: ids, metrics, weights.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[2]), str(HERE.parents[1] / "support")]

from by_hand import HandCheck  # noqa: E402
from paced import Pace  # noqa: E402
from real_trials import (  # noqa: E402
    Trials,
    explain,
    kill_everything,
    make_policy,
    metrics_of,
    name_of,
    trained_ids,
    wait_until,
    weights_of,
)

from realsys.data.sources.record_parts import items_of_epoch, place  # noqa: E402
from realsys.trial.records import TrialFiles  # noqa: E402
from realsys.trial.trial_state import State  # noqa: E402

KILLS, EPOCHS, BATCH, STEP_S = 20, 8, 8, 0.8
SIZES = {"sums": 24, "differences": 5, "stories": 12}
WEIGHTS = {"sums": 2.0, "differences": 1.0, "stories": 1.0}
ITEMS = items_of_epoch(SIZES, WEIGHTS)
STEPS = EPOCHS * sum(ITEMS.values()) // BATCH
EARLY = 0.25  # share of the kills that do not wait for a step


def settings(folder: Path) -> tuple[str, ...]:
    """The run, with data written into ``folder``."""
    words = []
    for name, sign in (("sums", "+"), ("differences", "-")):
        rows = [{"prompt": f"{9 * i} {sign} {i} = ", "answer": "0"} for i in range(SIZES[name] + 4)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        source = f"task.sources.{name}"
        words += [f"{source}=file", f"{source}.path={folder}/{name}.jsonl"]
        words += [f"{source}.eval_size=4", f"{source}.reward=math_verify"]
    return (
        *("task=mixture", *words, "task.sources.stories=math"),
        *(
            f"task.sources.stories.train_size={SIZES['stories']}",
            "task.sources.stories.eval_size=4",
        ),
        *(f"task.weights.{name}={weight}" for name, weight in WEIGHTS.items()),
        *(f"actor.path={folder}/policy", f"train_bs_n_seqs={BATCH}", "group_size=2"),
        *("gen.max_new_tokens=6", f"exp_ctrl.total_train_epochs={EPOCHS}"),
        *("exp_ctrl.ckpt_freq_steps=2", "exp_ctrl.ckpt_freq_secs=none"),
        *("exp_ctrl.eval_freq_steps=10", "scheduling.model_worker.cpu=1", "tensorboard=false"),
    )


def paced(pace: Pace) -> tuple[str, ...]:
    """The rule of one source sleeps."""
    return tuple(w.replace("task.reward=", "task.sources.stories.reward=") for w in pace.words)


def disturbed(trials: Trials, files: TrialFiles, pace: Pace, rng: random.Random) -> list[int]:
    """Kills, resumes, stops and resumes a run, then lets it end; returns the steps it had at each kill."""
    steps: list[int] = []
    for _ in range(KILLS):
        if rng.random() > EARLY:
            trials.wait_for_step(files, max(steps, default=0) + 1)
            time.sleep(rng.uniform(0.0, 2 * STEP_S))
        else:
            time.sleep(rng.uniform(0.5, 8.0))
        kill_everything(files)
        view = wait_until(files, lambda v: v.state not in State.live(), timeout_s=30)
        if view.state is not State.LOST:
            raise SystemExit(f"the run ended before its kills: {explain(files, view)}")
        steps.append(view.step or 0)
        trials.resume(files)
    trials.wait_for_step(files, max(steps) + 1)
    if (done := trials.run("stop", name_of(files))).returncode:
        raise SystemExit(done.stderr)
    view = trials.wait(files)
    if view.state is State.STOPPED:
        pace.set(0.0)
        trials.resume(files)
    return steps


def wrong_counts(files: TrialFiles) -> dict[str, list[int]]:
    """Records that were trained more or less often than they should: found and expected times."""
    found: Counter[tuple[str, str, int]] = Counter()
    for id_ in trained_ids(files):
        epoch, _, index = id_.partition("-")
        name, number = place(ITEMS, int(index))
        found[epoch, name, number % SIZES[name]] += 1
    wrong = {}
    for epoch in map(str, range(EPOCHS)):
        for name, size in SIZES.items():
            for record in range(size):
                times = ITEMS[name] // size + (record < ITEMS[name] % size)
                if (there := found.pop((epoch, name, record), 0)) != times:
                    wrong[f"{name} {record}, epoch {epoch}"] = [there, times]
    return wrong | {str(key): [times, 0] for key, times in found.items()}


def run_of(trials: Trials, folder: Path, schedule: str, rng: random.Random) -> dict[str, Any]:
    """Makes the disturbed run, and in a synchronous schedule the other one; returns what was found."""
    words = (*settings(folder), f"schedule={schedule}")
    pace = Pace(folder, STEP_S, sequences=4)
    files = trials.launch("grpo-math", f"killed-{schedule}", *words, *paced(pace))
    steps = disturbed(trials, files, pace, rng)
    view = trials.wait(files, timeout_s=600)
    if view.state is not State.COMPLETED:
        raise SystemExit(explain(files, view))
    wrong = wrong_counts(files)
    found = {
        "kills": KILLS,
        "steps": STEPS,
        "steps_at_kills": steps,
        "attempts": len(files.all_attempts()),
        "trained": len(trained_ids(files)),
        "wrong_counts": wrong,
    }
    if schedule == "sync":
        pace.set(0.0)
        whole = trials.launch("grpo-math", "whole", *words, *paced(pace))
        trials.wait(whole, timeout_s=600)
        found["equal_to_undisturbed"] = {
            "ids": trained_ids(files) == trained_ids(whole),
            "metrics": metrics_of(files) == metrics_of(whole),
            "weights": weights_of(files, "actor") == weights_of(whole, "actor"),
        }
    return found


def main() -> int:
    """Returns 0 where every record was trained as often as it should."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1, help="of the moments of the kills")
    seed: int = parser.parse_args().seed
    check, runs = HandCheck(__file__), {}
    with tempfile.TemporaryDirectory(prefix="realsys-kills-") as name:
        folder = Path(name)
        make_policy(folder / "policy")
        trials = Trials(folder / "root")
        try:
            for schedule in ("sync", "async"):
                runs[schedule] = run_of(trials, folder, schedule, random.Random(seed))
                sys.stdout.write(f"{schedule}: {runs[schedule]}\n")
        finally:
            trials.end_all()
    problems = [
        f"{name}: {run['wrong_counts']}" for name, run in runs.items() if run["wrong_counts"]
    ]
    equal = runs["sync"]["equal_to_undisturbed"]
    problems += [f"{what} differ from the undisturbed run's" for what in equal if not equal[what]]
    return check.write(f"three sources, killed {KILLS} times, sync and async", problems, runs=runs)


if __name__ == "__main__":
    sys.exit(main())
