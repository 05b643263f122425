"""Token-by-token record of an episode's conversation, for agents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from realsys.api.agent import Answer, Trajectory


class Transcript:
    """Starts with a prompt; ``tokens`` is the context for the policy's next answer."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.tokens: list[int] = []
        self._from_policy: list[bool] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._kept: list[bytes] = []
        self._has_kept = False
        self.observed(prompt)

    def answered(self, answer: Answer, *, keep: int | None = None) -> None:
        """Appends the policy's answer, or only its first ``keep`` tokens."""
        kept = slice(keep)
        self.tokens += answer.tokens[kept]
        self._logprobs += answer.logprobs[kept]
        self._versions += answer.versions[kept]
        self._kept += answer.kept[kept] or [b""] * len(answer.tokens[kept])
        self._has_kept |= bool(answer.kept)
        self._from_policy += [True] * len(answer.tokens[kept])

    def observed(self, tokens: Sequence[int]) -> None:
        """Appends other tokens, which are shown to the policy and never trained on."""
        self.tokens += tokens
        self._logprobs += [0.0] * len(tokens)
        self._versions += [-1] * len(tokens)
        self._kept += [b""] * len(tokens)
        self._from_policy += [False] * len(tokens)

    def trajectory(
        self, *, reward: float, truncated: bool, stats: Mapping[str, float] | None = None
    ) -> Trajectory:
        """Returns the finished episode. ``truncated``: the last answer was cut off.

        Observations after the last answer are left out: they may not have fit in the model's context.
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
            kept=tuple(self._kept[:count]) if self._has_kept else (),
        )
