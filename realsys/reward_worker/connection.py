"""One process's connection to one reward worker, which may be restarted elsewhere."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from realsys.api.basics.reward import Score
from realsys.api.errors import RealsysError, RewardError
from realsys.transport.channel import RequestClient
from realsys.transport.codec import mismatch_error
from realsys.transport.reward_messages import (
    AskPresence,
    ScoreAnswers,
    ScoredAnswers,
    result_of,
)
from realsys.trial.records import WorkerRecord

logger = logging.getLogger(__name__)

ASK_S = 5.0  # interval of asking whether the worker is there
SILENT_S = 60.0  # without a reply to that, it is lost: the network between the two, say
# Of one request. The wait ends long before, when the worker is lost; while it is there, it is waited for.
LONGEST_S = 30 * 86400.0


@dataclass(eq=False, kw_only=True)
class Connection:
    """Open from ``open`` until it is lost or closed; within one event loop.

    Args:
        connect: makes a client for an endpoint, not yet open.
        on_change: called when the worker turns out to be there, and when it is lost.
    """

    name: str
    record: WorkerRecord
    connect: Callable[[str], RequestClient]
    on_change: Callable[[], None]
    is_up: bool = False
    is_lost: bool = False

    def open(self) -> None:
        """Connects in the background."""
        self._client = self.connect(self.record.control).open()
        self._following = asyncio.create_task(self._follow(), name=f"presence of {self.name}")

    async def score(self, answers: Sequence[str]) -> list[Score | RewardError]:
        """Returns the scores of answers, given as JSON.

        Raises:
            WorkerLost: the worker ended, or did not reply for a minute; also other errors that it raised.
        """
        what = f"the scores of {len(answers)} answers"
        reply = await self._client.call(
            ScoreAnswers(answers=tuple(answers)), timeout_s=LONGEST_S, what=what
        )
        if not isinstance(reply, ScoredAnswers) or len(reply.answers) != len(answers):
            raise mismatch_error(f"a reply without {what}", where=self.name)
        return [result_of(sent, self.name) for sent in reply.answers]

    def lose(self, why: str) -> None:
        """Ends the requests in progress with WorkerLost; late replies are ignored."""
        if not self.is_lost:
            self.is_up, self.is_lost = False, True
            logger.warning("reward worker lost worker=%s why=%s", self.name, why)
            self._client.fail(why)
            self.on_change()

    async def close(self) -> None:
        """Closes the connection."""
        self.is_up, self.is_lost = False, True
        self._following.cancel()
        await asyncio.gather(self._following, return_exceptions=True)
        await self._client.close()

    async def _follow(self) -> None:
        try:
            while not self.is_lost:
                await self._client.call(AskPresence(), timeout_s=SILENT_S, what="its presence")
                if not self.is_up and not self.is_lost:
                    self.is_up = True
                    self.on_change()
                await asyncio.sleep(ASK_S)
        except RealsysError as error:
            self.lose(error.what)
