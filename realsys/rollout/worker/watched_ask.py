"""Notes which requests of an episode the policy left without an answer: an outage is no agent's lesson.

The agent sees a status 502 or its own time limit, and ends as it likes; what it says then is not what
happened.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from realsys.api.agent import Answer
from realsys.api.errors import DataError
from realsys.rollout.worker.episode_tries import first_line

SILENCE_S = (
    30.0  # without an answer to anybody: then the servers, not the answer's length, are to blame
)


@dataclass(eq=False)
class PolicyPulse:
    """For how long a worker's requests have got no answer from the policy."""

    _pending: int = 0
    _since_s: float = 0.0

    def asked(self, now_s: float) -> None:
        """Notes a request."""
        if not self._pending:
            self._since_s = now_s
        self._pending += 1

    def ended(self, now_s: float, *, answered: bool) -> None:
        """Notes the end of a request."""
        self._pending -= 1
        if answered:
            self._since_s = now_s

    def silent_s(self, now_s: float) -> float:
        """Returns for how long none has been answered, though there were some."""
        return now_s - self._since_s


class WatchedAsk:
    """An ``Ask`` (realsys.api.agent) around the one that asks.

    Args:
        pulse: of the worker.
    """

    def __init__(self, ask: Any, pulse: PolicyPulse) -> None:
        self._ask, self._pulse = ask, pulse
        self._failed: dict[int, str] = {}  # request → why; gone when the same one is answered
        self._abandoned_silent_s: float | None = None  # of the last request that was not waited for

    async def __call__(
        self, tokens: Sequence[int], limit: int | None = None, /, **options: Any
    ) -> Answer:
        """Asks; see ``Ask``."""
        request = hash(tuple(tokens))
        clock = asyncio.get_running_loop().time
        self._abandoned_silent_s = None
        self._pulse.asked(clock())
        has_answer = False
        try:
            answer: Answer = await self._ask(tokens, limit, **options)
            has_answer = True
        except asyncio.CancelledError:
            self._abandoned_silent_s = self._pulse.silent_s(clock())
            raise
        except DataError:  # of the request
            raise
        except Exception as error:
            self._failed[request] = first_line(error)
            raise
        finally:
            self._pulse.ended(clock(), answered=has_answer)
        self._failed.pop(request, None)
        return answer

    async def trouble(self, *, ended_well: bool) -> str:
        """Returns why the policy did not answer; empty if it did, or if the agent did not wait for it.

        Args:
            ended_well: the episode; then a request that was not waited for is the agent's own choice.
        """
        if self._failed:
            return next(reversed(self._failed.values()))
        if ended_well or self._abandoned_silent_s is None:
            return ""
        if self._abandoned_silent_s >= SILENCE_S:
            return f"no answer came from any server for {self._abandoned_silent_s:.0f} s"
        look: Callable[[], Awaitable[str]] | None = getattr(self._ask, "trouble", None)
        return "" if look is None else await look()
