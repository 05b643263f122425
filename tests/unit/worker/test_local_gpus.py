"""On one machine each worker has its own GPUs, as on Slurm; how many there are is asked without CUDA."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import golden
import pytest
from stand_in_slurm import wait_until
from test_resolve import CLUSTER
from test_worker_restarts import SERVER, Trial
from test_worker_restarts import trial as trial

from experiments.asynchronous import Async
from launcher.plan.resolve import _more_than_one_gpu, gpu_problems
from realsys.api.errors import ClusterError
from realsys.api.scheduling import ExperimentScheduling, Scheduling, TasksGroup
from realsys.supervisor.steps import local_steps
from realsys.worker.local_gpus import assign_gpus, devices_for_added_worker, gpus_needed
from realsys.worker.machine_gpus import entries_of_list, gpu_entries

MIXED = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-5d3c-1)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-5d3c-2)
  MIG 3g.40gb     Device  0: (UUID: MIG-c6d4-1)
  MIG 3g.40gb     Device  1: (UUID: MIG-c6d4-2)
GPU 2: NVIDIA H100 80GB HBM3 (UUID: GPU-5d3c-3)
"""


def groups(**gpus: tuple[int, float]) -> ExperimentScheduling:
    """Worker type → (count, GPUs of each)."""
    made: dict[str, Any] = {
        kind: TasksGroup(count=count, scheduling=Scheduling(gpu=gpu))
        for kind, (count, gpu) in gpus.items()
    }
    one = TasksGroup(count=1, scheduling=Scheduling())
    return ExperimentScheduling(**{"master_worker": one, "model_worker": one, **made})


@pytest.mark.parametrize(
    ("asked", "dealt"),
    [
        ({"model_worker": (2, 1)}, {"model_worker/0": "0", "model_worker/1": "1"}),
        (  # a server beside the trainers, in the order in which workers start
            {"model_worker": (2, 1), "generation_server": (1, 2)},
            {"generation_server/0": "0,1", "model_worker/0": "2", "model_worker/1": "3"},
        ),
        (  # parts of one GPU, of whatever kind, behind the whole ones
            {"model_worker": (1, 0.5), "generation_server": (1, 0.5), "evaluator": (1, 1)},
            {"evaluator/0": "0", "generation_server/0": "1", "model_worker/0": "1"},
        ),
        (
            {"generation_server": (4, 0.3)},
            {f"generation_server/{i}": "0" for i in range(3)} | {"generation_server/3": "1"},
        ),
        ({"generation_server": (2, 0.6)}, {"generation_server/0": "0", "generation_server/1": "1"}),
    ],
)
def test_each_worker_gets_its_own_and_the_others_none(asked, dealt):
    scheduling = groups(**asked)
    found = assign_gpus(scheduling, ("0", "1", "2", "3"))
    assert {worker: own for worker, own in found.items() if own} == dealt
    assert found["master_worker/0"] == ""
    assert gpus_needed(scheduling) == len({e for own in dealt.values() for e in own.split(",")})


def test_entries_are_given_on_as_they_are():
    assert assign_gpus(groups(model_worker=(2, 1)), ("MIG-a", "GPU-b"))["model_worker/1"] == "GPU-b"


def test_too_few_are_an_error_with_both_numbers():
    with golden.raises(ClusterError):
        assign_gpus(groups(model_worker=(3, 1)), ("0", "1"))


def test_one_more_gets_what_is_free_or_was_left():
    dealt = {"model_worker/0": "0", "generation_server/0": "1"}
    more = {"assigned": dealt, "gone": (), "entries": ("0", "1", "2")}
    assert devices_for_added_worker("generation_server/1", 1, **more) == "2"
    dealt["generation_server/1"] = "2"
    assert devices_for_added_worker("rollout_worker/9", 0, **more) == ""
    with golden.raises(ClusterError):
        devices_for_added_worker("generation_server/2", 1, **more)
    more["gone"] = ["generation_server/0"]
    dealt["generation_server/2"] = devices_for_added_worker("generation_server/2", 1, **more)
    assert dealt["generation_server/2"] == "1"
    with pytest.raises(ClusterError):  # its place is taken
        devices_for_added_worker("generation_server/3", 1, **more)


def test_the_drivers_list_gives_numbers_and_instances():
    assert entries_of_list(MIXED) == ("0", "MIG-c6d4-1", "MIG-c6d4-2", "2")
    assert entries_of_list("No devices were found\n") == ()


@pytest.mark.parametrize(
    ("visible", "said", "found"),
    [
        (None, MIXED, ("0", "MIG-c6d4-1", "MIG-c6d4-2", "2")),
        (None, "", ("0", "1", "2")),  # it could not be asked: device files say how many
        ("2,0", MIXED, ("2", "0")),
        ("MIG-c6d4-2", MIXED, ("MIG-c6d4-2",)),
        ("GPU-5d3c-3", MIXED, ("GPU-5d3c-3",)),
        ("", MIXED, ()),
    ],
)
def test_what_the_shell_shows_is_dealt_out_and_nothing_else(tmp_path, visible, said, found):
    for i in range(3):
        (tmp_path / f"nvidia{i}").touch()
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert gpu_entries(environ, str(tmp_path), lambda _: said) == found


