"""Agent that calls a tool within one answer: the environment's output is inserted after the call."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from realsys.api.agent import Agent, Ask, Environment, Trajectory
from realsys.api.errors import ConfigError
from realsys.rollout.agents.answer_text import decode_answer, encode_inline
from realsys.rollout.agents.transcript import Transcript

CALL = r"<<[^<>=]*=?>>"  # the calculator's syntax


@dataclass(frozen=True, kw_only=True)
class ToolUse(Agent):
    """Lets the policy write until it calls a tool, inserts the result, and lets it continue.

    Text after a call is discarded, since it was written without the result. What is kept is still a sample
    of the policy, since each token was drawn before everything after it.

    Args:
        call: regular expression of a call.
        max_turns: maximum number of pieces of an answer.
    """

    call: str = CALL
    max_turns: int = 16

    def __post_init__(self) -> None:
        try:
            re.compile(self.call)
        except re.error as error:
            raise ConfigError(
                f"call is not a regular expression: {error}",
                where="agent tool_use",
                fix="correct it",
            ) from error
        if self.max_turns < 1:
            raise ConfigError(
                f"max_turns is {self.max_turns}", where="agent tool_use", fix="use 1 or more"
            )

    async def run(
        self, prompt: Sequence[int], *, ask: Ask, environment: Environment, tokenizer: Any
    ) -> Trajectory:
        transcript, reward, turns = Transcript(prompt), 0.0, 0
        info: Mapping[str, float] = {}
        for turn in range(1, self.max_turns + 1):
            answer = await ask(transcript.tokens, None)
            kept = len(answer.tokens)
            if turns and answer.is_none:
                break  # the conversation fills the model's context
            turns = turn
            kept = self._up_to_call(answer.tokens, tokenizer)
            transcript.answered(answer, keep=kept)
            environment.sampled(answer)
            observation = await environment.step(decode_answer(tokenizer, answer.tokens[:kept]))
            reward, info = reward + observation.reward, observation.info
            if observation.done or turn == self.max_turns:
                break
            transcript.observed(encode_inline(tokenizer, observation.text))
        truncated = kept < len(answer.tokens) or not answer.stopped
        stats = {"turns": float(turns), **info}
        return transcript.trajectory(reward=reward, truncated=truncated, stats=stats)

    def _up_to_call(self, tokens: Sequence[int], tokenizer: Any) -> int:
        """Counts tokens up to the end of the first call; all if there is none."""

        def has_call(count: int) -> bool:
            return re.search(self.call, decode_answer(tokenizer, tokens[:count])) is not None

        # A prefix holds every call of shorter prefixes, so the first one with a call can be bisected.
        return min(bisect_left(range(len(tokens) + 1), True, key=has_call), len(tokens))
