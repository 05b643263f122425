"""A client that does to its history whatever clients do, and a checker of what is trained on at the end.

The client knows an answer by the log-probs that came with it, so that the checker needs nothing of the
session but its sequences: each token in them must be one of the policy's log, where the log has it.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from chat_families import ChatFamily
from simulated_policy import SampledTokens, SamplingNoise, SimulatedPolicy

from realsys.api.agent import Trajectory
from realsys.api.errors import DataError, RemoteError
from realsys.rollout.conversation.chat_messages import (
    ChatMessage,
    ChatRequest,
    ChatResult,
)
from realsys.rollout.conversation.chat_rendering import TemplateRenderer
from realsys.rollout.conversation.episode_session import EpisodeSession
from realsys.rollout.conversation.form_choice import choose_form
from realsys.rollout.conversation.message_matching import MessageMatch
from realsys.rollout.conversation.renderer_choice import TEMPLATE, make_renderer
from realsys.rollout.conversation.session_settings import SessionSettings

NOISES = {
    "canonical tokens": SamplingNoise(),
    "some split": SamplingNoise(splits=0.05),
    "any tokens": SamplingNoise(splits=0.2, any_token=0.05),
}
TOOLS = tuple(
    {"type": "function", "function": {"name": name, "description": "find", "parameters": {}}}
    for name in ("search", "open")
)
USER_TEXTS = (
    *(
        "",
        "what is it?",
        "<|im_end|>",
        "<think>",
        "</think>",
        "[INST]",
        "<eos>",
        "日本語 😀",
        "e\u0301",
    ),
    *(
        "<tool_call>{}</tool_call>",
        "answer-0-stands-here",
        "  spaces  ",
        "\n",
        "</s>",
        "<|eot_id|>",
    ),
    *(
        '{"a": 1}',
        "<｜end▁of▁sentence｜>",
        "realsys-answer-stands-here",
        "answer-1-stands-here",
        "STOP",
    ),
)
STOPS = ("STOP", "END", "\n\n", " is", "swer", "語", "}", "</tool_call>", "\ufffd")


def session_of(
    family: ChatFamily,
    policy: SimulatedPolicy,
    *,
    match: MessageMatch = MessageMatch.TOOLS,
    keep_thoughts: bool = True,
    renderer: str = TEMPLATE,
    template: str | None = None,
    template_args: Mapping[str, Any] | None = None,
) -> EpisodeSession:
    """Makes a session over a family's tokenizer, and its template or another one, or another renderer."""
    settings = _settings(
        family,
        match,
        keep_thoughts=keep_thoughts,
        renderer=renderer,
        template=template,
        template_args=template_args,
    )
    return EpisodeSession(id="e", policy=policy, settings=settings)


_MADE: dict[tuple[Any, ...], SessionSettings] = {}


def _settings(
    family: ChatFamily,
    match: MessageMatch,
    *,
    keep_thoughts: bool,
    renderer: str,
    template: str | None,
    template_args: Mapping[str, Any] | None,
) -> SessionSettings:
    place = (family, match.value, keep_thoughts, renderer, template, str(template_args))
    if place not in _MADE:
        tokenizer = family.tokenizer
        _MADE[place] = SessionSettings(
            renderer=make_renderer(
                renderer,
                tokenizer,
                end_ids=family.end_ids,
                template=template,
                template_args=template_args,
                keep_thoughts=keep_thoughts,
            ),
            form=choose_form("", tokenizer, renderer=renderer, template=family.template),
            decode=lambda tokens: str(tokenizer.decode(list(tokens))),
            encode=lambda text: list(tokenizer.encode(text)),
            num_ids=len(tokenizer),
            end_ids=family.end_ids,
            match=match,
        )
    return _MADE[place]


