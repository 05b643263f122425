"""What every worker does around its own work: register, keep its lease, publish its state, stop.

``main.py`` creates one per process and passes it to the role's ``run``. All exchange with name resolution
goes through the heartbeat process (heartbeat_process.py), which no computation of the worker can delay. A
model worker has no store connection of its own.
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
from typing import TYPE_CHECKING, Any

from realsys.api.errors import InternalError, TrialError
from realsys.api.plan import LaunchPlan, PhasePlan
from realsys.heartbeat.heartbeat_link import Heartbeat
from realsys.heartbeat.heartbeat_messages import Init, Terminate
from realsys.name_resolve.key_table import TrialKeys
from realsys.name_resolve.lease_validity import LeaseStatus, lease_ttl_s
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

if TYPE_CHECKING:
    from realsys.transport.curve_keys import ChannelIdentity

logger = logging.getLogger(__name__)

DEREGISTER_S = 10.0
PAUSE_POLL_S = 0.5


@dataclass
class WorkerRunner:
    """One worker's place in its trial. ``config`` is its own part of the experiment.

    Attributes:
        controls: pending commands; the role declares which ones it supports.
        ticks_within_s: set by roles without steps: the interval in which they tick while healthy.
        is_alone: whether the watched workers existed and are gone.
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
    _may_take_s: float = 0.0  # its activity, without a tick
    _status_lock: threading.RLock = field(default_factory=threading.RLock)
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
        """The worker's own connection to name resolution, opened on first use.

        A model worker must not depend on the store's availability.
        """
        if self._store is None:
            if self.worker_type == "model_worker":
                raise InternalError("a model worker does not open the store", where=self.name)
            self._store = retry_while_unavailable(
                lambda: open_trial_store(self.plan, self.attempt_files),
                timeout_s=self.patience_s,
                what="opening the store",
            )
        return self._store

    def revision(self) -> int:
        """Returns the store's revision; waits while it is unavailable. Raises StoreUnavailable after
        ``patience_s``."""
        return retry_while_unavailable(
            lambda: self.store.revision(), timeout_s=self.patience_s, what="reading the revision"
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
        """Ports that they may use; None: any."""
        return ports(self.plan.cluster)

    # ---- registration -----------------------------------------------------------------------

    def start_heartbeat(self, *, on_terminate: Callable[[Terminate], None]) -> None:
        """Starts the heartbeat process, which initialises while this one continues.

        Args:
            on_over: called before this process is made to exit.
        """
        begin = Init(
            worker_type=self.worker_type,
            index=self.index,
            pid=os.getpid(),
            attempt=self.attempt.number,
            token=self.attempt.token,
            store_url=self.plan.name_resolve_url,
            keys=self.keys,
            etcd=asdict(self.plan.cluster.etcd),
            attempt_dir=str(self.attempt_files.root),
            patience_s=self.patience_s,
        )
        self._heartbeat = Heartbeat(
            begin,
            on_stop=self._on_stop_request,
            on_command=self._on_command,
            on_terminate=on_terminate,
            on_watched=self._on_watched,
        ).start()

    def register(self, *, control: str = "", data: str = "", rendezvous: str = "") -> None:
        """Publishes this worker's addresses under a lease that is renewed from now on.

        Raises:
            StaleAttempt: another attempt has taken over.
            StoreUnavailable: the store did not answer for ``patience_s``.
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
        with self._status_lock:
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
        """Returns the records of all ``count`` workers of a type, of this attempt, in order of index.

        Time in which the store is unavailable does not count.

        Raises:
            WaitTimeout: names the workers that did not register, and where their logs are.
        """
        keys = [self.keys.worker(worker_type, i) for i in range(count)]
        wait = partial(self.store.wait, describe_missing=self._describe_missing)
        found = retry_while_unavailable(
            lambda: wait(keys, timeout_s=timeout_s),
            timeout_s=self.patience_s,
            what=f"waiting for each {worker_type}",
        )
        return [loads(WorkerRecord, found[k], where=k) for k in keys]

    def _describe_missing(self, missing: list[str]) -> str:
        names = [key.removeprefix(self.keys.workers + "/") for key in missing]
        return describe_missing(names, self.attempt_files)

    @property
    def heartbeat(self) -> Heartbeat:
        """The link to the heartbeat process."""
        if self._heartbeat is None:
            raise InternalError("the heartbeat process was not started", where=self.name)
        return self._heartbeat

    def check_lease(self, *, timeout_s: float) -> None:
        """Waits while the lease is uncertain. Call it before a side effect that others see.

        Raises:
            LeaseLost: it has expired. WaitTimeout: it stayed uncertain for ``timeout_s``.
        """
        self.heartbeat.check(timeout_s=timeout_s)

    def may_publish(self) -> bool:
        """Returns whether the lease is valid now; while it is uncertain, publishing must wait.

        Raises:
            LeaseLost: it has expired.
        """
        if self.heartbeat.lease_status is LeaseStatus.EXPIRED:
            self.check_lease(timeout_s=0.0)  # raises
        return self.heartbeat.lease_status is LeaseStatus.VALID

    @property
    def patience_s(self) -> float:
        """How long the store may be unavailable before the worker gives up."""
        return float(self.plan.cluster.store_patience_seconds)

    def deregister(self) -> None:
        """Deregisters in the last published state, and ends the heartbeat process.

        Raises:
            StoreError, WaitTimeout: the store was not reached; the lease expires by itself.
        """
        try:
            if self._heartbeat is not None:
                self._heartbeat.deregister(self._status, timeout_s=DEREGISTER_S)
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
        """Moves this worker by the lifecycle table and publishes its new state.

        Args:
            may_take_s: how long the new activity may take without a tick.
        """
        with self._status_lock:
            self._move(event, mfc=mfc, step=step, reason=reason)
            self._may_take_s = may_take_s
            self._publish_status()

    def publish_status(
        self, *, mfc: str = "", step: int = 0, reason: str = "", may_take_s: float = 0.0
    ) -> None:
        """Publishes this worker's activity without changing its state. Args: as ``move``."""
        with self._status_lock:
            self._status = replace(
                self._status, mfc=mfc, step=step, reason=reason, since=time.time()
            )
            self._may_take_s = may_take_s
            self._publish_status()

    @contextmanager
    def waiting_for(self, text: str) -> Iterator[None]:
        """Publishes what another worker must do first, while the block runs."""
        with self._status_lock:
            self._status = replace(self._status, waits_for=text)
            self._publish_status()
        try:
            yield
        finally:
            with self._status_lock:
                self._status = replace(self._status, waits_for="")
                self._publish_status()

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

    def _publish_status(self) -> None:
        tick()
        if self._heartbeat is not None:
            self._heartbeat.publish_status(
                self._status, may_take_s=self._may_take_s, ticks_within_s=self.ticks_within_s
            )

    # ---- stop and commands --------------------------------------------------------------------

    @property
    def on_stop(self) -> Callable[[StopRequest], None] | None:
        """Callback for the stop request: called once, from another thread, also for a request received
        before it was set."""
        return self._on_stop

    @on_stop.setter
    def on_stop(self, on_stop: Callable[[StopRequest], None] | None) -> None:
        with self._status_lock:
            self._on_stop, request = on_stop, self._stop
        if on_stop is not None and request is not None:
            on_stop(request)

    def between_requests(self, *, until: Callable[[], bool]) -> None:
        """Executes a pending pause: returns when it is resumed, or ``until`` returns true."""
        command = self.controls.pending_pause
        if command is None:
            return
        self.move(WorkerEvent.PAUSE)
        self._answer(command)
        logger.info("paused by=%s", command.by)
        while not until() and not self.controls.wait_for_resume(PAUSE_POLL_S):
            pass
        self.move(WorkerEvent.RESUME)
        logger.info("resumed")

    def _on_stop_request(self, request: StopRequest) -> None:
        with self._status_lock:
            first, self._stop = self._stop is None, self._stop or request
            on_stop = self._on_stop
        if first and on_stop is not None:
            on_stop(request)

    def _on_watched(self, present: bool) -> None:
        self.is_alone = not present

    def _on_command(self, value: bytes) -> None:
        try:
            command = parse_command(value, where=self.keys.command(self.worker_type, self.index))
        except TrialError as error:
            logger.warning("command not decoded error=%s", error.what)
            return
        why = refusal(
            command, attempt=self.attempt.number, token=self.attempt.token, state=self.state
        )
        if not why and command.verb not in self.controls.supported:
            why = f"a {self.worker_type} takes no {command.verb}"
        if why:
            logger.warning("command refused verb=%s by=%s reason=%s", command.verb, command.by, why)
            self._answer(command, refused=why)
            return
        logger.info("command accepted verb=%s by=%s id=%s", command.verb, command.by, command.id)
        if command.verb is Verb.CONFIGURE:
            logging.getLogger().setLevel(command.args["log_level"].upper())
        else:
            self.controls.record(command)
        if command.verb is not Verb.PAUSE or self.state is WorkerState.PAUSED:
            self._answer(command)  # a pause is confirmed when it has begun

    def _answer(self, command: Command, *, refused: str = "") -> None:
        with self._status_lock:
            self._status = replace(self._status, last_command=command.id, command_refused=refused)
            self._publish_status()


def channel_identity(runner: WorkerRunner) -> ChannelIdentity:
    """Returns what this worker's channels identify themselves by; loads the trial's keys."""
    # Imported here: the heartbeat process starts before zmq is loaded.
    from realsys.transport.curve_keys import TrialKeypairs

    return {
        "trial": runner.plan.trial,
        "attempt": runner.attempt.number,
        "token": runner.attempt.token,
        "keypairs": TrialKeypairs.load(runner.attempt_files.curve_keys),
    }
