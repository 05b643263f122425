"""Agent with several tries at one question: it sees the environment's feedback on a wrong answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from realsys.api.agent import Agent, Ask, Environment, Trajectory
from realsys.api.errors import ConfigError
from realsys.rollout.agents.answer_text import decode_answer, encode_next_turn
from realsys.rollout.agents.transcript import Transcript


@dataclass(frozen=True, kw_only=True)
class MathMultiTurn(Agent):
    """Answers until the environment is done, at most ``max_turns`` times; rewards are summed.

    The environment decides how many tries are rewarded (``math_verify``: ``turns``).
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
                break  # the conversation fills the model's context
            turns = turn
            transcript.answered(answer)
            environment.sampled(answer)
            observation = await environment.step(decode_answer(tokenizer, answer.tokens))
            reward, info = reward + observation.reward, observation.info
            if observation.done or turn == self.max_turns:
                break  # the environment's last message is not used
            last_token = transcript.tokens[-1]
            transcript.observed(
                encode_next_turn(tokenizer, observation.text, last_token=last_token)
            )
        stats = {"turns": float(turns), **info}
        return transcript.trajectory(reward=reward, truncated=not answer.stopped, stats=stats)
