"""--after: which jobs sbatch is told to wait for, and what can't be waited for."""

from __future__ import annotations

from pathlib import Path

import golden
import pytest

from launcher.sites.places import user_name
from launcher.submit import dependencies
from launcher.submit.dependencies import dependency_on
from launcher.trials.submission import Submission
from launcher.trials.trial_view import TrialView
from realsys.api.errors import ConfigError, NoSuchTrial
from realsys.trial.records import TrialFiles, TrialRecord, trial_dir, write_record
from realsys.trial.trial_state import State

pytestmark = pytest.mark.usefixtures("file_root")


@pytest.fixture(autouse=True)
def states(monkeypatch: pytest.MonkeyPatch) -> dict[str, State]:
    """The states of trials; QUEUED for those not named."""
    found: dict[str, State] = {}

    def views(trials: list[TrialFiles]) -> list[TrialView]:
        states = [found.get(files.root.name, State.QUEUED) for files in trials]
        return [TrialView(trial="", state=state, folder="") for state in states]

    monkeypatch.setattr(dependencies, "trial_views", views)
    return found


def trial(
    root: Path, name: str, *jobs: str, sweep: str = "", scheduler: str = "slurm"
) -> TrialFiles:
    """A trial with these jobs; never handed over without any."""
    files = TrialFiles(trial_dir(root, user_name(), "ppo-math", name))
    files.submitit.mkdir(parents=True)
    files.plan.write_text("{}")
    record = TrialRecord(
        experiment_name="ppo-math",
        trial_name=name,
        user=user_name(),
        cluster="c",
        plan_hash="",
        created_at=1.0,
        launch_host="h",
        sweep=sweep,
    )
    write_record(files.record, record)
    if jobs:
        note = Submission(
            job_id=jobs[0], scheduler=scheduler, job_ids=jobs, host="h", after_attempt=0, at=1.0
        )
        write_record(files.submission, note)
    return files


@pytest.mark.parametrize(
    ("after", "dependency"),
    [
        ("ppo-math/run1", "afterok:12"),
        ("ppo-math/run1:ok", "afterok:12"),
        ("ppo-math/run1:any", "afterany:12"),
        ("ppo-math/run1:notok", "afternotok:12"),
        ("ppo-math:any", "afterany:12"),
    ],
)
def test_the_condition_is_sbatchs(file_root: Path, after: str, dependency: str) -> None:
    trial(file_root, "run1", "12")
    assert dependency_on(after) == dependency


def test_a_trial_of_several_jobs_is_waited_for_by_its_supervisors(file_root: Path) -> None:
    trial(file_root, "run1", "12", "13", "14")
    assert dependency_on("ppo-math/run1") == "afterok:12"


def test_an_element_of_an_array_is_waited_for_alone(file_root: Path) -> None:
    trial(file_root, "s-0", "9_0", sweep="s")
    trial(file_root, "s-1", "9_1", sweep="s")
    assert dependency_on("ppo-math/s-1:any") == "afterany:9_1"


def test_a_sweep_is_waited_for_as_a_whole(file_root: Path) -> None:
    trial(file_root, "s-0", "9_0", sweep="s")
    trial(file_root, "s-1", "9_1", sweep="s")
    assert dependency_on("ppo-math/s") == "afterok:9"  # its one array
    trial(file_root, "s-2", "31", sweep="s")  # resumed: a job of its own
    assert dependency_on("ppo-math/s:any") == "afterany:9_0:9_1:31"


def test_a_sweep_of_one_trial_is_waited_for_by_its_element(file_root: Path) -> None:
    trial(file_root, "s-1", "9_1", sweep="s")  # the others' folders were removed
    assert dependency_on("ppo-math/s") == "afterok:9_1"


def test_not_ok_of_a_sweep_means_all_of_its_trials(file_root: Path) -> None:
    trial(file_root, "s-0", "9_0", sweep="s")
    trial(file_root, "s-1", "9_1", sweep="s")
    assert dependency_on("ppo-math/s:notok") == "afternotok:9_0:9_1"


FULFILLED = {
    "ok": {State.COMPLETED},
    "any": {State.COMPLETED, State.STOPPED, State.FAILED, State.LOST},
    "notok": {State.STOPPED, State.FAILED, State.LOST},
}


@pytest.mark.parametrize("state", list(State))
@pytest.mark.parametrize("condition", ["ok", "any", "notok"])
def test_a_trial_that_is_over_is_judged_by_its_end_not_by_slurm(
    file_root: Path, states: dict[str, State], condition: str, state: State
) -> None:
    trial(file_root, "run1", "12")
    states["run1"] = state
    over = state in FULFILLED["any"]
    if over and state not in FULFILLED[condition]:
        with golden.raises(ConfigError):
            dependency_on(f"ppo-math/run1:{condition}")
    else:
        expected = None if over else f"after{condition}:12"
        assert dependency_on(f"ppo-math/run1:{condition}") == expected


def test_of_a_sweep_only_the_trials_that_are_not_over_are_waited_for(
    file_root: Path, states: dict[str, State]
) -> None:
    for i in range(3):
        trial(file_root, f"s-{i}", f"9_{i}", sweep="s")
    states["s-1"] = State.COMPLETED
    assert dependency_on("ppo-math/s") == "afterok:9_0:9_2"
    states |= {"s-0": State.COMPLETED, "s-2": State.COMPLETED}
    assert dependency_on("ppo-math/s") is None


@pytest.mark.parametrize("after", ["ppo-math/run1:", "ppo-math/run1:later", "run1:OK"])
def test_an_unknown_condition(file_root: Path, after: str) -> None:
    trial(file_root, "run1", "12")
    with golden.raises(ConfigError):
        dependency_on(after)


def test_no_such_trial(file_root: Path) -> None:
    trial(file_root, "run1", "12")
    with golden.raises(NoSuchTrial):
        dependency_on("ppo-math/run2")


def test_what_slurm_has_no_job_of_can_not_be_waited_for(file_root: Path) -> None:
    trial(file_root, "run1", "4711", scheduler="local")
    trial(file_root, "run2")
    trial(file_root, "s-0", "9_0", sweep="s")
    trial(file_root, "s-1", sweep="s")
    for after, name in [("run1", "run1"), ("run2:any", "run2"), ("s", "s-1")]:
        with golden.raises(ConfigError) as refused:
            dependency_on(f"ppo-math/{after}")
        assert name in str(refused.value)
