"""One agent's episode with the policy: requests in, replies out, and at its end the sequences to train on.

    ChatRequest ─ CallBook: sent before? ─ RequestPlaces: AnswerTree, which answer does it continue?
        ChatRenderer: the new tokens ─ ReplySampler: policy, AnswerForm for thoughts, calls ─ ChatResult

The endpoint speaks HTTP for it. All methods belong to one event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from realsys.api.agent import Answer, Trajectory
from realsys.api.errors import DataError
from realsys.rollout.conversation.answer_tree import AnswerNode, AnswerTree, sequences
from realsys.rollout.conversation.call_book import CallBook, CallState, ChatCall
from realsys.rollout.conversation.chat_messages import (
    ChatMessage,
    ChatRequest,
    ChatResult,
    Unserved,
)
from realsys.rollout.conversation.continued_answer import with_reply
from realsys.rollout.conversation.message_matching import key_behind
from realsys.rollout.conversation.pending_call import (
    GrowingReply,
    LiveReply,
    OnText,
    PendingCall,
    session_over,
)
from realsys.rollout.conversation.reply_sampling import ReplySampler
from realsys.rollout.conversation.request_places import RequestPlaces
from realsys.rollout.conversation.session_settings import SessionPolicy, SessionSettings
from realsys.runtime.first_error import first_error

_TURNS = 20  # of the event loop, in which a connection that has ended is noticed


@dataclass(eq=False, kw_only=True)
class EpisodeSession:
    """An episode's conversation. ``close`` it in any case."""

    id: str
    policy: SessionPolicy
    settings: SessionSettings
    reward: float | None = None
    tree: AnswerTree = field(default_factory=AnswerTree)
    is_over: bool = False
    on_first_call: Callable[[], None] | None = None
    _book: CallBook[PendingCall] = field(default_factory=CallBook)
    _num_starts: int = 0
    _num_left_out: int = 0  # requests that something was left out of
    _num_unread_calls: int = 0  # texts that looked like calls and could not be read
    _asked: list[float] = field(default_factory=list)  # when, of answers that are on their way
    _given_up: set[asyncio.Task[ChatResult]] = field(default_factory=set)

    @asynccontextmanager
    async def call(
        self, request: ChatRequest, *, on_text: OnText | None = None
    ) -> AsyncIterator[LiveReply]:
        """Answers a request, or gives the answer that it got before, while the block runs.

        Args:
            on_text: called with a reply's number and its content so far, as far as it is sure.
        Raises:
            SessionOver: the episode has ended. DataError: the request can't be answered.
        """
        await self._notice_disconnects()
        if self.is_over:
            raise session_over()
        call, is_new = self._book.claim(request)
        if self.on_first_call is not None:
            self.on_first_call()
        self._num_left_out += is_new and bool(request.left_out)
        if is_new or (call.work is not None and call.work.is_left):
            self._start(call, request, on_text)
        elif call.work is not None and on_text is not None:
            call.work.add_sink(on_text)
        work = call.work
        assert work is not None
        live = LiveReply(id=self._call_id(call), created=int(time.time()), work=work)
        try:
            yield live
        finally:
            self._book.left(call, read=live.was_read)
            if on_text is not None:
                work.sinks.remove(on_text)
            if live.was_read:
                work.release()
            elif not call.listeners:
                self._end_at_what_was_written(call)

    async def _notice_disconnects(self) -> None:
        """Has streams end whose clients have left: their next request holds what they got of them."""
        for _ in range(_TURNS):
            calls = (c for c in self._book.calls if c.listeners and c.work is not None)
            if not any(call.work.ends_early for call in calls if call.work is not None):
                return
            await asyncio.sleep(0)

    def _end_at_what_was_written(self, call: ChatCall[PendingCall]) -> None:
        """Makes a finished answer of what a client had got of its stream when it left, if it had."""
        work = call.work
        if work is None or call.state is CallState.FAILED or not work.ends_early:
            return
        calls = self._book.calls
        if not any(one is call for one in calls):
            return  # of the episode before this one began anew
        running = [c.work for c in calls if c.work is not None and c.state is CallState.RUNNING]
        parents = [place.parent for other in running for place in other.places]
        if any(node is parent for node in work.nodes for parent in parents):
            return  # another request is going on with it
        answers = [reply.handed_answer() for reply in work.replies]
        if not any(answers) and not any(reply.prefix for reply in work.replies):
            return  # the policy has not told the tokens of the text
        work.is_left = True
        work.running.cancel()
        self._given_up.add(work.running)
        work.running.add_done_callback(self._given_up.discard)
        for node in work.nodes:
            self.tree.remove(node)
        work.nodes.clear()
        for number, (answer, reply) in enumerate(zip(answers, work.replies, strict=True)):
            if answer is not None:
                reply.prefix = self._left_node(call, work, number, answer)
        # Who got no more of it than before, and asks again, wants another one.
        call.state = CallState.LEFT if any(answers) else CallState.READ

    def _left_node(
        self, call: ChatCall[PendingCall], work: PendingCall, number: int, answer: Answer
    ) -> AnswerNode:
        """Adds what was written of a reply: its client has ended it, as by a stop text."""
        reply = work.replies[number]
        message = ChatMessage(
            role="assistant", content=reply.handed, reasoning=reply.thoughts(reply.handed_tokens())
        )
        answer = replace(answer, stopped=True)
        node = self._add_node(call, work, number, answer, message)
        node.delivered = node.was_left = True
        return node

    def model_of(self, request: ChatRequest) -> str:
        """Returns the model's name that replies carry."""
        return request.model or self.settings.model

    def set_reward(self, reward: float, *, call_id: str | None = None) -> None:
        """Sets the reward of one answer, or of the whole episode.

        Raises:
            DataError: no answer has this id.
        """
        if call_id is None:
            self.reward = reward
            return
        works = ((self._call_id(c), c.work) for c in self._book.calls if c.work is not None)
        of_call = {id_: work.answers() for id_, work in works}
        found = of_call.get(call_id) or [n for n in self.tree.nodes if n.id == call_id]
        if not found:
            raise DataError(
                f"no answer of this episode has the id {call_id!r}",
                where="interaction_id",
                fix="send the id of a response, or none for the whole episode",
            )
        for node in found:
            node.reward = reward

    def asked_s(self) -> float:
        """Returns for how many seconds the oldest answer has been on its way; 0: there is none."""
        now_s = asyncio.get_running_loop().time()
        return max((now_s - began_s for began_s in self._asked), default=0.0)

    async def close(self) -> None:
        """Ends the episode: answers on their way are abandoned, later requests refused."""
        self.is_over = True
        for call in self._book.calls:
            self._end_at_what_was_written(call)
        tasks = {c.work.running for c in self._book.calls if c.work is not None} | self._given_up
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def restart(self) -> None:
        """Begins the episode anew: what was answered is forgotten, and new answers have other ids."""
        await self.close()
        self._num_starts += 1
        self.tree, self._book = AnswerTree(), CallBook()
        self.reward, self.is_over = None, False
        self._num_left_out = self._num_unread_calls = 0

    def last_node(self) -> AnswerNode | None:
        """Returns the newest answer that the client has got."""
        return next((n for n in reversed(self.tree.nodes) if n.delivered), None)

    def sequences(self, *, reward: float) -> list[Trajectory]:
        """Returns what is trained on: one sequence a branch, each with its reward."""
        return sequences(self.tree, reward=reward)

    def num_calls(self) -> int:
        """Counts the requests; one that was sent again counts once."""
        return len(self._book.calls)

    def num_left(self) -> int:
        """Counts the requests whose client left before there was an answer."""
        return sum(call.was_left for call in self._book.calls)

    def figures(self) -> dict[str, float]:
        """Returns numbers for the metrics."""
        drops = self.settings.unserved is Unserved.DROP
        left_out = {"left_out": float(self._num_left_out)} if drops else {}
        return {
            **left_out,
            "calls": float(sum(not node.is_rest for node in self.tree.nodes)),
            "branches": float(len(self.tree.leaves())),
            "unread_answers": float(self.tree.num_unread()),
            "unread_calls": float(self._num_unread_calls),
        }

    # ---- one call --------------------------------------------------------------------------------

    def _call_id(self, call: ChatCall[PendingCall]) -> str:
        start = f".{self._num_starts}" if self._num_starts else ""
        return f"{call.prefix}{self.id}{start}-{call.number}"

    def _start(
        self, call: ChatCall[PendingCall], request: ChatRequest, on_text: OnText | None
    ) -> None:
        """Begins to answer a call, or goes on with one that was left."""
        former, call.state = call.work, CallState.RUNNING
        prefix = (
            [None] * request.num_replies if former is None else [r.prefix for r in former.replies]
        )
        work = call.work = PendingCall(
            replies=[GrowingReply(prefix=node) for node in prefix],
            is_streamed=on_text is not None,
            sinks=[] if on_text is None else [on_text],
            places=() if former is None else former.places,
        )
        work.task = asyncio.create_task(self._answer(call, request, work), name=self._call_id(call))
        # Nobody may be there to read its error
        work.task.add_done_callback(lambda t: t.cancelled() or t.exception())

    async def _answer(
        self, call: ChatCall[PendingCall], request: ChatRequest, work: PendingCall
    ) -> ChatResult:
        try:
            result = await self._sampled(call, request, work)
        except BaseException:
            if not work.is_left:
                call.state = CallState.FAILED
            raise
        call.state = CallState.ANSWERED
        return result

    async def _sampled(
        self, call: ChatCall[PendingCall], request: ChatRequest, work: PendingCall
    ) -> ChatResult:
        if call.number >= self.settings.max_calls:
            raise DataError(
                f"the episode has made {self.settings.max_calls} requests",
                where=f"session {self.id}",
                fix="see why the agent does not end, or raise agent_args.max_calls",
            )
        if not work.places:
            work.places = await RequestPlaces(settings=self.settings).places(request, self.tree)
        sampler = ReplySampler(
            session=self.id, policy=self.policy, settings=self.settings, asked=self._asked
        )
        async with first_error(), asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(
                    sampler.reply(call.number, number, request, work),
                    name=f"{self._call_id(call)}/{number}",
                )
                for number in range(len(work.places))
            ]
        sampled = [task.result() for task in tasks]
        for number, one in enumerate(sampled):
            if one.answer is not None:  # else its client had got all of it
                node = self._add_node(call, work, number, one.answer, one.reply.message)
                work.nodes.append(node)
            self._num_unread_calls += one.num_faults
        num_prompt_tokens, num_cached = work.prompt_tokens()
        return ChatResult(
            id=self._call_id(call),
            created=int(time.time()),
            model=self.model_of(request),
            replies=tuple(one.reply for one in sampled),
            num_prompt_tokens=num_prompt_tokens,
            num_cached=num_cached,
        )

    def _add_node(
        self,
        call: ChatCall[PendingCall],
        work: PendingCall,
        number: int,
        answer: Answer,
        message: ChatMessage,
    ) -> AnswerNode:
        """Adds a reply to the tree, or what of it is new behind the part that its client had got."""
        place, prefix = work.places[number], work.replies[number].prefix
        request, cut = place.request, place.cut
        messages = with_reply(request, message, None if cut is None else cut.message)
        node = AnswerNode(
            id=self._call_id(call) + (f"-{number}" if len(work.places) > 1 else ""),
            parent=place.parent if prefix is None else prefix,
            observed=place.prompt.tokens if prefix is None else (),
            answer=answer,
            message=messages[-1],
            num_messages=0 if request.prompts else len(messages),
            reward=None if prefix is None else prefix.reward,
            is_rest=prefix is not None,
            content_of=work.replies[number].sure if work.is_streamed else None,
        )
        if request.prompts:
            self.tree.add(node, None)
            return node
        before = place.keys[len(messages) - 1]
        path_key = key_behind(before, messages[-1], self.settings.match)
        self.tree.add(node, path_key, question_key=before)
        return node
