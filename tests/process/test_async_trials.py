"""Whole trials whose answers come from generation servers: exact at staleness 0, bounded above it, and
nothing is lost when one of their processes is killed.
"""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from paced import Pace
from real_trials import (
    SMALL_PPO,
    SMALL_PPO_STEPS,
    Trials,
    explain,
    small_ppo,
    trained_ids,
    wait_until,
    weights_of,
    worker_pid,
)

from realsys.observability.metrics import deterministic, read_metrics
from realsys.trial.records import TrialFiles
from realsys.trial.trial_state import State

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

# The plain objective, so that nothing but the way of the answers differs.
PLAIN = ("algorithm.use_decoupled_loss=false", "algorithm.correction=none")
# What only one of the two ways has to tell.
ONE_SIDED = ("rollout/", "staleness/", "mismatch/")


def comparable(files: TrialFiles) -> list[dict[str, object]]:
    """The metrics that both ways have."""
    rows = [deterministic(row) for row in read_metrics(files.phase(files.root).metrics)]
    return [
        {k: v for k, v in row.items() if not any(part in k for part in ONE_SIDED)} for row in rows
    ]


def column(files: TrialFiles, name: str) -> list[float]:
    """A metric's values, of the steps that have it."""
    rows = read_metrics(files.phase(files.root).metrics)
    return [float(row[name]) for row in rows if name in row]


@pytest.fixture(scope="module")
def module_trials(tmp_path_factory: pytest.TempPathFactory):
    trials = Trials(tmp_path_factory.mktemp("async") / "root")
    yield trials
    trials.end_all()


def run_to_the_end(trials: Trials, experiment: str, name: str, *words: str) -> TrialFiles:
    files = trials.launch(experiment, name, *words)
    view = trials.wait(files, timeout_s=240)
    assert view.state is State.COMPLETED, explain(files, view)
    return files


def sampled_tokens(files: TrialFiles) -> int:
    """Tokens that the policy wrote, of all that was trained on."""
    return int(sum(column(files, "actor/staleness/tokens_checked")))


