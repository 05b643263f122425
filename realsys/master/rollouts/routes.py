"""Decides where a rollout worker delivers, and how much may wait there (pure).

Each model worker that accepts experience has a queue: prompts in progress for it, and deliveries that no
step has trained on yet. With a limit a worker gets no prompt while all its targets are full; only prompts
without which the next step can't start are granted all the same, so that a full queue never blocks a
step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from realsys.api.worker_configs import MakerRoute
from realsys.transport.rollout_messages import Places


class Routes:
    """Queues of all targets.

    Args:
        holders: model workers that take experience; ``makers`` may narrow them down.
        endpoints: tensor servers of all model workers.
        buffer_limit: most prompts in a queue; None: any number.
    """

    def __init__(
        self,
        *,
        holders: Sequence[int],
        endpoints: Sequence[str],
        makers: Sequence[MakerRoute] = (),
        buffer_limit: int | None = None,
    ) -> None:
        self._holders, self._endpoints = tuple(holders), tuple(endpoints)
        self._limit = buffer_limit
        self._makers = {
            f"rollout_worker/{index}": maker for maker in makers for index in maker.rollout_workers
        }
        self._queue_of: dict[int, int] = {}  # prompt → model worker
        self._waiting: Counter[int] = Counter()
        self._given: Counter[str] = Counter()

    def add(self, worker: str, *, like: str) -> None:
        """Adds a rollout worker, with the targets of ``like``."""
        if (maker := self._makers.get(like)) is not None:
            self._makers[worker] = maker

    def is_known(self, worker: str) -> bool:
        """Returns whether a worker's targets are known: not immediately for an added rollout group."""
        return not self._makers or worker in self._makers

    def places(self, worker: str) -> Places:
        """Returns what a rollout worker must know of its targets."""
        return Places(holders=self._targets(worker), endpoints=self._endpoints)

    def target(self, worker: str, *, urgent: bool) -> int | None:
        """Returns the index, among the worker's targets, of the one with most room; None: it must wait."""
        maker = self._makers.get(worker)
        most = maker.tickets if maker is not None else None
        if most is not None and self._given[worker] >= most and not urgent:
            return None
        targets = self._targets(worker)
        best = min(range(len(targets)), key=lambda i: (self._waiting[targets[i]], i))
        full = self._limit is not None and self._waiting[targets[best]] >= self._limit
        return None if full and not urgent else best

    def gave(self, number: int, worker: str, target: int) -> None:
        """Records that prompt ``number`` is in progress for a target."""
        self._given[worker] += 1
        self.took(number, self._targets(worker)[target])

    def took(self, number: int, holder: int) -> None:
        """Records that it waits at ``holder``, or will."""
        self.left(number)
        self._queue_of[number] = holder
        self._waiting[holder] += 1

    def left(self, number: int) -> None:
        """Records that it was trained on, lost or given up; unknown ones are ignored."""
        if (holder := self._queue_of.pop(number, None)) is not None:
            self._waiting[holder] -= 1

    def holder(self, number: int) -> int | None:
        """Returns where it waits, or will; None if unknown."""
        return self._queue_of.get(number)

    def waiting(self) -> dict[int, int]:
        """Returns model worker → length of its queue."""
        return {holder: self._waiting[holder] for holder in self._holders}

    def _targets(self, worker: str) -> tuple[int, ...]:
        maker = self._makers.get(worker)
        return self._holders if maker is None else maker.holders
