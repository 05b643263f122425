"""What Slurm, its operators and broken machines do to a trial, and what the user is told of it.

Every test brings about lines of the table in docs/running_on_slurm.md and compares. What can happen to one
run after the other does: to start one costs more than all else.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from paced import Pace
from real_trials import (
    LONG_PPO,
    SMALL_PPO,
    name_of,
    small_ppo,
    trained_ids,
    wait_until,
    worker_pid,
)
from slurm_cluster import SlurmCluster
from slurm_trials import SlurmTrials
from told import row, rows

from launcher.trials.explain import explain
from launcher.trials.status import trial_view
from launcher.trials.trial_view import TrialView
from realsys.api.plan import read_plan
from realsys.api.scheduling import WorkerType
from realsys.trial.records import TrialFiles
from realsys.trial.trial_state import State

# Of 1,000,000 MiB: one a node.
TWO_NODES = ("actor.parallel=d2t1p1", "scheduling.model_worker.mem=600000")


@pytest.fixture
def long_run(slurm_trials: SlurmTrials, tiny_policy: Path) -> Callable[..., TrialFiles]:
    """Launches a trial that would take minutes, on two nodes."""

    def launch(name: str, *words: str) -> TrialFiles:
        path = f"actor.path={tiny_policy}"
        return slurm_trials.launch("ppo-math", name, *LONG_PPO, *TWO_NODES, path, *words)

    return launch


def job_of(view: TrialView) -> int:
    """The id of the trial's job."""
    return int(view.job_ids[0])


def until(
    files: TrialFiles, condition: Callable[[TrialView], bool], *, timeout_s: float = 240
) -> TrialView:
    return wait_until(files, condition, timeout_s=timeout_s)


def in_state(state: State) -> Callable[[TrialView], bool]:
    return lambda view: view.state is state


def nothing_left(cluster: SlurmCluster, job_id: int) -> bool:
    """Waits for the job's last processes: the pictures are drawn after the end."""
    deadline = time.monotonic() + 240
    while cluster.processes_of(job_id) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not cluster.processes_of(job_id)


# ---- in the queue ---------------------------------------------------------------------------


def test_a_job_that_is_held_and_one_that_waits_for_it(
    slurm: SlurmCluster, slurm_trials: SlurmTrials, long_run: Callable[..., TrialFiles]
) -> None:
    first = long_run("first", "--begin", "now+1hour")
    job_id = str(job_of(trial_view(first)))
    slurm.run("scontrol", "hold", job_id)
    row("its owner holds it").check(until(first, in_state(State.HELD)))
    slurm.run("scontrol", "release", job_id)
    until(first, in_state(State.QUEUED))
    second = long_run("second", "--after", "ppo-math/first:any")
    view = until(second, lambda v: bool(v.job and v.job.reason == "Dependency"))
    row("it waits for another trial").check(view)
    done = slurm_trials.run("stop", name_of(first))
    assert done.returncode == 0, done.stderr
    view = trial_view(first)
    row("realsys stop while it waits").check(view)
    assert view.attempt == 0
    until(second, lambda v: v.attempt == 1)


def block(slurm: SlurmCluster, nodes: str) -> int:
    """The id of a job that holds these nodes."""
    job_id = slurm.submit(f"--nodelist={nodes}", "--exclusive", command="sleep 300")
    slurm.wait_for_job(job_id, "RUNNING")
    return job_id


def test_a_run_is_cancelled_while_it_waits_suspended_and_cancelled_while_it_runs(
    slurm: SlurmCluster, slurm_trials: SlurmTrials, long_run: Callable[..., TrialFiles]
) -> None:
    """All the while another trial waits for other nodes, until it misses its deadline."""
    slurm_trials.write_spec(slurm={"grace_seconds": 20})  # of a minute
    block(slurm, "n[3-4]")
    never = ("--nodelist", "n[3-4]", "--deadline", "now+96seconds", "--time", "1")
    late = long_run("late", *never)
    slurm_trials.write_spec()

    blocker = block(slurm, "n[1-2]")
    files = long_run("s", "--nodelist", "n[1-2]")
    view = until(files, lambda v: bool(v.job and v.job.reason in ("Resources", "Priority")))
    row("it waits for resources").check(view)
    slurm.run("scancel", str(job_of(view)), str(blocker))
    row("somebody cancels it while it waits").check(until(files, in_state(State.STOPPED)))
    slurm_trials.resume(files)  # and it can be resumed all the same
    view = slurm_trials.wait_for_step(files, 2)
    assert view.attempt == 1

    slurm.run("scontrol", "suspend", str(job_of(view)))
    row("an operator suspends it").check(until(files, in_state(State.PAUSED)))
    slurm.run("scontrol", "resume", str(job_of(view)))
    slurm_trials.wait_for_step(files, trial_view(files).step + 3)

    slurm.stop_slurmctld()
    try:
        silent = trial_view(files)
        row("slurmctld is down").check(silent)
        assert any("slurmctld does not" in note for note in silent.notes)
    finally:
        slurm.start_slurmctld()
    slurm.wait_for_nodes()
    later = slurm_trials.wait_for_step(files, silent.step + 3)
    assert later.attempt == view.attempt

    slurm.run("scancel", str(job_of(view)))  # it saves first
    stopped = until(files, in_state(State.STOPPED), timeout_s=150)
    row("somebody cancels it while it runs").check(stopped)
    assert nothing_left(slurm, job_of(view))
    row("it misses its deadline").check(until(late, in_state(State.LOST), timeout_s=150))


