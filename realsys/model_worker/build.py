"""Builds a model worker: tensor and control servers, shards, weight movement, main loop."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import transformers.modeling_utils  # noqa: F401 - models will; here it is quickest (worker/main.py)

from realsys.api.worker_configs import RolloutControl
from realsys.data.transfer.tensor_client import TensorClient
from realsys.data.transfer.tensor_server import TensorServer
from realsys.data.transfer.tensor_store import TensorStore
from realsys.devices.cuda_settings import apply, settings_for
from realsys.model_worker.control import ControlThread
from realsys.model_worker.model_worker import ModelWorkerLoop
from realsys.model_worker.move_weights import WeightMoves
from realsys.model_worker.ordered_requests import OrderedRequests
from realsys.model_worker.process_groups import make_process_groups
from realsys.model_worker.publishing import WeightPublications
from realsys.model_worker.rendezvous import Rendezvous
from realsys.model_worker.shards import Shards
from realsys.reward_worker.scoring_elsewhere import scoring_elsewhere
from realsys.runtime import worker_exit_codes
from realsys.runtime.worker_commands import Verb
from realsys.weights.realloc.links import Link
from realsys.weights.realloc.pairwise_link import open_link
from realsys.weights.sync.manifest import KEY
from realsys.worker.device import compute_device
from realsys.worker.runner import WorkerRunner, channel_identity

COLLECTIVE_TIMEOUT_S = 1800.0


def run(runner: WorkerRunner) -> int:
    """Runs the model worker until it ends; returns its exit code."""
    device = _set_up_torch(runner)
    identity = channel_identity(runner)
    tensors, ordered = TensorStore(), OrderedRequests()
    published = TensorStore()  # weights for generation servers; not part of a checkpoint
    address: dict[str, Any] = {"name": runner.name, "host": runner.host, "ports": runner.ports}
    runner.controls.supported = frozenset(Verb)
    runner.controls.leave = ordered.close
    tensor_server = TensorServer(
        tensors, published={KEY: published}, on_failure=ordered.close, **address, **identity
    ).start()
    control = ControlThread(ordered, tensors, **address, **identity)
    rendezvous = Rendezvous(
        runner.plan.cluster.rendezvous,
        worker=runner.index,
        num_workers=runner.config.worker_info.worker_count,
        folder=runner.attempt_files.rendezvous,
        host=runner.host,
        ports=runner.ports,
        timeout_s=COLLECTIVE_TIMEOUT_S,
    )
    runner.register(
        control=control.start(), data=tensor_server.endpoint, rendezvous=rendezvous.endpoint
    )
    shards = Shards(runner.config, device=device)
    weights = WeightMoves(
        shards,
        runner.phase.config.model_worker,
        worker=runner.index,
        make_link=lambda: _open_link(runner, device, rendezvous),
        folder=_weights_folder(runner),
    )
    loop = ModelWorkerLoop(
        runner,
        shards=shards,
        weights=weights,
        publications=_publications(runner, shards, published),
        tensors=tensors,
        ordered=ordered,
        connect_to=rendezvous.connect_to,
        make_groups=lambda: make_process_groups(
            runner.config.msid2mwid,
            worker=runner.index,
            num_workers=runner.config.worker_info.worker_count,
            open_store=lambda: rendezvous.store(runner.phase.name),
            device=device,
            timeout_s=COLLECTIVE_TIMEOUT_S,
        ),
        make_client=lambda endpoints: TensorClient(endpoints, store=tensors, **identity),
    )
    try:
        with scoring_elsewhere(runner):
            loop.run()
        control.raise_failure()  # the loop also ends if one of the servers failed
        tensor_server.raise_failure()
    finally:
        weights.close()
        control.stop()
        tensor_server.stop()
    return worker_exit_codes.STOPPED if runner.controls.is_interrupted else worker_exit_codes.DONE


def _publications(
    runner: WorkerRunner, shards: Shards, published: TensorStore
) -> WeightPublications:
    """Makes the publisher of this worker's weights to generation servers."""
    control = runner.phase.config.rollout or RolloutControl()
    return WeightPublications(
        shards,
        runner.phase.config.model_worker,
        worker=runner.index,
        store=published,
        wire_dtype=control.wire_dtype,
        delta=control.delta,
    )


def _open_link(runner: WorkerRunner, device: str, rendezvous: Rendezvous) -> Link:
    """Opens the link that carries weights to other model workers."""
    store: Any = None
    if runner.config.worker_info.worker_count > 1:
        store = rendezvous.store(f"{runner.phase.name}.weights")
    return open_link(runner.index, device=device, store=store, timeout_s=COLLECTIVE_TIMEOUT_S)


def _weights_folder(runner: WorkerRunner) -> Path | None:
    """Folder for weight transfers through disk, separate per attempt; None if they go through memory."""
    if runner.phase.config.weights_through == "memory":
        return None
    return runner.attempt_files.rendezvous / f"{runner.phase.name}.weight-files"


def _set_up_torch(runner: WorkerRunner) -> str:
    """Sets threads, seed and determinism; returns the device. Random streams have seeds of their own."""
    if runner.config.num_threads is not None:
        torch.set_num_threads(runner.config.num_threads)
    torch.manual_seed(runner.config.base_seed)  # realsys draws nothing from it; a plug-in might
    gpus = runner.phase.scheduling.model_worker.scheduling.gpu
    device = compute_device(
        gpus, sees_gpu=torch.cuda.is_available(), worker=runner.name, environ=os.environ
    )
    apply(settings_for(device, deterministic=runner.phase.config.deterministic, gpus=gpus))
    return device
