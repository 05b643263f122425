"""Inside a job: starts four tasks, kills one and starts it again, twice. Of test_slurm_restarts.py.

``python restart_job.py ROOT`` is the batch step and writes down what it saw; ``-m restart_job TYPE …`` is
a task: realsys/worker/srun_task.py, with a shell script for a worker.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from stand_in_slurm import make_plan, write_plan

from realsys.api.plan import StepPlan, plan_hash, plan_text
from realsys.api.scheduling import WorkerType
from realsys.slurm import step_command
from realsys.supervisor.steps.slurm_steps import SlurmSteps, component_nodes
from realsys.supervisor.steps.steps import StepTask
from realsys.worker import srun_task as task

WORKER = 'echo "$$ $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES $SLURM_STEP_ID" >> {seen}; exec sleep 600'


def run_task() -> int:
    """One task of the step."""

    def command(*, trial_dir: str, index: int, **_: object) -> list[str]:
        return ["/bin/sh", "-c", WORKER.format(seen=f"{trial_dir}/seen-{index}")]

    task.command = command
    return task.main()


def wait_until(is_true: Callable[[], object], what: str) -> None:
    """Looks every 20 ms."""
    deadline_s = time.monotonic() + 240
    while not is_true():
        assert time.monotonic() < deadline_s, f"waited in vain until {what}"
        time.sleep(0.02)


def run_job(root: Path) -> None:
    """Two tasks on each of two nodes; the second one of the second node is started again."""
    plan = make_plan(root)
    step = StepPlan(
        worker_type=WorkerType.GENERATION_SERVER,
        nodes=((2, 2),),
        cpus_per_task=1,
        memory_mib=50,
        gpus_per_task=1.0,
        gpus_per_node=2,
        gpu_type="h200",
        gpu_binding="visible",
    )
    (phase,) = plan.phases
    plan = replace(plan, phases=(replace(phase, steps=(step,)),))
    trial = write_plan(plan)
    assert plan.job is not None
    (nodes,) = component_nodes(plan.job, dict(os.environ))
    step_command.TASK_MODULE = "restart_job"
    steps = SlurmSteps(plan, plan_hash(plan_text(plan)), trial.attempt(1), {0: nodes})

    def seen(index: int) -> list[list[str]]:
        path = trial.root / f"seen-{index}"
        return [line.split(" ") for line in path.read_text().splitlines()] if path.exists() else []

    told: dict[str, object] = {"nodes": nodes}
    tasks: list[StepTask] = steps.start(plan.phases[0])
    try:
        wait_until(lambda: all(seen(i) for i in range(4)), "four tasks run")
        for time_number in (1, 2):
            steps.kill(tasks[3])
            wait_until(lambda: tasks[3].poll() is not None, "one is killed")
            told[f"killed {time_number}"] = tasks[3].poll()
            tasks[3] = steps.restart(tasks[3])
            wait_until(lambda n=time_number: len(seen(3)) > n, "it runs again")
        time.sleep(0.5)  # whoever is ended by it, is by now
        told["running"] = [t.worker for t in tasks if t.poll() is None]
    finally:
        steps.end(tasks, grace_s=0.0)
    told["ended"] = [t.poll() is not None for t in tasks]
    told["seen"] = [seen(i) for i in range(4)]
    (root / "told.part").write_text(json.dumps(told))
    (root / "told.part").rename(root / "told.json")


if __name__ == "__main__":
    if len(sys.argv) == 2:
        run_job(Path(sys.argv[1]))
    else:
        sys.exit(run_task())
