"""When a reader polls a folder for changes that nothing notifies it of (pure). For file_store.py.

Changes tend to come in bursts, and something waits for them; after a quiet minute nothing is
urgent. So the interval is a share of the quiet time before: polling delays a reader by at most a
tenth of the time it has already waited.
"""

from __future__ import annotations

from dataclasses import dataclass

LONGEST_S = 2.0
SHARE = 0.1


@dataclass
class PollSchedule:
    """The polls of one reader. Times are seconds of one monotonic clock.

    Attributes: shortest_s: interval while changes arrive. looked_s, changed_s: when it last polled,
    and last found a change.
    """

    shortest_s: float
    looked_s: float = float("-inf")
    changed_s: float = float("-inf")

    def looked(self, now_s: float, *, found: bool) -> None:
        """Records a poll."""
        self.looked_s = now_s
        if found:
            self.changed_s = now_s

    def due_in_s(self, now_s: float) -> float:
        """Returns the time until the next poll; 0 or less: now."""
        pause_s = min(max(self.shortest_s, SHARE * (now_s - self.changed_s)), LONGEST_S)
        return self.looked_s + pause_s - now_s