# ---- while it runs --------------------------------------------------------------------------


def test_a_killed_worker_then_a_killed_supervisor_then_a_lost_node(
    slurm: SlurmCluster, slurm_trials: SlurmTrials, long_run: Callable[..., TrialFiles]
) -> None:
    """Each time the trial is resumed, and goes on."""

    def resumed(ended: TrialView) -> TrialView:
        slurm_trials.resume(files)
        number, step = ended.attempt + 1, (ended.step or 0) + 2
        return until(files, lambda v: v.attempt == number and (v.step or 0) >= step)

    files = long_run("k")
    view = slurm_trials.wait_for_step(files, 2)
    os.kill(worker_pid(view, "model_worker/1"), signal.SIGKILL)
    failed = until(files, in_state(State.FAILED), timeout_s=150)
    row("a worker is killed").check(failed)
    assert failed.exit is not None
    assert failed.exit.resume == "realsys resume ppo-math/k"
    assert nothing_left(slurm, job_of(view))

    view = resumed(failed)
    assert view.supervisor_pid is not None
    os.kill(view.supervisor_pid, signal.SIGKILL)
    lost = until(files, in_state(State.LOST))
    row("the supervisor is killed").check(lost)
    assert nothing_left(slurm, job_of(view))

    view = resumed(lost)
    names = trained_ids(files)
    assert len(names) == len(set(names))  # each prompt of an epoch once
    slurm.kill_node(view.host)
    lost = until(files, in_state(State.LOST), timeout_s=180)
    row("the supervisor's node is lost").check(lost)


def test_a_setup_line_that_fails(
    slurm_trials: SlurmTrials, long_run: Callable[..., TrialFiles]
) -> None:
    slurm_trials.write_spec(setup=["echo no such thing here >&2", "exit 3"])
    done = slurm_trials.run(
        "launch", "ppo-math", "--trial", "f", "--detach", *SMALL_PPO, "actor.path=/nowhere"
    )
    assert done.returncode == 4  # its own mistake comes first
    with pytest.raises(AssertionError, match="no such thing here"):
        long_run("f")  # the launch that waits for its start shows what the script said
    view = until(slurm_trials.files("ppo-math", "f"), in_state(State.LOST))
    row("a setup line of the site fails").check(view)


