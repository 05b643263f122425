"""Does a failed episode cost itself alone, and an outage nothing but time? By hand; an hour.

    python tests/by_hand/acceptance/episode_failures.py [--steps 50] [--questions 64] [--group 8] …

writes results/episode_failures.json. An asynchronous run whose agent is a Python function with a limit of
five seconds. By seed 10 % of its episodes fail before they ask anything, 3 % hang after an answer, and 1 %
return NaN; in its middle the generation servers are away for five minutes. The run must complete, with a
clean audit; of the good episodes at most 2 % may be thrown away, and none may be trained as failed but
those that hung or returned NaN twice. A second run in which 60 % fail must end by itself and say which.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SUPPORT = HERE.parents[1] / "support"
sys.path[:0] = [str(HERE.parents[2]), str(SUPPORT)]

from by_hand import HandCheck  # noqa: E402
from real_trials import Trials, explain, make_policy, metrics_of, name_of, wait_until  # noqa: E402

from realsys.trial.records import TrialFiles  # noqa: E402
from realsys.trial.trial_state import State  # noqa: E402

MOST_THROWN_AWAY = 0.02
BEFORE, HANG, NAN = 0.10, 0.03, 0.01
SEED_OF_FAULTS = 1
AGENT = """
    import asyncio, json, os, random

    BEFORE, HANG, NAN, SEED, LOG = {before}, {hang}, {nan}, {seed}, {log!r}

    def note(task, what):
        with open(LOG, "a") as file:
            file.write(json.dumps([task["id"], what]) + "\\n")

    async def solve(client, task, model):
        draw = random.Random(f"{{SEED}}/{{task['id']}}").random()
        if draw < BEFORE:
            note(task, "before")
            raise ConnectionError("the sandbox provider said 429")
        messages = [{{"role": "user", "content": task["prompt"]}}]
        note(task, "began")
        first = await client.chat.completions.create(model=model, messages=messages, max_tokens=4)
        text = first.choices[0].message.content or ""
        if draw < BEFORE + HANG:
            note(task, "hangs")
            await asyncio.sleep(1000)
        if draw < BEFORE + HANG + NAN:
            note(task, "nan")
            return float("nan")
        messages += [{{"role": "assistant", "content": text}}, {{"role": "user", "content": "Sure?"}}]
        last = await client.chat.completions.create(model=model, messages=messages, max_tokens=4)
        note(task, "good")
        return 0.5 + 0.5 * (len(last.choices[0].message.content or "") % 2)
