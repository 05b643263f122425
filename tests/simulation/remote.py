"""Runs the real, blocking code over the simulated network.

``remotely(function)`` calls ``function(store)`` with a store whose every call is one message there and
one back. A generator can't wait in the middle of a plain function, so the function is run again from
its beginning after each answer, with the answers so far: it must be deterministic and change nothing
but what it returns.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Sequence
from typing import Any

from realsys.api.errors import RealsysError, StoreUnavailable
from realsys.name_resolve.fence import AttemptFence
from realsys.name_resolve.memory_store import MemoryStore
from realsys.name_resolve.store import Put

from .world import Process, Rpc, World

Call = Callable[[MemoryStore], Any]
RETRY_S = 0.5


class _Ask(BaseException):  # no Exception: the code under test must not catch it
    def __init__(self, call: Call) -> None:
        self.call = call


class _Answers:
    """A NameResolve that knows the first answers and asks for the next one."""

    def __init__(self, answers: list[Any], accepted: Callable[[], None] | None) -> None:
        self._answers, self._next, self._accepted = answers, 0, accepted

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def method(*arguments: Any, **options: Any) -> Any:
            if self._next == len(self._answers):
                raise _Ask(self._call(name, arguments, options))
            answer = self._answers[self._next]
            self._next += 1
            if isinstance(answer, RealsysError):
                raise answer
            return answer

        return method

    def _call(self, name: str, arguments: Sequence[Any], options: dict[str, Any]) -> Call:
        def call(store: MemoryStore) -> Any:
            answer = getattr(store, name)(*arguments, **options)
            if name == "transaction" and answer and self._accepted is not None:
                self._accepted()
            return answer

        return call


def remotely(
    function: Callable[[Any], Any],
    *,
    timeout_s: float,
    accepted: Callable[[], None] | None = None,
) -> Generator[Any, Any, Any]:
    """Args: ``accepted`` is called at the moment when the store accepts a transaction."""
    answers: list[Any] = []
    while True:
        try:
            return function(_Answers(answers, accepted))
        except _Ask as ask:
            call = ask.call
        try:
            answers.append((yield Rpc(call, timeout_s)))
        except RealsysError as error:
            answers.append(error)


def insistently(
    attempt: Callable[[], Generator[Any, Any, Any]], world: World, me: Process, *, for_s: float
) -> Generator[Any, Any, Any]:
    """As EtcdClient: a call that is refused is made again until its deadline."""
    deadline = world.clock(me) + for_s
    while True:
        try:
            return (yield from attempt())
        except StoreUnavailable:
            if world.clock(me) + RETRY_S > deadline:
                raise
            yield RETRY_S


def fenced_write(
    fence: AttemptFence,
    puts: Sequence[Put],
    deletes: Sequence[str] = (),
    *,
    timeout_s: float,
    accepted: Callable[[], None] | None = None,
) -> Generator[Any, Any, None]:
    """AttemptFence.write itself. Raises StaleAttempt or StoreUnavailable."""

    def write(store: Any) -> int:
        again = copy.copy(fence)
        again._store = store
        again.write(puts, deletes=deletes)
        return again._revision

    fence._revision = yield from remotely(write, timeout_s=timeout_s, accepted=accepted)


def fence_check(fence: AttemptFence, *, timeout_s: float) -> Generator[Any, Any, None]:
    """AttemptFence.check itself. Raises StaleAttempt or StoreUnavailable."""

    def check(store: Any) -> None:
        again = copy.copy(fence)
        again._store = store
        again.check()

    yield from remotely(check, timeout_s=timeout_s)