def audited(trials: Trials, files: TrialFiles, *, whole: bool = True) -> dict[str, Any]:
    """What `realsys audit` says of a trial that it must find clean. ``whole``: the trial is completed."""
    done = trials.run("audit", str(files.root), "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert (found["clean"], found["findings"]) == (True, [])
    if whole:
        assert found["datapoints"] == len(trained_ids(files))
    return found


@pytest.fixture(scope="module")
def synchronous(module_trials: Trials, tiny_policy: Path) -> TrialFiles:
    return run_to_the_end(
        module_trials, "ppo-math", "sync", f"actor.path={tiny_policy}", *SMALL_PPO
    )


@pytest.mark.parametrize(
    "how",
    [
        ("schedule.servers=2", "schedule.workers=2", "schedule.new_tokens_per_chunk=3"),
        ("schedule.weights_through=disk", "schedule.staleness_policy=window"),
    ],
    ids=["two servers and workers, in chunks", "weights through the folder"],
)
def test_staleness_0_is_the_synchronous_run_bit_for_bit(
    module_trials: Trials, synchronous: TrialFiles, tiny_policy: Path, how: tuple[str, ...]
) -> None:
    name = f"zero{len(how)}"
    files = run_to_the_end(
        module_trials,
        "ppo-math-async",
        name,
        f"actor.path={tiny_policy}",
        "schedule.max_staleness=0",
        *PLAIN,
        *SMALL_PPO,
        *how,
    )
    assert trained_ids(files) == trained_ids(synchronous)
    assert comparable(files) == comparable(synchronous)
    for role in ("actor", "critic"):
        assert weights_of(files, role) == weights_of(synchronous, role)
    assert set(column(files, "actor/staleness/max")) == {0.0}
    for trial in (files, synchronous):
        assert bool(audited(module_trials, trial)["tickets"]) == (trial is files)


def test_adapters_alone_reach_the_servers_and_make_the_same_bits(
    module_trials: Trials, tiny_policy: Path
) -> None:
    """16 versions of adapters, merged each time from the base weights that came once."""
    words = (f"actor.path={tiny_policy}", "actor.lora.rank=4", *SMALL_PPO)
    here = run_to_the_end(module_trials, "ppo-math", "lora", *words)
    there = run_to_the_end(
        module_trials, "ppo-math-async", "lora", *words, *PLAIN, "schedule.max_staleness=0"
    )
    assert comparable(there) == comparable(here)
    assert weights_of(there, "actor") == weights_of(here, "actor")


@pytest.mark.parametrize("policy", ["window", "drop"])
def test_the_bound_holds_for_every_token_and_every_prompt_is_trained_once(
    module_trials: Trials, tiny_policy: Path, policy: str
) -> None:
    files = run_to_the_end(
        module_trials,
        "ppo-math-async",
        f"two-{policy}",
        f"actor.path={tiny_policy}",
        "schedule.max_staleness=2",
        f"schedule.staleness_policy={policy}",
        "schedule.new_tokens_per_chunk=4",
        *SMALL_PPO,
    )
    lags = column(files, "actor/staleness/max")
    assert max(lags) <= 2
    assert max(lags) > 0, "it never ran ahead"
    assert sum(column(files, "actor/staleness/tokens_checked")) > 0
    assert set(Counter(trained_ids(files)).values()) == {1}
    assert len(trained_ids(files)) == SMALL_PPO_STEPS * 8
    found = audited(module_trials, files)
    assert found["tickets"]["trained"] == SMALL_PPO_STEPS * 8
    assert found["tokens"] == {"of_dump": sampled_tokens(files), "of_rows": 0, "unknown": 0}


def test_killed_workers_are_started_again_alone_and_nothing_is_lost(
    module_trials: Trials, tiny_policy: Path, tmp_path: Path
) -> None:
    """A server, the manager and a rollout worker, one after another, by kill -9; policy ``wait``."""
    pace = Pace(tmp_path, 0.3)  # it has not ended before all are killed
    files = module_trials.launch(
        "ppo-math-async",
        "kill",
        f"actor.path={tiny_policy}",
        "schedule.max_staleness=2",
        "schedule.servers=2",
        *small_ppo("task.train_size=96"),
        *pace.words,
    )
    view = module_trials.wait_for_step(files, 3)
    killed = ("generation_server/0", "gserver_manager/0", "rollout_worker/0")
    others = {w.worker: w.pid for w in view.workers if w.worker not in killed}
    for worker in killed:
        began = view.step or 0
        os.kill(worker_pid(view, worker), signal.SIGKILL)
        view = wait_until(files, lambda v: (v.step or 0) >= began + 4, timeout_s=120)  # noqa: B023
    assert {w.worker: w.pid for w in view.workers if w.worker in others} == others
    pace.set(0.0)
    done = module_trials.wait(files, timeout_s=240)
    assert (done.state, done.attempt) == (State.COMPLETED, 1), explain(files, done)
    assert set(Counter(trained_ids(files)).values()) == {1}
    assert len(trained_ids(files)) == 24 * 8
    assert max(column(files, "actor/staleness/max")) == 2
    told = [json.loads(line) for line in files.attempt(1).restarts.read_text().splitlines()]
    assert [row["worker"] for row in told] == list(killed)
    tickets = audited(module_trials, files)["tickets"]
    assert tickets["trained"] == 24 * 8
    assert tickets.keys() <= {"trained", "worker lost", "failed", "attempt ended"}


def test_a_stopped_run_goes_on_with_what_was_delivered(
    module_trials: Trials, tiny_policy: Path, tmp_path: Path
) -> None:
    pace = Pace(tmp_path, 1.2)  # it has not ended before it is stopped
    words = ("schedule.max_staleness=3", *SMALL_PPO, *pace.words)
    files = module_trials.launch("ppo-math-async", "stop", f"actor.path={tiny_policy}", *words)
    module_trials.wait_for_step(files, 3)
    assert audited(module_trials, files, whole=False)["tickets"]["trained"] >= 2 * 8
    done = module_trials.run("stop", "ppo-math-async/stop", "--grace", "30")
    assert done.returncode == 0, done.stderr
    view = module_trials.wait(files)
    assert view.state is State.STOPPED, explain(files, view)
    pace.set(0.0)
    module_trials.resume(files)
    view = module_trials.wait(files, timeout_s=240)
    assert view.state is State.COMPLETED, explain(files, view)
    assert set(Counter(trained_ids(files)).values()) == {1}
    assert len(trained_ids(files)) == SMALL_PPO_STEPS * 8
    assert max(column(files, "actor/staleness/max")) <= 3
    tickets = audited(module_trials, files)["tickets"]
    assert tickets["trained"] == SMALL_PPO_STEPS * 8
    assert tickets.keys() <= {"trained", "attempt ended"}


def test_an_audit_leaves_out_what_a_killed_attempt_did_after_its_checkpoint(
    module_trials: Trials, tiny_policy: Path, tmp_path: Path
) -> None:
    """The master is killed between two checkpoints, which are three steps apart."""
    pace = Pace(tmp_path, 1.2)  # it has not ended before
    files = module_trials.launch(
        "ppo-math-async",
        "killed",
        f"actor.path={tiny_policy}",
        "schedule.max_staleness=2",
        "schedule.staleness_policy=window",
        *SMALL_PPO,
        *pace.words,
    )
    view = module_trials.wait_for_step(files, 4)
    os.kill(worker_pid(view, "master_worker/0"), signal.SIGKILL)
    view = module_trials.wait(files)
    assert view.state is State.FAILED, explain(files, view)
    in_between = audited(module_trials, files, whole=False)["tickets"]
    assert in_between["trained"] >= 3 * 8  # progress is told before the line is written
    pace.set(0.0)
    module_trials.resume(files)
    view = module_trials.wait(files, timeout_s=240)
    assert view.state is State.COMPLETED, explain(files, view)
    found = audited(module_trials, files)
    assert found["tickets"]["trained"] == SMALL_PPO_STEPS * 8
    lines = files.root.glob("rows/*/episodes/*.jsonl")
    granted = sum(path.read_text().count('"granted"') for path in lines)
    assert sum(found["tickets"].values()) == granted > SMALL_PPO_STEPS * 8


def test_rollouts_alone_can_be_trained_on_later(module_trials: Trials, tiny_policy: Path) -> None:
    """The servers keep their weights; a run without servers then learns from what they made."""
    start = f"actor.path={tiny_policy}"
    made = run_to_the_end(module_trials, "grpo-math", "made", start, *SMALL_PPO, "schedule=rollout")
    assert not list(made.phase(made.root).checkpoints.glob("*"))
    logs = made.root.glob("rows/*/rollouts/*.jsonl")
    kept = [json.loads(line) for log in logs for line in log.read_text().splitlines()]
    assert len(kept) == len(trained_ids(made))
    assert all(len(row["texts"]["episodes"]) == 2 for row in kept)
    rows = list(read_metrics(made.phase(made.root).metrics))
    assert len(rows) == SMALL_PPO_STEPS
    assert all("rollout/reward" in row and "actor/actor_loss" not in row for row in rows)
    learns = (
        "schedule=replay",
        f"schedule.folder={made.root}",
        f"schedule.max_staleness={SMALL_PPO_STEPS}",
    )
    learnt = run_to_the_end(module_trials, "grpo-math", "learnt", start, *SMALL_PPO, *learns)
    assert trained_ids(learnt) == trained_ids(made)
    assert column(learnt, "actor/staleness/max") == [float(i) for i in range(SMALL_PPO_STEPS)]


HELD_AGENT = """
import json

async def solve(client, task):
    reply = await client.chat.completions.create(
        model="policy",
        messages=[{"role": "user", "content": task["prompt"]}],
        response_format={"type": "json_schema", "json_schema": {"name": "sum", "schema": {
            "type": "object",
            "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 99}},
            "required": ["sum"],
            "additionalProperties": False,
        }}},
    )
    value = json.loads(reply.choices[0].message.content)
    assert value.keys() == {"sum"} and 0 <= value["sum"] <= 99
    return {"reward": value["sum"] / 99}
"""


def test_answers_that_are_held_to_a_schema_are_trained_on_as_they_were_sampled(
    module_trials: Trials, tiny_policy: Path, tmp_path: Path
) -> None:
    """In pieces of three tokens. What an agent refuses would fail its episode."""
    (tmp_path / "held.py").write_text(HELD_AGENT)
    files = run_to_the_end(
        module_trials,
        "grpo-math-async",
        "held",
        f"actor.path={tiny_policy}",
        *small_ppo("exp_ctrl.total_train_epochs=1", "gen.max_new_tokens=60"),
        "exp_ctrl.benchmark_steps=3",
        *("task.agent=python", f"task.agent_args.function={tmp_path}/held.py:solve"),
        *(
            "task.agent_args.schema=enforce",
            "task.agent_args.form=plain",
            "schedule.new_tokens_per_chunk=3",
        ),
        "schedule.max_staleness=0",
    )
    assert column(files, "rollout/agent/failed") == [0.0] * 3
    assert max(column(files, "actor/mismatch/abs_max")) < 1e-3
    assert max(column(files, "rollout/reward")) > 0
    audited(module_trials, files, whole=False)
    again = module_trials.run("replay", str(files.root), "--trial", "held-again", timeout_s=240)
    assert again.returncode == 0, again.stderr
    assert "the same weights," in again.stderr
