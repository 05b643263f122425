"""Builds a rollout worker: data set, agent, environment, connections, loop."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from realsys.api import registry
from realsys.api.agent import AgentHost, Environment, EpisodeAgent
from realsys.api.errors import ConfigError, KeyNotFound
from realsys.api.worker_configs import RolloutWorker
from realsys.data.rollout_dump import DumpWriter
from realsys.data.transfer.tensor_client import TensorClient
from realsys.generation.http.http_client import HttpGenerationClient
from realsys.generation.http.secret import bearer_key
from realsys.models.hf import end_token_ids, load_generation_config, load_tokenizer
from realsys.reward_worker.scoring_elsewhere import scoring_elsewhere
from realsys.rollout.worker.chunks import AnswerSettings
from realsys.rollout.worker.episode_log import EpisodeLog
from realsys.rollout.worker.episode_tries import EpisodeTries
from realsys.rollout.worker.group import GroupRunner
from realsys.rollout.worker.peers import Peer
from realsys.rollout.worker.policy_client import PolicyCaller
from realsys.rollout.worker.rollout_log import RolloutLog, rollouts_file
from realsys.rollout.worker.rollout_worker import RolloutLimits, RolloutLoop
from realsys.rollout.worker.servers import ServerClients
from realsys.rollout.worker.tensor_upload import TensorUploader
from realsys.runtime import worker_exit_codes
from realsys.runtime.lifecycle import WorkerEvent
from realsys.transport.channel import RequestClient, client_context
from realsys.transport.curve_keys import TrialKeypairs
from realsys.transport.generation_messages import GenerationClient
from realsys.transport.rollout_messages import FromManager, FromMaster
from realsys.trial.dump_records import SUFFIX
from realsys.trial.episode_records import episodes_file
from realsys.trial.records import WorkerRecord, loads
from realsys.worker.runner import WorkerRunner, channel_identity

logger = logging.getLogger(__name__)

REGISTER_TIMEOUT_S = 300.0
TICKS_WITHIN_S = 300.0  # its loop ticks every few seconds, unless an environment blocks it


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Objects made from a worker's configuration."""

    tokenizer: Any
    dataset: Any
    agent: EpisodeAgent
    make_environment: Callable[[], Environment]
    settings: AnswerSettings


def run(runner: WorkerRunner) -> int:
    """Runs the rollout worker until it ends; returns its exit code."""
    torch.set_num_threads(1)  # it only packs small tensors
    parts = make_parts(runner.config)
    runner.register()
    for peer in ("master_worker", "gserver_manager"):
        with runner.waiting_for(f"{peer}/0"):
            runner.peers(peer, 1, timeout_s=REGISTER_TIMEOUT_S)
    runner.ticks_within_s = TICKS_WITHIN_S
    runner.move(WorkerEvent.STARTED, mfc="rollouts")
    asyncio.run(_run(runner, parts))
    runner.move(WorkerEvent.FINISHED_CALL)
    return worker_exit_codes.DONE


def make_parts(config: RolloutWorker) -> Parts:
    """Makes data set, agent, environment and answer settings.

    Raises:
        ConfigError: an unknown name, wrong arguments, or not exactly one data set.
    """
    if len(config.datasets) != 1:
        raise ConfigError(
            f"{len(config.datasets)} data sets",
            where="rollout_worker.datasets",
            fix="name the one that prompts come from",
        )
    make_environment = partial(registry.make_environment, config.env, **config.env_args)
    _check_environment(make_environment(), config.env)  # reveals mistakes before the first prompt
    tokenizer = load_tokenizer(config.tokenizer_path)
    ends = end_token_ids(tokenizer, load_generation_config(config.tokenizer_path))
    (dataset,) = config.datasets
    return Parts(
        tokenizer=tokenizer,
        dataset=registry.make_dataset(dataset, tokenizer=tokenizer, seed=config.base_seed),
        agent=registry.make_agent(config.agent, **config.agent_args),
        make_environment=make_environment,
        settings=AnswerSettings(
            gconfig=config.gconfig,
            end_ids=frozenset(ends),
            base_seed=config.base_seed,
            chunk=config.new_tokens_per_chunk,
            timeout_s=config.rollout_request_timeout,
            kept_sets=config.kept_sets,
        ),
    )


