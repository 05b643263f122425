"""What commands have asked of a worker, and the worker's own thread has yet to do.

The listening thread notes, the compute thread looks between two requests (runner.py). Commands never
interrupt a computation: that would leave peers in half a collective.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from realsys.runtime.worker_commands import Command, Verb


@dataclass
class Controls:
    """Thread-safe. ``can`` is what this role's loop carries out; the others are refused.

    Attributes:
        leave: what asks the loop to end after its current request; set by the role.
    """

    can: frozenset[Verb] = frozenset({Verb.CONFIGURE, Verb.DUMP})
    leave: Callable[[], None] = lambda: None
    _pause: Command | None = None
    _leaving: Command | None = None
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def ask(self, command: Command) -> None:
        """Notes a command that concerns the compute thread."""
        with self._changed:
            if command.verb is Verb.PAUSE:
                self._pause = command
            elif command.verb in (Verb.RESUME, Verb.START):
                self._pause = None
            else:
                self._pause, self._leaving = None, command
            self._changed.notify_all()
        if command.verb in (Verb.INTERRUPT, Verb.EXIT):
            self.leave()

    @property
    def pause_asked(self) -> Command | None:
        """The command that asks for a pause, while it does."""
        return self._pause

    @property
    def is_interrupted(self) -> bool:
        """True when the worker must leave as stopped."""
        return self._leaving is not None and self._leaving.verb is Verb.INTERRUPT

    def wait_for_resume(self, timeout_s: float) -> bool:
        """True when the pause is over."""
        with self._changed:
            return self._changed.wait_for(lambda: self._pause is None, timeout_s)