"""
OWN_FAULTS = ("hangs", "nan")


def settings(folder: Path, given: argparse.Namespace, agent: Path, steps: int) -> tuple[str, ...]:
    """The run."""
    return (
        f"actor.path={folder}/policy",
        "task.agent=python",
        f"task.agent_args.function={agent}:solve",
        f"task.agent_args.timeout_s={given.timeout_s}",
        f"task.train_size={given.questions * given.steps}",
        "task.eval_size=4",
        f"train_bs_n_seqs={given.questions}",
        f"group_size={given.group}",
        "gen.max_new_tokens=8",
        "schedule.max_staleness=1",
        "schedule.servers=2",
        f"schedule.max_concurrent_rollouts={given.at_once}",
        "exp_ctrl.total_train_epochs=1",
        f"exp_ctrl.benchmark_steps={steps}",
        "exp_ctrl.ckpt_freq_steps=10",
        "exp_ctrl.eval_freq_steps=none",
        "scheduling.model_worker.cpu=1",
        "tensorboard=false",
        *("--import", str(SUPPORT / "servers_away.py")),
    )


def agent_file(folder: Path, name: str, *, before: float, hang: float, nan: float) -> Path:
    """Writes the agent, whose log is beside it."""
    path = folder / f"{name}.py"
    text = AGENT.format(
        before=before, hang=hang, nan=nan, seed=SEED_OF_FAULTS, log=str(path.with_suffix(".jsonl"))
    )
    path.write_text(textwrap.dedent(text))
    return path


def told(agent: Path) -> dict[str, list[str]]:
    """Returns session id → what its function told, in order."""
    found: dict[str, list[str]] = {}
    for line in agent.with_suffix(".jsonl").read_text().splitlines():
        id_, what = json.loads(line)
        found.setdefault(id_, []).append(what)
    return found


def rows_of(files: TrialFiles) -> Iterator[dict[str, Any]]:
    """The lines of all rollout workers about groups that were delivered."""
    for path in files.root.rglob("rollouts/*.jsonl"):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            if row["outcome"] == "kept":
                yield row


def judged(files: TrialFiles, agent: Path) -> dict[str, Any]:
    """Compares what was delivered with what the functions tell of their episodes."""
    said = told(agent)
    tries: dict[str, list[str]] = {}  # an episode → its tries, in order
    for id_ in said:
        tries.setdefault(id_.partition("-try")[0], []).append(id_)
    num_delivered = num_failed = 0
    lessons: list[str] = []  # episodes that were scored as failed, through no fault of their own
    for row in rows_of(files):
        name = row["id"] + (f".{row['tries']}" if row["tries"] else "")
        for index, reward in enumerate(row["rewards"]):
            num_delivered += 1
            if reward > 0:
                continue
            num_failed += 1
            last = tries.get(f"{name}-{index}", [""])[-1]
            if not last or said[last][-1] not in OWN_FAULTS:
                lessons.append(f"{last or f'{name}-{index}'}: {said.get(last)}")
    num_good = sum(what[-1] == "good" for what in said.values())
    kept_good = num_delivered - num_failed
    return {
        "episodes_delivered": num_delivered,
        "scored_as_failed": num_failed,
        "taught_by_others_faults": lessons,
        "good": num_good,
        "good_thrown_away": num_good - kept_good,
        "tries_told": dict(Counter(what[-1] for what in said.values())),
        "most_tries_of_an_episode": max(map(len, tries.values())),
    }


def run_with_faults(trials: Trials, folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Makes the run with few faults and an outage; returns what was found."""
    agent = agent_file(folder, "faulty", before=BEFORE, hang=HANG, nan=NAN)
    away = Path(os.environ["REALSYS_TEST_SERVERS_AWAY"])
    files = trials.launch("grpo-math-async", "faults", *settings(folder, given, agent, given.steps))
    wait_until(
        files,
        lambda v: v.state not in State.live() or (v.step or 0) >= given.steps // 2,
        timeout_s=given.limit_s,
    )
    began_s = time.monotonic()
    away.touch()
    explained = ""
    while time.monotonic() - began_s < given.away_s:
        time.sleep(5)
        said = trials.run("explain", name_of(files)).stdout
        explained = next((x for x in said.splitlines() if "waits:" in x), explained)
    away.unlink()
    view = trials.wait(files, timeout_s=given.limit_s)
    audit = trials.run("audit", name_of(files), "--json", timeout_s=900)
    found = judged(files, agent)
    rows = metrics_of(files)
    problems = []
    if view.state is not State.COMPLETED:
        problems.append(explain(files, view))
    if audit.returncode:
        problems.append(f"audit: {audit.stdout[-2000:]} {audit.stderr[-2000:]}")
    if found["good_thrown_away"] > MOST_THROWN_AWAY * found["good"]:
        problems.append(f"{found['good_thrown_away']} of {found['good']} good episodes thrown away")
    if found["taught_by_others_faults"]:
        problems.append(f"scored as failed: {found['taught_by_others_faults'][:9]}")
    if given.away_s >= 120 and not explained:
        problems.append("explain did not say that the run waits")
    return {
        "problems": problems,
        **found,
        "steps": view.step,
        "explain": explained,
        **{
            f"sum of {name}": sum(float(str(row.get(f"rollout/{name}", 0))) for row in rows)
            for name in ("failed_tries", "outage_tries")
        },
        "set_aside": max((float(str(r.get("rollout/set_aside", 0))) for r in rows), default=0.0),
    }


def run_of_failures(trials: Trials, folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Makes the run of which 60 % of the episodes fail; returns how it ended."""
    agent = agent_file(folder, "failing", before=0.6, hang=0, nan=0)
    files = trials.launch(
        "grpo-math-async", "failing", *settings(folder, given, agent, given.steps)
    )
    view = trials.wait(files, timeout_s=given.limit_s)
    why = view.exit.first_failure.why if view.exit and view.exit.first_failure else ""
    problems = []
    if view.state is not State.FAILED or "the sandbox provider said 429" not in why:
        problems.append(f"at 60 % it is {view.state}: {why or explain(files, view)}")
    ended = Counter(what[-1] for what in told(agent).values())
    return {"problems": problems, "why": why, "steps": view.step, "tries_told": dict(ended)}


def main() -> int:
    """Returns 0 where both runs end as they should."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--questions", type=int, default=64, help="a step")
    parser.add_argument("--group", type=int, default=8, help="episodes a question")
    parser.add_argument("--at-once", type=int, default=16, help="questions under way")
    parser.add_argument("--away-s", type=float, default=300.0)
    parser.add_argument("--timeout-s", type=float, default=5.0, help="of an episode")
    parser.add_argument("--limit-s", type=float, default=4 * 3600.0, help="of a run")
    given = parser.parse_args()
    check = HandCheck(__file__)
    folder = Path(tempfile.mkdtemp(prefix="realsys-failures-"))
    os.environ["REALSYS_TEST_SERVERS_AWAY"] = str(folder / "away")
    make_policy(folder / "policy")
    trials = Trials(folder / "root")
    try:
        few = run_with_faults(trials, folder, given)
        many = run_of_failures(trials, folder, given)
    finally:
        trials.end_all()
    problems = [*few.pop("problems"), *many.pop("problems")]
    if problems:
        sys.stdout.write(f"both runs are kept: {folder}\n")
    else:
        shutil.rmtree(folder)
    return check.write(
        f"{given.steps} steps of {given.questions} questions x {given.group} episodes with faults, and "
        f"servers away for {given.away_s:g} s",
        problems,
        args=" ".join(sys.argv[1:]),
        faults={"before": BEFORE, "hang": HANG, "nan": NAN},
        timeout_s=given.timeout_s,
        with_faults=few,
        at_60_percent=many,
    )


if __name__ == "__main__":
    sys.exit(main())
