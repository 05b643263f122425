"""Wires a rollout worker together: data set, agent, environment, connections, loop."""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import AsyncExitStack, closing
from functools import partial
from typing import Any

import torch

from realsys.api import registry
from realsys.api.agent import Environment
from realsys.api.errors import ConfigError, KeyNotFound
from realsys.api.experiment import RolloutWorker
from realsys.api.trial import WorkerRecord, loads
from realsys.data_plane.rollout_dump import SUFFIX, DumpWriter
from realsys.data_plane.tensor_client import TensorClient
from realsys.models.answer_ends import end_token_ids, load_generation_config
from realsys.models.hf import load_tokenizer
from realsys.rollout_worker.asking import PolicyCaller
from realsys.rollout_worker.chunks import AnswerSettings
from realsys.rollout_worker.group import GroupRunner
from realsys.rollout_worker.peers import Peer
from realsys.rollout_worker.putting import TensorPutter
from realsys.rollout_worker.rollout_log import RolloutLog, rollouts_file
from realsys.rollout_worker.servers import ServerClients
from realsys.rollout_worker.worker import RolloutLimits, RolloutLoop
from realsys.serving.api import GenerationClient
from realsys.serving.client import HttpGenerationClient
from realsys.serving.secret import bearer_key
from realsys.transport.channel import RequestClient, client_context
from realsys.transport.keys import TrialKeypairs
from realsys.transport.rollout_messages import FromManager, FromMaster
from realsys.worker import exit_codes
from realsys.worker.lifecycle import WorkerEvent
from realsys.worker.runner import WorkerRunner

logger = logging.getLogger(__name__)

REGISTER_TIMEOUT_S = 300.0


def run(runner: WorkerRunner) -> int:
    """Runs the rollout worker to its end; returns its exit code."""
    torch.set_num_threads(1)  # it packs small tensors only
    parts = make_parts(runner.config)
    runner.register()
    for peer in ("master_worker", "gserver_manager"):
        with runner.waiting_for(f"{peer}/0"):
            runner.peers(peer, 1, timeout_s=REGISTER_TIMEOUT_S)
    runner.move(WorkerEvent.STARTED, mfc="rollouts")
    asyncio.run(_run(runner, parts))
    runner.move(WorkerEvent.FINISHED_CALL)
    return exit_codes.DONE


def make_parts(config: RolloutWorker) -> dict[str, Any]:
    """What a ``GroupRunner`` needs beside its caller, and ``settings`` of answers.

    Raises:
        ConfigError: an unknown name, arguments that do not fit, not exactly one data set.
    """
    if len(config.datasets) != 1:
        raise ConfigError(
            f"{len(config.datasets)} data sets",
            where="rollout_worker.datasets",
            fix="name the one that prompts come from",
        )
    make_environment = partial(registry.make_environment, config.env, **config.env_args)
    _check_environment(make_environment(), config.env)  # a mistake shows before the first prompt
    tokenizer = load_tokenizer(config.tokenizer_path)
    ends = end_token_ids(tokenizer, load_generation_config(config.tokenizer_path))
    return {
        "tokenizer": tokenizer,
        "dataset": registry.make_dataset(
            config.datasets[0], tokenizer=tokenizer, seed=config.base_seed
        ),
        "agent": registry.make_agent(config.agent, **config.agent_args),
        "make_environment": make_environment,
        "settings": AnswerSettings(
            gconfig=config.gconfig,
            end_ids=frozenset(ends),
            base_seed=config.base_seed,
            chunk=config.new_tokens_per_chunk,
            timeout_s=config.rollout_request_timeout,
        ),
    }


def _check_environment(made: Any, name: str) -> None:
    if not isinstance(made, Environment):
        raise ConfigError(
            f"environment {name!r} is a {type(made).__name__}",
            where="rollout_worker.env",
            fix="register a subclass of realsys.api.agent.Environment",
        )


async def _run(runner: WorkerRunner, parts: dict[str, Any]) -> None:
    config: RolloutWorker = runner.config
    keypairs = TrialKeypairs.load(runner.attempt_files.curve_keys)
    who: dict[str, Any] = {
        "trial": runner.plan.trial,
        "attempt": runner.attempt.number,
        "token": runner.attempt.token,
        "keypairs": keypairs,
    }
    path = rollouts_file(runner.phase_files, attempt=runner.attempt.number, index=runner.index)
    settings = parts.pop("settings")
    async with AsyncExitStack() as stack:
        context = client_context()
        stack.callback(context.term)  # the last to go
        peers = {}
        for kind, replies in (("master_worker", FromMaster), ("gserver_manager", FromManager)):
            peers[kind] = Peer(
                f"{kind}/0",
                look_up=partial(_endpoint, runner, kind),
                connect=partial(
                    RequestClient,
                    peer_name=f"{kind}/0",
                    sender=runner.name,
                    reply_type=replies,
                    context=context,
                    **who,
                ),
            )
            stack.push_async_callback(peers[kind].close)
        clients = ServerClients(partial(_server_client, bearer_key(keypairs)))
        stack.push_async_callback(clients.close)
        putter = TensorPutter(partial(TensorClient, **who), _dump(runner))
        stack.callback(putter.close)
        log = stack.enter_context(
            closing(RolloutLog(path, tokenizer=parts["tokenizer"], texts=config.dump_texts))
        )
        caller = PolicyCaller(
            worker=runner.name,
            manager=peers["gserver_manager"],
            clients=clients,
            settings=settings,
        )
        groups = GroupRunner(
            caller=caller,
            group_size=config.group_size,
            agent_name=config.agent,
            environment_name=config.env,
            environment_s=config.rollout_request_timeout,
            **parts,
        )
        limits = RolloutLimits(
            max_concurrent_rollouts=config.max_concurrent_rollouts,
            success_rate_lb=config.success_rate_lb,
            success_rate_ub=config.success_rate_ub,
        )
        await RolloutLoop(
            name=runner.name,
            master=peers["master_worker"],
            groups=groups,
            connect=putter.connect,
            log=log,
            limits=limits,
        ).run()


def _dump(runner: WorkerRunner) -> DumpWriter | None:
    """A file of this process alone: behind the torn end of another's nothing would be read."""
    if not runner.config.dump:
        return None
    name = f"{runner.attempt.number:04d}-{runner.index:04d}-{os.getpid()}{SUFFIX}"
    return DumpWriter(runner.phase_files.rollout_dump / name)


def _endpoint(runner: WorkerRunner, kind: str) -> str:
    """Where ``kind``/0 of this attempt listens now.

    Raises:
        KeyNotFound: it is not registered, or an older attempt's, or does not listen.
    """
    key = runner.keys.worker(kind, 0)
    record = loads(WorkerRecord, runner.store.get(key).value, where=key)
    if (record.attempt, record.token) != (runner.attempt.number, runner.attempt.token):
        raise KeyNotFound(
            f"{kind}/0 is of attempt {record.attempt}, we are of {runner.attempt.number}",
            where=key,
            fix="it registers anew, or this attempt is over",
        )
    if not record.control:
        raise KeyNotFound(f"{kind}/0 takes no messages", where=key, fix=f"see the log of {kind}/0")
    return record.control


def _server_client(key: str, url: str, name: str) -> GenerationClient:
    return HttpGenerationClient(url, key, name=name)