@dataclass(frozen=True)
class Talk:
    """A conversation as the client has it."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[dict[str, Any], ...] = ()


@dataclass(eq=False)
class FuzzedHistory:
    """One episode of a client with habits drawn from ``seed``. ``problems`` is empty if the claim holds."""

    family: ChatFamily
    seed: int
    renderer: str = TEMPLATE
    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = rng = random.Random(f"{self.family.name} {self.seed}")
        self.noise = rng.choice(list(NOISES))
        self.policy = SimulatedPolicy(
            family=self.family,
            rng=rng,
            noise=NOISES[self.noise],
            context_length=rng.choice((400, 1500, 4000)),
            fails=rng.choice((0.0, 0.0, 0.1)),
            with_kept=rng.random() < 0.2,
        )
        self.session = session_of(
            self.family,
            self.policy,
            match=rng.choice((MessageMatch.TOOLS, MessageMatch.TOOLS, *MessageMatch)),
            keep_thoughts=rng.random() < 0.7,
            renderer=self.renderer,
        )
        self.keeps_thoughts = rng.random() < 0.3
        self._read: dict[int, int] = {}  # by the number of the log's entry, how many of its tokens
        self._seen: dict[int, int] = {}  # and the server does not know
        self._missed: dict[int, tuple[tuple[ChatMessage, ...], str]] = {}
        self._middle: set[str] = set()  # ids of answers that were left in the middle
        self._sent: set[str] = set()  # what it has sent as the policy's
        self._rewards: dict[int, float] = {}
        self._conversation: dict[int, Talk] = {}  # that ends with the answer
        self._told = 0

    async def run(self) -> None:
        """Plays it and checks what came of it."""
        talks = [self._opening()]
        for _ in range(self.rng.randrange(1, 6)):
            self.counts["steps"] += 1
            talk = self.rng.choice(talks[-3:])
            new = await self.rng.choice(_ACTIONS)(self, talk)
            talks += new
        await self.session.close()
        sequences = self.session.sequences(reward=0.25)
        self._check(sequences)
        if not self.problems and self.renderer == TEMPLATE:
            self._count_naive(sequences)

    # ---- what the client does --------------------------------------------------------------------

    async def _go_on(self, talk: Talk) -> list[Talk]:
        return self._answered(talk, await self._ask(self._request(talk)))

    async def _several(self, talk: Talk) -> list[Talk]:
        return self._answered(talk, await self._ask(self._request(talk, n=self.rng.choice((2, 3)))))

    async def _edit(self, talk: Talk) -> list[Talk]:
        messages = list(talk.messages)
        place = self.rng.randrange(len(messages))
        messages[place] = replace(messages[place], content=self._text())
        keep = self.rng.choice((place + 1, len(messages)))
        return await self._go_on(self._ending_with_a_question(messages[:keep], talk.tools))

    async def _shorten(self, talk: Talk) -> list[Talk]:
        """Goes on with the beginning of an answer, as a client that reads no further."""
        answers = [i for i, m in enumerate(talk.messages) if m.role == "assistant" and m.content]
        if not answers:
            return await self._go_on(talk)
        place = self.rng.choice(answers)
        whole = talk.messages[place].content
        part = ChatMessage(role="assistant", content=whole[: self.rng.randrange(1, len(whole) + 1)])
        num_parts = sum(node.is_rest for node in self.session.tree.nodes)
        made = await self._go_on(
            self._ending_with_a_question([*talk.messages[:place], part], talk.tools)
        )
        more = sum(node.is_rest for node in self.session.tree.nodes) - num_parts
        self.counts["gone on with a part"] += more
        return made

    async def _forget(self, talk: Talk) -> list[Talk]:
        """Cuts the oldest turns behind the system text, as agents with a small window do."""
        head = talk.messages[:1] if talk.messages[0].role == "system" else ()
        rest = talk.messages[len(head) :]
        cut = self.rng.randrange(len(rest))
        return await self._go_on(self._ending_with_a_question([*head, *rest[cut:]], talk.tools))

    async def _go_back(self, talk: Talk) -> list[Talk]:
        keep = self.rng.randrange(1, len(talk.messages) + 1)
        return await self._go_on(self._ending_with_a_question(talk.messages[:keep], talk.tools))

    async def _other_system(self, talk: Talk) -> list[Talk]:
        rest = [m for m in talk.messages if m.role != "system"]
        system = ChatMessage(role="system", content=self._text())
        return await self._go_on(Talk((system, *rest), talk.tools))

    async def _other_tools(self, talk: Talk) -> list[Talk]:
        return await self._go_on(replace(talk, tools=self.rng.choice(((), TOOLS[:1], TOOLS))))

    async def _strip_thoughts(self, talk: Talk) -> list[Talk]:
        bare = tuple(replace(m, reasoning="", content=m.content.strip()) for m in talk.messages)
        return await self._go_on(replace(talk, messages=bare))

    async def _ends_with_an_answer(self, talk: Talk) -> list[Talk]:
        said = ChatMessage(role="assistant", content=self._text())
        return await self._go_on(replace(talk, messages=(*talk.messages, said)))

    async def _prefill(self, talk: Talk) -> list[Talk]:
        """Has the last message go on: an answer of the policy's, or one that the client has begun."""
        rng = self.rng
        known = [t for t in self._conversation.values() if not t.messages[-1].tool_calls]
        own = ChatMessage(role="assistant", content=self._text() or "So")
        base = replace(talk, messages=(*talk.messages, own))
        if known and rng.random() < 0.6:
            base = rng.choice(known)
        result = await self._ask(replace(self._request(base), continues=True))
        self.counts["last message"] += result is not None
        made = []
        for reply in result.replies if result else ():
            sent = _behind(base.messages, self._as_sent_back(reply.message))[-1]
            whole = (*base.messages[:-1], sent)
            for token in reply.logprobs:
                self._conversation[self._entry(token.logprob).number] = Talk(whole, base.tools)
            made.append(Talk((*whole, *self._reaction(sent)), base.tools))
        return made

    async def _leave_and_retry(self, talk: Talk) -> list[Talk]:
        """Disconnects before the answer, or before its last byte, and asks again until it has it."""
        rng = self.rng
        key = rng.choice(("", "", f"key-{self._told}"))
        request = self._request(talk, key=key)
        left = await self._ask(request, leave=rng.choice(("early", "late")))
        if rng.random() < 0.2:
            return []
        asked = self.policy.asked
        again = replace(request, retries=rng.choice((0, 1)))
        result = await self._ask(again)
        if left and result and self._numbers(left) != self._numbers(result):
            self.problems.append("a retry got another answer than the one it had missed")
        if left and self.policy.asked != asked:
            self.problems.append("a retry was sampled again")
        if result and rng.random() < 0.3:
            third = await self._ask(replace(request, retries=2))
            if third and self._numbers(third) != self._numbers(result):
                self.problems.append("a second retry got another answer")
        return self._answered(talk, result)

    async def _half_read(self, talk: Talk) -> list[Talk]:
        """Reads all of the text, breaks off before the last byte, and goes on with what it has read."""
        return self._answered(talk, await self._ask(self._request(talk), leave="late", uses=True))

    async def _leave_in_the_middle(self, talk: Talk) -> list[Talk]:
        """Leaves a stream of which something was written, and goes on with that, or asks again."""
        rng, texts, written = self.rng, dict[int, str](), dict[int, str]()
        request = self._request(talk, n=rng.choice((1, 1, 2)))
        self.counts["requests"] += 1
        try:
            async with self.session.call(request, on_text=texts.__setitem__) as live:
                result = asyncio.ensure_future(live.result())
                for _ in range(rng.randrange(1, 30)):
                    await asyncio.sleep(0)
                    if result.done() and rng.random() < 0.5:
                        break
                    for index, text in texts.items():
                        if text and rng.random() < 0.4:
                            live.wrote(index, text)
                            written[index] = text
                result.cancel()
                await asyncio.gather(result, return_exceptions=True)
        except DataError:
            return []
        task = live.work.running
        has_failed = task.done() and not task.cancelled() and task.exception() is not None
        if has_failed or not written:
            return []
        self.counts["left midway"] += 1
        was_left_before, self._middle = live.id in self._middle, {*self._middle, live.id}
        made = [t for i, text in written.items() for t in await self._left(talk, live.id, i, text)]
        if rng.random() < 0.5:
            return made
        asked = await self._ask(replace(request, retries=rng.choice((0, 1))))
        for index, reply in enumerate(asked.replies if asked else ()):
            goes_on = reply.message.content.startswith(written.get(index, ""))
            assert asked is not None
            # Who has left the same answer twice may get another one
            if not goes_on and not (was_left_before and asked.id != live.id):
                self.problems.append("who came again got another answer than the part that it had")
        return self._answered(talk, asked)

    async def _left(self, talk: Talk, id: str, index: int, text: str) -> list[Talk]:
        """Notes what of a reply must be trained on; returns the conversation with it."""
        ids = (id, f"{id}-{index}")
        nodes = [n for n in self.session.tree.nodes if n.id in ids]
        found = [n for n in nodes if n.was_left and n.message.content == text]
        if not found:  # another client has got all of it, or has gone on with it
            if not any(n.message.content.startswith(text) for n in nodes):
                self.problems.append(f"{text!r} was written, and is no answer")
            return []
        node, sent = found[-1], ChatMessage(role="assistant", content=text)
        while not any(
            e.logprobs[0] >= node.answer.logprobs[0] >= e.logprobs[-1] for e in self.policy.log
        ):
            await asyncio.sleep(0)  # it is logged when it has been given up
        entry = self._entry(node.answer.logprobs[0])
        self._read[entry.number] = len(node.answer.tokens)
        whole = [t for n in node.line if n.id in ids for t in n.answer.tokens]
        if text[-3:] not in str(
            self.family.tokenizer.decode(whole)
        ):  # marks before it are left out
            self.problems.append(f"{text!r} was written, and is not in the tokens of it")
        self._conversation[entry.number] = Talk((*talk.messages, sent), talk.tools)
        return [Talk((*talk.messages, sent, *self._reaction(sent)), talk.tools)]

    async def _at_once(self, talk: Talk) -> list[Talk]:
        """Sends the same request several times at the same time: each is a sample of its own."""
        request = self._request(talk)
        results = await asyncio.gather(*(self._ask(request) for _ in range(2)))
        numbers = [n for r in results if r for n in self._numbers(r)]
        if len(set(numbers)) != len(numbers):
            self.problems.append("two requests at the same time got one answer")
        return [t for r in results for t in self._answered(talk, r)]

    async def _branches_at_once(self, talk: Talk) -> list[Talk]:
        talks = [
            self._ending_with_a_question(talk.messages[: self.rng.randrange(1, 9)], talk.tools)
            for _ in range(2)
        ]
        return [t for new in await asyncio.gather(*map(self._go_on, talks)) for t in new]

    async def _reward(self, talk: Talk) -> list[Talk]:
        nodes = [n for n in self.session.tree.nodes if n.delivered]
        if nodes:
            id_ = self.rng.choice(nodes).id
            reward = 10.0 + self._told
            self._told += 1
            self.session.set_reward(reward, call_id=id_)
            for node in self.session.tree.nodes:
                if node.id == id_ and node.delivered:
                    self._rewards[self._entry(node.answer.logprobs[0]).number] = reward
        return await self._go_on(talk)

    # ---- asking ----------------------------------------------------------------------------------

    def _request(self, talk: Talk, *, n: int = 1, key: str = "") -> ChatRequest:
        rng = self.rng
        return ChatRequest(
            messages=talk.messages,
            tools=talk.tools,
            n=n,
            max_tokens=rng.choice((None, None, None, 1, 4, 12)),
            stop=tuple(rng.sample(STOPS, rng.choice((0, 0, 0, 1, 2)))),
            logprobs=True,
            idempotency_key=key,
            template_args=self._template_args(),
        )

    def _template_args(self) -> dict[str, Any]:
        """Now and then other arguments of the template than the run's, where it reads them."""
        reads = self.session.settings.renderer.reads("enable_thinking")
        if not reads or self.rng.random() < 0.7:
            return {}
        self.counts["template arguments"] += 1
        return {"enable_thinking": self.rng.random() < 0.5}

    async def _ask(
        self, request: ChatRequest, *, leave: str = "", uses: bool = False
    ) -> ChatResult | None:
        """Returns the answer; None if the client has left before, or got an error."""
        texts: dict[int, str] = {}

        def on_text(index: int, text: str) -> None:
            if not text.startswith(texts.get(index, "")):
                self.problems.append(f"text {texts[index]!r} was taken back: {text!r}")
            texts[index] = text

        self.counts["requests"] += 1
        self._sent |= {m.content.strip() for m in request.messages if m.role == "assistant"}
        num_logged = len(self.policy.log)
        try:
            async with self.session.call(request, on_text=on_text) as live:
                if leave == "early":
                    for _ in range(self.rng.randrange(3)):
                        await asyncio.sleep(0)
                    return None
                result = await live.result()
                if not leave:
                    live.read()
        except DataError:
            self.counts["refused"] += 1
            return None
        except RemoteError:
            self.counts["failed"] += 1
            return None
        for i, reply in enumerate(result.replies):
            if not reply.message.content.startswith(texts.get(i, "")):
                self.problems.append(f"streamed {texts[i]!r}, whole {reply.message.content!r}")
            if reply.stop_text and reply.stop_text in reply.message.content:
                self.problems.append("the stop text is in the answer")
            entry = self._entry(reply.logprobs[0].logprob)
            if entry.number >= num_logged:
                self._check_context(entry, request)
            sent = self._as_sent_back(reply.message)
            whole = (*request.messages, sent)
            if request.continues:
                whole = _behind(request.messages, sent)
            parts = Counter(self._entry(token.logprob).number for token in reply.logprobs)
            for number, count in parts.items():  # several, if its client had left it before
                self._missed[number] = (request.messages, reply.message.content)
                if not leave or uses:
                    (self._seen if leave else self._read)[number] = count
                    self._conversation[number] = Talk(whole, request.tools)
        return result

    def _numbers(self, result: ChatResult) -> list[int]:
        return [self._entry(r.logprobs[0].logprob).number for r in result.replies]

    def _entry(self, logprob: float) -> SampledTokens:
        return next(e for e in self.policy.log if e.logprobs[0] >= logprob >= e.logprobs[-1])

    def _check_context(self, entry: SampledTokens, request: ChatRequest) -> None:
        """What others said since the last answer, and all before it, was shown to the policy, in order."""
        text, at = str(self.family.tokenizer.decode(list(entry.context))), 0
        for message in request.messages:
            if message.role not in ("user", "tool") or not message.content.strip():
                continue
            plain = message.content.strip()
            escaped = json.dumps(message.content, ensure_ascii=False)[1:-1].strip()
            found = [p for p in (text.find(plain, at), text.find(escaped, at)) if p >= 0]
            if not found:
                self.problems.append(f"the policy was not shown {plain!r}: {text!r}")
                return
            at = min(found)

    # ---- what it makes of an answer --------------------------------------------------------------

    def _answered(self, talk: Talk, result: ChatResult | None) -> list[Talk]:
        """Returns the conversation with the answer and what the client says to it, for some of several."""
        made = []
        for reply in result.replies if result else ():
            if self.rng.random() < 0.25 and made:
                continue
            sent = self._as_sent_back(reply.message)
            for token in reply.logprobs:
                known = self._entry(token.logprob).number
                self._conversation[known] = Talk((*talk.messages, sent), talk.tools)
            made.append(Talk((*talk.messages, sent, *self._reaction(sent)), talk.tools))
        return made

    def _as_sent_back(self, message: ChatMessage) -> ChatMessage:
        rng = self.rng
        content = message.content.strip() if rng.random() < 0.3 else message.content
        calls = tuple(
            replace(c, arguments=self._rewritten(c.arguments)) for c in message.tool_calls
        )
        thoughts = message.reasoning if self.keeps_thoughts else ""
        return replace(message, content=content, reasoning=thoughts, tool_calls=calls)

    def _rewritten(self, arguments: str) -> str:
        if self.rng.random() < 0.4:
            return arguments
        ways = (
            {},
            {"indent": 2},
            {"sort_keys": True},
            {"separators": (",", ":")},
            {"ensure_ascii": False},
        )
        text = json.dumps(json.loads(arguments), **self.rng.choice(ways))  # type: ignore[arg-type]
        return text.replace("1.0", "1") if self.rng.random() < 0.2 else text  # as JavaScript does

    def _reaction(self, answer: ChatMessage) -> list[ChatMessage]:
        results = [
            ChatMessage(role="tool", content=self._text(), tool_call_id=c.id, name=c.name)
            for c in answer.tool_calls
        ]
        if not results or self.rng.random() < 0.1:
            results.append(ChatMessage(role="user", content=self._text()))
        return results

    def _opening(self) -> Talk:
        rng = self.rng
        system = [ChatMessage(role="system", content=self._text())] if rng.random() < 0.5 else []
        question = ChatMessage(role="user", content=self._text())
        tools = rng.choice(((), TOOLS[:1], TOOLS))
        return Talk((*system, question), tools)

    def _ending_with_a_question(
        self, messages: Sequence[ChatMessage], tools: tuple[dict[str, Any], ...]
    ) -> Talk:
        more = [] if messages[-1].role in ("user", "tool") else self._reaction(messages[-1])
        return Talk((*messages, *more), tools)

    def _text(self) -> str:
        """Returns text that nobody has said before, or none."""
        self._told += 1
        text = self.rng.choice(USER_TEXTS)
        return text and f"q{self._told}: {text}"

    # ---- what is checked -------------------------------------------------------------------------

    def _check(self, sequences: Sequence[Trajectory]) -> None:
        trained: Counter[tuple[int, int]] = Counter()  # tokens of the log
        for sequence in sequences:
            of_entry = self._check_sequence(sequence)
            trained.update(of_entry)
            for number, _ in of_entry:
                wanted = self._rewards.get(number, sequence.reward)
                if sequence.reward != wanted:
                    self.problems.append(f"reward {sequence.reward} instead of {wanted}")
        if twice := {number for (number, _), times in trained.items() if times > 1}:
            self.problems.append(f"answers {sorted(twice)} are trained on twice")
        counts = Counter(number for number, _ in trained)
        if missing := self._read.keys() - counts.keys():
            self.problems.append(f"answers {sorted(missing)} were read, and are not trained on")
        if more := {n for n in counts.keys() - self._read.keys() if not self._may_be_seen(n)}:
            self.problems.append(f"answers {sorted(more)} were not read, and are trained on")
        known = {**self._seen, **self._read}
        if other := {n: c for n, c in counts.items() if c != known.get(n, c)}:
            self.problems.append(f"of answers {other} other parts were read: {known}")

    def _may_be_seen(self, number: int) -> bool:
        """Whether the client went on with this answer, or with one that read the same, unread as well."""
        if number in self._seen:
            return True
        answers = {self._entry(n.answer.logprobs[0]).number: n for n in self.session.tree.nodes}
        node, known = answers[number], self._read.keys() | self._seen.keys()
        twins = [n for k, n in answers.items() if k in known and n.parent is node.parent]
        said = node.message.content.strip()  # nothing: as an answer that it has edited may say
        twin = any(n.message.content.strip() == said for n in twins)
        if not said or twin or said in self._sent:
            return bool(node.children)  # it went on with one that says the same, or so began
        if number not in self._missed:
            return False
        before, content = self._missed[number]
        return any(
            (talk.messages[:-1], talk.messages[-1].content.strip()) == (before, content.strip())
            for talk in (self._conversation[n] for n in self._seen)
        )

    def _check_sequence(self, sequence: Trajectory) -> set[tuple[int, int]]:
        """Compares it with the log, token by token; returns which tokens of which answers it trains."""
        found: set[tuple[int, int]] = set()
        place, size = 0, len(sequence.tokens)
        while place < size:
            if not sequence.from_policy[place]:
                if (sequence.logprobs[place], sequence.versions[place]) != (0.0, -1):
                    self.problems.append("an observation has a log-prob or a version")
                place += 1
                continue
            entry = self._entry(sequence.logprobs[place])
            first = entry.logprobs.index(
                sequence.logprobs[place]
            )  # not 0: a client went on with a part
            its = set(entry.logprobs)
            count = sum(1 for _ in takewhile(its.__contains__, sequence.logprobs[place:]))
            span, logged = slice(place, place + count), slice(first, first + count)
            same = (
                sequence.tokens[:place] == entry.context + entry.tokens[:first]
                and sequence.tokens[span] == entry.tokens[logged]
                and sequence.logprobs[span] == entry.logprobs[logged]
                and sequence.versions[span] == entry.versions[logged]
                and all(sequence.from_policy[span])
                and (not self.policy.with_kept or sequence.kept[span] == entry.kept[logged])
            )
            if not same:
                self.problems.append(f"answer {entry.number} is not trained as it was sampled")
                self.counts["retokenised"] += count
            self.counts["trained"] += count
            found |= {(entry.number, i) for i in range(first, first + count)}
            place += max(count, 1)
        return found

    def _count_naive(self, sequences: Sequence[Trajectory]) -> None:
        """Counts what would be wrong if the conversations were tokenised anew at the end."""
        for sequence in sequences:
            last = max(i for i, p in enumerate(sequence.from_policy) if p)
            talk = self._conversation[self._entry(sequence.logprobs[last]).number]
            naive = self._rendered(talk)
            pairs = zip(sequence.tokens, naive, strict=False)
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            num = sum(sequence.from_policy)
            self.counts["naive conversations"] += 1
            self.counts["naive conversations wrong"] += same <= last
            self.counts["naive tokens"] += num
            self.counts["naive tokens wrong"] += num - sum(sequence.from_policy[:same])

    def _rendered(self, talk: Talk) -> list[int]:
        renderer = self.session.settings.renderer
        assert isinstance(renderer, TemplateRenderer)
        try:
            text = renderer._text(talk.messages, talk.tools, opens=False)
        except DataError:  # the answer can't be written by the template at all
            return []
        return list(self.family.tokenizer(text, add_special_tokens=False).input_ids)


def _behind(messages: Sequence[ChatMessage], reply: ChatMessage) -> tuple[ChatMessage, ...]:
    """Returns the conversation whose last message the reply goes on with."""
    *before, last = messages
    return (*before, replace(reply, content=last.content + reply.content))


_ACTIONS = (
    *[FuzzedHistory._go_on] * 10,
    *[FuzzedHistory._leave_and_retry] * 3,
    *[FuzzedHistory._leave_in_the_middle] * 3,
    *[FuzzedHistory._prefill] * 2,
    FuzzedHistory._several,
    FuzzedHistory._edit,
    *[FuzzedHistory._shorten] * 2,
    FuzzedHistory._forget,
    FuzzedHistory._go_back,
    FuzzedHistory._other_system,
    FuzzedHistory._other_tools,
    FuzzedHistory._strip_thoughts,
    FuzzedHistory._ends_with_an_answer,
    FuzzedHistory._half_read,
    FuzzedHistory._at_once,
    FuzzedHistory._branches_at_once,
    FuzzedHistory._reward,
)
