"""What every worker does around its own work: register, keep its lease, tell its state, stop.

``main.py`` makes one per process and hands it to the role's ``run``. All that name resolution must hear
of a worker, and the other way round, goes through its heartbeat process (heartbeat_process.py), which no
computation of ours can hold up. A model worker has no connection to the store of its own.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from realsys.api.errors import InternalError, TrialError
from realsys.api.plan import LaunchPlan, PhasePlan
from realsys.heartbeat.heartbeat_link import Heartbeat
from realsys.heartbeat.heartbeat_messages import Init, Terminate
from realsys.name_resolve.key_table import TrialKeys
from realsys.name_resolve.lease_judge import LeaseStatus, lease_ttl_s
from realsys.name_resolve.retry import retry_while_unavailable
from realsys.name_resolve.store import NameResolve
from realsys.name_resolve.trial_store import open_trial_store
from realsys.runtime.lifecycle import WorkerEvent, WorkerState, next_state
from realsys.runtime.progress import tick
from realsys.runtime.worker_commands import Command, Verb, parse_command, refusal
from realsys.trial.records import (
    AttemptFiles,
    AttemptRecord,
    PhaseFiles,
    StopRequest,
    TrialFiles,
    WorkerRecord,
    WorkerStatus,
    loads,
    process_start,
)
from realsys.worker.controls import Controls
from realsys.worker.missing import describe_missing
from realsys.worker.network import listening_address, ports

logger = logging.getLogger(__name__)

GOODBYE_S = 10.0
PAUSE_POLL_S = 0.5


@dataclass
class WorkerRunner:
    """One worker's place in its trial. ``config`` is its own part of the experiment.

    Attributes:
        controls: what commands have asked for; the role says which ones it carries out.
        ticks_within_s: set by roles without steps: they tick at least so often while they are well.
        is_alone: whether those whose keys it watches were there and are gone.
    """

    plan: LaunchPlan
    phase: PhasePlan
    attempt: AttemptRecord
    worker_type: str
    index: int
    config: Any = None
    set_log_step: Callable[[int], None] = lambda step: None
    state: WorkerState = WorkerState.STARTING
    controls: Controls = field(default_factory=Controls)
    ticks_within_s: float = 0.0
    is_alone: bool = False
    _heartbeat: Heartbeat | None = None
    _store: NameResolve | None = None
    _status: WorkerStatus = field(init=False)
    _telling: threading.RLock = field(default_factory=threading.RLock)
    _stop: StopRequest | None = None
    _on_stop: Callable[[StopRequest], None] | None = None

    def __post_init__(self) -> None:
        self._status = WorkerStatus(
            state=self.state.value, attempt=self.attempt.number, token=self.attempt.token
        )

    @property
    def name(self) -> str:
        """``model_worker/3``."""
        return f"{self.worker_type}/{self.index}"

    @property
    def keys(self) -> TrialKeys:
        """The trial's name-resolution keys."""
        return TrialKeys.of(self.plan)

    @property
    def store(self) -> NameResolve:
        """An own connection to name resolution, made when it is first asked for.

        A model worker must not depend on the store's being there.
        """
        if self._store is None:
            if self.worker_type == "model_worker":
                raise InternalError("a model worker does not open the store", where=self.name)
            self._store = retry_while_unavailable(
                lambda: open_trial_store(self.plan, self.attempt_files),
                timeout_s=self.patience_s,
                what="opening it",
            )
        return self._store

    def revision(self) -> int:
        """The store's, now; waits while it is away. Raises StoreUnavailable after our patience."""
        return retry_while_unavailable(
            lambda: self.store.revision(), timeout_s=self.patience_s, what="its revision"
        )

    @property
    def trial_files(self) -> TrialFiles:
        """The trial's files."""
        return TrialFiles(Path(self.plan.trial_dir))

    @property
    def phase_files(self) -> PhaseFiles:
        """Files of the phase that this worker runs."""
        return TrialFiles.phase(self.phase.folder)

    @property
    def attempt_files(self) -> AttemptFiles:
        """Files of this attempt."""
        return self.trial_files.attempt(self.attempt.number)

    @property
    def host(self) -> str:
        """IPv4 address that this worker's sockets listen on."""
        return listening_address(self.plan.cluster, self.attempt.nodes)

    @property
    def ports(self) -> range | None:
        """Ports they may take; None: any."""
        return ports(self.plan.cluster)

    # ---- registration -----------------------------------------------------------------------

    def start_heartbeat(self, *, on_over: Callable[[Terminate], None]) -> None:
        """Starts the heartbeat process, which gets ready while this one goes on.

        Args:
            on_over: called before this process exits because it must.
        """
        begin = Init(
            worker_type=self.worker_type,
            index=self.index,
            pid=os.getpid(),
            attempt=self.attempt.number,
            token=self.attempt.token,
            store_url=self.plan.name_resolve_url,
            etcd=asdict(self.plan.cluster.etcd),
            attempt_dir=str(self.attempt_files.root),
            patience_s=self.patience_s,
            **asdict(self.keys),
        )
        self._heartbeat = Heartbeat.start(
            begin,
            on_stop=self._stop_asked,
            on_command=self._commanded,
            on_over=on_over,
            on_watched=self._watched,
        )

    def register(self, *, control: str = "", data: str = "", rendezvous: str = "") -> None:
        """Publishes where this worker listens, under a lease that is kept from now on.

        Raises:
            StaleAttempt: another attempt has taken over.
            StoreUnavailable: the store did not answer for longer than this site's patience.
        """
        record = WorkerRecord(
            worker=self.name,
            host=socket.gethostname(),
            pid=os.getpid(),
            start=process_start(os.getpid()) or 0,
            attempt=self.attempt.number,
            token=self.attempt.token,
            control=control,
            data=data,
            rendezvous=rendezvous,
            node=os.environ.get("SLURMD_NODENAME", ""),
        )
        num_workers = sum(group.count for group in self.phase.scheduling.groups().values())
        with self._telling:
            self._move(WorkerEvent.REGISTERED)
            status = self._status
        self.heartbeat.register(
            record,
            status,
            ttl_s=lease_ttl_s(num_workers),
            timeout_s=self.patience_s,
            watch_keys=[f"{self.keys.root}/{key}" for key in self.config.worker_info.watch_keys],
        )
        logger.info("registered control=%s data=%s pid=%d", control, data, os.getpid())

    def peers(self, worker_type: str, count: int, *, timeout_s: float) -> list[WorkerRecord]:
        """Records of all ``count`` workers of a type, of this attempt, in order of index.

        Time in which the store is away does not count.

        Raises:
            WaitTimeout: names the workers that did not register, and where their logs are.
        """
        keys = [self.keys.worker(worker_type, i) for i in range(count)]
        wait = partial(self.store.wait, describe_missing=self._describe_missing)
        found = retry_while_unavailable(
            lambda: wait(keys, timeout_s=timeout_s),
            timeout_s=self.patience_s,
            what=f"looking for each {worker_type}",
        )
        return [loads(WorkerRecord, found[k], where=k) for k in keys]

    def _describe_missing(self, missing: list[str]) -> str:
        names = [key.removeprefix(self.keys.workers + "/") for key in missing]
        return describe_missing(names, self.attempt_files)

    @property
    def heartbeat(self) -> Heartbeat:
        """The heartbeat process's near end."""
        if self._heartbeat is None:
            raise InternalError("the heartbeat process was not started", where=self.name)
        return self._heartbeat

    def check_lease(self, *, timeout_s: float) -> None:
        """Before a side effect that others see: waits while the lease is in doubt.

        Raises:
            LeaseLost: it is over. WaitTimeout: it stayed in doubt for ``timeout_s``.
        """
        self.heartbeat.check(timeout_s=timeout_s)

    def may_publish(self) -> bool:
        """Whether our lease is held now; while it is in doubt, what others would see must wait.

        Raises:
            LeaseLost: it is over.
        """
        if self.heartbeat.standing is LeaseStatus.OVER:
            self.check_lease(timeout_s=0.0)  # says so
        return self.heartbeat.standing is LeaseStatus.HELD

    @property
    def patience_s(self) -> float:
        """How long the store may be away before we give up."""
        return float(self.plan.cluster.store_patience_seconds)

    def goodbye(self) -> None:
        """Leaves in the state that was told last, and ends the heartbeat process.

        Raises:
            StoreError, WaitTimeout: the store was not told; the lease runs out by itself.
        """
        try:
            if self._heartbeat is not None:
                self._heartbeat.goodbye(self._status, timeout_s=GOODBYE_S)
        finally:
            if self._store is not None:
                self._store.close()

    # ---- state ------------------------------------------------------------------------------

    def move(
        self,
        event: WorkerEvent,
        *,
        mfc: str = "",
        step: int = 0,
        reason: str = "",
        may_take_s: float = 0.0,
    ) -> None:
        """Moves this worker by the lifecycle table and tells its new state.

        Args:
            may_take_s: what begins may go on for so long without a tick.
        """
        with self._telling:
            self._move(event, mfc=mfc, step=step, reason=reason)
            self._tell(may_take_s)

    def tell(
        self, *, mfc: str = "", step: int = 0, reason: str = "", may_take_s: float = 0.0
    ) -> None:
        """Tells what this worker is at, in the state that it is in. Args: as ``move``."""
        with self._telling:
            self._status = replace(
                self._status, mfc=mfc, step=step, reason=reason, since=time.time()
            )
            self._tell(may_take_s)

    @contextmanager
    def waiting_for(self, text: str) -> Iterator[None]:
        """Tells what another worker must do first, while the block runs."""
        with self._telling:
            self._status = replace(self._status, waits_for=text)
            self._tell()
        try:
            yield
        finally:
            with self._telling:
                self._status = replace(self._status, waits_for="")
                self._tell()

    def _move(self, event: WorkerEvent, *, mfc: str = "", step: int = 0, reason: str = "") -> None:
        self.state = next_state(self.state, event)
        self._status = replace(
            self._status,
            state=self.state.value,
            mfc=mfc,
            step=step,
            reason=reason,
            since=time.time(),
            waits_for="",
        )

    def _tell(self, may_take_s: float = 0.0) -> None:
        tick()
        if self._heartbeat is not None:
            self._heartbeat.tell(
                self._status, may_take_s=may_take_s, ticks_within_s=self.ticks_within_s
            )

    # ---- stop and commands --------------------------------------------------------------------

    @property
    def on_stop(self) -> Callable[[StopRequest], None] | None:
        """Gets the stop request, once, from another thread; also one that came before it was set."""
        return self._on_stop

    @on_stop.setter
    def on_stop(self, on_stop: Callable[[StopRequest], None] | None) -> None:
        with self._telling:
            self._on_stop, request = on_stop, self._stop
        if on_stop is not None and request is not None:
            on_stop(request)

    def between_requests(self, *, until: Callable[[], bool]) -> None:
        """Where a pause takes effect: returns when it is over, or ``until`` says so."""
        command = self.controls.pause_asked
        if command is None:
            return
        self.move(WorkerEvent.PAUSE)
        self._answer(command)
        logger.info("paused by=%s", command.by)
        while not until() and not self.controls.wait_for_resume(PAUSE_POLL_S):
            pass
        self.move(WorkerEvent.RESUME)
        logger.info("resumed")

    def _stop_asked(self, request: StopRequest) -> None:
        with self._telling:
            first, self._stop = self._stop is None, self._stop or request
            on_stop = self._on_stop
        if first and on_stop is not None:
            on_stop(request)

    def _watched(self, present: bool) -> None:
        self.is_alone = not present

    def _commanded(self, value: bytes) -> None:
        try:
            command = parse_command(value, where=self.keys.command(self.worker_type, self.index))
        except TrialError as error:
            logger.warning("command not understood error=%s", error.what)
            return
        why = refusal(
            command, attempt=self.attempt.number, token=self.attempt.token, state=self.state
        )
        if not why and command.verb not in self.controls.can:
            why = f"a {self.worker_type} takes no {command.verb}"
        if why:
            logger.warning("command refused verb=%s by=%s why=%s", command.verb, command.by, why)
            self._answer(command, refused=why)
            return
        logger.info("command taken verb=%s by=%s id=%s", command.verb, command.by, command.id)
        if command.verb is Verb.CONFIGURE:
            logging.getLogger().setLevel(command.args["log_level"].upper())
        else:
            self.controls.ask(command)
        if command.verb is not Verb.PAUSE or self.state is WorkerState.PAUSED:
            self._answer(command)  # a pause is answered when it has begun

    def _answer(self, command: Command, *, refused: str = "") -> None:
        with self._telling:
            self._status = replace(self._status, last_command=command.id, command_refused=refused)
            self._tell()
