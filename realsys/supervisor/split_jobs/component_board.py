"""The supervisor's access to the keys through which the jobs of one trial coordinate (layout split).

Every call reports an unavailable store by its return value; split_steps.py decides what that means, this
module only reads and writes.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self, TypeVar

from realsys.api.errors import KeyExists, StaleAttempt, StoreError, TrialError
from realsys.name_resolve.fence import AttemptFence
from realsys.name_resolve.key_table import TrialKeys
from realsys.name_resolve.store import Entry, NameResolve, Put
from realsys.supervisor.split_jobs.components import Action, ComponentRecord, Order, Report
from realsys.supervisor.split_jobs.membership import Membership
from realsys.trial.records import AttemptRecord, StopRequest, TrialFiles, dumps, loads

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass
class ComponentBoard:
    """Keys of one attempt; holds ``component/0`` between ``open`` and ``close``.

    Args:
        nodes: of the supervisor's own job, a hostlist.
    """

    attempt: AttemptRecord
    store: NameResolve
    keys: TrialKeys
    nodes: str
    _member: Membership = field(init=False)
    _fence: AttemptFence = field(init=False)
    _stop_passed_on: bool = False
    _silent: bool = False  # the store, when last asked
    _damaged: set[int] = field(default_factory=set)  # revisions of values that can't be understood

    def __post_init__(self) -> None:
        record = ComponentRecord(
            index=0,
            agent=self.attempt.token,
            job_id=self.attempt.job_id,
            host=self.attempt.host,
            nodes=self.nodes,
            attempt=self.attempt.number,
            token=self.attempt.token,
        )
        self._fence = AttemptFence(self.store, self.keys, self.attempt, may_have_ended=True)
        self._member = Membership(self.store, self._fence, self.keys.component(0), record)

    def open(self) -> Self:
        """Registers the supervisor, upon which agents register. Raises StoreError."""
        self._member.hold()
        return self

    def close(self) -> None:
        """Deregisters the supervisor."""
        self._member.leave()

    def components(self) -> dict[int, ComponentRecord] | None:
        """Returns this attempt's registered components by index; None if the store does not answer."""
        try:
            self._member.hold()
            entries = self.store.get_subtree(self.keys.components)
        except StoreError as error:
            if not self._silent:
                logger.warning("store unavailable error=%s", error.what)
            self._silent = True
            return None
        self._silent = False
        records = self._decoded(ComponentRecord, entries)
        return {r.index: r for r in records if r.token == self.attempt.token}

    def reports(self, sequence: int, agents: Mapping[int, str]) -> dict[int, Report]:
        """Returns those agents' reports on a phase, by component."""
        try:
            entries = self.store.get_subtree(self.keys.component_reports)
        except StoreError:
            return {}
        reports = self._decoded(Report, entries)
        mine = (self.attempt.token, sequence)
        return {
            r.component: r
            for r in reports
            if (r.token, r.sequence) == mine and agents.get(r.component) == r.agent
        }

    def order(
        self, action: Action, sequence: int, agents: Mapping[int, str], phase: str = ""
    ) -> bool:
        """Writes an order; returns False if the store did not answer: try again.

        An order of a superseded attempt is not written: no agent of it is left to follow it.
        """
        order = Order(
            attempt=self.attempt.number,
            token=self.attempt.token,
            sequence=sequence,
            action=action,
            phase=phase,
            agents={str(index): agent for index, agent in agents.items()},
        )
        try:
            self._fence.write([Put(self.keys.component_order, dumps(order))])
        except StoreError as error:
            logger.warning("order not written action=%s error=%s", action, error.what)
            return False
        except StaleAttempt as error:
            logger.error("order not written action=%s reason=%s", action, error.what)
            return True
        logger.info("order written action=%s sequence=%d phase=%s", action, sequence, phase)
        return True

    def is_stop_requested(self) -> bool:
        """Returns whether a stop of this attempt was requested."""
        try:
            entry = self.store.get(self.keys.stop)
        except StoreError:  # no such key, or no answer
            return False
        found = self._decoded(StopRequest, [entry])
        return any(request.attempt == self.attempt.number for request in found)

    def _decoded(self, kind: type[T], entries: Sequence[Entry]) -> list[T]:
        """Decodes the values; skips damaged ones and logs each once."""
        found = []
        for entry in entries:
            try:
                found.append(loads(kind, entry.value, where=entry.key))
            except TrialError as error:
                if entry.revision not in self._damaged:
                    logger.error("%s; %s", error.what, error.fix)
                self._damaged.add(entry.revision)
        return found

    def pass_on_end(self, component: ComponentRecord, name: str) -> None:
        """Requests a stop of the attempt if Slurm is about to end the component's job."""
        if not component.leaving or self._stop_passed_on:
            return
        request = StopRequest(
            grace_seconds=component.leaving_grace_s,
            by=f"{component.leaving}, component {name}",
            at=time.time(),
            attempt=self.attempt.number,
        )
        try:
            self._fence.check()
            self.store.add(self.keys.stop, dumps(request))
        except (KeyExists, StaleAttempt):
            pass  # already requested, or this attempt is superseded
        except StoreError as error:
            logger.warning("stop not passed on error=%s", error.what)
            return
        self._stop_passed_on = True


def submitted_job_ids(files: TrialFiles, attempt: AttemptRecord) -> list[str]:
    """Returns the job ids of all components in order, as recorded by the launch; empty if they are not
    this attempt's."""
    try:
        note = json.loads((files.submission).read_bytes())
        ids = [str(job_id) for job_id in note["job_ids"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return ids if ids and ids[0] == attempt.job_id else []


def submitted_comment(files: TrialFiles) -> str:
    """Returns the comment of the trial's jobs, as Slurm showed it to the launch; empty if it did not: a
    site may have dropped or rewritten what was sent."""
    try:
        job = json.loads(files.submission.read_bytes())["job"]
        return str(job["comment"]) if job["submitted"] else ""
    except (OSError, ValueError, KeyError, TypeError):
        return ""