def _check_environment(made: Any, name: str) -> None:
    if not isinstance(made, Environment):
        raise ConfigError(
            f"environment {name!r} is a {type(made).__name__}",
            where="rollout_worker.env",
            fix="register a subclass of realsys.api.agent.Environment",
        )


async def _run(runner: WorkerRunner, parts: Parts) -> None:
    config: RolloutWorker = runner.config
    who = channel_identity(runner)
    mine = {"attempt": runner.attempt.number, "index": runner.index}
    path = rollouts_file(runner.phase_files, **mine)
    async with AsyncExitStack() as stack:
        stack.enter_context(scoring_elsewhere(runner))
        context = client_context()
        stack.callback(context.term)  # closed last
        master, manager = (
            _peer(runner, kind, reply_type=replies, context=context, **who)
            for kind, replies in (("master_worker", FromMaster), ("gserver_manager", FromManager))
        )
        clients = ServerClients(partial(_server_client, bearer_key(who["keypairs"])))
        for closed in (master, manager, clients):
            stack.push_async_callback(closed.close)
        putter = TensorUploader(partial(TensorClient, **who), _dump(runner))
        stack.callback(putter.close)
        log = RolloutLog(path, tokenizer=parts.tokenizer, texts=config.dump_texts)
        stack.callback(log.close)
        episodes = EpisodeLog(episodes_file(runner.phase_files, **mine))
        stack.callback(episodes.close)
        caller = PolicyCaller(
            worker=runner.name, manager=manager, clients=clients, settings=parts.settings
        )
        stack.push_async_callback(parts.agent.close)
        await parts.agent.open(_agent_host(runner, parts, who["keypairs"]))
        await RolloutLoop(
            name=runner.name,
            master=master,
            groups=_groups(config, parts, caller),
            connect=putter.connect,
            log=log,
            episodes=episodes,
            limits=RolloutLimits(
                max_concurrent_rollouts=config.max_concurrent_rollouts,
                success_rate_lb=config.success_rate_lb,
                success_rate_ub=config.success_rate_ub,
            ),
        ).run()


def _agent_host(runner: WorkerRunner, parts: Parts, keypairs: TrialKeypairs) -> AgentHost:
    return AgentHost(
        name=runner.name,
        tokenizer=parts.tokenizer,
        end_ids=frozenset(parts.settings.stop_token_ids),
        folder=runner.phase_files.rows_of(runner.attempt.number).root
        / "agents"
        / str(runner.index),
        host=runner.host,
        ports=runner.ports,
        secret=keypairs.server_secret,
        place=f"{runner.phase_files.root}/{runner.name}",  # the same in all attempts of the phase
    )


def _groups(config: RolloutWorker, parts: Parts, caller: PolicyCaller) -> GroupRunner:
    return GroupRunner(
        dataset=parts.dataset,
        tokenizer=parts.tokenizer,
        agent=parts.agent,
        make_environment=parts.make_environment,
        caller=caller,
        group_size=config.group_size,
        agent_name=config.agent,
        environment_name=config.env,
        environment_s=config.rollout_request_timeout,
        kept_sets=config.kept_sets,
        retries=EpisodeTries(),
    )


def _peer(runner: WorkerRunner, kind: str, **client: Any) -> Peer:
    """Makes the client of ``kind``/0, wherever it runs."""
    name = f"{kind}/0"
    return Peer(
        name,
        look_up=partial(_endpoint, runner, kind),
        connect=partial(RequestClient, peer_name=name, sender=runner.name, **client),
    )


def _dump(runner: WorkerRunner) -> DumpWriter | None:
    """Opens a dump file for this process alone: readers skip everything after an incomplete record."""
    if not runner.config.dump:
        return None
    folder, limit_gib = runner.phase_files.rollout_dump, runner.config.dump_limit_gib
    name = f"{runner.attempt.number:04d}-{runner.index:04d}-{secrets.token_hex(4)}{SUFFIX}"
    if limit_gib is None:
        return DumpWriter(folder / name)
    former = sum(p.stat().st_size for p in folder.glob(f"*-{runner.index:04d}-*{SUFFIX}"))
    return DumpWriter(folder / name, room=max(0, int(limit_gib * 2**30) - former))


def _endpoint(runner: WorkerRunner, kind: str) -> str:
    """Looks up where ``kind``/0 of this attempt listens now.

    Raises:
        KeyNotFound: it is not registered, belongs to an older attempt, or does not listen.
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