def test_a_step_for_which_nothing_is_free_and_a_job_that_slurm_forgot(
    start_slurm: Callable[..., SlurmCluster],
    tmp_path: Path,
    tiny_policy: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each srun of one trial asks for more than half of its job's memory: the first one gets it. The other
    says after SlurmctldTimeout, but not before a minute is over, what it waits for. Meanwhile another
    trial's supervisor is killed; without accounting, a forgotten job is lost and never completed."""
    with start_slurm(accounting=False, settings={"SlurmctldTimeout": "2"}) as slurm:
        monkeypatch.setenv("SLURM_CONF", slurm.environment["SLURM_CONF"])
        trials = SlurmTrials(tmp_path / "root", slurm)
        trials.write_spec(slurm={"extra_srun": {"mem": "1500"}})
        memory = [f"scheduling.{kind}_worker.mem=1000" for kind in ("model", "master")]
        path = f"actor.path={tiny_policy}"
        waits = trials.launch("ppo-math", "b", *LONG_PPO, *memory, path)
        trials.write_spec()
        files = trials.launch("ppo-math", "g", *LONG_PPO, path)
        view = trials.wait_for_step(files, 2)
        assert view.supervisor_pid is not None
        os.kill(view.supervisor_pid, signal.SIGKILL)
        until(files, in_state(State.LOST))

        view = until(waits, lambda view: "srun can't start" in view.reason, timeout_s=150)
        row("a step finds what it needs taken").check(view)
        told = list(explain(view))
        assert any("scheduling.<worker type>.cpu" in line for line in told), told
        assert not any("nothing; watch it" in line for line in told)
        assert trials.run("stop", name_of(waits), "--grace", "1").returncode == 0

        slurm.stop_slurmctld()
        slurm.start_slurmctld(clean=True)  # its memory of the job goes with its state
        forgotten = until(files, in_state(State.LOST))
        row("Slurm has forgotten it, without accounting").check(forgotten)


def test_an_option_that_srun_does_not_know(slurm_trials: SlurmTrials, tiny_policy: Path) -> None:
    slurm_trials.write_spec(slurm={"extra_srun": {"nonsense": "1"}})
    words = ("--trial", "o", "--detach", *SMALL_PPO, f"actor.path={tiny_policy}")
    slurm_trials.run("launch", "ppo-math", *words)  # it may see the end, and say so by its code
    files = slurm_trials.files("ppo-math", "o")
    view = until(files, in_state(State.FAILED))
    row("srun does not know an option of the site file").check(view)
    assert "slurm.extra_srun" in view.fix
    assert view.exit is not None
    assert view.exit.first_failure is not None
    assert "unrecognized option" in Path(view.exit.first_failure.log).read_text()


# ---- time, preemption, requeue --------------------------------------------------------------


def announce_the_end(slurm: SlurmCluster, job_id: int) -> None:
    """What Slurm does ``slurm.grace_seconds`` before the time limit; its own clock ticks each 30 s."""
    slurm.run("scancel", "--batch", "--signal=USR2", str(job_id))


def test_the_time_limit_is_announced_and_the_run_saves(
    slurm: SlurmCluster, slurm_trials: SlurmTrials, tiny_policy: Path, tmp_path: Path
) -> None:
    """With Slurm's own clock, which announces up to 60 s early: 5 to 65 s after the start."""
    slurm_trials.write_spec(slurm={"grace_seconds": 55})
    pace = Pace(tmp_path, 0.8)
    long = (*small_ppo("exp_ctrl.total_train_epochs=1000"), *TWO_NODES, *pace.words)
    path = f"actor.path={tiny_policy}"
    files = slurm_trials.launch("ppo-math", "t", *long, path, "--time", "2")
    until(files, lambda v: v.state not in State.live() or (v.step or 0) > 0)
    pace.set(4.0)
    stopped = until(files, in_state(State.STOPPED), timeout_s=150)
    row("its time limit comes").check(stopped)
    assert (files.root / "recover").is_dir() == (stopped.step > 0)  # nothing to save before a step
    pace.set(0.8)
    words = ("--time", "20", "scheduling.model_worker.mem=1200")
    done = slurm_trials.run("resume", name_of(files), *words, "--detach")
    assert done.returncode == 0, done.stderr
    assert "--time: 2 → 20" in done.stderr
    assert "scheduling.model_worker.mem: 600000 → 1200" in done.stderr
    later = slurm_trials.wait_for_step(files, stopped.step + 1)
    assert (later.attempt, later.job_ids != stopped.job_ids) == (2, True)
    assert slurm.show_job(later.job_ids[0])["TimeLimit"] == "00:20:00"
    steps = {s.worker_type: s for s in read_plan(files.plan).phases[-1].steps}
    assert steps[WorkerType.MODEL_WORKER].memory_mib == 1200
    assert slurm_trials.run("stop", name_of(files)).returncode == 0


def test_a_requeued_run_goes_on_in_the_same_job_and_comes_back_after_a_preemption(
    slurm: SlurmCluster, slurm_trials: SlurmTrials, long_run: Callable[..., TrialFiles]
) -> None:
    files = long_run("r", "--requeue", "--qos", "spot")
    view = slurm_trials.wait_for_step(files, 2)
    announce_the_end(slurm, job_of(view))
    again = until(files, lambda v: v.attempt == 2 and v.state is State.RUNNING, timeout_s=180)
    row("its time limit comes, with requeue").check(again)
    assert again.job_ids == view.job_ids
    later = slurm_trials.wait_for_step(files, view.step + 4)
    assert later.attempt == 2

    urgent = slurm.submit("--qos=urgent", "--nodes=4", "--exclusive", command="sleep 300")
    slurm.wait_for_job(urgent, "RUNNING", timeout_s=60)
    row("it is preempted, with requeue").check(until(files, in_state(State.QUEUED)))
    slurm.run("scancel", str(urgent))
    again = until(files, lambda v: v.attempt == 3 and v.step > later.step, timeout_s=180)
    assert again.job_ids == view.job_ids


def test_every_line_of_the_page_has_its_test() -> None:
    sources = "".join(p.read_text() for p in Path(__file__).parent.glob("test_*.py"))
    untested = [r.scenario for r in rows() if f'row("{r.scenario}")' not in sources]
    assert not untested
    assert len(rows()) >= 20
