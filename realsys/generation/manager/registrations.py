"""Watches which generation servers and rollout workers are registered, added or leaving, for the manager.

Runs on a thread of its own, because the store may be slow. A restarted worker is another process
behind the same key: ``incarnation`` distinguishes them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from realsys.api.errors import RealsysError
from realsys.api.scheduling import WorkerType
from realsys.generation.manager.fleet import RegisteredServer
from realsys.name_resolve.key_table import TrialKeys
from realsys.name_resolve.store import NameResolve, Watch
from realsys.runtime.background_thread import BackgroundThread
from realsys.transport.generation_messages import ServerAddress
from realsys.trial.records import WorkerRecord, loads
from realsys.worker.live_scaling import Scaling, read_scaling

logger = logging.getLogger(__name__)

POLL_S = 0.5
LIST_EVERY_S = 30.0  # also without changes: an unreadable record may be readable now
_TYPES = (WorkerType.GENERATION_SERVER, WorkerType.ROLLOUT_WORKER)


@dataclass(frozen=True, kw_only=True)
class Registrations:
    """Servers by index; rollout workers by name, with their incarnation; added and leaving workers."""

    servers: Mapping[int, RegisteredServer] = field(default_factory=dict)
    rollout_workers: Mapping[str, str] = field(default_factory=dict)
    scaling: Scaling | None = None


def registrations(
    store: NameResolve, keys: TrialKeys, *, token: str, phase: str = ""
) -> Registrations:
    """Reads the registrations of one attempt. Raises StoreError; TrialError for an invalid scaling
    request.
    """
    servers: dict[int, RegisteredServer] = {}
    workers: dict[str, str] = {}
    for kind in _TYPES:
        for entry in store.get_subtree(f"{keys.workers}/{kind.value}"):
            try:
                record = loads(WorkerRecord, entry.value, where=entry.key)
                index = int(record.worker.rpartition("/")[2])
            except (RealsysError, ValueError) as error:
                logger.warning("registration not readable key=%s error=%s", entry.key, error)
                continue
            incarnation = f"{record.host}:{record.pid}:{record.start}"
            if record.token != token:
                continue
            if kind is WorkerType.GENERATION_SERVER:
                address = ServerAddress(index=index, url=record.control)
                servers[index] = RegisteredServer(address=address, incarnation=incarnation)
            else:
                workers[record.worker] = incarnation
    # Read last: workers register after scaling was recorded, so none is seen without its record.
    scaling = read_scaling(store, keys, token=token, phase=phase)
    return Registrations(servers=servers, rollout_workers=workers, scaling=scaling)


class RegistrationWatch:
    """Follows the store. Use as a context manager.

    Args:
        token: the attempt's token; registrations of other attempts are ignored.
        phase: phase of the workers; "": any.
        on_change: called on the watching thread with all registrations, first when it starts.
    """

    def __init__(
        self,
        store: NameResolve,
        keys: TrialKeys,
        *,
        token: str,
        on_change: Callable[[Registrations], None],
        phase: str = "",
    ) -> None:
        self._store, self._keys, self._on_change = store, keys, on_change
        self._token, self._phase = token, phase
        self._thread = BackgroundThread(self._follow, name="registrations")

    def __enter__(self) -> RegistrationWatch:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._thread.stop()

    def _follow(self) -> None:
        told: Registrations | None = None
        while not self._thread.is_ending:
            try:
                # Watch first, then list: changes in between are seen twice, not missed.
                prefixes = [f"{self._keys.workers}/{kind.value}" for kind in _TYPES]
                prefixes.append(self._keys.scaling)
                # The supervisor evaluates all leases, as does each listing.
                with self._store.watch(*prefixes, judges_leases=False) as watch:
                    while not self._thread.is_ending:
                        found = registrations(
                            self._store, self._keys, token=self._token, phase=self._phase
                        )
                        if found != told:
                            told = found
                            self._on_change(found)
                        self._wait_for_changes(watch)
            # The store is unavailable; servers are still checked meanwhile.
            except RealsysError as error:
                logger.warning("registrations not read error=%s", error.what)
                self._thread.pause(POLL_S)

    def _wait_for_changes(self, watch: Watch) -> None:
        for _ in range(int(LIST_EVERY_S / POLL_S)):
            if watch.poll(POLL_S) or self._thread.is_ending:
                return
