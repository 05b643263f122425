"""A generation server in virtual time: rows that advance together, pauses, weight versions (pure)."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Owner = TypeVar("Owner")


@dataclass(eq=False, slots=True)
class VirtualServer(Generic[Owner]):
    """Decodes up to ``slots`` rows at once; a step takes ``token_s``, plus ``row_s`` per row.

    ``steps`` counts decoding steps since the start: an answer of n tokens that joins at x leaves at x + n,
    whatever the server's speed meanwhile.
    """

    slots: int
    token_s: float
    row_s: float
    version: int = 0
    wanted: int = 0  # the newest weights that were announced to it
    paused: bool = False
    drains: bool = False  # accepts nothing new until it has the announced weights
    changes: int = 0  # invalidates ends predicted before the last change
    steps: float = 0.0
    at: float = 0.0  # time up to which ``steps`` counts
    _rows: list[tuple[float, int, Owner]] = field(
        default_factory=list
    )  # ordered by their last step
    _joined: int = 0

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def has_room(self) -> bool:
        """True if it can start another answer now."""
        return not self.paused and not self.drains and len(self._rows) < self.slots

    @property
    def step_s(self) -> float:
        """Duration of a decoding step with the current rows, in seconds."""
        return self.token_s + self.row_s * len(self._rows)

    def advance(self, now: float) -> float:
        """Decodes up to ``now``; returns the row seconds spent."""
        passed, self.at = now - self.at, now
        if self.paused or not self._rows:
            return 0.0
        self.steps += passed / self.step_s
        return passed * len(self._rows)

    def join(self, owner: Owner, num_tokens: int) -> None:
        """Starts an answer. Call ``advance`` first."""
        heapq.heappush(self._rows, (self.steps + num_tokens, self._joined, owner))
        self._joined += 1

    def leave(self) -> list[Owner]:
        """Removes and returns the owners of finished answers. Call ``advance`` first."""
        done = []
        while self._rows and self._rows[0][0] <= self.steps + 1e-6:  # tolerance, in tokens
            done.append(heapq.heappop(self._rows)[2])
        return done

    def next_end(self) -> float | None:
        """Time at which the next answer finishes if nothing changes; None without rows."""
        if self.paused or not self._rows:
            return None
        return self.at + max(0.0, self._rows[0][0] - self.steps) * self.step_s
