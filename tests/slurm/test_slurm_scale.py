"""Live runs on a real Slurm get workers, as steps of their own in the same job, and let others go."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from real_trials import SMALL_PPO, explain, trained_ids
from slurm_trials import SlurmTrials

from launcher.status import trial_view
from launcher.trial_state import State
from realsys.api.trial import TrialFiles, read_record
from realsys.worker.task_place import TaskPlace

STEPS = 150  # long enough for the commands to come while it runs
OTHER = ("total_train_epochs", "eval_freq_steps", "ckpt_freq_steps")
RUN = (
    *(word for word in SMALL_PPO if not any(name in word for name in OTHER)),
    "exp_ctrl.total_train_epochs=50",
    f"exp_ctrl.benchmark_steps={STEPS}",
    "max_staleness=2",
)


def test_a_maker_comes_as_steps_of_its_own_and_another_goes(
    slurm_trials: SlurmTrials, tiny_policy: Path
) -> None:
    name = "ppo-math-detached/live"
    files = slurm_trials.launch(
        "ppo-math-detached",
        "live",
        f"actor.path={tiny_policy}",
        "detached.makers={maker_0: trainer_0, maker_1: trainer_0}",
        'detached.trainers={trainer_0: "maker_0, maker_1"}',
        "detached.experience_batch_size=8",
        *RUN,
    )
    slurm_trials.wait_for_step(files, 3, timeout_s=180)
    came = slurm_trials.run("scale", name, "--makers", "3", timeout_s=240)
    assert came.returncode == 0, came.stderr + explain(files, trial_view(files))
    assert came.stdout.splitlines()[-1] == "maker_2  generation_server/2  rollout_worker/2"
    gone = slurm_trials.run("scale", name, "--drain", "maker_0", timeout_s=240)
    assert gone.returncode == 0, gone.stderr
    assert [line.split()[0] for line in gone.stdout.splitlines()] == ["maker_1", "maker_2"]
    done = slurm_trials.wait(files, timeout_s=300)
    assert (done.state, done.attempt) == (State.COMPLETED, 1), explain(files, done)
    steps = [json.loads(line) for line in files.attempt(1).steps.read_text().splitlines()]
    kinds = Counter(row["step"] for row in steps)
    assert (kinds["generation_server"], kinds["rollout_worker"]) == (2, 2), (
        "the plan's, and one more"
    )
    assert set(Counter(trained_ids(files)).values()) == {1}
    assert len(trained_ids(files)) == STEPS * 8
    assert not files.attempt(1).restarts.exists()


def place_of(files: TrialFiles, worker: str) -> TaskPlace | None:
    return read_record(TaskPlace, files.attempt(1).place_of(worker))


def test_a_server_with_gpus_comes_in_the_place_of_one_that_left(
    slurm_trials: SlurmTrials, tiny_policy: Path
) -> None:
    name = "ppo-math-async/gpus"
    files = slurm_trials.launch(
        "ppo-math-async",
        "gpus",
        f"actor.path={tiny_policy}",
        "rollout.servers=2",
        "rollout.gpus_per_server=2",
        *RUN,
    )
    slurm_trials.wait_for_step(files, 3, timeout_s=180)
    places = [place_of(files, f"generation_server/{i}") for i in range(2)]
    assert places[0] != places[1]
    full = slurm_trials.run("scale", name, "--servers", "3", timeout_s=240)
    assert full.returncode != 0
    assert "no GPU of the job is free for generation_server/2" in full.stderr
    swap = ("--servers", "2", "--drain", "generation_server/0")
    done = slurm_trials.run("scale", name, *swap, timeout_s=240)
    assert done.returncode == 0, done.stderr + explain(files, trial_view(files))
    first, newest, _ = done.stdout.split()
    assert (first, newest) == ("generation_server/1", "generation_server/3"), (
        "no name is used twice"
    )
    assert place_of(files, newest) == places[0]
    view = slurm_trials.wait(files, timeout_s=300)
    assert (view.state, view.attempt) == (State.COMPLETED, 1), explain(files, view)
    assert set(Counter(trained_ids(files)).values()) == {1}
    assert len(trained_ids(files)) == STEPS * 8
