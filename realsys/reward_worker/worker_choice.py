"""Chooses the reward worker that gets the next answers of one process (pure).

A process has a bounded number of answers at each worker. If all are full it waits, and sends on as they
reply: a slow rule makes others wait, and never fail.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import count

ANSWERS_EACH = 32  # of one process at one worker; those of an asynchronous rule run side by side
ANSWERS_A_REQUEST = 8


@dataclass(kw_only=True)
class WorkerChoice:
    """Answers that each worker has, by index.

    Attributes:
        first: worker that gets the first answers; differs by process, so that not all begin with the same.
    """

    num_workers: int
    first: int = 0
    limit: int = ANSWERS_EACH
    up: set[int] = field(default_factory=set)  # workers that are connected
    in_flight: dict[int, int] = field(default_factory=dict)
    _used: dict[int, int] = field(default_factory=dict)  # worker → number of its last request
    _numbers: count[int] = field(default_factory=lambda: count(1))

    def take(self, num_answers: int, *, avoid: Collection[int] = ()) -> int | None:
        """Gives answers to the worker with the fewest, the one that waited longest of equals.

        Args:
            avoid: workers where these answers failed; asked again only if there is no other in the run.
        Returns:
            The worker; None: those that may have them are full, or not connected.
        """
        free = [
            w
            for w in self.candidates(avoid)
            if not (held := self.in_flight.get(w, 0)) or held + num_answers <= self.limit
        ]
        if not free:
            return None
        chosen = min(free, key=self._order)
        self.in_flight[chosen] = self.in_flight.get(chosen, 0) + num_answers
        self._used[chosen] = next(self._numbers)
        return chosen

    def candidates(self, avoid: Collection[int] = ()) -> set[int]:
        """Returns the connected workers that may have answers which failed on ``avoid``."""
        return self.up & ((set(range(self.num_workers)) - set(avoid)) or set(avoid))

    def give_back(self, worker: int, num_answers: int) -> None:
        """Records that a worker has these answers no more."""
        self.in_flight[worker] -= num_answers

    def _order(self, worker: int) -> tuple[int, int, int]:
        turn = (worker - self.first) % self.num_workers
        return self.in_flight.get(worker, 0), self._used.get(worker, 0), turn

    def describe(self) -> str:
        """Names all workers with what they have, for logs: ``reward_worker/0 (32 answers), …``."""
        return ", ".join(
            f"reward_worker/{w} ({self.in_flight.get(w, 0)} answers)"
            if w in self.up
            else f"reward_worker/{w} (not connected)"
            for w in range(self.num_workers)
        )
