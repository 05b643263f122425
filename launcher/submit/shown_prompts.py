"""Which prompts the policy sees where an agent asks it, for ``realsys data show``.

An agent that speaks in tokens begins with the question's own. Of a chat agent the first request is known;
of one that speaks through the endpoint (a function, a program, clients) only the agent knows what it sends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from realsys.api import registry
from realsys.api.agent import AgentHost, Environment
from realsys.api.worker_configs import RolloutWorker

CHAT = "chat"
_KNOWN_HERE = ("calculator", "math_verify")  # environments that need nothing outside this process


@dataclass(kw_only=True)
class AgentPrompts:
    """What an agent makes of questions.

    Attributes:
        note: who makes the policy's prompt, and what is shown of it; empty: it is the question's tokens.
    """

    worker: RolloutWorker | None
    tokenizer: Any
    note: str = field(init=False, default="")
    _agent: Any = field(init=False, default=None)

    def __post_init__(self) -> None:
        worker = self.worker
        if worker is None or not getattr(registry.find("agent", worker.agent), "own_prompt", True):
            return
        if worker.agent != CHAT:
            self.note = (
                f"made by agent {worker.agent!r}, which alone knows what it asks; shown is the question by "
                "itself, as no agent asks it"
            )
            return
        self.note = "the first request of agent 'chat'"
        if worker.env not in _KNOWN_HERE:
            self.note += f", without what environment {worker.env!r} puts behind it, and its tools"
        self._agent = registry.make_agent(worker.agent, **worker.agent_args)
        host = AgentHost(
            name="shown",
            tokenizer=self.tokenizer,
            end_ids=frozenset({self.tokenizer.eos_token_id}),
            folder=Path(),
        )
        asyncio.run(self._agent.open(host))

    @staticmethod
    def packages(worker: RolloutWorker | None) -> tuple[str, ...]:
        """Packages that the agent's prompts need."""
        return ("aiohttp",) if worker is not None and worker.agent == CHAT else ()

    def tokens(self, record: Mapping[str, Any], question: Sequence[int]) -> list[int]:
        """Returns the first prompt of a record, ``question`` by itself."""
        if self._agent is None:
            return list(question)
        return list(asyncio.run(self._first(record)))

    async def _first(self, record: Mapping[str, Any]) -> tuple[int, ...]:
        worker, environment = self.worker, None
        assert worker is not None  # there is an agent
        if worker.env in _KNOWN_HERE:
            made: Environment = registry.make_environment(worker.env, **worker.env_args)
            environment = made
            await environment.reset(record)
        found: tuple[int, ...] = self._agent.first_prompt(record["prompt"], environment)
        return found
