"""Which attempt's work counts, and up to which step (pure).

Before it writes anything else, each attempt records whose checkpoint it resumes from. The newest
attempt with such a record is the head; the chain backwards from it is the trial's lineage. What
other attempts wrote, or these wrote later, is a *dead branch*: the work of a master that was cut
off or stopped while another took over. Anything such a master writes when it continues has no
effect: it is not in the chain.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from realsys.trial.records import Resumed


@dataclass(frozen=True)
class Lineage:
    """``limits``: attempt → its last step that counts, None for all. Empty: everything counts."""

    limits: Mapping[int, int | None]

    @classmethod
    def of(cls, resumed: Mapping[int, Resumed]) -> Lineage:
        """Builds the lineage from the attempts' resume records."""
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
        """Returns whether what ``attempt`` wrote after ``step`` is part of the trial."""
        if not self.limits:
            return True
        limit = self.limits.get(attempt, -1)
        return limit is None or step <= limit
