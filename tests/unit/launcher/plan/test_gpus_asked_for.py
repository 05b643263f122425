"""A GPU that was asked for is never replaced by the CPU: the plan refuses, or the worker."""

from __future__ import annotations

import golden
import pytest
from test_resolve import CLUSTER, Tiny
from wanted_resources import model_workers

from launcher.plan.resolve import resolve
from realsys.api.errors import ConfigError
from realsys.worker.device import STAND_IN, compute_device
from realsys.worker.machine_gpus import machine_gpus


def plan(gpu: float, machine: int | None) -> None:
    given = {"cluster": CLUSTER, "trial_name": "a", "user": "me"}
    tiny = Tiny(scheduling=model_workers(gpu=gpu))
    resolve("tiny", tiny, machine_gpus=None if machine is None else lambda: machine, **given)


@pytest.mark.parametrize(("gpu", "machine"), [(0.5, 1), (1, 1), (0, 0), (1, None)])
def test_gpus_that_are_here_can_be_planned(gpu, machine):
    plan(gpu, machine)


@pytest.mark.parametrize(
    ("gpu", "machine", "told"),
    [(0.5, 0, "this machine has none"), (1, 0, "this machine has none")],
)
def test_gpus_that_are_not_here_are_refused_in_the_plan(gpu, machine, told):
    with golden.raises(ConfigError):
        plan(gpu, machine)


@pytest.mark.parametrize(
    ("names", "visible", "found"),
    [
        ((), None, 0),
        (("nvidiactl", "nvidia-uvm", "nvidia-modeset"), None, 0),  # a driver, and no GPU
        (("nvidia0", "nvidia1", "nvidiactl"), None, 2),
        (("nvidia0", "nvidia1"), "", 0),
        (("nvidia0", "nvidia1"), "-1", 0),
        (("nvidia0", "nvidia1"), "1", 1),
        (("nvidia0", "nvidia1"), "0,-1,1", 1),
        (("nvidia0",), "MIG-1,MIG-2", 2),
        (("kfd", "dri/renderD128", "dri/renderD129"), None, 2),
        (("dri/renderD128",), None, 0),  # a display's
        (("dxg",), None, 1),
    ],
)
def test_gpus_are_counted_from_device_files(tmp_path, names, visible, found):
    (tmp_path / "dri").mkdir()
    for name in names:
        (tmp_path / name).touch()
    environ = {"PATH": ""} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert machine_gpus(environ, str(tmp_path)) == found


def test_a_worker_computes_where_the_plan_says_or_not_at_all():
    def device(gpus, sees_gpu, **environ):
        return compute_device(gpus, sees_gpu=sees_gpu, worker="model_worker/0", environ=environ)

    assert (device(0, True), device(0, False)) == ("cpu", "cpu")
    assert (device(1, True), device(0.5, True)) == ("cuda", "cuda")
    assert device(1, False, **{STAND_IN: "1"}) == "cpu"
    with golden.raises(ConfigError) as caught:
        device(1, False, CUDA_VISIBLE_DEVICES="3")
    assert caught.value.where == "CUDA_VISIBLE_DEVICES is '3'"
