"""Several tries at one question: what the environment says to a wrong answer is read before the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from realsys.api.agent import Agent, Ask, Environment, Trajectory
from realsys.api.errors import ConfigError
from realsys.rollout.agents.answer_text import next_turn, said
from realsys.rollout.agents.transcript import Transcript


@dataclass(frozen=True, kw_only=True)
class MathMultiTurn(Agent):
    """Answers until the environment is done, at most ``max_turns`` times; rewards add up.

    How many tries are worth something is the environment's business (``math_verify``: ``turns``).
    """

    max_turns: int = 8

    def __post_init__(self) -> None:
        if self.max_turns < 1:
            raise ConfigError(
                f"max_turns is {self.max_turns}", where="agent math_multi_turn", fix="use 1 or more"
            )

    async def run(
        self, prompt: Sequence[int], *, ask: Ask, environment: Environment, tokenizer: Any
    ) -> Trajectory:
        transcript, reward, turns = Transcript(prompt), 0.0, 0
        info: Mapping[str, float] = {}
        for turn in range(1, self.max_turns + 1):
            answer = await ask(transcript.tokens, None)
            if turns and answer.is_none:
                break  # the model is full
            turns = turn
            transcript.answered(answer)
            observation = await environment.step(said(tokenizer, answer.tokens))
            reward, info = reward + observation.reward, observation.info
            if observation.done or turn == self.max_turns:
                break  # nobody will read what the environment says now
            last_token = transcript.tokens[-1]
            transcript.observed(next_turn(tokenizer, observation.text, last_token=last_token))
        stats = {"turns": float(turns), **info}
        return transcript.trajectory(reward=reward, truncated=not answer.stopped, stats=stats)
