"""Passes a worker's ordered requests to its compute thread strictly by number.

Filled by the control thread, emptied by the compute thread. Processes that share collective
operations run their requests in the order of the master's numbers, so they enter every collective
in the same order even if the network reorders messages.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from realsys.api.errors import InternalError, WorkerLost


@dataclass(frozen=True)
class PendingRequest:
    """A request and the future of its reply."""

    request: Any
    reply: Future[Any]


class OrderedRequests:
    """Queue that releases requests 0, 1, 2, … in that order."""

    def __init__(self) -> None:
        self._waiting: dict[int, PendingRequest] = {}
        self._next = 0
        self._closed = False
        self._changed = threading.Condition()

    def put(self, request: Any) -> Future[Any]:
        """Stores a request until its turn; returns the future of its reply."""
        ordered = PendingRequest(request, Future())
        with self._changed:
            if request.order < self._next or request.order in self._waiting:
                raise InternalError(
                    f"request number {request.order} arrived twice", where="ordered requests"
                )
            if self._closed:
                ordered.reply.set_exception(_not_run_error(request.order))
            else:
                self._waiting[request.order] = ordered
                self._changed.notify_all()
        return ordered.reply

    def take(self, timeout_s: float) -> PendingRequest | None:
        """Returns the next request in order; None if it did not arrive in time or the queue was closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._next in self._waiting, timeout_s)
            ordered = None if self._closed else self._waiting.pop(self._next, None)
            if ordered is not None:
                self._next += 1
            return ordered

    def close(self) -> None:
        """Closes the queue and wakes a waiting ``take``; no further request is released."""
        with self._changed:
            self._closed = True
            for order, ordered in self._waiting.items():
                ordered.reply.set_exception(_not_run_error(order))
            self._waiting.clear()
            self._changed.notify_all()

    @property
    def closed(self) -> bool:
        """True once the queue was closed."""
        return self._closed


def _not_run_error(order: int) -> WorkerLost:
    return WorkerLost(
        f"request number {order} was not run: the worker is ending",
        where="ordered requests",
        fix="see the worker's log for why it ended",
    )
