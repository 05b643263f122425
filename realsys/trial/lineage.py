"""Which attempt's work counts up to which step (pure).

Each attempt says, before it writes anything else, from whose checkpoint it goes on. The newest attempt
that has said so is the head; its chain backwards is the trial's lineage, and what other attempts wrote, or
these wrote later, is a *dead branch*: the work of a master that was cut off or stood still while another
took over. What such a master writes down when it wakes up changes nothing: it is not in the chain.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from realsys.trial.records import Resumed


@dataclass(frozen=True)
class Lineage:
    """``limits``: attempt → the last step of it that counts, None for all. Empty: everything counts."""

    limits: Mapping[int, int | None]

    @classmethod
    def of(cls, resumed: Mapping[int, Resumed]) -> Lineage:
        """The lineage that the attempts' own words mean."""
        if not resumed:
            return cls({})
        head = max(resumed)
        limits: dict[int, int | None] = {head: None}
        link, last = resumed.get(head), None
        while link is not None and link.step > 0 and link.of_attempt not in limits:
            last = link.step if last is None else min(last, link.step)
            limits[link.of_attempt] = last
            link = resumed.get(link.of_attempt)
        return cls(limits)

    def counts(self, attempt: int, step: int) -> bool:
        """Whether what ``attempt`` wrote after ``step`` is part of the trial."""
        if not self.limits:
            return True
        limit = self.limits.get(attempt, -1)
        return limit is None or step <= limit
