"""Plays an outsider's case against the endpoint of an agent in this process, over real sockets.

For outsider_endpoint.py. The policy is case_policy.py's, the client raw_client.py's; between them is the
product: ``EndpointAgent.run_episode`` with a ``play`` that does what the case says.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from case_bodies import body_text, gzip_of_zeros, number_of, pieces_of_bytes
from case_policy import HELD_S, CaseAsk
from chat_families import FAMILIES
from raw_client import RawExchange, RawRequest, exchange

from realsys.api.agent import AgentHost, Environment, Episode, EpisodeTask, Observation
from realsys.rollout.runners.endpoint_agent import EndpointAgent
from realsys.rollout.runners.episode_outcome import AgentOutcome, EpisodeSeat

CASE_S = 160.0  # longest
CONTEXT = 2048  # tokens of the model whose context is filled
MOST_NEW = 256
# A stream whose head alone is read: the endpoint gives a sign of life after ten seconds.
HEAD_HELD_S = 12.0
FAILED_REWARD = -1.0
SPEEDUP = 10  # of a reader that is slow
PATHS = {
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "completions": "/v1/completions",
}
TEXT = "Two and one is three."
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
Play = Callable[[EpisodeSeat], Awaitable[AgentOutcome]]


class ScoringNote(Environment):
    """Scores every text with 1 and keeps it."""

    def __init__(self) -> None:
        self.scored: list[str] = []

    async def reset(self, record: Mapping[str, Any]) -> None:
        pass

    async def step(self, action: str) -> Observation:
        self.scored.append(action)
        return Observation(reward=1.0)


class CaseAgent(EndpointAgent):
    """An agent whose episodes do what cases say."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(failed_reward=FAILED_REWARD, **arguments)
        self.plays: dict[str, Play] = {}
        self.seats: dict[str, EpisodeSeat] = {}

    async def play(self, task: EpisodeTask, seats: Sequence[EpisodeSeat]) -> AgentOutcome:
        self.seats[task.id] = seats[0]
        return await self.plays[task.id](seats[0])

    async def episode(self, id_: str, ask: CaseAsk, play: Play) -> tuple[Episode, list[str]]:
        """Runs an episode; returns it, and the texts that its environment was given."""
        environment = ScoringNote()
        self.plays[id_] = play
        task = EpisodeTask(
            id=id_,
            prompt=(),
            record={"prompt": "?"},
            ask=ask,
            environment=environment,
            tokenizer=ask.family.tokenizer,
        )
        return await self.run_episode(task), environment.scored


@asynccontextmanager
async def case_agent(family: str, folder: Path, **arguments: Any) -> AsyncIterator[CaseAgent]:
    """Starts an agent's endpoint over a family's tokenizer."""
    agent = CaseAgent(**arguments)
    known = FAMILIES[family]
    await agent.open(
        AgentHost(name="w", tokenizer=known.tokenizer, end_ids=known.end_ids, folder=folder)
    )
    try:
        yield agent
    finally:
        await agent.close()


@dataclass(kw_only=True)
class PlayedCase:
    """What became of a case.

    Attributes:
        episode: None: ``error`` says why there is none.
        rewards: that were sent. statuses: of requests for the episode's life.
        prompts: tokens of each request's prompt, if that was measured.
        blocked_ms: longest time that the event loop worked without a pause, of its thread's own time.
        beside: statuses of another session's requests during the case.
        without: context of the policy for the same request without a field.
    """

    ask: CaseAsk
    exchanges: list[RawExchange] = field(default_factory=list)
    episode: Episode | None = None
    error: BaseException | None = None
    scored: list[str] = field(default_factory=list)
    figures: Mapping[str, float] = field(default_factory=dict)
    rewards: list[float] = field(default_factory=list)
    statuses: list[int | None] = field(default_factory=list)
    prompts: list[int | None] = field(default_factory=list)
    blocked_ms: float = 0.0
    memory_mb: float = 0.0
    beside: list[int | None] = field(default_factory=list)
    without: tuple[int, ...] | None = None


