"""What every worker does around its own work: register, keep its lease, tell its state, stop.

``main.py`` makes one per process and hands it to the role's ``run``. Threads it owns: the lease
keeper's, and one that looks at the stop key and at the keys this worker depends on. Neither is ever
blocked by compute.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from realsys.api.errors import KeyNotFound, StoreError
from realsys.api.plan import LaunchPlan, PhasePlan
from realsys.api.trial import (
    AttemptFiles,
    AttemptRecord,
    PhaseFiles,
    StopRequest,
    TrialFiles,
    WorkerRecord,
    WorkerStatus,
    dumps,
    loads,
    process_start,
)
from realsys.name_resolve.keys import TrialKeys
from realsys.name_resolve.lease_keeper import LeaseKeeper
from realsys.name_resolve.store import NameResolve
from realsys.worker import exit_codes
from realsys.worker.lifecycle import WorkerEvent, WorkerState, next_state
from realsys.worker.network import listening_address, ports

logger = logging.getLogger(__name__)

LEASE_TTL_S = 15.0
WATCH_EVERY_S = 0.25


@dataclass
class WorkerRunner:
    """One worker's place in its trial. ``config`` is its own part of the experiment."""

    plan: LaunchPlan
    phase: PhasePlan
    attempt: AttemptRecord
    config: Any
    store: NameResolve
    set_log_step: Callable[[int], None] = lambda step: None
    state: WorkerState = WorkerState.STARTING
    on_stop: Callable[[StopRequest], None] | None = None
    _keeper: LeaseKeeper | None = None
    _watcher: threading.Thread | None = None
    _ended: threading.Event = field(default_factory=threading.Event)
    _status_lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def name(self) -> str:
        """``model_worker/3``."""
        return str(self.config.worker_info.name)

    @property
    def index(self) -> int:
        """Index among the workers of its type."""
        return int(self.config.worker_info.worker_index)

    @property
    def keys(self) -> TrialKeys:
        """The trial's name-resolution keys."""
        return trial_keys(self.plan)

    @property
    def trial_files(self) -> TrialFiles:
        """The trial's files."""
        from pathlib import Path

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

    def register(self, *, control: str = "", data: str = "") -> None:
        """Publishes where this worker listens, under a lease that it keeps from now on."""
        info = self.config.worker_info
        lease = self.store.grant(LEASE_TTL_S)
        record = WorkerRecord(
            worker=self.name,
            host=socket.gethostname(),
            pid=os.getpid(),
            start=process_start(os.getpid()) or 0,
            attempt=self.attempt.number,
            token=self.attempt.token,
            control=control,
            data=data,
        )
        key = self.keys.worker(info.worker_type, info.worker_index)
        self.store.add(key, dumps(record), lease=lease, replace=True)
        self._keeper = LeaseKeeper(lease, name=self.name, on_lost=self._fence).start()
        self._watcher = threading.Thread(target=self._watch, name="stop-watch", daemon=True)
        self._watcher.start()
        self.move(WorkerEvent.REGISTERED)
        logger.info("registered control=%s data=%s pid=%d", control, data, os.getpid())

    def peers(self, worker_type: str, count: int, *, timeout_s: float) -> list[WorkerRecord]:
        """Records of all ``count`` workers of a type, of this attempt, in order of index.

        Raises:
            WaitTimeout: names the workers that did not register, and where their logs are.
        """
        keys = [self.keys.worker(worker_type, i) for i in range(count)]
        found = self.store.wait(keys, timeout_s=timeout_s, describe_missing=self._describe_missing)
        return [loads(WorkerRecord, found[k], where=k) for k in keys]

    def _describe_missing(self, missing: list[str]) -> str:
        names = [key.removeprefix(self.keys.workers + "/") for key in missing]
        logs = ", ".join(str(self.attempt_files.log(name)) for name in names[:3])
        return f"not registered: {', '.join(names)}; their logs: {logs}"

    def goodbye(self) -> None:
        """Ends the threads and the lease."""
        self._ended.set()
        if self._watcher is not None:
            self._watcher.join(5.0)
        if self._keeper is not None:
            self._keeper.stop()

    # ---- state ------------------------------------------------------------------------------

    def move(self, event: WorkerEvent, *, mfc: str = "", step: int = 0, reason: str = "") -> None:
        """Moves this worker by the lifecycle table and publishes its new state."""
        with self._status_lock:
            self.state = next_state(self.state, event)
        self.tell(mfc=mfc, step=step, reason=reason)

    def tell(self, *, mfc: str = "", step: int = 0, reason: str = "") -> None:
        """Publishes what this worker is at, in the state that it is in."""
        with self._status_lock:
            status = WorkerStatus(
                state=self.state.value, mfc=mfc, step=step, since=time.time(), reason=reason
            )
            info = self.config.worker_info
            key = self.keys.worker_status(info.worker_type, info.worker_index)
            try:
                self.store.add(key, dumps(status), replace=True)
            except StoreError as error:  # a state nobody sees is no reason to stop computing
                logger.warning("status not published error=%s", error.what)

    def stop_request(self) -> StopRequest | None:
        """The stop request for this attempt, if there is one."""
        try:
            entry = self.store.get(self.keys.stop)
        except KeyNotFound:
            return None
        except StoreError as error:
            logger.warning("stop key not readable error=%s", error.what)
            return None
        request = loads(StopRequest, entry.value, where=self.keys.stop)
        return request if request.attempt == self.attempt.number else None

    # ---- the two reasons to leave that are not our own --------------------------------------

    def _watch(self) -> None:
        seen: set[str] = set()
        stop_told = False
        while not self._ended.wait(WATCH_EVERY_S):
            if not stop_told and self.on_stop is not None:
                request = self.stop_request()
                if request is not None:
                    stop_told = True
                    self.on_stop(request)
            if self._is_orphaned(seen):
                logger.error("workers gone watch_keys=%s", self.config.worker_info.watch_keys)
                os._exit(exit_codes.ORPHANED)

    def _is_orphaned(self, seen: set[str]) -> bool:
        """True when keys that this worker watches were there once and all are gone now.

        A store that does not answer says nothing: then nobody is orphaned.
        """
        watched = [f"{self.keys.root}/{k}" for k in self.config.worker_info.watch_keys]
        present = set()
        for key in watched:
            try:
                self.store.get(key)
                present.add(key)
            except KeyNotFound:
                continue
            except StoreError:
                return False
        seen |= present
        return bool(watched) and not present and bool(seen)

    def _fence(self, reason: str) -> None:
        logger.error("fenced reason=%s", reason)
        os._exit(exit_codes.FENCED)


def trial_keys(plan: LaunchPlan) -> TrialKeys:
    """Name-resolution keys of the plan's trial."""
    return TrialKeys(
        cluster=plan.cluster.name,
        user=plan.user,
        experiment=plan.experiment_name,
        trial=plan.trial_name,
    )
