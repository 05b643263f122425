"""The batch step of every job but the first, if a trial's groups are in several Slurm jobs.

The job's first process (job_entry.py) calls ``run_component``. It runs an ``OrderFollower`` and passes
Slurm's signals on to it.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import FrameType

from realsys.api.errors import StoreUnavailable
from realsys.api.plan import LaunchPlan, read_plan
from realsys.name_resolve.key_table import TrialKeys
from realsys.name_resolve.store import NameResolve
from realsys.name_resolve.trial_store import open_trial_store
from realsys.supervisor.attempt.attempt import Job
from realsys.supervisor.signals import SAVE_MARGIN_S, TERM_GRACE_S
from realsys.supervisor.split_jobs.order_follower import OrderFollower
from realsys.supervisor.steps.slurm_steps import SlurmSteps, component_nodes
from realsys.supervisor.supervisor_main import log_to
from realsys.trial.records import AttemptFiles, TrialFiles

AWAIT_STORE_POLL_S = 1.0


def run_component(trial_dir: str, plan_hash: str, component: int, attempt_number: int) -> int:
    """Serves one component of one attempt. Returns 0; exits with 1 if it ends without an order.

    Raises:
        ConfigError: the plan was changed.
        ClusterError: the attempt's supervisor did not appear in time.
    """
    files = TrialFiles(Path(trial_dir))
    plan = read_plan(files.plan, expected_hash=plan_hash)
    assert plan.job is not None
    job = Job.from_environment(os.environ)
    (nodes,) = component_nodes(plan.job, dict(os.environ))
    store = _await_store(plan, files.attempt(attempt_number))
    steps = SlurmSteps(plan, plan_hash, files.attempt(attempt_number), {component: nodes})
    agent = OrderFollower(
        plan, component, attempt_number, job, files, store, TrialKeys.of(plan), steps
    )
    _listen_to_signals(agent, plan)
    agent.join()
    log_to(files.attempt(attempt_number).log(f"component-{component}"), f"component/{component}")
    was_ordered = agent.serve()
    store.close()
    if not was_ordered:
        raise SystemExit(1)
    return 0


def _await_store(plan: LaunchPlan, attempt: AttemptFiles) -> NameResolve:
    """Opens the trial's store; waits for a job's own etcd, which starts with the first job."""
    deadline_s = time.monotonic() + plan.cluster.slurm.rendezvous_seconds
    while True:
        try:
            return open_trial_store(plan, attempt)
        except StoreUnavailable:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(AWAIT_STORE_POLL_S)


def _listen_to_signals(agent: OrderFollower, plan: LaunchPlan) -> None:
    """Passes Slurm's signals to this batch step on, so that the whole attempt stops gracefully."""
    announced = plan.cluster.slurm.grace_seconds

    def on_signal(number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        early = number == signal.SIGUSR2
        grace_s = max(5.0, announced - SAVE_MARGIN_S) if early else TERM_GRACE_S
        agent.announce_end(f"Slurm ({name} to job {agent.job.job_id})", grace_s=grace_s)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        signal.signal(number, on_signal)
