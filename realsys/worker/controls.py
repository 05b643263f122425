"""Commands received by a worker that its compute thread has yet to execute.

The receiving thread records them, the compute thread checks between two requests (runner.py). Commands
never interrupt a computation: that would leave peers in half a collective.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from realsys.runtime.worker_commands import Command, Verb


@dataclass
class Controls:
    """Pending commands. Thread-safe. Verbs outside ``supported`` are refused.

    Attributes:
        supported: verbs that this role's loop executes.
        leave: asks the loop to end after its current request; set by the role.
    """

    supported: frozenset[Verb] = frozenset({Verb.CONFIGURE, Verb.DUMP})
    leave: Callable[[], None] = lambda: None
    _pause: Command | None = None
    _leaving: Command | None = None
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def record(self, command: Command) -> None:
        """Records a command for the compute thread."""
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
    def pending_pause(self) -> Command | None:
        """The command that requested a pause, until it is resumed."""
        return self._pause

    @property
    def is_interrupted(self) -> bool:
        """True if the worker must exit as stopped."""
        return self._leaving is not None and self._leaving.verb is Verb.INTERRUPT

    def wait_for_resume(self, timeout_s: float) -> bool:
        """Waits for the end of the pause; returns whether it has ended."""
        with self._changed:
            return self._changed.wait_for(lambda: self._pause is None, timeout_s)
