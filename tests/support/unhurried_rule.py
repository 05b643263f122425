"""The usual rule, slowed down: a step takes most of a second.

``--import tests/support/unhurried_rule.py reward=unhurried``.

For runs that a test ends itself, while the run shall do no more than go on.
"""

from __future__ import annotations

import time

from realsys.api.registry import register_reward
from realsys.rewards.math_verify import math_verify_reward


def unhurried(*, response: str, answer: str) -> float:
    """math_verify's score, later."""
    time.sleep(0.05)
    return math_verify_reward(response=response, answer=answer)


register_reward("unhurried", unhurried, trusted=True)  # one answer after the other
