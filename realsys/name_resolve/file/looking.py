"""When a reader looks for news that nobody tells him of (pure). For file_store.py.

Soon after something happened more tends to follow, and somebody waits for it; where nothing happened for
a minute nothing is urgent. So the pause between two looks is a share of the quiet before: whoever waits
waits at most a tenth longer than he must.
"""

from __future__ import annotations

from dataclasses import dataclass

LONGEST_S = 2.0
SHARE = 0.1


@dataclass
class Looking:
    """The looks of one reader. Times are seconds of one monotonic clock.

    Attributes:
        shortest_s: pause between two looks while things happen.
        looked_s, changed_s: when he last looked, and last found something.
    """

    shortest_s: float
    looked_s: float = float("-inf")
    changed_s: float = float("-inf")

    def looked(self, now_s: float, *, found: bool) -> None:
        """Notes a look."""
        self.looked_s = now_s
        if found:
            self.changed_s = now_s

    def due_in_s(self, now_s: float) -> float:
        """How long until the next look; 0 or less: now."""
        pause_s = min(max(self.shortest_s, SHARE * (now_s - self.changed_s)), LONGEST_S)
        return self.looked_s + pause_s - now_s
