"""Layout split: jobs that start apart meet, run as one attempt, and end together.

Supervisor's side and agents are the real ones, in threads of this process; Slurm's programs are
stand-ins (fake_srun.py). Tests of one side alone speak the other's records.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import fake_srun
import golden
import pytest
from stand_in_slurm import wait_until

from experiments.ppo_math import ppo_math
from realsys.api.cluster import ClusterSpec, SlurmSpec
from realsys.api.errors import ClusterError, KeyNotFound, StoreUnavailable
from realsys.api.plan import (
    JobComponent,
    JobLayout,
    JobPlan,
    LaunchPlan,
    PhasePlan,
    StepPlan,
    plan_hash,
    plan_text,
)
from realsys.api.scheduling import WorkerType
from realsys.name_resolve.key_table import TrialKeys
from realsys.name_resolve.lease_validity import LeaseStatus
from realsys.name_resolve.open import open_store
from realsys.runtime import worker_exit_codes
from realsys.supervisor.attempt.attempt import Job, claim_attempt
from realsys.supervisor.split_jobs.component_board import ComponentBoard
from realsys.supervisor.split_jobs.components import Action, ComponentRecord, Order, Report, TaskEnd
from realsys.supervisor.split_jobs.order_follower import OrderFollower
from realsys.supervisor.split_jobs.split_steps import SplitSteps
from realsys.supervisor.steps.slurm_steps import SlurmSteps
from realsys.supervisor.supervisor import Supervisor
from realsys.trial.records import (
    AttemptRecord,
    ExitMarker,
    Result,
    StopRequest,
    TrialFiles,
    TrialRecord,
    WorkerExit,
    dumps,
    loads,
    read_record,
    write_record,
)

POLL_S = 0.02
SLACK_S = 0.3


def make_plan(tmp_path: Path) -> LaunchPlan:
    """A master in one job, two rollout workers in another."""
    experiment = ppo_math()

    def component(name: str, kind: WorkerType) -> JobComponent:
        return JobComponent(
            name=name, worker_types=(kind,), nodes=1, cpus_per_node=2, memory_mib_per_node=100
        )

    def step(kind: WorkerType, index: int, tasks: int) -> StepPlan:
        nodes = ((1, tasks),)
        return StepPlan(
            worker_type=kind, component=index, nodes=nodes, cpus_per_task=1, memory_mib=50
        )

    phase = PhasePlan(
        name="main",
        experiment_name="ppo-math",
        folder=str(tmp_path / "run1"),
        publish=None,
        scheduling=experiment.scheduling_setup(),
        config=experiment.initial_setup().lazy_init().set_worker_information("ppo-math", "run1"),
        steps=(step(WorkerType.MASTER_WORKER, 0, 1), step(WorkerType.ROLLOUT_WORKER, 1, 2)),
    )
    return LaunchPlan(
        experiment_name="ppo-math",
        trial_name="run1",
        user="anna",
        trial_dir=str(tmp_path / "run1"),
        cluster=ClusterSpec(
            name="site",
            scheduler="slurm",
            file_root=str(tmp_path),
            name_resolve=f"memory://{tmp_path}",
            slurm=SlurmSpec(rendezvous_seconds=20),
        ),
        phases=(phase,),
        job=JobPlan(
            layout=JobLayout.SPLIT,
            components=(
                component("trainer", WorkerType.MASTER_WORKER),
                component("rollout", WorkerType.ROLLOUT_WORKER),
            ),
        ),
    )


class Trial:
    """One trial's files, store and attempt 1, and the two sides that a test may start."""

    def __init__(self, tmp_path: Path, bin_folder: Path) -> None:
        self.bin = bin_folder
        self.plan = make_plan(tmp_path)
        self.files = TrialFiles(Path(self.plan.trial_dir))
        self.files.submitit.mkdir(parents=True)
        (self.files.submission).write_text('{"job_ids": ["120", "121"]}')
        self.store, self.keys = open_store(self.plan.name_resolve_url), TrialKeys.of(self.plan)
        self.left: list[bool] = []
        self.threads: list[threading.Thread] = []

    def take(self) -> AttemptRecord:
        job = Job(job_id="120", nodes="n1")
        self.attempt, self.attempt_files = claim_attempt(self.files, self.store, self.keys, job=job)
        return self.attempt

    def split_steps(self, **changes) -> SplitSteps:
        self.take()
        board = ComponentBoard(self.attempt, self.store, self.keys, "n1").open()
        local = SlurmSteps(self.plan, "hash", self.attempt_files, {0: ["n1"]})
        limits = {"poll_s": POLL_S, "slack_s": SLACK_S, "end_s": 5.0, "leave_s": 5.0}
        return SplitSteps(
            self.plan, self.files, self.attempt_files, board, local, **{**limits, **changes}
        )

    def agent(self, *, store=None, number: int = 1) -> OrderFollower:
        steps = SlurmSteps(self.plan, "hash", self.files.attempt(number), {1: ["n2"]})
        return OrderFollower(
            self.plan,
            1,
            number,
            Job(job_id="121", nodes="n2"),
            self.files,
            store or open_store(self.plan.name_resolve_url),
            self.keys,
            steps,
            poll_s=POLL_S,
            slack_s=SLACK_S,
        )

    def serve(self, agent: OrderFollower) -> None:
        """Joins and serves in a thread; ``left`` tells how it left."""

        def run() -> None:
            agent.join()
            self.left.append(agent.serve())

        self.threads.append(threading.Thread(target=run))
        self.threads[-1].start()

    def joined(self, agent: OrderFollower) -> OrderFollower:
        """``agent``, serving, once its key is there."""
        self.serve(agent)
        wait_until(lambda: self.component(1) is not None)
        return agent

    def wait_for_tasks(self, *workers: str) -> None:
        """Until each of them has begun."""
        logs = [self.files.attempt(1).log(worker) for worker in workers]
        wait_until(lambda: all(log.exists() and "up" in log.read_text() for log in logs))

    def told(self) -> list[bool]:
        """How the agents left."""
        for thread in self.threads:
            thread.join(240)
            assert not thread.is_alive()
        return self.left

    def component(self, index: int) -> ComponentRecord | None:
        try:
            return loads(
                ComponentRecord, self.store.get(self.keys.component(index)).value, where=""
            )
        except KeyNotFound:
            return None

    def order(self, action: Action, **changes) -> None:
        order = Order(
            attempt=self.attempt.number,
            token=self.attempt.token,
            sequence=1,
            action=action,
            phase="main",
        )
        self.store.add(self.keys.component_order, dumps(replace(order, **changes)), replace=True)

    def report(self) -> Report:
        return loads(Report, self.store.get(self.keys.component_report(1)).value, where="")

    def stand_in(self, *, ttl_s: float = 60.0, leaving: str = ""):
        """Registers component 1 as an agent would, and returns the lease."""
        record = ComponentRecord(
            index=1,
            agent="a1",
            job_id="121",
            host="n2",
            nodes="n2",
            attempt=1,
            token=self.attempt.token,
            leaving=leaving,
            leaving_grace_s=20.0,
        )
        lease = self.store.grant(ttl_s)
        self.store.add(self.keys.component(1), dumps(record), lease=lease, replace=True)
        return lease

    def stand_in_reports(self, **fields) -> None:
        report = Report(
            attempt=1, token=self.attempt.token, agent="a1", component=1, sequence=1, **fields
        )
        self.store.add(self.keys.component_report(1), dumps(report), replace=True)


