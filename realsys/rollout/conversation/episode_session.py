"""One agent's episode with the policy: requests in, replies out, and at its end the sequences to train on.

    ChatRequest ─ CallBook: sent before? ─ AnswerTree: continues which answer?
        ─ ChatRenderer: the new tokens ─ policy samples ─ AnswerForm: thoughts, calls ─ ChatResult

The endpoint speaks HTTP for it. All methods belong to one event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Protocol

from realsys.api.agent import Answer, AnswerSoFar, Trajectory
from realsys.api.basics.thoughts import THINK
from realsys.api.errors import ConfigError, DataError
from realsys.generation.engine.token_grammar import grammar_fault
from realsys.rollout.conversation.answer_forms import ANSWER_FORMS, AnswerForm
from realsys.rollout.conversation.answer_reading import opens_thoughts, read_answer
from realsys.rollout.conversation.answer_tree import AnswerNode, AnswerTree, sequences
from realsys.rollout.conversation.call_book import CallBook, CallState, ChatCall
from realsys.rollout.conversation.chat_messages import (
    ChatMessage,
    ChatReply,
    ChatRequest,
    ChatResult,
    FinishReason,
    TokenLogprob,
    ToolCall,
    ToolChoice,
    Unserved,
)
from realsys.rollout.conversation.chat_rendering import ChatRenderer, RenderedChat, request_args
from realsys.rollout.conversation.continued_answer import (
    check_continued,
    last_of,
    text_behind,
    with_reply,
)
from realsys.rollout.conversation.full_context import ContextFull, context_full
from realsys.rollout.conversation.given_prompts import continued_answer, no_texts, prompt_tokens
from realsys.rollout.conversation.growing_answer import HALF_LETTER, GrowingAnswer, GrowingText
from realsys.rollout.conversation.large_texts import beside_loop, size_of
from realsys.rollout.conversation.message_matching import MessageMatch, key_behind, path_keys
from realsys.rollout.conversation.pending_call import (
    CallPlace,
    GrowingReply,
    LiveReply,
    OnText,
    PendingCall,
    SessionOver,
    session_over,
)
from realsys.rollout.conversation.reply_grammar import reply_grammar
from realsys.rollout.conversation.stop_cut import before_stops, cut_at_stop
from realsys.runtime.first_error import first_error

__all__ = [
    "ContextFull",
    "EpisodeSession",
    "SchemaUse",
    "SessionOver",
    "SessionPolicy",
    "SessionSettings",
]

OnTokens = Callable[[Sequence[int]], None]


_TURNS = 20  # of the event loop, in which a connection that has ended is noticed


class SessionPolicy(Protocol):
    """What samples answers. Implementations find a server, wait for weights, and retry."""

    async def sample(
        self,
        tokens: Sequence[int],
        *,
        limit: int | None,
        stop: Sequence[str],
        sampling: Mapping[str, Any],
        on_tokens: OnTokens | None,
        grammar: str = "",
        answer_prefix: int = 0,
    ) -> Answer:
        """Samples an answer to ``tokens``.

        Args:
            limit: most tokens; None: as many as the run allows.
            stop: texts at which sampling may end early; the session cuts there in any case.
            sampling: the client's wishes; a training run samples by its own settings.
            on_tokens: called with all tokens of the answer so far, whenever there are more. They are an
                ``AnswerSoFar`` where an answer that its client leaves is to be trained on.
            grammar: what the answer must be, see reply_grammar.py; empty: anything.
            answer_prefix: so many of the last ``tokens`` are the answer's own beginning. Returned is the
                rest; ``limit`` and ``grammar`` are of the whole.
        Raises:
            WaitTimeout, RemoteError: there is no answer.
        """


class SchemaUse(StrEnum):
    """What becomes of a request for a JSON schema, or for a call of certain tools (``tool_choice``)."""

    REFUSE = "refuse"  # a schema; tool_choice is ignored
    IGNORE = "ignore"  # both: answered as other requests are
    ENFORCE = "enforce"  # the engine holds the answer to it


@dataclass(frozen=True, kw_only=True)
class SessionSettings:
    """How a session understands requests; the same for all of a run.

    Attributes:
        model: name that replies carry.
        match: how equal messages must be for a request to continue an answer.
        decode: tokens → text with special tokens. ``encode``: text → tokens, with those that the tokenizer
            puts before every text. ``num_ids``: tokens that a client may send; None: the engine knows it.
        end_ids: tokens that end an answer, not part of its text.
        max_calls: requests of one episode, above which it fails: an agent in a loop.
        special: special tokens of the tokenizer, their ids by text; for schemas that are enforced.
        unserved: what becomes of tools and parts of messages that the policy can't take.
    """

    renderer: ChatRenderer
    form: AnswerForm
    decode: Callable[[Sequence[int]], str]
    end_ids: frozenset[int]
    encode: Callable[[str], Sequence[int]] = no_texts
    num_ids: int | None = None
    model: str = "policy"
    match: MessageMatch = MessageMatch.TOOLS
    max_calls: int = 1000
    schemas: SchemaUse = SchemaUse.REFUSE
    special: Mapping[str, int] = field(default_factory=dict)
    unserved: Unserved = Unserved.REFUSE


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
            if not live.was_read and not call.listeners:
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

    @contextmanager
    def _noted_request(self) -> Iterator[None]:
        began_s = asyncio.get_running_loop().time()
        self._asked.append(began_s)
        try:
            yield
        finally:
            self._asked.remove(began_s)

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
        if not work.places:
            work.places = await self._places(call, request)
        async with first_error(), asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(
                    self._one(
                        place.context,
                        request,
                        place.prompt.thinking,
                        place.grammar,
                        (call.number, number),
                        work,
                    ),
                    name=f"{self._call_id(call)}/{number}",
                )
                for number, place in enumerate(work.places)
            ]
        replies = []
        for number, (answer, reply) in enumerate(task.result() for task in tasks):
            if answer is not None:  # else its client had got all of it
                work.nodes.append(self._add_node(call, work, number, answer, reply.message))
            replies.append(reply)
        num_prompt_tokens, num_cached = work.prompt_tokens()
        return ChatResult(
            id=self._call_id(call),
            created=int(time.time()),
            model=self.model_of(request),
            replies=tuple(replies),
            num_prompt_tokens=num_prompt_tokens,
            num_cached=num_cached,
        )

    async def _places(
        self, call: ChatCall[PendingCall], request: ChatRequest
    ) -> tuple[CallPlace, ...]:
        """Finds where each reply stands, which is behind the conversation, or behind its prompt.

        Raises:
            DataError: the request can't be answered.
        """
        if call.number >= self.settings.max_calls:
            raise DataError(
                f"the episode has made {self.settings.max_calls} requests",
                where=f"session {self.id}",
                fix="see why the agent does not end, or raise agent_args.max_calls",
            )
        self._check_held(request)
        if not request.prompts:
            return (await self._place(request),) * request.n
        settings, grammar = self.settings, ""
        if request.has_form and settings.schemas is SchemaUse.ENFORCE:
            grammar = await asyncio.to_thread(self._grammar, request, thinking=False)
        places = []
        for prompt in request.prompts:
            tokens = await prompt_tokens(prompt, settings.encode, num_ids=settings.num_ids)
            parent = continued_answer(self.tree, tokens)
            new = tokens[len(parent.tokens) if parent is not None else 0 :]
            rendered = RenderedChat(tokens=new, thinking=False)
            place = CallPlace(request=request, parent=parent, prompt=rendered, grammar=grammar)
            places += [place] * request.n
        return tuple(places)

    async def _place(self, request: ChatRequest) -> CallPlace:
        """Finds where in the conversation the answers stand, and what they are held to."""
        args = request_args(request, self.settings.renderer)
        size = size_of(request)
        keys = await beside_loop(
            lambda: path_keys(request.messages, request.tools, self.settings.match, args), size=size
        )
        found = self.tree.longest(keys, request.messages)
        answered = 0 if found is None else found[1]
        found = self.tree.shortened(keys, request.messages, answered) or found
        parent, prompt = await beside_loop(lambda: self._prompt(request, found, args), size=size)
        opened = opens_thoughts(self.settings.form, prompt.tokens, self.settings.decode)
        prompt = replace(prompt, thinking=prompt.thinking or opened)
        grammar, cut = "", _cut_answer(request, parent)
        if request.continues:
            written = "" if cut is None else self._text(cut.answer.tokens)
            check_continued(
                request,
                request.messages[-1].content + written,
                self.settings.form,
                is_held=self.settings.schemas is SchemaUse.ENFORCE,
            )
        may_be_held = request.has_form or bool(request.tools)
        if may_be_held and self.settings.schemas is SchemaUse.ENFORCE:  # reading may take seconds
            grammar = await asyncio.to_thread(self._grammar, request, thinking=prompt.thinking)
        return CallPlace(
            request=request, parent=parent, prompt=prompt, cut=cut, keys=keys, grammar=grammar
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

    def _check_held(self, request: ChatRequest) -> None:
        """Raises DataError if the request wants to be held to what answers are not held to here."""
        use = self.settings.schemas
        if use is SchemaUse.ENFORCE or (use is SchemaUse.IGNORE and not request.must_hold):
            return
        if request.has_form:
            raise DataError(
                "answers are not held to JSON schemas here",
                where=request.schema_field,
                fix="leave it out; a training run takes it with task.agent_args.schema=enforce",
            )
        if request.allowed_tools:
            raise DataError(
                "answers are not held to some of the tools here",
                where="tool_choice",
                fix="offer only these as tools; or run with task.agent_args.schema=enforce",
            )

    def _prompt(
        self,
        request: ChatRequest,
        found: tuple[AnswerNode, int] | None,
        args: Mapping[str, Any],
    ) -> tuple[AnswerNode | None, RenderedChat]:
        """Renders what is new behind the answer that was found, if the request continues it."""
        renderer, continues = self.settings.renderer, request.continues
        if found is not None:
            node, answered = found
            is_cut = answered == len(request.messages) and (
                node.was_left or not node.answer.stopped
            )
            if continues and is_cut and node.message.content == request.messages[-1].content:
                return node, RenderedChat(tokens=(), thinking=self._is_thinking(node))
            if answered < len(request.messages):
                messages = _with_thoughts(request.messages, node)
                rendered = renderer.behind(
                    messages,
                    answered,
                    request.tools,
                    prompt=node.prompt,
                    sampled=node.answer.tokens,
                    args=args,
                    continues=continues,
                )
                if rendered is not None:
                    return node, rendered
        whole = renderer.whole(request.messages, request.tools, args=args, continues=continues)
        return None, whole

    def _is_thinking(self, node: AnswerNode) -> bool:
        """Returns whether an answer that was cut ends within its thoughts."""
        message = node.message
        is_open = bool(message.reasoning) and not message.content and not message.tool_calls
        return is_open and THINK[1] not in self._text(node.answer.tokens)

    def _grammar(self, request: ChatRequest, *, thinking: bool) -> str:
        """Returns what the reply is held to; raises DataError if that can't be."""
        where = request.schema_field if request.has_form else "tools"
        try:
            grammar = reply_grammar(
                request,
                self._form_of(request),
                thinking=thinking,
                template="" if request.prompts else self.settings.renderer.template,
                special=self.settings.special,
            )
            fault = grammar_fault(grammar) if grammar else ""
        except ConfigError as error:  # here it is the request that asks for what is missing
            raise DataError(error.what, where=where, fix=error.fix) from error
        except RecursionError:
            raise DataError(
                "the schema is nested too deeply", where=where, fix="send a flatter one"
            ) from None
        if fault:
            raise DataError(
                f"the schema can't be used: {fault}",
                where=where,
                fix="leave out what is named, or all of the schema",
            )
        return grammar

    async def _one(
        self,
        context: Sequence[int],
        request: ChatRequest,
        thinking: bool,
        grammar: str,
        place: tuple[int, int],
        work: PendingCall,
    ) -> tuple[Answer | None, ChatReply]:
        """Samples a reply, or the rest of one that was left. Returns what was sampled, None if nothing was
        left to sample, and the whole reply.
        """
        growing_reply = work.replies[place[1]]
        prefix = growing_reply.prefix_answer()
        has_tools = bool(request.tools) and request.tool_choice is not ToolChoice.NONE
        form, growing = self._form_of(request), GrowingAnswer()
        growing_text: GrowingText | None = None

        def text_of(tokens: Sequence[int]) -> str:
            return (
                text_behind(self._text, context, tokens)
                if request.continues or request.prompts
                else self._text(tokens)
            )

        def sure(text: str) -> str:
            kept = before_stops(text, request.stop)
            return form.safe_prefix(kept, thinking=thinking, tools=has_tools)

        def on_tokens(tokens: Sequence[int]) -> None:
            growing_reply.sampled = tokens if isinstance(tokens, AnswerSoFar) else None
            if not growing.is_due(len(tokens)):
                return
            nonlocal growing_text
            if growing_text is None:
                before = last_of(context) if request.continues else ()
                growing_text = GrowingText(self.settings.decode, whole=text_of, before=before)
            grown = (*prefix.tokens, *tokens) if prefix.tokens else tokens
            text = growing_text.of(self._without_end(grown))
            if not text.endswith(HALF_LETTER):
                work.publish(place[1], sure(text), len(prefix.tokens) + len(tokens))

        growing_reply.sure = lambda tokens: sure(text_of(tokens))
        growing_reply.thoughts = lambda tokens: (
            form.parse(text_of(tokens), thinking=thinking, tools=has_tools).reasoning
        )
        answer = prefix
        if not self._is_whole(prefix, request):
            with self._noted_request():
                answer = await self.policy.sample(
                    [*context, *prefix.tokens],
                    limit=request.max_tokens,
                    stop=request.stop,
                    sampling=request.sampling,
                    on_tokens=on_tokens if work.is_streamed else None,
                    grammar=grammar,
                    **({"answer_prefix": len(prefix.tokens)} if prefix.tokens else {}),
                )
            answer = prefix.joined(answer)
        if answer.is_none:
            raise context_full(
                len(context),
                num_answer=request.max_tokens,
                context_length=answer.context_length,
                what="prompt" if request.prompts else "conversation",
                where="prompt" if request.prompts else "messages",
            )
        count, stop_text = cut_at_stop(answer.tokens, request.stop, self._text)
        answer = replace(answer.part(0, count), stopped=bool(stop_text) or answer.stopped)
        rest = answer.part(len(prefix.tokens), count)
        growing_reply.sampled = AnswerSoFar.of(rest)
        text = text_of(answer.tokens)
        if stop_text:
            text = text[: text.find(stop_text)]
        parsed = await read_answer(
            form, text, thinking=thinking, tools=has_tools, schemas=_schemas(request)
        )
        self._num_unread_calls += len(parsed.faults)
        calls = tuple(
            ToolCall(id=self._tool_call_id(*place, i), name=c.name, arguments=c.arguments)
            for i, c in enumerate(parsed.calls)
        )
        message = ChatMessage(
            role="assistant", content=parsed.content, reasoning=parsed.reasoning, tool_calls=calls
        )
        finish = FinishReason.STOP if answer.stopped else FinishReason.LENGTH
        if calls and answer.stopped:
            finish = FinishReason.TOOL_CALLS
        return rest if rest.tokens or not prefix.tokens else None, ChatReply(
            message=message,
            finish=finish,
            stop_text=stop_text,
            logprobs=self._logprobs(answer) if request.logprobs else (),
            num_tokens=len(answer.tokens),
            token_ids=answer.tokens if request.token_ids else (),
            prompt_ids=tuple(context) if request.token_ids else (),
        )

    def _is_whole(self, prefix: Answer, request: ChatRequest) -> bool:
        """Whether nothing may follow on what a client had got of a reply."""
        _, stop_text = cut_at_stop(prefix.tokens, request.stop, self._text)
        limit = request.max_tokens
        return bool(stop_text) or (limit is not None and len(prefix.tokens) >= limit)

    def _form_of(self, request: ChatRequest) -> AnswerForm:
        """Returns how replies are read: those to prompts are texts and nothing else."""
        return ANSWER_FORMS["plain"] if request.prompts else self.settings.form

    def _tool_call_id(self, *place: int) -> str:
        """Returns an id of nine letters and digits, as some templates want them."""
        text = "/".join((self.id, *map(str, place)))
        return hashlib.blake2b(text.encode()).hexdigest()[:9]

    def _text(self, tokens: Sequence[int]) -> str:
        """Decodes an answer with special tokens, without the token that ended it."""
        return self.settings.decode(self._without_end(tokens))

    def _without_end(self, tokens: Sequence[int]) -> Sequence[int]:
        ended = bool(tokens) and tokens[-1] in self.settings.end_ids
        return tokens[:-1] if ended else tokens

    def _logprobs(self, answer: Answer) -> tuple[TokenLogprob, ...]:
        return tuple(
            TokenLogprob(text=self.settings.decode([token]), logprob=logprob)
            for token, logprob in zip(answer.tokens, answer.logprobs, strict=True)
        )


def _schemas(request: ChatRequest) -> dict[str, Any]:
    """Returns the schemas of the tools' arguments by the tools' names."""
    functions = [tool.get("function", {}) for tool in request.tools]
    return {f["name"]: f.get("parameters") or {} for f in functions if "name" in f}


def _with_thoughts(messages: Sequence[ChatMessage], node: AnswerNode) -> list[ChatMessage]:
    """Gives the continued answers their thoughts, which most clients don't send back."""
    made = list(messages)
    for answered in node.line:
        place = answered.num_messages - 1
        made[place] = replace(made[place], reasoning=answered.message.reasoning)
    return made


def _cut_answer(request: ChatRequest, parent: AnswerNode | None) -> AnswerNode | None:
    """Returns the answer of the policy with which the request goes on; None: it is not the policy's."""
    is_cut = parent is not None and parent.num_messages == len(request.messages)
    return parent if request.continues and is_cut else None
