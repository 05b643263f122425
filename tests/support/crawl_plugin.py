"""Agents of a run that waits for its test: slow from some weights on, until a file is there.

``--import tests/support/crawl_plugin.py task.agent=crawl``. With a fixed number of steps alone, a quick
machine has trained the last one before the command comes that is to change the run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from realsys.api.agent import Ask, Environment, Trajectory
from realsys.api.registry import register_agent
from realsys.rollout.agents.math_single_step import MathSingleStep

# Short beside what a command waits for: a worker that is let go finishes its questions first.
SLOW_S = 8.0


@dataclass(frozen=True, kw_only=True)
class Crawl(MathSingleStep):
    """An answer by weights of ``version`` or later is kept for seconds, until the file ``go`` is there."""

    version: int
    go: str
    slow_s: float = SLOW_S

    async def run(
        self, prompt: Sequence[int], *, ask: Ask, environment: Environment, tokenizer: Any
    ) -> Trajectory:
        made = await super().run(prompt, ask=ask, environment=environment, tokenizer=tokenizer)
        until = time.monotonic() + self.slow_s
        while max(made.versions) >= self.version and time.monotonic() < until:
            if Path(self.go).exists():
                break
            await asyncio.sleep(0.05)
        return made


register_agent("crawl", Crawl)
