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

from realsys.api.agent import Answer, Trajectory
from realsys.api.basics.thoughts import THINK
from realsys.api.errors import ConfigError, DataError, TrialError
from realsys.generation.engine.token_grammar import grammar_fault
from realsys.rollout.conversation.answer_forms import AnswerForm
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
)
from realsys.rollout.conversation.chat_rendering import ChatRenderer, RenderedChat, request_args
from realsys.rollout.conversation.continued_answer import (
    check_continued,
    last_of,
    text_behind,
    with_reply,
)
from realsys.rollout.conversation.growing_answer import HALF_LETTER, GrowingAnswer, GrowingText
from realsys.rollout.conversation.large_texts import beside_loop, size_of
from realsys.rollout.conversation.message_matching import MessageMatch, key_behind, path_keys
from realsys.rollout.conversation.reply_grammar import reply_grammar
from realsys.rollout.conversation.stop_cut import before_stops, cut_at_stop
from realsys.runtime.first_error import first_error

OnTokens = Callable[[Sequence[int]], None]


class ContextFull(DataError):
    """The conversation fills the model's context: nothing can be sampled behind it."""


class SessionOver(TrialError):
    """The session has ended, so it answers no requests any more."""


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
    ) -> Answer:
        """Samples an answer to ``tokens``.

        Args:
            limit: most tokens; None: as many as the run allows.
            stop: texts at which sampling may end early; the session cuts there in any case.
            sampling: the client's wishes; a training run samples by its own settings.
            on_tokens: called with all tokens of the answer so far, whenever there are more.
            grammar: what the answer must be, see reply_grammar.py; empty: anything.
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
        decode: tokens → text with special tokens.
        end_ids: tokens that end an answer, not part of its text.
        max_calls: requests of one episode, above which it fails: an agent in a loop.
        special: special tokens of the tokenizer, their ids by text; for schemas that are enforced.
    """

    renderer: ChatRenderer
    form: AnswerForm
    decode: Callable[[Sequence[int]], str]
    end_ids: frozenset[int]
    model: str = "policy"
    match: MessageMatch = MessageMatch.TOOLS
    max_calls: int = 1000
    schemas: SchemaUse = SchemaUse.REFUSE
    special: Mapping[str, int] = field(default_factory=dict)


@dataclass(eq=False, kw_only=True)
class _Work:
    """A call that is being answered, for everybody who waits for it."""

    task: asyncio.Task[ChatResult]
    nodes: list[AnswerNode]


