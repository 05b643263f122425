"""Memory of rollout workers whose agents work in boxes on their nodes."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace as Parts
from typing import Any, cast

import pytest

from launcher.plan.box_memory import IN_BOXES, WORKER_MIB, box_warnings
from realsys.api.plan import LaunchPlan
from realsys.api.scheduling import Scheduling, WorkerType
from realsys.rewards.harbor.harbor_rule import HarborTests

DEFAULTS = {f.name: f.default for f in dataclasses.fields(HarborTests)}
BY_DEFAULT = DEFAULTS["mem"] * DEFAULTS["boxes_at_once"]


def warned(agent: str, rule: dict[str, Any], mem: int, *, slurm: bool = True) -> list[str]:
    group = Parts(scheduling=Scheduling(mem=mem))
    worker = Parts(agent=agent, agent_args={"rule": rule})
    phase = Parts(
        name="main",
        config=Parts(rollout_worker=[worker]),
        scheduling=Parts(groups=lambda: {WorkerType.ROLLOUT_WORKER: group}),
    )
    plan = Parts(job=Parts() if slurm else None, phases=[phase])
    return list(box_warnings(cast(LaunchPlan, plan)))


@pytest.mark.parametrize("agent", IN_BOXES)
@pytest.mark.parametrize(
    ("rule", "boxes"),
    [({}, BY_DEFAULT), ({"mem": 256}, 256 * 8), ({"mem": 100, "boxes_at_once": 3}, 300)],
)
def test_a_task_that_requests_less_than_its_boxes_may_take_is_told(agent, rule, boxes) -> None:
    (warning,) = warned(agent, rule, WORKER_MIB + boxes - 1)
    assert f"scheduling.rollout_worker.mem={WORKER_MIB + boxes}" in warning
    assert not warned(agent, rule, WORKER_MIB + boxes)


def test_other_agents_and_workers_of_this_machine_need_none() -> None:
    assert not warned("chat", {}, WORKER_MIB)
    assert not warned("harbor", {}, WORKER_MIB, slurm=False)
