"""A request's replies while they are sampled: what there is of each, and what of it has gone out.

For episode_session.py, which samples them. An answer whose client leaves its stream ends with what was
written to the connection: that is what the client acts on.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from realsys.api.agent import Answer, AnswerSoFar
from realsys.api.errors import TrialError
from realsys.rollout.conversation.answer_tree import AnswerNode
from realsys.rollout.conversation.chat_messages import ChatRequest, ChatResult
from realsys.rollout.conversation.chat_rendering import RenderedChat

OnText = Callable[[int, str], None]
NOTHING = Answer(tokens=(), logprobs=(), versions=(), stopped=False)


class SessionOver(TrialError):
    """The session has ended, so it answers no requests any more."""


def session_over() -> SessionOver:
    """Returns the error of a request to a session that has ended."""
    return SessionOver(
        "the session has ended", where="session", fix="start a new one: POST /rl/start_session"
    )


@dataclass(frozen=True, kw_only=True)
class CallPlace:
    """Where the answers of a request stand in the conversation.

    Attributes:
        request: the first of those that ask for them.
        parent: the answer that they continue; None: a branch begins.
        prompt: what is new behind it.
        cut: the answer of the policy with which the request goes on; None: it is not the policy's.
        keys: of its first messages, one for each number of them (``path_keys``).
        grammar: what the answers are held to; empty: nothing.
    """

    request: ChatRequest
    parent: AnswerNode | None
    prompt: RenderedChat
    cut: AnswerNode | None = None
    keys: Sequence[bytes] = ()
    grammar: str = ""

    @property
    def context(self) -> list[int]:
        """All tokens before the answers."""
        return [*(self.parent.tokens if self.parent is not None else ()), *self.prompt.tokens]


@dataclass(eq=False, kw_only=True)
class GrowingReply:
    """One reply of a request, on its way.

    Attributes:
        prefix: what its client had got of it when it left; the reply goes on from there.
        sampled: the tokens behind that; None: the policy has not told of any.
        sure: tokens of the whole answer → the content that a reply with them has for sure.
        thoughts: tokens of the whole answer → the thoughts in it.
        text: sure content so far. readings: its length with so many tokens, in order.
        handed: the longest beginning of it that was written to a connection.
    """

    prefix: AnswerNode | None = None
    sampled: AnswerSoFar | None = None
    sure: Callable[[Sequence[int]], str] = field(default=lambda tokens: "")
    thoughts: Callable[[Sequence[int]], str] = field(default=lambda tokens: "")
    text: str = ""
    readings: list[tuple[int, int]] = field(default_factory=list)
    handed: str = ""

    def prefix_answer(self) -> Answer:
        """Returns all that its client had got when it left, once or several times."""
        made, node = NOTHING, self.prefix
        while node is not None:
            made = node.answer.joined(made)
            node = node.parent if node.is_rest else None
        return made

    def handed_tokens(self) -> tuple[int, ...]:
        """Returns the fewest tokens of the answer that hold all that was written."""
        sampled = () if self.sampled is None else self.sampled.tokens
        tokens = (*self.prefix_answer().tokens, *sampled)
        # Between two readings, else each stream that is left were decoded from its beginning many times
        reached = bisect_left(self.readings, (len(self.handed), 0))
        first = self.readings[reached - 1][1] if reached else 0
        last = self.readings[reached][1] if reached < len(self.readings) else len(tokens)
        count = bisect_left(
            range(last),
            True,
            lo=min(first, last),
            key=lambda n: self.sure(tokens[:n])[: len(self.handed)] == self.handed,
        )
        return tokens[:count]

    def handed_answer(self) -> Answer | None:
        """Returns what was written and was not ``prefix`` before; None: nothing was."""
        count = len(self.handed_tokens()) - len(self.prefix_answer().tokens)
        return None if self.sampled is None or count < 1 else self.sampled.first(count)


@dataclass(eq=False, kw_only=True)
class PendingCall:
    """A call that is being answered, for everybody who waits for it.

    Attributes:
        places: of its replies; empty: not known yet.
        nodes: its answers, once they are whole; of those that go on, what is new.
        is_streamed: clients want its text as it comes. sinks: of their connections.
        is_left: it was given up when its last client left its stream.
        counts: what ``prompt_tokens`` returns, once the places are forgotten.
    """

    replies: list[GrowingReply]
    nodes: list[AnswerNode] = field(default_factory=list)
    is_streamed: bool = False
    sinks: list[OnText] = field(default_factory=list)
    places: tuple[CallPlace, ...] = ()
    is_left: bool = False
    counts: tuple[int, int] | None = None
    task: asyncio.Task[ChatResult] | None = None

    @property
    def running(self) -> asyncio.Task[ChatResult]:
        """The task that answers it."""
        assert self.task is not None
        return self.task

    def add_sink(self, sink: OnText) -> None:
        """Gives the text that there is, and from now on all further text, to ``sink``."""
        self.sinks.append(sink)
        for number, reply in enumerate(self.replies):
            if reply.text:
                sink(number, reply.text)

    def publish(self, number: int, text: str, num_tokens: int) -> None:
        """Notes the sure content of a reply's first ``num_tokens``, and gives it to who wants it."""
        reply = self.replies[number]
        if len(text) > len(reply.text):
            reply.text = text
            reply.readings.append((len(text), num_tokens))
        for sink in self.sinks:
            sink(number, text)

    @property
    def ends_early(self) -> bool:
        """Whether clients have got a part of it, none all of it, and nobody went on with it: if the last
        one leaves now, this part is what there is.
        """
        is_open = not self.is_left and bool(self.places)
        is_used = any(node.delivered or node.children for node in self.nodes)
        return is_open and not is_used and any(reply.handed for reply in self.replies)

    def prompt_tokens(self) -> tuple[int, int]:
        """Returns how many tokens are before the answers, those of several to one prompt once, and how many
        of them the conversation had already."""
        if self.counts is not None:
            return self.counts
        places = {id(place): place for place in self.places}.values()
        count = sum(len(place.context) for place in places)
        return count, count - sum(len(place.prompt.tokens) for place in places)

    def release(self) -> None:
        """Forgets what only an answer needs that goes on, now that a client has got all of it: its request
        and all before it, of which an episode of many requests would hold the square.
        """
        if self.places and self.task is not None and self.task.done():
            self.counts = self.prompt_tokens()
            self.places = ()

    def answers(self) -> list[AnswerNode]:
        """Returns the answers, or the parts of them that there are."""
        parts = [*self.nodes, *(r.prefix for r in self.replies if r.prefix is not None)]
        for part in parts:  # grows
            if part.is_rest and part.parent is not None:
                parts.append(part.parent)
        return parts


@dataclass(eq=False, kw_only=True)
class LiveReply:
    """A call whose answer is on its way. ``result`` waits for it."""

    id: str
    created: int
    work: PendingCall
    was_read: bool = False

    async def result(self) -> ChatResult:
        """Waits for the answer.

        Raises:
            Whatever the policy raised; SessionOver: the session ended before.
        """
        task = self.work.running
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise session_over() from None
            raise

    def prompt_tokens(self) -> tuple[int, int] | None:
        """Returns how many tokens are before the answer, and how many of them the conversation had already;
        None: nobody knows yet.
        """
        return self.work.prompt_tokens() if self.work.places or self.work.counts else None

    def wrote(self, index: int, text: str) -> None:
        """Notes that the content of reply ``index`` as far as ``text`` was handed to the connection."""
        reply = self.work.replies[index]
        if len(text) > len(reply.handed):
            reply.handed = text

    def read(self) -> None:
        """Notes that the client got the whole reply, which is there."""
        self.was_read = True
        for node in self.work.nodes:
            node.delivered = True