@dataclass(frozen=True, kw_only=True)
class LiveReply:
    """A call whose answer is on its way. ``result`` waits for it; it ends although the client leaves."""

    id: str
    created: int
    _task: asyncio.Task[ChatResult]
    _read: list[bool]

    async def result(self) -> ChatResult:
        """Waits for the answer.

        Raises:
            Whatever the policy raised; SessionOver: the session ended before.
        """
        try:
            return await asyncio.shield(self._task)
        except asyncio.CancelledError:
            if self._task.cancelled():
                raise _over() from None
            raise

    def read(self) -> None:
        """Notes that the client got the whole reply."""
        self._read.append(True)


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
    _book: CallBook[_Work] = field(default_factory=CallBook)
    _num_starts: int = 0
    _asked: list[float] = field(default_factory=list)  # when, of answers that are on their way

    @asynccontextmanager
    async def call(
        self, request: ChatRequest, *, on_text: Callable[[int, str], None] | None = None
    ) -> AsyncIterator[LiveReply]:
        """Answers a request, or gives the answer that it got before, while the block runs.

        Args:
            on_text: called with a reply's number and its content so far, as far as it is sure.
        Raises:
            SessionOver: the episode has ended. DataError: the request can't be answered.
        """
        if self.is_over:
            raise _over()
        call, is_new = self._book.claim(request)
        if self.on_first_call is not None:
            self.on_first_call()
        if is_new:
            self._start(call, request, on_text)
        assert call.work is not None
        task = call.work.task
        read: list[bool] = []
        live = LiveReply(
            id=self._call_id(call),
            created=int(time.time()),
            _task=task,
            _read=read,
        )
        try:
            yield live
        finally:
            self._book.left(call, read=bool(read))
            if read:
                for node in call.work.nodes:
                    node.delivered = True

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
        of_call = {self._call_id(c): c.work.nodes for c in self._book.calls if c.work is not None}
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
        tasks = [c.work.task for c in self._book.calls if c.work is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def restart(self) -> None:
        """Begins the episode anew: what was answered is forgotten, and new answers have other ids."""
        await self.close()
        self._num_starts += 1
        self.tree, self._book = AnswerTree(), CallBook()
        self.reward, self.is_over = None, False

    def last_node(self) -> AnswerNode | None:
        """Returns the newest answer that the client has got."""
        return next((n for n in reversed(self.tree.nodes) if n.delivered), None)

    def sequences(self, *, reward: float) -> list[Trajectory]:
        """Returns what is trained on: one sequence a branch, each with its reward."""
        return sequences(self.tree, reward=reward)

    def figures(self) -> dict[str, float]:
        """Returns numbers for the metrics."""
        return {
            "calls": float(len(self.tree.nodes)),
            "branches": float(len(self.tree.leaves())),
            "unread_answers": float(self.tree.num_unread()),
        }

    # ---- one call --------------------------------------------------------------------------------

    def _call_id(self, call: ChatCall[_Work]) -> str:
        start = f".{self._num_starts}" if self._num_starts else ""
        return f"chatcmpl-{self.id}{start}-{call.number}"

    def _start(
        self,
        call: ChatCall[_Work],
        request: ChatRequest,
        on_text: Callable[[int, str], None] | None,
    ) -> None:
        nodes: list[AnswerNode] = []
        answering = self._answer(call, request, nodes, on_text)
        task = asyncio.create_task(answering, name=self._call_id(call))
        # Nobody may be there to read its error
        task.add_done_callback(lambda t: t.cancelled() or t.exception())
        call.work = _Work(task=task, nodes=nodes)

    async def _answer(
        self,
        call: ChatCall[_Work],
        request: ChatRequest,
        nodes: list[AnswerNode],
        on_text: Callable[[int, str], None] | None,
    ) -> ChatResult:
        try:
            result = await self._sampled(call, request, nodes, on_text)
        except BaseException:
            call.state = CallState.FAILED
            raise
        call.state = CallState.ANSWERED
        return result

    async def _sampled(
        self,
        call: ChatCall[_Work],
        request: ChatRequest,
        nodes: list[AnswerNode],
        on_text: Callable[[int, str], None] | None,
    ) -> ChatResult:
        if call.number >= self.settings.max_calls:
            raise DataError(
                f"the episode has made {self.settings.max_calls} requests",
                where=f"session {self.id}",
                fix="see why the agent does not end, or raise agent_args.max_calls",
            )
        if request.schema is not None and self.settings.schemas is SchemaUse.REFUSE:
            raise DataError(
                "answers are not held to JSON schemas here",
                where=request.schema_field,
                fix="leave it out; a training run takes it with task.agent_args.schema=enforce",
            )
        args = request_args(request, self.settings.renderer)
        size = size_of(request)
        keys = await beside_loop(
            lambda: path_keys(request.messages, request.tools, self.settings.match, args), size=size
        )
        found = self.tree.longest(keys, request.messages)
        parent, prompt = await beside_loop(lambda: self._prompt(request, found, args), size=size)
        grammar, cut = "", _cut_answer(request, parent)
        if request.continues:
            written = "" if cut is None else self._text(cut.answer.tokens)
            check_continued(
                request,
                request.messages[-1].content + written,
                self.settings.form,
                is_held=self.settings.schemas is SchemaUse.ENFORCE,
            )
        may_be_held = request.schema is not None or bool(request.tools)
        if may_be_held and self.settings.schemas is SchemaUse.ENFORCE:  # reading may take seconds
            grammar = await asyncio.to_thread(self._grammar, request, thinking=prompt.thinking)
        context = [*(parent.tokens if parent is not None else ()), *prompt.tokens]
        async with first_error(), asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(
                    self._one(
                        context, request, prompt.thinking, grammar, (call.number, number), on_text
                    ),
                    name=f"{self._call_id(call)}/{number}",
                )
                for number in range(request.n)
            ]
        replies = []
        for number, (answer, reply) in enumerate(task.result() for task in tasks):
            messages = with_reply(request, reply.message, None if cut is None else cut.message)
            node = AnswerNode(
                id=self._call_id(call) + (f"-{number}" if request.n > 1 else ""),
                parent=parent,
                observed=prompt.tokens,
                answer=answer,
                message=messages[-1],
                num_messages=len(messages),
            )
            before = keys[len(messages) - 1]
            self.tree.add(node, key_behind(before, messages[-1], self.settings.match))
            nodes.append(node)
            replies.append(reply)
        return ChatResult(
            id=self._call_id(call),
            created=int(time.time()),
            model=self.model_of(request),
            replies=tuple(replies),
            num_prompt_tokens=len(context),
            num_cached=len(context) - len(prompt.tokens),
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
            is_cut = answered == len(request.messages) and not node.answer.stopped
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
        where = "tools" if request.schema is None else request.schema_field
        try:
            grammar = reply_grammar(
                request,
                self.settings.form,
                thinking=thinking,
                template=self.settings.renderer.template,
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
        on_text: Callable[[int, str], None] | None,
    ) -> tuple[Answer, ChatReply]:
        has_tools = bool(request.tools) and request.tool_choice is not ToolChoice.NONE
        form, growing = self.settings.form, GrowingAnswer()
        growing_text: GrowingText | None = None

        def text_of(tokens: Sequence[int]) -> str:
            return (
                text_behind(self._text, context, tokens)
                if request.continues
                else self._text(tokens)
            )

        def on_tokens(tokens: Sequence[int]) -> None:
            if on_text is None or not growing.is_due(len(tokens)):
                return
            nonlocal growing_text
            if growing_text is None:
                before = last_of(context) if request.continues else ()
                growing_text = GrowingText(self.settings.decode, whole=text_of, before=before)
            text = growing_text.of(self._without_end(tokens))
            if not text.endswith(HALF_LETTER):
                kept = before_stops(text, request.stop)
                on_text(place[1], form.safe_prefix(kept, thinking=thinking, tools=has_tools))

        with self._noted_request():
            answer = await self.policy.sample(
                context,
                limit=request.max_tokens,
                stop=request.stop,
                sampling=request.sampling,
                on_tokens=on_tokens if on_text is not None else None,
                grammar=grammar,
            )
        if answer.is_none:
            raise ContextFull(
                f"the conversation of {len(context)} tokens fills the model's context length",
                where="messages",
                fix="send a shorter conversation",
            )
        count, stop_text = cut_at_stop(answer.tokens, request.stop, self._text)
        answer = _kept(answer, count, stopped=bool(stop_text) or answer.stopped)
        text = text_of(answer.tokens)
        if stop_text:
            text = text[: text.find(stop_text)]
        parsed = form.parse(text, thinking=thinking, tools=has_tools, schemas=_schemas(request))
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
        return answer, ChatReply(
            message=message,
            finish=finish,
            stop_text=stop_text,
            logprobs=self._logprobs(answer) if request.logprobs else (),
            num_tokens=len(answer.tokens),
        )

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


def _kept(answer: Answer, count: int, *, stopped: bool) -> Answer:
    return replace(
        answer,
        tokens=answer.tokens[:count],
        logprobs=answer.logprobs[:count],
        versions=answer.versions[:count],
        kept=answer.kept[:count],
        stopped=stopped,
    )


def _schemas(request: ChatRequest) -> dict[str, Any]:
    """Returns the schemas of the tools' arguments by the tools' names."""
    functions = [tool.get("function", {}) for tool in request.tools]
    return {f["name"]: f.get("parameters", {}) for f in functions if "name" in f}


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


def _over() -> SessionOver:
    return SessionOver(
        "the session has ended", where="session", fix="start a new one: POST /rl/start_session"
    )
