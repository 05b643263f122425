"""Which GPUs a task uses: integers, UUIDs and MIG instances alike, whole and shared."""

from __future__ import annotations

import golden
import pytest

from realsys.api.errors import ClusterError
from realsys.slurm.gpus import (
    gpu_ids,
    gpu_positions,
    gpus_for,
    own_devices,
    same_devices,
    tasks_per_gpu,
)

INTEGERS = "4,5,6,7"
UUIDS = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6,GPU-0fd7,GPU-aa,GPU-bb"
MIGS = "MIG-c7384736-a75d-5afc-978f-d2f1294409fd,MIG-1,MIG-2,MIG-3"


@pytest.mark.parametrize("visible", [INTEGERS, UUIDS, MIGS], ids=["integer", "uuid", "mig"])
def test_each_task_keeps_its_own_entries_whatever_they_look_like(visible):
    entries = visible.split(",")
    assert [own_devices(visible, local, 1.0) for local in range(4)] == entries
    assert own_devices(visible, 1, 2.0) == ",".join(entries[2:])


def test_tasks_of_a_fraction_share_one_gpu():
    # 0.5: tasks 0 and 1 on the first, 2 and 3 on the second; 0.3: three on each
    assert [own_devices("0,1", local, 0.5) for local in range(4)] == ["0", "0", "1", "1"]
    assert [own_devices("0,1", local, 0.3) for local in range(6)] == ["0"] * 3 + ["1"] * 3
    assert [tasks_per_gpu(share) for share in (1.0, 2.0, 0.5, 0.6, 0.1)] == [1, 1, 2, 1, 10]
    assert tasks_per_gpu(1 / 3) == 3  # 1 / (1/3) is 3.0000000000000004 or less: never 2


def test_gpus_of_a_node_are_those_that_its_tasks_need():
    assert [gpus_for(tasks, 0.5) for tasks in range(5)] == [0, 1, 1, 2, 2]
    assert [gpus_for(tasks, 2.0) for tasks in range(3)] == [0, 2, 4]
    assert gpus_for(7, 0.0) == 0
    assert gpu_positions(3, 0.0) == range(0)


def test_a_task_without_gpus_sees_none():
    assert own_devices("0,1", 0, 0.0) == ""


@pytest.mark.parametrize("visible", [None, "", "0"])
def test_too_few_gpus_are_told_with_both_numbers(visible):
    with golden.raises(ClusterError):
        own_devices(visible, 1, 1.0)


@pytest.mark.parametrize(
    ("step_gpus", "local", "gpus", "ids"),
    [
        ("4, 5,6,7,", 1, 1.0, ("5",)),
        ("4,5,6,7", 1, 2.0, ("6", "7")),
        ("4,5", 3, 2.0, ("4", "5")),  # its own, as Slurm bound them
        ("4,5", 1, 2.0, ("4", "5")),
        ("4,5,6", 1, 2.0, ()),  # too few
        ("4,5", 3, 0.5, ("5",)),
        ("4", 0, 0.0, ()),
        ("", 0, 1.0, ()),
        (None, 0, 1.0, ()),
    ],
)
def test_slurms_numbers_of_a_tasks_gpus(step_gpus, local, gpus, ids):
    assert gpu_ids(step_gpus, local, gpus) == ids


@pytest.mark.parametrize(
    ("ids", "step_gpus", "visible", "found"),
    [
        (["5", "4"], "4, 5,6", UUIDS.rpartition(",")[0], ",".join(UUIDS.split(",")[1::-1])),
        (["6"], "4,5,6", "0, 1 ,2", "2"),
        ([], "4,5", "0,1", None),
        (["4"], "4,5", "0", None),
        (["4", "7"], "4,5", "0,1", None),
        (["4"], None, None, None),
    ],
)
def test_the_same_gpus_in_another_step(ids, step_gpus, visible, found):
    assert same_devices(ids, step_gpus=step_gpus, visible=visible) == found
