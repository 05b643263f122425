"""Rule ``verifiers``: answers that only an environment of verifiers can score, in its own interpreter."""

from __future__ import annotations

from realsys.api.errors import RewardError


def verifiers_reward(*, response: str) -> float:
    """Raises RewardError, whatever the response: ``agent=verifiers`` returns the environment's reward."""
    raise RewardError(
        f"the environment gave no reward for an answer of {len(response)} characters",
        where="task=verifiers",
        fix="use task.agent=verifiers, which rewards episodes itself, or name a rule in task.reward",
    )
