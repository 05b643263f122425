"""Agent that gives one answer to one question."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from realsys.api.agent import Agent, Ask, Environment, Trajectory
from realsys.rollout.agents.answer_text import decode_answer
from realsys.rollout.agents.transcript import Transcript


class MathSingleStep(Agent):
    """Requests one answer; the environment's first reward is the episode's."""

    async def run(
        self, prompt: Sequence[int], *, ask: Ask, environment: Environment, tokenizer: Any
    ) -> Trajectory:
        transcript = Transcript(prompt)
        answer = await ask(transcript.tokens, None)
        transcript.answered(answer)
        environment.sampled(answer)
        observation = await environment.step(decode_answer(tokenizer, answer.tokens))
        return transcript.trajectory(
            reward=observation.reward, truncated=not answer.stopped, stats=observation.info
        )
