"""Hands a worker's ordered requests to its compute thread strictly by number.

Filled by the control thread, emptied by the compute thread. Processes that share collective
operations all run their requests in the order in which the master numbered them, so they enter every
collective in the same order, whatever the network did to the messages.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from realsys.api.errors import InternalError, WorkerLost


@dataclass(frozen=True)
class Ordered:
    """A request and the promise of its reply."""

    request: Any
    reply: Future[Any]


class OrderedRequests:
    """Requests 0, 1, 2, … in that order."""

    def __init__(self) -> None:
        self._waiting: dict[int, Ordered] = {}
        self._next = 0
        self._closed = False
        self._changed = threading.Condition()

    def put(self, request: Any) -> Future[Any]:
        """Keeps a request until its turn; the future is its reply."""
        ordered = Ordered(request, Future())
        with self._changed:
            if request.order < self._next or request.order in self._waiting:
                raise InternalError(
                    f"request number {request.order} came twice", where="ordered requests"
                )
            if self._closed:
                ordered.reply.set_exception(_ended(request.order))
            else:
                self._waiting[request.order] = ordered
                self._changed.notify_all()
        return ordered.reply

    def take(self, timeout_s: float) -> Ordered | None:
        """The next request in order; None when it did not come in time or the end was told."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._next in self._waiting, timeout_s)
            ordered = None if self._closed else self._waiting.pop(self._next, None)
            if ordered is not None:
                self._next += 1
            return ordered

    def close(self) -> None:
        """No more will be taken; wakes the taker."""
        with self._changed:
            self._closed = True
            for order, ordered in self._waiting.items():
                ordered.reply.set_exception(_ended(order))
            self._waiting.clear()
            self._changed.notify_all()

    @property
    def closed(self) -> bool:
        """True once the end was told."""
        return self._closed


def _ended(order: int) -> WorkerLost:
    return WorkerLost(
        f"request number {order} was not run: the worker was told to end",
        where="ordered requests",
        fix="see the worker's log for why it ended",
    )