@pytest.fixture
def trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trial]:
    folder = fake_srun.install(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    for kind in ("master_worker", "rollout_worker"):
        fake_srun.task_program(folder, kind, "echo up; exec sleep 30")
    trial = Trial(tmp_path, folder)
    yield trial
    if trial.threads:
        marker = ExitMarker(result=Result.FAILED, attempt=1, ended_at=2.0, phase="main")
        write_record(trial.files.attempt(1).exit, marker)
        trial.told()
    trial.store.close()


def poll_until_ended(tasks, worker: str):
    (task,) = [t for t in tasks if t.worker == worker]
    wait_until(lambda: task.poll() is not None)
    return task


# ---- meeting --------------------------------------------------------------------------------------


def test_jobs_that_do_not_come_in_time_are_named_and_cancelled(trial: Trial):
    steps = trial.split_steps(_opened=time.monotonic() - 1000)
    with golden.raises(ClusterError):
        steps.start(trial.plan.phases[0])
    steps.end([], grace_s=0.0)
    steps.close()
    assert fake_srun.cancelled(trial.bin) == ["121"]
    assert trial.component(0) is None


def test_nothing_starts_before_all_jobs_are_there(trial: Trial):
    steps = trial.split_steps()
    tasks = steps.start(trial.plan.phases[0])
    assert [t.worker for t in tasks] == ["master_worker/0", "rollout_worker/0", "rollout_worker/1"]
    assert [t.poll() for t in tasks] == [None, None, None]
    assert not trial.attempt_files.steps.exists()
    trial.stand_in()
    wait_until(lambda: tasks[0].poll() is None and trial.attempt_files.steps.exists())
    order = loads(Order, trial.store.get(trial.keys.component_order).value, where="")
    assert order == Order(
        attempt=1,
        token=trial.attempt.token,
        sequence=1,
        action=Action.START,
        phase="main",
        agents={"0": trial.attempt.token, "1": "a1"},
    )
    assert read_record(AttemptRecord, trial.attempt_files.record).nodes == "n1,n2"
    trial.stand_in_reports(rest=0)
    steps.end(tasks, grace_s=0.0)
    steps.board.close()


def test_a_component_of_another_attempt_does_not_count(trial: Trial):
    steps = trial.split_steps(_opened=time.monotonic() - 1000)
    trial.attempt = replace(trial.attempt, token="older")
    trial.stand_in()
    with golden.raises(ClusterError):
        steps.start(trial.plan.phases[0])
    steps.board.close()


def test_a_stop_is_heard_while_jobs_are_missing(trial: Trial):
    steps = trial.split_steps()
    tasks = steps.start(trial.plan.phases[0])
    request = StopRequest(grace_seconds=60.0, by="anna", at=1.0, attempt=1)
    trial.store.add(trial.keys.stop, dumps(request))
    assert poll_until_ended(tasks, "master_worker/0").poll() == worker_exit_codes.STOPPED
    steps.board.close()


def test_slurms_signal_to_another_job_reaches_the_attempt(trial: Trial, tmp_path: Path):
    cluster = replace(trial.plan.cluster, name_resolve=f"file://{tmp_path}/store")
    trial.plan = replace(trial.plan, cluster=cluster)
    text = plan_text(trial.plan)
    trial.files.plan.write_text(text, encoding="utf-8")
    trial.store.close()
    trial.store = open_store(trial.plan.name_resolve_url)
    call = "from realsys.supervisor.component_agent import run_component as run; import sys; "
    call += f"run({trial.plan.trial_dir!r}, {plan_hash(text)!r}, 1, 1)"
    slurm = {"SLURM_JOB_ID": "121", "SLURM_JOB_NODELIST": "n2"}
    agent = subprocess.Popen([sys.executable, "-c", call], env={**os.environ, **slurm})
    try:
        steps = trial.split_steps()
        tasks = steps.start(trial.plan.phases[0])
        wait_until(lambda: tasks[0].poll() is None and trial.attempt_files.steps.exists())
        trial.wait_for_tasks("rollout_worker/0", "rollout_worker/1")
        agent.send_signal(signal.SIGUSR2)
        wait_until(lambda: tasks[0].poll() is None and steps.board.is_stop_requested())
        request = loads(StopRequest, trial.store.get(trial.keys.stop).value, where="")
        assert request.by == "Slurm (SIGUSR2 to job 121), component rollout"
        assert request.grace_seconds == 110.0
        steps.end(tasks, grace_s=0.0)
        assert [t.poll() for t in tasks[1:]] == [-9, -9]
        steps.close()
        assert agent.wait(240) == 0
        assert "component left ordered=True" in trial.attempt_files.log("component/1").read_text()
    finally:
        agent.kill()
        agent.wait()


def test_an_agent_waits_for_its_attempt_and_makes_no_folder(trial: Trial):
    agent = trial.agent()
    trial.serve(agent)
    time.sleep(5 * POLL_S)
    assert not trial.files.attempts.exists()
    assert trial.component(1) is None
    steps = trial.split_steps()
    wait_until(lambda: trial.component(1) is not None)
    record = trial.component(1)
    assert (record.job_id, record.nodes, record.token) == ("121", "n2", trial.attempt.token)
    steps.close()
    assert trial.told() == [True]
    assert fake_srun.cancelled(trial.bin) == []


def test_an_agent_that_leaves_at_once_is_not_cancelled(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial.serve(trial.agent())
    steps = trial.split_steps()
    wait_until(lambda: trial.component(1) is not None)
    order = steps._order

    def ordered_and_obeyed(action: Action, phase: str = "") -> bool:
        done = order(action, phase)
        wait_until(lambda: trial.component(1) is None)
        return done

    monkeypatch.setattr(steps, "_order", ordered_and_obeyed)
    steps.close()
    assert fake_srun.cancelled(trial.bin) == []


def test_an_agent_says_whom_it_waited_for(trial: Trial):
    slurm = SlurmSpec(rendezvous_seconds=1)
    trial.plan = replace(trial.plan, cluster=replace(trial.plan.cluster, slurm=slurm))
    with golden.raises(ClusterError):
        trial.agent().join()


# ---- running --------------------------------------------------------------------------------------


def supervisor_of(trial: Trial, steps: SplitSteps) -> Supervisor:
    return Supervisor(
        trial.plan,
        "hash",
        trial.attempt,
        trial.files,
        trial.attempt_files,
        trial.store,
        trial.keys,
        steps,
    )


def test_both_jobs_run_to_the_end(trial: Trial):
    steps = trial.split_steps()
    done = f'echo \'{{"token": "{trial.attempt.token}"}}\' > {trial.attempt_files.done("main")}'
    fake_srun.task_program(trial.bin, "master_worker", done)
    fake_srun.task_program(
        trial.bin, "rollout_worker", 'echo "task $SLURM_PROCID on $SLURMD_NODENAME"'
    )
    trial.serve(trial.agent())
    marker = supervisor_of(trial, steps).run()
    steps.close()
    assert (marker.result, marker.first_failure) == (Result.COMPLETED, None)
    assert trial.told() == [True]
    assert trial.attempt_files.log("rollout_worker/1").read_text() == "task 1 on n2\n"
    assert trial.report().ended["rollout_worker/1"].returncode == 0
    assert fake_srun.cancelled(trial.bin) == []


def test_a_remote_task_that_fails_is_told_by_its_own_record(trial: Trial):
    steps = trial.split_steps()
    failing = "[ $SLURM_PROCID = 1 ] || exec sleep 30; kill -SEGV $$"
    fake_srun.task_program(trial.bin, "rollout_worker", failing)
    trial.serve(trial.agent())
    marker = supervisor_of(trial, steps).run()
    steps.close()
    assert marker.result is Result.FAILED
    first = marker.first_failure
    told = read_record(WorkerExit, trial.attempt_files.exit_of("rollout_worker/1"))
    assert (first.worker, first.host) == ("rollout_worker/1", "n2")
    assert (first.pid, first.at) == (told.pid, told.at)
    assert "component rollout can't" in first.why
    assert trial.told() == [True]
    assert fake_srun.cancelled(trial.bin) == []
    assert set(trial.report().ended) == {"rollout_worker/0", "rollout_worker/1"}


def test_steps_that_an_agent_can_not_start_are_told_with_its_reason(trial: Trial):
    steps = trial.split_steps()
    agent = trial.agent()
    agent.steps.components = {1: []}  # Slurm gave no node
    trial.serve(agent)
    marker = None
    with golden.raises(ClusterError) as caught:
        marker = supervisor_of(trial, steps).run()
    steps.close()
    assert marker is None
    assert "rollout: nodes (none)" in caught.value.where
    assert trial.told() == [True]


def test_tasks_of_a_job_that_is_gone_count_as_ended(trial: Trial):
    steps = trial.split_steps()
    trial.stand_in(ttl_s=0.5)  # never renewed: the node is lost
    tasks = steps.start(trial.plan.phases[0])
    lost = poll_until_ended(tasks, "rollout_worker/1")
    assert (lost.poll(), lost.hint) == (1, "job 121 of component rollout is gone")
    assert tasks[0].poll() is None
    trial.wait_for_tasks("master_worker/0")
    steps.end(tasks, grace_s=0.0)
    assert tasks[0].poll() == -9
    steps.close()


def test_tasks_that_slurm_ended_with_their_job_say_so(trial: Trial):
    steps = trial.split_steps()
    trial.stand_in()
    tasks = steps.start(trial.plan.phases[0])
    trial.stand_in(leaving="Slurm (SIGTERM to job 121)")
    told = TaskEnd(returncode=3, pid=77, hint="its own")
    trial.stand_in_reports(
        ended={"rollout_worker/0": told, "rollout_worker/1": TaskEnd(returncode=1, hint="srun: …")}
    )
    poll_until_ended(tasks, "rollout_worker/1")
    assert [t.hint for t in tasks[1:]] == ["its own", "Slurm (SIGTERM to job 121)"]
    steps.end(tasks, grace_s=0.0)
    steps.board.close()


def test_an_end_that_is_not_reported_cancels_the_job(trial: Trial):
    steps = trial.split_steps(end_s=0.2)
    trial.stand_in()
    tasks = steps.start(trial.plan.phases[0])
    steps.end(tasks, grace_s=0.0)
    assert fake_srun.cancelled(trial.bin) == ["121"]
    assert "121 of component" in tasks[1].hint
    steps.board.close()


def test_a_job_that_stays_after_leave_is_cancelled(trial: Trial):
    steps = trial.split_steps(leave_s=0.2, end_s=0.2)
    trial.stand_in()
    steps.start(trial.plan.phases[0])
    steps.close()
    assert fake_srun.cancelled(trial.bin) == ["121"]
    steps.end([], grace_s=0.0)


def test_a_job_that_slurm_ends_stops_the_attempt_in_good_order(trial: Trial):
    steps = trial.split_steps()
    agent = trial.agent()
    trial.serve(agent)
    tasks = steps.start(trial.plan.phases[0])
    wait_until(lambda: tasks[0].poll() is None and trial.attempt_files.steps.exists())
    trial.wait_for_tasks("master_worker/0", "rollout_worker/0", "rollout_worker/1")
    agent.announce_end("Slurm (SIGTERM to job 121)", grace_s=20.0)
    wait_until(lambda: tasks[0].poll() is not None or steps.board.is_stop_requested())
    request = loads(StopRequest, trial.store.get(trial.keys.stop).value, where="")
    assert request.by == "Slurm (SIGTERM to job 121), component rollout"
    assert (request.grace_seconds, request.attempt) == (20.0, 1)
    assert tasks[1].poll() is None  # it serves on until it is told to end
    steps.end(tasks, grace_s=0.0)
    assert [t.poll() for t in tasks] == [-9, -9, -9]
    steps.close()
    assert trial.told() == [True]


# ---- an agent alone -------------------------------------------------------------------------------


def test_an_agent_starts_a_phase_reports_and_ends_it(trial: Trial):
    steps = trial.split_steps()
    trial.joined(trial.agent())
    trial.order(Action.START)
    trial.wait_for_tasks("rollout_worker/0", "rollout_worker/1")
    wait_until(lambda: trial.store.find_subtree(trial.keys.component_report(1)))
    assert (trial.report().sequence, trial.report().rest) == (1, None)
    trial.order(Action.END)
    wait_until(lambda: trial.report().rest == 0)
    assert {w: e.returncode for w, e in trial.report().ended.items()} == {
        "rollout_worker/0": -9,
        "rollout_worker/1": -9,
    }
    trial.order(Action.LEAVE)
    assert trial.told() == [True]
    assert trial.component(1) is None
    steps.board.close()


@pytest.mark.parametrize("stale", [{"attempt": 7}, {"token": "older"}], ids=["number", "token"])
def test_an_order_of_another_attempt_moves_nobody(trial: Trial, stale: dict[str, object]):
    steps = trial.split_steps()
    trial.order(Action.LEAVE, **stale)
    trial.joined(trial.agent())
    time.sleep(5 * POLL_S)
    assert trial.left == []
    assert trial.component(1) is not None
    steps.close()
    assert trial.told() == [True]


def test_an_agent_leaves_when_its_attempt_has_an_exit_marker(trial: Trial):
    steps = trial.split_steps()
    trial.joined(trial.agent())
    trial.order(Action.START)
    trial.wait_for_tasks("rollout_worker/0", "rollout_worker/1")
    marker = ExitMarker(result=Result.FAILED, attempt=1, ended_at=2.0, phase="main")
    write_record(trial.attempt_files.exit, marker)
    assert trial.told() == [True]
    assert trial.report().rest == 0
    steps.board.close()


def test_an_agent_leaves_for_a_newer_attempt(trial: Trial):
    steps = trial.split_steps()
    trial.joined(trial.agent())
    newer = replace(trial.attempt, number=2, token="newer")
    trial.store.add(trial.keys.attempt, dumps(newer), replace=True)
    assert trial.told() == [True]
    steps.board.close()


def test_an_agent_leaves_by_itself_when_the_supervisor_is_gone(trial: Trial):
    steps = trial.split_steps()
    trial.joined(trial.agent())
    trial.order(Action.START)
    trial.wait_for_tasks("rollout_worker/0", "rollout_worker/1")
    steps.board.close()  # as if its lease had ended
    assert trial.told() == [False]
    assert {e.returncode for e in trial.report().ended.values()} == {-9}


def test_an_agent_that_came_after_the_start_leaves(trial: Trial):
    steps = trial.split_steps()
    trial.order(Action.START, agents={"0": "s", "1": "the agent before Slurm restarted the job"})
    trial.serve(trial.agent())
    assert trial.told() == [False]
    assert not trial.attempt_files.steps.exists()
    steps.board.close()


class Silent:
    """A store that stops answering for a while."""

    def __init__(self, store) -> None:
        self.store, self.silent = store, False

    def __getattr__(self, name: str):
        if self.silent:
            raise StoreUnavailable("no answer", where="test", fix="wait")
        return getattr(self.store, name)


def test_a_store_that_does_not_answer_ends_nothing(trial: Trial):
    steps = trial.split_steps()
    store = Silent(open_store(trial.plan.name_resolve_url))
    trial.joined(trial.agent(store=store))
    trial.order(Action.START)
    trial.wait_for_tasks("rollout_worker/0", "rollout_worker/1")
    store.silent = True
    time.sleep(2 * SLACK_S)
    assert trial.left == []
    store.silent = False
    trial.order(Action.LEAVE)
    assert trial.told() == [True]
    steps.board.close()


def test_a_lost_lease_is_taken_again(trial: Trial):
    steps = trial.split_steps()
    agent = trial.joined(trial.agent())
    wait_until(lambda: agent._member is not None)
    before = trial.store.get(trial.keys.component(1)).lease_id
    agent._member._renewer._end("the test says so")
    wait_until(lambda: trial.store.get(trial.keys.component(1)).lease_id != before)
    assert trial.left == []
    steps.close()
    assert trial.told() == [True]


def test_an_end_of_an_older_agent_is_not_believed(trial: Trial):
    steps = trial.split_steps()
    trial.stand_in()
    tasks = steps.start(trial.plan.phases[0])
    old = TaskEnd(returncode=3)
    report = Report(
        attempt=1,
        token="older",
        agent="a1",
        component=1,
        sequence=1,
        ended={"rollout_worker/0": old},
    )
    trial.store.add(trial.keys.component_report(1), dumps(report))
    time.sleep(3 * POLL_S)
    assert tasks[1].poll() is None
    trial.stand_in_reports(ended={"rollout_worker/0": TaskEnd(returncode=0, host="n2")}, rest=4)
    assert (poll_until_ended(tasks, "rollout_worker/0").poll(), tasks[1].host) == (0, "n2")
    assert tasks[2].poll() == 4
    steps.end(tasks, grace_s=0.0)
    steps.board.close()


# ---- an attempt that was superseded while it was cut off ---------------------------------------------


def superseded(trial: Trial) -> AttemptRecord:
    """A newer attempt has taken over, with jobs of its own."""
    newer = replace(trial.attempt, number=2, token="newer", host="n9")
    trial.store.add(trial.keys.attempt, dumps(newer), replace=True)
    for index in (0, 1):
        record = ComponentRecord(
            index=index, agent="a2", job_id="130", host="n9", nodes="n9", attempt=2, token="newer"
        )
        lease = trial.store.grant(60.0)
        trial.store.add(trial.keys.component(index), dumps(record), lease=lease, replace=True)
    order = Order(attempt=2, token="newer", sequence=1, action=Action.START, phase="main")
    trial.store.add(trial.keys.component_order, dumps(order), replace=True)
    return newer


def test_an_old_supervisor_takes_and_says_nothing_of_a_newer_attempt(trial: Trial):
    steps = trial.split_steps()
    board = steps.board
    keeper = board._member._renewer
    superseded(trial)
    theirs = {entry.key: entry for entry in trial.store.get_subtree(trial.keys.root)}
    assert keeper is not None
    keeper._lost = True  # its lease is lost: it is reacquired only if the attempt is ours
    wait_until(lambda: keeper.lease_status is LeaseStatus.EXPIRED)
    assert "attempt 2 on" in keeper._validity.reason
    assert board.components() == {}
    assert board.order(Action.LEAVE, 1, {}), "there is nothing to try again"
    leaving = replace(board._member.record, leaving="time limit", leaving_grace_s=5.0)
    board.pass_on_end(leaving, "main")
    board.close()
    assert {e.key: e for e in trial.store.get_subtree(trial.keys.root)} == theirs


def test_an_old_agent_leaves_and_reports_nothing_over_a_newer_one(trial: Trial):
    steps = trial.split_steps()
    trial.joined(trial.agent())
    trial.order(Action.START)
    trial.wait_for_tasks("rollout_worker/0", "rollout_worker/1")
    wait_until(lambda: trial.store.find_subtree(trial.keys.component_reports))
    superseded(trial)
    report = Report(attempt=2, token="newer", agent="a2", component=1, sequence=1)
    trial.store.add(trial.keys.component_report(1), dumps(report), replace=True)
    assert len(trial.told()) == 1, (
        "its supervisor is gone, and the attempt is over: whichever it sees first"
    )
    assert trial.report() == report, "it ended its tasks, and that is nobody's business any more"
    assert trial.component(1).token == "newer"
    steps.board.close()


def test_an_agent_is_not_sent_away_by_the_key_of_a_removed_trial(trial: Trial):
    """Its name was used before; the supervisor has not begun yet."""
    record = TrialRecord(
        experiment_name="e", trial_name="t", user="u", cluster="c", plan_hash="h",
        created_at=time.time(), launch_host="login1",
    )  # fmt: skip
    write_record(trial.files.record, record)
    old = AttemptRecord(
        number=3, token="old", host="n7", supervisor_pid=1, supervisor_start=1, started_at=1.0
    )
    trial.store.add(trial.keys.attempt, dumps(old))
    agent = trial.agent()
    assert not agent._is_over()
    trial.serve(agent)
    steps = trial.split_steps()
    assert trial.attempt.number == 1
    wait_until(lambda: trial.component(1) is not None)
    steps.close()
    assert trial.told() == [True]
