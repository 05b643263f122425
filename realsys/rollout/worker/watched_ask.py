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

SILENCE_S = 30.0  # without a token to anybody: a request that a server lost was lost in an outage


@dataclass(eq=False)
class PolicyPulse:
    """For how long a worker's requests have got no answer from the policy, nor a piece of one."""

    _pending: int = 0
    _since_s: float = 0.0

    def asked(self, now_s: float) -> None:
        """Notes a request."""
        if not self._pending:
            self._since_s = now_s
        self._pending += 1

    def grew(self, now_s: float) -> None:
        """Notes further tokens of an answer."""
        self._since_s = now_s

    def ended(self, now_s: float, *, answered: bool) -> None:
        """Notes the end of a request."""
        self._pending -= 1
        if answered:
            self._since_s = now_s

    def silent_s(self, now_s: float) -> float:
        """Returns for how long none has got a token, though there were some."""
        return now_s - self._since_s


class WatchedAsk:
    """An ``Ask`` (realsys.api.agent) around the one that asks.

    Args:
        pulse: of the worker.
    """

    def __init__(self, ask: Any, pulse: PolicyPulse) -> None:
        self._ask, self._pulse = ask, pulse
        self._failed: dict[int, str] = {}  # request → why; gone when the same one is answered
        self._look: Callable[[], Awaitable[str]] | None = getattr(ask, "trouble", None)
        self._abandoned: _Abandoned | None = None  # the last request, if it was not waited for

    async def __call__(
        self,
        tokens: Sequence[int],
        limit: int | None = None,
        /,
        *,
        on_tokens: Callable[[Sequence[int]], None] | None = None,
        **options: Any,
    ) -> Answer:
        """Asks; see ``Ask``."""
        request = hash(tuple(tokens))
        clock = asyncio.get_running_loop().time
        self._abandoned, broken_before, length = None, self._num_broken, 0

        def grew(so_far: Sequence[int]) -> None:
            nonlocal length
            if len(so_far) > length:  # it is told of pieces without tokens, too
                length = len(so_far)
                self._pulse.grew(clock())
            if on_tokens is not None:
                on_tokens(so_far)

        if on_tokens is not None or self._look is not None:
            options["on_tokens"] = grew
        self._pulse.asked(clock())
        has_answer = False
        try:
            answer: Answer = await self._ask(tokens, limit, **options)
            has_answer = True
        except asyncio.CancelledError:
            self._abandoned = _Abandoned(
                silent_s=self._pulse.silent_s(clock()),
                num_broken=self._num_broken - broken_before,
            )
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
        if ended_well or self._abandoned is None or self._look is None:
            return ""
        if trouble := await self._look():
            return trouble
        # One that is well may have been at a long answer all the time: silence alone tells nothing.
        if self._abandoned.num_broken and self._abandoned.silent_s >= SILENCE_S:
            return f"no answer came from any server for {self._abandoned.silent_s:.0f} s"
        return ""

    @property
    def _num_broken(self) -> int:
        stats = getattr(self._ask, "request_stats", None)
        return 0 if stats is None else int(stats.broken)


@dataclass(frozen=True, kw_only=True)
class _Abandoned:
    """A request whose answer the agent did not wait for.

    Attributes:
        silent_s: for how long nobody had got a token then. num_broken: how often a server had lost it.
    """

    silent_s: float
    num_broken: int
