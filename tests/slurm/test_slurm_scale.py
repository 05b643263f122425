"""Live runs on a real Slurm get workers, as steps of their own in the same job, and let others go."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import live_runs
from real_trials import explain
from slurm_trials import SlurmTrials

from launcher.trials.status import trial_view
from realsys.trial.records import TrialFiles, read_record
from realsys.worker.task_place import TaskPlace


def test_a_maker_comes_as_steps_of_its_own_and_another_goes(
    slurm_trials: SlurmTrials, tiny_policy: Path
) -> None:
    name = "ppo-math-detached/live"
    files = live_runs.launch(slurm_trials, "ppo-math-detached", tiny_policy, *live_runs.TWO_MAKERS)
    came = slurm_trials.run("scale", name, "--makers", "3", timeout_s=240)
    assert came.returncode == 0, came.stderr + explain(files, trial_view(files))
    assert came.stdout.splitlines()[-1] == "maker_2  generation_server/2  rollout_worker/2"
    gone = slurm_trials.run("scale", name, "--drain", "maker_0", timeout_s=240)
    assert gone.returncode == 0, gone.stderr + explain(files, trial_view(files))
    assert [line.split()[0] for line in gone.stdout.splitlines()] == ["maker_1", "maker_2"]
    live_runs.finish(slurm_trials, files)
    steps = [json.loads(line) for line in files.attempt(1).steps.read_text().splitlines()]
    kinds = Counter(row["step"] for row in steps)
    assert (kinds["generation_server"], kinds["rollout_worker"]) == (2, 2), (
        "the plan's, and one more"
    )


def place_of(files: TrialFiles, worker: str) -> TaskPlace | None:
    return read_record(TaskPlace, files.attempt(1).place_of(worker))


def test_a_server_with_gpus_comes_in_the_place_of_one_that_left(
    slurm_trials: SlurmTrials, tiny_policy: Path
) -> None:
    name = "ppo-math-async/live"
    gpus = ("schedule.servers=2", "scheduling.generation_server.gpu=1")
    files = live_runs.launch(slurm_trials, "ppo-math-async", tiny_policy, *gpus)
    places = [place_of(files, f"generation_server/{i}") for i in range(2)]
    assert places[0] != places[1]
    full = slurm_trials.run("scale", name, "--servers", "3", timeout_s=240)
    assert full.returncode != 0
    assert "for generation_server/2" in full.stderr
    swap = ("--servers", "2", "--drain", "generation_server/0")
    done = slurm_trials.run("scale", name, *swap, timeout_s=240)
    assert done.returncode == 0, done.stderr + explain(files, trial_view(files))
    first, newest, _ = done.stdout.split()
    assert (first, newest) == ("generation_server/1", "generation_server/3"), (
        "no name is used twice"
    )
    assert place_of(files, newest) == places[0]
    live_runs.finish(slurm_trials, files)