def policy_of(case: Mapping[str, Any], file: str, family: str) -> CaseAsk:
    """Makes the policy that a case wants."""
    known = FAMILIES[family]
    if file == "full_context":
        endless = case.get("policy") == "never ends by itself"
        answers = ["x" * 3 * MOST_NEW if endless else "Yes."] * 8
        return CaseAsk(
            family=known,
            answers=answers,
            ends=not endless,
            context_length=CONTEXT,
            max_new_tokens=MOST_NEW,
        )
    if file == "requests":
        body = case.get("body") or {}
        says = f"I add.\n{CALL}" if isinstance(body, dict) and body.get("tools") else TEXT
        return CaseAsk(family=known, answers=[says] * 64, as_bytes=False)
    script = case["policy"]
    answers = [a if isinstance(a, str) else a["repeat"] * a["times"] for a in script["answers"]]
    hold = None
    if (count := script.get("hold_after_characters")) is not None:
        hold = lambda text, _: len(text) >= count  # noqa: E731
    elif (mark := script.get("hold_after_text")) is not None:
        hold = lambda text, _: mark in text  # noqa: E731
    elif (size := script.get("hold_after_bytes")) is not None:
        hold = lambda _, tokens: tokens >= size  # noqa: E731
    leave = case.get("leave_after")
    waits_for_head = count == 0 and isinstance(leave, dict)
    return CaseAsk(
        family=known,
        answers=answers,
        chunk=None if case["chunk_tokens"] == "whole" else case["chunk_tokens"],
        hold=hold,
        held_s=HEAD_HELD_S if waits_for_head else HELD_S,
        ends=script.get("end_token", True),
    )


async def played(agent: CaseAgent, case: Mapping[str, Any], ask: CaseAsk) -> PlayedCase:
    """Plays a case to its end."""
    made = PlayedCase(ask=ask)
    if isinstance(zeros := case.get("raw"), dict) and "gzip_of_zeros_bytes" in zeros:
        gzip_of_zeros(zeros["gzip_of_zeros_bytes"])  # it is kept
    player = _Player(agent, case, made)
    watch = asyncio.create_task(_watch(made))
    try:
        async with asyncio.timeout(CASE_S):
            made.episode, made.scored = await agent.episode(case["id"], ask, player.play)
    except Exception as error:
        made.error = error
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        if (seat := agent.seats.get(case["id"])) is not None:
            made.figures = seat.session.figures()
    return made


