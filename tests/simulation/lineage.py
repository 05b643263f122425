"""Which writes of older attempts are dead: the real rule, from realsys/master/recover.py."""

from __future__ import annotations

from collections.abc import Mapping

try:
    from realsys.master.recover import dead_after
except ImportError:  # until it is there: what it shall be

    def dead_after(attempt: int, resumed: Mapping[int, int]) -> int | None:
        """The step after which what ``attempt`` wrote is dead; None while nobody resumed it."""
        return min((step for number, step in resumed.items() if number > attempt), default=None)


def is_dead(attempt: int, step: int, resumed: Mapping[int, int]) -> bool:
    limit = dead_after(attempt, resumed)
    return limit is not None and step > limit
