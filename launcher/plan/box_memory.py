"""Checks that rollout workers whose agents work in boxes have the memory of these (pure)."""

from __future__ import annotations

from collections.abc import Iterator

from experiments.parts.time_limits import argument_of
from realsys.api.plan import LaunchPlan
from realsys.api.scheduling import WorkerType

IN_BOXES = ("harbor", "harbor_command")  # agents whose boxes run on the rollout worker's node
WORKER_MIB = 2048  # that the worker itself needs, as a plan requests by default


def box_warnings(plan: LaunchPlan) -> Iterator[str]:
    """Warns of rollout workers on Slurm that request less memory than their boxes may take."""
    if plan.job is None:  # nothing limits a worker of this machine
        return
    for phase in plan.phases:
        group = phase.scheduling.groups().get(WorkerType.ROLLOUT_WORKER)
        worker = next(iter(phase.config.rollout_worker), None)
        if group is None or worker is None or worker.agent not in IN_BOXES:
            continue
        rule = worker.agent_args.get("rule") or {}
        box = argument_of("reward", "harbor", rule, "mem") or 0
        number = argument_of("reward", "harbor", rule, "boxes_at_once") or 0
        needs = WORKER_MIB + int(box * number)
        if group.scheduling.mem < needs:
            all_of_them = int(box * number)
            yield (
                f"phase {phase.name}: the boxes of agent {worker.agent!r} may take {all_of_them:,} MiB "
                f"on each rollout worker's node, {number:g} of {box:g} MiB, but its task requests "
                f"{group.scheduling.mem:,}: set scheduling.rollout_worker.mem={needs}, or lower "
                "task.reward_args.harbor: mem, boxes_at_once"
            )
