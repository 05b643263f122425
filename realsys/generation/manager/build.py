"""Builds the manager of generation servers: store, messages, record, loops."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from functools import partial

from realsys.api.errors import StoreError
from realsys.api.worker_configs import GserverManager
from realsys.generation.http.http_client import HttpGenerationClient
from realsys.generation.http.secret import bearer_key
from realsys.generation.manager.fleet import Fleet, MakeClient
from realsys.generation.manager.manager import Dismiss, Manager
from realsys.generation.manager.manager_record import GenerationRecord, ManagerEvent
from realsys.generation.manager.quarantine import Quarantine, Rules
from realsys.generation.manager.registrations import Registrations, RegistrationWatch
from realsys.generation.manager.routing import Router, RoutingPolicy
from realsys.generation.manager.updates import UpdateMode, Updates
from realsys.runtime import worker_exit_codes
from realsys.runtime.lifecycle import WorkerEvent
from realsys.runtime.worker_commands import Command, Verb
from realsys.transport.channel import RequestServer
from realsys.transport.curve_keys import ChannelIdentity
from realsys.transport.generation_messages import GenerationClient, ServerAddress
from realsys.transport.rollout_messages import ToManager
from realsys.trial.records import dumps
from realsys.worker.runner import WorkerRunner, channel_identity

logger = logging.getLogger(__name__)

TICKS_WITHIN_S = 60.0  # its loop does each second


def run(runner: WorkerRunner) -> int:
    """Runs the manager until it ends; returns its exit code."""
    return asyncio.run(_run(runner))


async def _run(runner: WorkerRunner) -> int:
    identity = channel_identity(runner)
    record = GenerationRecord(runner.phase_files.generation, attempt=runner.attempt.number)
    make_client = partial(_make_client, bearer_key(identity["keypairs"]))
    try:
        manager = make_manager(
            runner.config, make_client=make_client, record=record, dismiss=partial(_dismiss, runner)
        )
        await _serve(runner, manager, identity)
    finally:
        record.close()
    return worker_exit_codes.STOPPED if runner.controls.is_interrupted else worker_exit_codes.DONE


def make_manager(
    config: GserverManager,
    *,
    make_client: MakeClient,
    record: GenerationRecord,
    dismiss: Dismiss,
) -> Manager:
    """Makes the configured manager. Needs a running event loop, which owns it."""
    fleet = Fleet(
        Router(
            RoutingPolicy(config.schedule_policy),
            num_servers=config.n_servers,
            routes=dict(config.routes),
        ),
        Quarantine(Rules(failures=config.sick_after, check_every_s=config.check_every_s)),
        make_client=make_client,
        record=record,
        server_limit=config.server_limit,
    )
    updates = Updates(
        fleet,
        mode=UpdateMode(config.update_mode),
        share=config.update_share,
        timeout_s=config.flush_request_timeout,
    )
    record.write(ManagerEvent.MANAGER_UP)
    return Manager(fleet, updates, dismiss=dismiss)


def _make_client(key: str, address: ServerAddress) -> GenerationClient:
    return HttpGenerationClient(address.url, key, name=f"generation_server/{address.index}")


async def _dismiss(runner: WorkerRunner, index: int) -> None:
    """Asks a server to finish its requests and end. Repeated later if it can't be reached."""
    command = Command(
        id=secrets.token_hex(8),
        verb=Verb.EXIT,
        by=runner.name,
        at=time.time(),
        attempt=runner.attempt.number,
        token=runner.attempt.token,
    )
    key = runner.keys.command("generation_server", index)
    try:
        await asyncio.to_thread(lambda: runner.store.add(key, dumps(command), replace=True))
    except StoreError as error:
        logger.warning("server not dismissed server=%d error=%s", index, error.what)


async def _serve(runner: WorkerRunner, manager: Manager, identity: ChannelIdentity) -> None:
    """Listens, registers, and serves until the master ends the run."""
    loop = asyncio.get_running_loop()

    def on_change(found: Registrations) -> None:
        loop.call_soon_threadsafe(manager.registered, found)

    def leave() -> None:
        loop.call_soon_threadsafe(manager.leave)

    runner.controls.supported = frozenset({Verb.CONFIGURE, Verb.DUMP, Verb.INTERRUPT, Verb.EXIT})
    runner.controls.leave = leave
    server = RequestServer(
        name=runner.name,
        request_type=ToManager,
        bind_host=runner.host,
        ports=runner.ports,
        **identity,
    )
    async with server:
        # Registration by the heartbeat process may be slow: calls are answered meanwhile.
        serving = loop.create_task(server.serve(manager.handle), name="messages")
        managing = loop.create_task(manager.run(), name="checks")
        try:
            await asyncio.to_thread(runner.register, control=server.endpoint)
            runner.ticks_within_s = TICKS_WITHIN_S
            runner.move(WorkerEvent.STARTED, mfc="routing")
            store = await asyncio.to_thread(lambda: runner.store)
            with RegistrationWatch(
                store,
                runner.keys,
                token=runner.attempt.token,
                phase=runner.phase.name,
                on_change=on_change,
            ):
                await asyncio.wait({serving, managing}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (managing, serving):
                task.cancel()
            ended = await asyncio.gather(managing, serving, return_exceptions=True)
    for outcome in ended:
        if isinstance(outcome, Exception):
            raise outcome
    runner.move(WorkerEvent.FINISHED_CALL)
