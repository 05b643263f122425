"""verifiers' v1: a task with a reward, and an agent of a harness and a model."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Any

import verifiers.v1 as vf
from agent_report import CALCULATOR, Report, run
from counting_harness import CountingHarnessConfig

MODEL = "policy"
ABOUT = {"name": "calculate", "description": "Works out one operation.", "parameters": CALCULATOR}
TOOLS = [{"type": "function", "function": ABOUT}]


class CountingTask(vf.Task):
    """Rewards digits."""

    @vf.reward
    async def digits(self, trace: Any) -> float:
        """The share of digits in what the policy wrote."""
        text = "".join(_texts(trace))
        return sum(c.isdigit() for c in text) / max(1, len(text))


def _texts(trace: Any) -> list[str]:
    return [
        str(message.content)
        for branch in trace.branches
        for message in branch.messages
        if message.role == "assistant" and message.content  # not the call that the harness made up
    ]


async def _roll(report: Report, question: str, **options: Any) -> None:
    agent = vf.make_agent(
        vf.AgentConfig(
            harness=CountingHarnessConfig(id="counting-harness", **options),
            runtime=vf.SubprocessConfig(),
            model=MODEL,
            client=vf.EvalClientConfig(
                base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY"
            ),
        )
    )
    trace = await agent.run(CountingTask(vf.TaskData(prompt=question)))
    assert trace.ok, trace.errors
    for text in _texts(trace):
        report.saw(text)
    report.reward = float(trace.reward)


def plain(report: Report) -> None:
    """A rollout of one turn, and one of two."""
    asyncio.run(_roll(report, report.question))
    asyncio.run(_roll(report, report.question, turns=2))


def tools(report: Report) -> None:
    """A rollout that offers a tool."""
    asyncio.run(_roll(report, report.question, turns=3, tools=TOOLS))


def parallel(report: Report) -> None:
    """Three rollouts at the same time, two of the same question."""

    async def roll_all() -> None:
        texts = [report.question, report.question, "Is it even?"]
        await asyncio.gather(*(_roll(report, text) for text in texts))

    asyncio.run(roll_all())


def retry(report: Report) -> None:
    """A rollout of two turns; what the connection loses is sent again."""
    asyncio.run(_roll(report, report.question, turns=2))


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    run({"plain": plain, "tools": tools, "parallel": parallel, "retry": retry, "cut": retry})
