"""A taskset of verifiers 0.4 with a harness of its own, which asks in this process."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import openai
import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult

__all__ = ["LettersHarness", "LettersTaskset"]


class LettersData(vf.TaskData):
    """A task's question, and what it is worth."""

    worth: int = 0


class LettersTask(vf.Task[LettersData, vf.State]):
    """Rewards short answers."""

    @vf.reward
    async def letters(self, trace: Any) -> float:
        """More for fewer letters of the policy's."""
        text = "".join(
            str(m.content or "")
            for b in trace.branches
            for m in b.messages
            if m.role == "assistant"
        )
        reward = self.data.worth / (1 + len(text))
        with open(os.environ["LETTERS_FILE"], "a") as file:
            file.write(json.dumps([self.data.idx, reward]) + "\n")
        return reward


class LettersTaskset(vf.Taskset[LettersTask, vf.TasksetConfig]):
    """Forty tasks."""

    def load(self) -> Iterator[LettersTask]:
        """Yields the tasks."""
        for i in range(40):
            yield LettersTask(LettersData(prompt=f"Write {i}.", worth=i + 1))


class LettersHarness(vf.Harness[vf.HarnessConfig]):
    """Asks, and asks once more."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: Any,
        data: Any,
    ) -> ProgramResult:
        """Plays one rollout of two turns."""
        client = openai.AsyncOpenAI(base_url=endpoint, api_key=secret)
        messages: Any = [{"role": "user", "content": data.prompt}]
        for _ in range(2):
            reply = await client.chat.completions.create(model=ctx.model, messages=messages)
            messages += [
                reply.choices[0].message.model_dump(exclude_none=True),
                {"role": "user", "content": "Are you sure?"},
            ]
        return ProgramResult(exit_code=0, stdout="", stderr="")
