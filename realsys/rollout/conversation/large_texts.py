"""Rendering and tokenising of long conversations beside the event loop, which goes on meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from realsys.rollout.conversation.chat_messages import ChatRequest

T = TypeVar("T")

# Characters of which a loop is held up for a millisecond or a few: about what changing threads is worth.
LARGE = 20_000
_OF_A_TOOL = 1000  # a definition's, about


def size_of(request: ChatRequest) -> int:
    """Returns about how many characters a request's conversation has."""
    texts = sum(
        len(m.content) + len(m.reasoning) + sum(len(call.arguments) for call in m.tool_calls)
        for m in request.messages
    )
    return texts + _OF_A_TOOL * len(request.tools)


async def beside_loop(work: Callable[[], T], *, size: int) -> T:
    """Returns what ``work`` does: in a thread if it is of ``LARGE`` characters or more, else at once.

    The work goes on when the task that waits for it is cancelled, so it must change nothing.
    """
    return work() if size < LARGE else await asyncio.to_thread(work)