async def _watch(made: PlayedCase) -> None:
    """Notes how long the event loop is blocked, in its own thread's time, and how memory grows."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    first, before = _memory_mb("VmRSS"), time.thread_time()
    try:
        while True:
            await asyncio.sleep(0.01)
            now = time.thread_time()
            made.blocked_ms = max(made.blocked_ms, (now - before) * 1000)
            before = now
    finally:
        made.memory_mb = _memory_mb("VmHWM") - first


def _memory_mb(name: str) -> float:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) / 1024 if found is not None else 0.0


class _Player:
    """One case's client."""

    def __init__(self, agent: CaseAgent, case: Mapping[str, Any], made: PlayedCase) -> None:
        self._agent, self._case, self._made = agent, case, made
        self._port = int(urlsplit(agent.url).port or 0)

    async def play(self, seat: EpisodeSeat) -> AgentOutcome:
        """Takes the case's steps; the outcome is what its agent returns."""
        case, made = self._case, self._made
        self._key = seat.address.key
        beside = asyncio.create_task(self._beside()) if "beside" in case else None
        own = {k: v for k, v in case.items() if k not in ("then", "steps", "beside")}
        steps = case.get("steps") or [own, *case.get("then", ())]
        problem = ""
        for step in steps:
            if "parallel" in step:
                made.exchanges += await asyncio.gather(*map(self._asked, step["parallel"]))
            elif "reward" in step:
                made.rewards.append(step["reward"])
                more = {k: v for k, v in step.items() if k in ("reward", "interaction_id")}
                await self._life("set_reward", more)
            elif "end" in step:
                await self._life("end_session", {})
            elif "wait_s" in step:
                await asyncio.sleep(0.1)  # the client has waited without reading
            elif "raise" in step:
                problem = step["raise"]
            elif "exit" not in step:
                copies = case.get("copies", 1)
                asked = (self._asked(step, after_s=0.003 * i) for i in range(copies))
                made.exchanges += await asyncio.gather(*asked)
        if (path := (case["expect"].get("same_prompt_as_without"))) is not None:
            await self._without(case["body"], path)
        if beside is not None:
            beside.cancel()
            await asyncio.gather(beside, return_exceptions=True)
        return AgentOutcome(problem=problem)

    async def _life(self, name: str, body: dict[str, Any]) -> None:
        sent = RawRequest(
            path=f"/rl/{name}",
            headers=self._headers(self._case, self._key),
            body=self._replaced(body).encode(),
        )
        got = await exchange(self._port, sent, asked=self._made.ask.asked, on_end=lambda: None)
        self._made.statuses.append(got.status)

    async def _asked(self, step: Mapping[str, Any], *, after_s: float = 0.0) -> RawExchange:
        made = self._made
        if after_s:  # many at once would be this client's own work
            await asyncio.sleep(after_s)
        body = step.get("request", step.get("body"))
        if body is not None and "$FILL" in json.dumps(body) and "prompt_tokens" in step:
            target = number_of(step["prompt_tokens"], CONTEXT)
            body, prompt = await self._filled(step, body, target)
            made.prompts.append(prompt)
        else:
            made.prompts.append(None)
        sent = self._request(step, body, self._key)
        made.ask.num_clients += 1

        def ended() -> None:
            made.ask.num_clients -= 1

        return await exchange(self._port, sent, asked=made.ask.asked, on_end=ended)

    async def _filled(
        self, step: Mapping[str, Any], body: Any, target: int
    ) -> tuple[Any, int | None]:
        """Puts text in place of $FILL, so that the prompt has ``target`` tokens: a digit is a token."""
        short = await self._counted({**step, "body": _with_fill(body, "7")})
        if short is None:
            return _with_fill(body, "7" * target), None
        return _with_fill(body, "7" * (target - short + 1)), target

    async def _counted(self, step: Mapping[str, Any]) -> int | None:
        """Returns how many tokens the prompt of a request has, asked in a session of its own."""
        contexts, got = await self._apart(step)
        if "count_tokens" in step.get("path", "") and isinstance(got.answer, dict):
            return got.answer.get("input_tokens")
        return len(contexts[0]) if contexts else None

    async def _apart(self, step: Mapping[str, Any]) -> tuple[list[tuple[int, ...]], RawExchange]:
        """Asks in an episode of its own; returns the contexts that its policy saw, and the reply."""
        ask = dataclasses.replace(
            self._made.ask,
            log=[],
            contexts=[],
            asked=asyncio.Event(),
            hold=None,
            num_clients=0,
            context_length=1_000_000,
        )
        replies: list[RawExchange] = []

        async def play(seat: EpisodeSeat) -> AgentOutcome:
            sent = self._request(step, step["body"], seat.address.key)
            sent.leave = sent.read_per_s = None
            replies.append(await exchange(self._port, sent, asked=ask.asked, on_end=lambda: None))
            return AgentOutcome(reward=0.0)

        with suppress(Exception):  # a request that is refused leaves no episode
            await self._agent.episode(f"{self._case['id']} apart {time.monotonic_ns()}", ask, play)
        return ask.contexts, replies[0]

    async def _without(self, body: Any, path: str) -> None:
        made = json.loads(json.dumps(body))
        place = made
        *parts, last = path.split(".")
        for part in parts:
            place = place[int(part) if isinstance(place, list) else part]
        if last in place:
            del place[last]
        else:  # of each tool
            for tool in made["tools"]:
                tool.get("function", tool).pop(last, None)
        contexts, _ = await self._apart({**self._case, "body": made})
        self._made.without = contexts[0] if contexts else None

    async def _beside(self) -> None:
        """Asks in another session again and again."""
        step = self._case["beside"]
        ask = dataclasses.replace(
            self._made.ask, log=[], contexts=[], asked=asyncio.Event(), answers=["Yes."] * 5000
        )

        async def play(seat: EpisodeSeat) -> AgentOutcome:
            while True:
                sent = self._request(step, step.get("request", step.get("body")), seat.address.key)
                got = await exchange(self._port, sent, asked=ask.asked, on_end=lambda: None)
                self._made.beside.append(got.status)
                await asyncio.sleep(0.2)

        await self._agent.episode(f"{self._case['id']} beside", ask, play)

    # ---- what is sent ------------------------------------------------------------------------------

    def _request(self, step: Mapping[str, Any], body: Any, key: str) -> RawRequest:
        case = self._case
        api = case["api"]
        sent = RawRequest(
            path=step.get("path") or PATHS[api],
            headers={**self._headers(step, key), **step.get("headers", {})},
            api=api,
            method=step.get("method", "POST"),
            http=step.get("http", "1.1"),
            half_close=step.get("half_close", False),
            reset=step.get("close") == "reset",
            rcvbuf=step.get("socket", {}).get("rcvbuf"),
            leave=step.get("leave_after"),
        )
        match step.get("read"):
            case "never":
                sent.read_per_s, sent.rcvbuf = 0, 4096
            case {"bytes_per_second": rate}:
                sent.read_per_s, sent.rcvbuf = rate * SPEEDUP, 4096
        if sent.leave == {"at": "last_text"}:
            sent.last_text = len(last_text(body, case["policy"]["answers"][0]))
        self._fill(sent, step, body)
        return sent

    def _fill(self, sent: RawRequest, step: Mapping[str, Any], body: Any) -> None:
        if sent.method == "GET":
            return
        if "raw_hex" in step:
            sent.body = bytes.fromhex(step["raw_hex"])
            return
        match step.get("raw"):
            case str(text):
                sent.body = text.encode()
                return
            case {"repeat": text, "times": count}:
                sent.body = (text * count).encode()
                return
            case {"gzip_of_zeros_bytes": size}:
                sent.headers = {**sent.headers, "content-encoding": "gzip"}
                sent.body = gzip_of_zeros(size)
                return
        text = self._replaced(body)
        if "$FILL_BYTES" in text:
            sent.pieces, size = pieces_of_bytes(text)
            sent.size = None if step.get("transfer") == "chunked" else size
            return
        sent.body = text.encode()
        if step.get("encode") == "gzip":
            import gzip

            sent.headers = {**sent.headers, "content-encoding": "gzip"}
            sent.body = gzip.compress(sent.body)
        how = step.get("send", {})
        sent.bytes_per_s = how.get("bytes_per_second")
        sent.half = "half_then_wait_s" in how

    def _headers(self, step: Mapping[str, Any], key: str) -> dict[str, str]:
        api, auth = self._case["api"], step.get("auth")
        content = {"content-type": "application/json"}
        if auth == "api-key":
            return {**content, "api-key": key}
        if auth == "wrong":
            key = "sk-nobody-gave-it"
        if api == "messages":
            return {**content, "x-api-key": key, "anthropic-version": "2023-06-01"}
        return {**content, "authorization": f"Bearer {key}"}

    def _replaced(self, body: Any) -> str:
        """Returns a body's text, with what the server said before."""
        text = body_text(body, CONTEXT)
        before = self._made.exchanges
        if before:
            call = before[0].calls[0][2] if before[0].calls else "none"
            for name, value in (
                ("call_id", call),
                ("id", before[0].id),
                ("answer_1", before[0].text),
            ):
                text = text.replace(f'"${name}"', json.dumps(value))
            output = (before[0].answer or {}).get("output", []) if before[0].answer else []
            items = ", ".join(map(json.dumps, output))
            text = text.replace(
                '"$output_1..."', items or json.dumps({"role": "user", "content": "-"})
            )
        return text


def _with_fill(body: Any, text: str) -> Any:
    return json.loads(json.dumps(body).replace('"$FILL"', json.dumps(text)))


def last_text(body: Mapping[str, Any], answer: str) -> str:
    """Returns the text that a client gets of an answer, up to a stop text or its length."""
    stops = [*(body.get("stop") or ()), *(body.get("stop_sequences") or ())]
    found = [at for stop in stops if (at := answer.find(stop)) >= 0]
    return answer[: min([*found, body.get("max_output_tokens") or len(answer)])]
