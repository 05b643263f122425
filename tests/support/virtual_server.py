"""A generation server in virtual time: rows that advance together, pauses, weight versions (pure)."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Owner = TypeVar("Owner")


@dataclass(eq=False, slots=True)
class VirtualServer(Generic[Owner]):
    """Decodes up to ``slots`` rows at once; a step takes ``token_s``, and ``row_s`` more for each row.

    ``steps`` is how many tokens a row would have had since the beginning: an answer of n tokens that joins
    at x leaves at x + n, however fast the server is meanwhile.
    """

    slots: int
    token_s: float
    row_s: float
    version: int = 0
    wanted: int = 0  # the newest weights that it was told of
    paused: bool = False
    drains: bool = False  # takes nothing new until it has the weights it wants
    changes: int = 0  # an end that was foreseen before the last change does not come
    steps: float = 0.0
    at: float = 0.0  # time up to which ``steps`` counts
    _rows: list[tuple[float, int, Owner]] = field(default_factory=list)  # by their last step
    _joined: int = 0

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def has_room(self) -> bool:
        """Whether it may begin another answer now."""
        return not self.paused and not self.drains and len(self._rows) < self.slots

    @property
    def step_s(self) -> float:
        """Seconds of a decoding step with the rows that are here."""
        return self.token_s + self.row_s * len(self._rows)

    def advance(self, now: float) -> float:
        """Decodes up to ``now``; the seconds of rows that this was."""
        passed, self.at = now - self.at, now
        if self.paused or not self._rows:
            return 0.0
        self.steps += passed / self.step_s
        return passed * len(self._rows)

    def join(self, owner: Owner, num_tokens: int) -> None:
        """An answer begins. ``advance`` first."""
        heapq.heappush(self._rows, (self.steps + num_tokens, self._joined, owner))
        self._joined += 1

    def leave(self) -> list[Owner]:
        """Takes out the answers that are done by now. ``advance`` first."""
        done = []
        while self._rows and self._rows[0][0] <= self.steps + 1e-6:  # of a token
            done.append(heapq.heappop(self._rows)[2])
        return done

    def next_end(self) -> float | None:
        """When the next answer is done, if nothing changes until then."""
        if self.paused or not self._rows:
            return None
        return self.at + max(0.0, self._rows[0][0] - self.steps) * self.step_s
