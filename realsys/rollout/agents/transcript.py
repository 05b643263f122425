"""What was said in an episode so far, token by token, and by whom: for agents to write down as they go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from realsys.api.agent import Answer, Trajectory


class Transcript:
    """Begins with a prompt; ``tokens`` is what the policy is asked to go on from."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.tokens: list[int] = []
        self._from_policy: list[bool] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self.observed(prompt)

    def answered(self, answer: Answer, *, keep: int | None = None) -> None:
        """The policy said this; only its first ``keep`` tokens count, where that is given."""
        kept = slice(keep)
        self.tokens += answer.tokens[kept]
        self._logprobs += answer.logprobs[kept]
        self._versions += answer.versions[kept]
        self._from_policy += [True] * len(answer.tokens[kept])

    def observed(self, tokens: Sequence[int]) -> None:
        """Somebody else said this: it is shown to the policy and never trained on."""
        self.tokens += tokens
        self._logprobs += [0.0] * len(tokens)
        self._versions += [-1] * len(tokens)
        self._from_policy += [False] * len(tokens)

    def trajectory(
        self, *, reward: float, truncated: bool, stats: Mapping[str, float] | None = None
    ) -> Trajectory:
        """The episode, ended. ``truncated``: what the policy said last was cut.

        What nobody answered is left out: there may have been no room for it in the model.
        """
        from_policy = self._from_policy
        last = next((i for i in reversed(range(len(from_policy))) if from_policy[i]), None)
        count = len(from_policy) if last is None else last + 1
        return Trajectory(
            tokens=tuple(self.tokens[:count]),
            from_policy=tuple(self._from_policy[:count]),
            logprobs=tuple(self._logprobs[:count]),
            versions=tuple(self._versions[:count]),
            reward=reward,
            truncated=truncated,
            stats=dict(stats or {}),
        )