def test_the_driver_is_asked_by_nvidia_smi(tmp_path):
    (tmp_path / "nvidia0").touch()
    program = tmp_path / "nvidia-smi"
    program.write_text(f'#!/bin/sh\n[ "$1" = -L ] && cat <<"END"\n{MIXED}END\n')
    program.chmod(0o755)
    assert len(gpu_entries({"PATH": f"{tmp_path}:/usr/bin:/bin"}, str(tmp_path))) == 4
    program.write_text("#!/bin/sh\nexit 9\n")
    assert gpu_entries({"PATH": f"{tmp_path}:/usr/bin:/bin"}, str(tmp_path)) == ("0",)


# ---- plan and supervisor ---------------------------------------------------------------------------


def refusals(
    scheduling: ExperimentScheduling,
    machine: int,
    cluster: Any = CLUSTER,
    backend: str = "embedded",
) -> Any:
    config = SimpleNamespace(generation_server=(SimpleNamespace(backend_type=backend),))
    phase: Any = SimpleNamespace(name="main", scheduling=scheduling, config=config)
    found = [*_more_than_one_gpu(phase)] or gpu_problems([phase], cluster, lambda: machine)
    return [problem.what for problem in found]


def test_a_plan_for_more_gpus_than_are_here_says_both_numbers():
    asked = groups(model_worker=(1, 1), generation_server=(2, 0.5))
    assert refusals(asked, 2) == []
    golden.check(refusals(asked, 1))
    assert refusals(asked, 1, replace(CLUSTER, scheduler="slurm")) == []


@pytest.mark.parametrize(
    ("count", "gpus", "told"),
    [
        (1, 2, "a model worker computes on one GPU, but 2 are requested for each"),
        (2, 0.5, "with 0.5 GPUs each, 2 of 2 model workers would share one GPU, which NCCL"),
        (4, 0.3, "with 0.3 GPUs each, 3 of 4 model workers"),
    ],
)
def test_model_workers_have_a_gpu_each(count, gpus, told):
    for cluster in (CLUSTER, replace(CLUSTER, scheduler="slurm")):
        (what,) = refusals(groups(model_worker=(count, gpus)), 8, cluster)
        assert what.startswith(told)
    assert refusals(groups(model_worker=(1, gpus if gpus < 1 else 1)), 8) == []


def test_who_computes_in_one_process_has_one_gpu_at_most():
    for kind in ("evaluator", "generation_server"):
        (what,) = refusals(groups(**{kind: (1, 2)}), 8)
        golden.check(what)
    assert refusals(groups(generation_server=(1, 2)), 8, backend="sglang") == []
    assert refusals(groups(evaluator=(1, 2)), 8)[0].startswith("an evaluator computes")


def test_a_server_told_to_use_a_gpu_has_one():
    for gpus, problems in ((0.0, 1), (1.0, 0)):
        options = Async(server_args={"device": "cuda"})
        assert len(list(options.device_problems(Scheduling(gpu=gpus)))) == problems


def test_workers_on_this_machine_have_their_own_gpus(trial, monkeypatch, tmp_path):
    """Two model workers and a server of a real supervisor, which say what they see."""
    one: Trial = trial()
    (phase,) = one.plan.phases
    gpu = Scheduling(gpu=1)
    scheduling = replace(
        phase.scheduling,
        model_worker=replace(phase.scheduling.model_worker, scheduling=gpu),
        generation_server=TasksGroup(count=1, scheduling=gpu),
    )
    one.plan = replace(one.plan, phases=(replace(phase, scheduling=scheduling),))
    one.steps.plan = one.supervisor.plan = one.plan
    monkeypatch.setattr(local_steps, "gpu_entries", lambda environ: ("5", "MIG-x", "GPU-y", "7"))
    seen: dict[str, Path] = {}

    def command(*, worker_type: str, index: int, **_: object) -> list[str]:
        worker = f"{worker_type}/{index}"
        seen[worker] = tmp_path / worker.replace("/", "-")
        (shell, flag, text) = one.command(worker_type=worker_type, index=index)
        return [shell, flag, f'echo "[$CUDA_VISIBLE_DEVICES]" >> {seen[worker]};' + text]

    monkeypatch.setattr(local_steps, "command", command)
    one.begin()
    one.end(SERVER, 3)  # started again: on the same GPU
    one.pid(SERVER, starts=2)
    wait_until(lambda: len(seen) == 4)
    one.finish()
    assert {worker: path.read_text().split() for worker, path in seen.items()} == {
        SERVER: ["[5]", "[5]"],
        "model_worker/0": ["[MIG-x]"],
        "model_worker/1": ["[GPU-y]"],
        "master_worker/0": ["[]"],
    }
