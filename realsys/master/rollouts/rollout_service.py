"""Rollout support for the master: the RPC service for rollout workers and the client of the server
manager.

Owns its sockets and background tasks; the first of these that fails ends the master.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from functools import partial
from types import TracebackType
from typing import Self

from realsys.api.errors import CheckpointError, RealsysError
from realsys.api.model import ModelShardID
from realsys.api.worker_configs import RolloutControl
from realsys.master.graph.curriculum import Curriculum
from realsys.master.graph.data_schedule import DataSchedule
from realsys.master.graph.function_executor import AfterCall
from realsys.master.graph.master_state import Rollouts
from realsys.master.graph.model_workers import ModelWorkers
from realsys.master.rollouts.manager_client import MANAGER, GserverManagerClient
from realsys.master.rollouts.recent_episodes import RecentEpisodes
from realsys.master.rollouts.rollout_dispatcher import RolloutDispatcher
from realsys.master.rollouts.routes import Routes
from realsys.master.rollouts.server_weights import ServerWeights
from realsys.rollout.staleness.ledger import StalenessLedger
from realsys.runtime.first_error import first_error
from realsys.transport import rollout_messages as rm
from realsys.transport.channel import RequestServer
from realsys.transport.worker_requests import ClearData
from realsys.trial.records import RUN_FILE, WorkerRecord
from realsys.worker.live_scaling import Scaling, read_scaling
from realsys.worker.runner import WorkerRunner, channel_identity

logger = logging.getLogger(__name__)

CLEAR_TIMEOUT_S = 60.0
LEAVE_TIMEOUT_S = 5.0
LOOK_S = 1.0  # for workers that come and go


class RolloutService:
    """Use as ``async with``; ``endpoint`` is known then, ``start`` begins to grant prompts."""

    def __init__(self, runner: WorkerRunner, control: RolloutControl) -> None:
        self._runner, self._control = runner, control
        who = channel_identity(runner)
        self.desk = RolloutDispatcher(
            RecentEpisodes(failed_share=control.failed_share, wait_limit_s=runner.patience_s),
            say=self._show_wait,
            silence_s=control.silence_s,
        )
        self._wait_shown, self._showing = "", ExitStack()
        self.manager = GserverManagerClient(
            self._find_manager, sender=runner.name, wait_limit_s=runner.patience_s, **who
        )
        self._server = RequestServer(
            name=runner.name,
            request_type=rm.ToMaster,
            bind_host=runner.host,
            ports=runner.ports,
            **who,
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._stack = AsyncExitStack()
        self.weights: ServerWeights | None = None

    @property
    def endpoint(self) -> str:
        """Where rollout workers connect."""
        return self._server.endpoint

    @property
    def silence_s(self) -> float:
        """Longest time without a delivery."""
        return self._control.silence_s

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self._server)
        await self._stack.enter_async_context(self.manager)
        await self._stack.enter_async_context(first_error())
        group = self._group = await self._stack.enter_async_context(asyncio.TaskGroup())
        self._tasks = [
            group.create_task(self._server.serve(self.desk.handle), name="rollout desk"),
            group.create_task(self.manager.run(), name="weights to servers"),
            group.create_task(self.manager.watch(), name="watch over the servers"),
        ]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.desk.close()
        if kind is None:
            await asyncio.sleep(0.2)  # workers that wait for prompts get the end of work
            with suppress(RealsysError):
                await self.manager.call(rm.Leave(), timeout_s=LEAVE_TIMEOUT_S, what="goodbye")
        for task in self._tasks:
            task.cancel()
        await self._stack.__aexit__(kind, error, trace)

    def _find_manager(self, timeout_s: float) -> WorkerRecord:
        (record,) = self._runner.peers("gserver_manager", 1, timeout_s=timeout_s)
        return record

    def make_ledger(self, *, batch_size: int, total_steps: int) -> StalenessLedger:
        """Creates the ledger of this run, in its initial state."""
        control = self._control
        return StalenessLedger(
            batch_size=batch_size,
            max_staleness=control.max_staleness if control.trains else total_steps,
            policy=control.policy,
            max_in_flight=control.max_in_flight,
            total_steps=total_steps,
        )

    async def start(
        self,
        workers: ModelWorkers,
        schedule: DataSchedule,
        *,
        holders: Sequence[int],
        shards: Sequence[tuple[ModelShardID, int]],
        trained_by: str | None,
        version: int,
        total_steps: int,
        saved: Rollouts | None,
        curriculum: Curriculum | None,
    ) -> AfterCall | None:
        """Brings the current weights to the servers and starts granting prompts.

        Args:
            holders: model workers that accept experience.
            trained_by: the call that makes a new version; None: no call does.
            version: of the current weights.
            saved: from the checkpoint that the run resumes from.
            curriculum: chooses the records instead of ``schedule``.
        Returns:
            What brings them the weights after a call.
        """
        control = self._control
        ledger = self.make_ledger(batch_size=schedule.batch_size, total_steps=total_steps)
        if saved is not None:
            if saved.dataset_size != schedule.dataset_size:  # its prompts would be others
                raise CheckpointError(
                    f"the run began with {saved.dataset_size} questions, there are "
                    f"{schedule.dataset_size} now",
                    where="data set of the rollout workers",
                    fix="resume with the same data, or start a new trial",
                )
            ledger.restore(saved.ledger)
            self.desk.restore(saved)

        async def clear(worker: int, ids: Sequence[str]) -> None:
            body = ClearData(ids=tuple(ids))
            await workers.tell(
                [worker], body, timeout_s=CLEAR_TIMEOUT_S, what="clear unused rollouts"
            )

        if trained_by is not None:
            self.weights = self._make_weights(workers, shards, trained_by)
            await self.weights.publish(version)
        await asyncio.to_thread(self._note_run, schedule.dataset_size)
        routes = Routes(
            holders=holders,
            endpoints=[record.data for record in workers.records],
            makers=control.makers,
            buffer_limit=control.buffer_limit,
        )
        await self.desk.open(ledger, schedule, routes=routes, clear=clear, curriculum=curriculum)
        scaling = self._group.create_task(self._follow_scaling(), name="workers that come and go")
        self._tasks.append(scaling)
        return None if self.weights is None else self.weights.after_call

    def _make_weights(
        self, workers: ModelWorkers, shards: Sequence[tuple[ModelShardID, int]], trained_by: str
    ) -> ServerWeights:
        control = self._control
        folder = self._runner.attempt_files.rendezvous / f"{self._runner.phase.name}.versions"
        return ServerWeights(
            control.model_name,
            trained_by=trained_by,
            holders=sorted({w for s, w in shards if s.model_name == control.model_name}),
            workers=workers,
            manager=self.manager,
            every=control.update_steps,
            makers=control.makers,
            max_staleness=control.max_staleness,
            folder=folder if control.weights_through == "disk" else None,
        )

    async def _follow_scaling(self) -> None:
        """Passes added and draining workers to the dispatcher; until cancelled."""
        runner = self._runner
        read = partial(
            read_scaling,
            runner.store,
            runner.keys,
            token=runner.attempt.token,
            phase=runner.phase.name,
        )
        known: Scaling | None = None
        while True:
            try:
                known = await asyncio.to_thread(read) or known
            except RealsysError as error:  # what is known still holds
                logger.warning("wanted workers not read error=%s", error.what)
            if known is not None:
                await self.desk.scaled(known)
            await asyncio.sleep(LOOK_S)

    def _note_run(self, dataset_size: int) -> None:
        """Records the run's length, for a replay."""
        folder = self._runner.phase_files.rollout_dump
        folder.mkdir(parents=True, exist_ok=True)
        (folder / RUN_FILE).write_text(json.dumps({"dataset_size": dataset_size}) + "\n")

    def _show_wait(self, text: str) -> None:
        """Shows what the run waits for in the master's status; nothing: it goes on."""
        since = text.partition(":")[0]  # the reason may be another at each look
        if since == self._wait_shown:
            return
        self._showing.close()
        if text:
            self._showing.enter_context(self._runner.waiting_for(text))
            logger.warning("waits for=%s", text)
        self._wait_shown = since

    def ended(self, worker: str, reason: str) -> None:
        """Handles the end of a worker (in the event loop): the supervisor restarts ours."""
        if worker == MANAGER:
            self.manager.fail(reason)
        elif worker.startswith("rollout_worker/"):
            lost = self._group.create_task(self.desk.lost(worker), name=f"lost {worker}")
            self._tasks.append(lost)

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of rollouts, ledger and servers for the last step."""
        row = self.desk.metrics()
        if self.weights is not None:
            row["time/publish_weights_s"] = self.weights.seconds
        if (at := self.manager.newest_at_servers) is not None:
            if at.versions:
                row["rollout/servers_at_version"] = float(min(at.versions.values()))
            row["time/update_servers_s"] = at.seconds
            row["time/servers_paused_s"] = at.paused_s
        return row
