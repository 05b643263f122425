"""The endpoint over HTTP on the loopback interface: who may ask, what errors become, who has read what."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import re
import threading
import zlib
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import pytest
from chat_families import FAMILIES
from fuzzed_history import session_of
from passing_time import pass_time
from scripted_policy import END, ScriptedPolicy

from realsys.api.agent import Answer
from realsys.api.errors import RemoteError, WaitTimeout
from realsys.rollout.conversation.chat_messages import Unserved
from realsys.rollout.conversation.episode_session import EpisodeSession
from realsys.rollout.dialects import chat_completions
from realsys.rollout.dialects.chat_stream import ChatStream
from realsys.rollout.endpoint import session_registry
from realsys.rollout.endpoint.endpoint_app import (
    BODY_S,
    LARGE_BODY_BYTES,
    MAX_BODY_BYTES,
    endpoint_app,
)
from realsys.rollout.endpoint.session_registry import (
    NoRoom,
    SessionRegistry,
    StartedEpisode,
)
from realsys.transport.http_listener import SILENCE_S, HttpListener

ADMIN = "sk-admin-1"
QUESTION = {"messages": [{"role": "user", "content": "1"}]}
FULL = {"openai": "This model's maximum context length is ", "anthropic": "prompt is too long: "}
FIELDS = {"/v1/responses": "input", "/v1/completions": "prompt"}  # of a conversation
GONE = RemoteError("the server is gone", where="server", fix="ask again")


@dataclass
class HandSource:
    """Gives the episodes that a test has put there."""

    waiting: list[EpisodeSession] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    go: asyncio.Event | None = None

    async def start(self, *, task_id: str, wait_s: float) -> StartedEpisode:
        if self.go is not None:
            await self.go.wait()
        if not self.waiting:
            raise NoRoom("no episode may start", where="here", fix="ask again")
        return StartedEpisode(
            session=self.waiting.pop(0), task={"prompt": "1 + 1", "asked": task_id}
        )

    async def end(self, session: EpisodeSession) -> None:
        self.ended.append(session.id)


@dataclass
class Endpoint:
    """A running endpoint, with a client."""

    registry: SessionRegistry
    source: HandSource
    url: str
    http: aiohttp.ClientSession

    def session(self, *script: Any, id: str = "e", **more: Any) -> tuple[str, EpisodeSession, Any]:
        """Opens a session as a runner does; returns its key, itself, and its policy."""
        made, policy = self.unopened(*script, id=id, **more)
        return self.registry.open(made), made, policy

    def unopened(self, *script: Any, id: str = "e", **more: Any) -> tuple[EpisodeSession, Any]:
        policy = ScriptedPolicy(FAMILIES["chatml"], list(script), **more)
        session = session_of(FAMILIES["chatml"], policy)  # type: ignore[arg-type]
        session.id = id
        return session, policy

    async def post(
        self, path: str, body: Any, key: str = "", **headers: str
    ) -> tuple[int, Any, Any]:
        """Returns status, body and headers."""
        sent = {"Authorization": f"Bearer {key}"} if key else {}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.http.post(self.url + path, data=data, headers=sent) as got:
            return got.status, json.loads(await got.read()), got.headers

    async def ask(self, key: str, body: Any = QUESTION, **headers: str) -> Any:
        status, said, _ = await self.post("/v1/chat/completions", body, key, **headers)
        assert status == 200, said
        return said


@asynccontextmanager
async def endpoint() -> AsyncIterator[Endpoint]:
    source = HandSource()
    registry = SessionRegistry(admin_key=ADMIN, source=source)
    listener = await HttpListener(endpoint_app(registry), name="test", tls=False).start()
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as http:
            yield Endpoint(registry, source, listener.url, http)
    finally:
        await listener.stop()


def over_http(test: Callable[[Endpoint], Coroutine[Any, Any, None]]) -> None:
    """Runs a test over an endpoint of its own."""

    async def run() -> None:
        async with endpoint() as at:
            await asyncio.wait_for(test(at), 120)

    asyncio.run(run())


async def until(is_so: Callable[[], Any]) -> None:
    """Waits until something has come to the server."""
    async with asyncio.timeout(60):
        while not is_so():
            await asyncio.sleep(0.005)


def events_of(text: str) -> list[Any]:
    """The data of server-sent events."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def chat_text(events: list[Any]) -> str:
    return "".join(c["delta"].get("content") or "" for e in events for c in e["choices"])


def response_text(events: list[Any]) -> str:
    return "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")


def anthropic_text(events: list[Any]) -> str:
    deltas = [e["delta"] for e in events if e["type"] == "content_block_delta"]
    return "".join(d.get("text", "") for d in deltas)


def completion_text(events: list[Any]) -> str:
    return "".join(c["text"] for e in events for c in e["choices"])


STREAMS = {
    "/v1/completions": ({"prompt": "1", "max_tokens": 50}, completion_text),
    "/v1/chat/completions": (QUESTION, chat_text),
    "/v1/responses": ({"input": "1"}, response_text),
    "/v1/messages": ({**QUESTION, "max_tokens": 50}, anthropic_text),
}


# ---- keys


def test_a_key_is_taken_from_the_path_or_either_kind_of_header() -> None:
    async def test(at: Endpoint) -> None:
        key, _, policy = at.session(*[f"hi{END}"] * 7)
        in_path = f"/sessions/{key}/v1/chat/completions"
        assert (await at.post("/v1/chat/completions", QUESTION, key))[0] == 200
        assert (await at.post("/v1/chat/completions", QUESTION, x_api_key=key))[0] == 200
        assert (await at.post(in_path, QUESTION))[0] == 200
        assert (await at.post(in_path, QUESTION, "sk-of-the-client"))[0] == 200
        assert (await at.post("/chat/completions", QUESTION, key))[0] == 200  # /v1 left out
        for azure in (
            "/openai/deployments/any/chat/completions?api-version=1",
            "/openai/v1/responses",
        ):
            body = {"input": "1"} if azure.endswith("responses") else QUESTION
            assert (await at.post(azure, body, api_key=key))[0] == 200
        assert len(policy.contexts) == 7
        for path, sent in (
            ("/v1/chat/completions", {}),
            ("/v1/chat/completions", {"key": "sk-sess-other"}),
            ("/v1/chat/completions", {"key": key[:-1]}),
            ("/v1/chat/completions", {"Authorization": f"Basic {key}"}),
            ("/sessions/other/v1/chat/completions", {"key": key}),
            ("/v1/chat/completions", {"key": ADMIN}),
            ("/openai/deployments/any/chat/completions", {"api_key": "sk-sess-other"}),
        ):
            status, said, _ = await at.post(path, QUESTION, **sent)
            assert (status, said["error"]["code"]) == (401, "invalid_api_key"), (path, sent)
        assert len(policy.contexts) == 7

    over_http(test)


def test_models_and_health_are_told() -> None:
    async def test(at: Endpoint) -> None:
        key, _, _ = at.session()
        for path, wanted in (
            (f"/sessions/{key}/v1/models", '"policy"'),
            (f"/sessions/{key}/v1/models/any/name", '"any/name"'),
            ("/health", '"ok"'),
        ):
            async with at.http.get(at.url + path) as got:
                assert got.status == 200
                assert wanted in await got.text()

    over_http(test)


# ---- errors


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/chat/completions", b"{", 400),
        ("/v1/chat/completions", b"", 400),
        ("/v1/chat/completions", {"messages": []}, 400),
        ("/v1/chat/completions", {"messages": [{"role": "king", "content": "x"}]}, 400),
        ("/v1/chat/completions", {**QUESTION, "n": 0}, 400),
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "\\ud83d"}]}', 400),
        ("/v1/messages", {"messages": []}, 400),
        ("/v1/responses", {}, 400),
        ("/v1/chat/completion", QUESTION, 404),
        ("/v1/models", QUESTION, 405),
        ("/rl/set_reward", {}, 400),
        ("/rl/set_reward", {"reward": "1"}, 400),
        ("/rl/set_reward", {"reward": True}, 400),
        ("/rl/set_reward", b'{"reward": NaN}', 400),
        ("/rl/set_reward", b'{"reward": 1e999}', 400),
        ("/rl/set_reward", b'{"reward": 1' + b"0" * 400 + b"}", 400),
        ("/rl/set_reward", b"[1]", 400),
        ("/rl/set_reward", {"reward": 1, "interaction_id": "chatcmpl-e"}, 400),
    ],
)
def test_what_can_not_be_understood_is_refused_for_good(path: str, body: Any, status: int) -> None:
    async def test(at: Endpoint) -> None:
        key, session, policy = at.session(f"hi{END}")
        got, said, headers = await at.post(path, body, key)
        assert got == status, said
        assert headers["x-should-retry"] == "false"
        assert headers.get("Allow", "") == ("GET,HEAD" if status == 405 else "")
        error = said["error"]
        assert error["message"]
        if path == "/v1/messages":
            assert (said["type"], error["type"]) == ("error", "invalid_request_error")
        assert policy.contexts == []
        assert session.reward is None

    over_http(test)


HALF = b'"a \\ud83d b"'
CHAT = "/v1/chat/completions"
CHAT_FORM = '{"type": "function", "function": {"name": …'


@pytest.mark.parametrize(
    ("path", "body", "field", "what", "fix"),
    [
        (
            CHAT,
            b'{"messages": [{"role": "system"}, {"role": "user", "content": %s}]}' % HALF,
            "messages[1].content",
            "half of a surrogate pair",
            "between whole characters",
        ),
        (
            CHAT,
            b'{"messages": [{"role": "user", "content": "\xed\xa0\xbd"}]}',
            "messages[0].content",
            "half of a surrogate pair",
            "between whole characters",
        ),
        ("/v1/responses", b'{"input": %s}' % HALF, "input", "half of a surrogate", "whole char"),
        (
            "/v1/messages",
            b'{"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "text", "text": %s}]}]}'
            % HALF,
            "messages[0].content[0].text",
            "half of a surrogate pair",
            "between whole characters",
        ),
        (CHAT, b'{"messages": [{%s: 1}]}' % HALF, "messages[0]", "half of a surrogate", "whole"),
        (
            CHAT,
            {**QUESTION, "tools": [{"type": "function"}]},
            "tools[0].function",
            "a function tool without its function",
            CHAT_FORM,
        ),
        (
            CHAT,
            {**QUESTION, "tools": [{"type": "function", "name": "f"}]},
            "tools[0]",
            "fields stand in the tool itself",
            CHAT_FORM,
        ),
        (
            CHAT,
            {**QUESTION, "tools": [{"type": "function", "function": "f"}]},
            "tools[0].function",
            "expected an object",
            CHAT_FORM,
        ),
        (
            CHAT,
            {**QUESTION, "tools": [{"type": "function", "function": {}}]},
            "tools[0].function.name",
            "a tool without a name",
            "name it",
        ),
        (
            CHAT,
            {**QUESTION, "tools": [{"type": "web_search"}]},
            "tools[0]",
            "of type 'web_search' is not served",
            CHAT_FORM,
        ),
        (
            "/v1/responses",
            {"input": "x", "tools": [{"type": "function", "function": {"name": "f"}}]},
            "tools[0].function",
            "one level too deep",
            '{"type": "function", "name": …',
        ),
        (
            "/v1/responses",
            {"input": "x", "tools": [{"type": "function"}]},
            "tools[0].name",
            "a tool without a name",
            "name it",
        ),
        (
            "/v1/messages",
            {"max_tokens": 1, **QUESTION, "tools": [{"input_schema": {}}]},
            "tools[0].name",
            "a tool without a name",
            "name it",
        ),
        (
            "/v1/responses",
            {"input": "x", "tool_choice": {"type": "web_search_preview"}},
            "tool_choice",
            "web_search_preview",
            '{"type": "function", "name": …',
        ),
        (CHAT, {**QUESTION, "tool_choice": "some"}, "tool_choice", "some", "auto"),
        (
            "/v1/messages",
            {"max_tokens": 1, **QUESTION, "tool_choice": {"type": "each"}},
            "tool_choice",
            "each",
            "any",
        ),
        (
            "/v1/responses",
            {"input": [{"type": "item_reference", "id": "m"}]},
            "input[0]",
            "item_reference",
            "send the item",
        ),
        ("/rl/start_session", {"task": "1"}, "task", "no field 'task'", "did you mean 'task_id'?"),
        (
            "/rl/start_session",
            {"a b": "1"},
            "body",
            "no field 'a b'",
            "use one of api_key, task_id",
        ),
        ("/rl/start_session", b'{"api_key": %s}' % HALF, "api_key", "half of", "whole char"),
        (
            "/rl/set_reward",
            {"reward": 1, "interactionId": "x"},
            "interactionId",
            "no field 'interactionId'",
            "did you mean 'interaction_id'?",
        ),
    ],
)
def test_a_refusal_says_what_is_wrong_and_where_and_what_to_do(
    path: str, body: Any, field: str, what: str, fix: str
) -> None:
    async def test(at: Endpoint) -> None:
        key, session, policy = at.session(f"hi{END}")
        status, said, _ = await at.post(
            path, body, ADMIN if path.endswith("start_session") else key
        )
        assert status == 400
        error = said["error"]
        begin, _, do = error["message"].partition(". Fix: ")
        assert begin.startswith(f"{field}: ")
        assert what in begin
        assert fix in do
        if path == "/v1/messages":
            assert (said["type"], error["type"]) == ("error", "invalid_request_error")
        else:
            assert error["param"] == field
        assert (policy.contexts, session.reward) == ([], None)

    over_http(test)


@pytest.mark.parametrize("path", STREAMS)
@pytest.mark.parametrize(("length", "wanted"), [(4, 7), (4, None), (0, 7)])
def test_a_full_context_is_told_in_the_words_that_clients_look_for(
    path: str, length: int, wanted: int | None
) -> None:
    async def test(at: Endpoint) -> None:
        full = Answer(tokens=(), logprobs=(), versions=(), stopped=False, context_length=length)
        key, _, policy = at.session(full)
        field = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
        body = {k: v for k, v in STREAMS[path][0].items() if k != field}
        if path == "/v1/messages":
            body[field] = wanted or 50
        elif wanted:
            body[field] = wanted
        status, said, _ = await at.post(path, {**body, "stream": True}, key)
        error, prompt = said["error"], len(policy.contexts[0])
        assert (status, error["type"]) == (400, "invalid_request_error")
        numbers = [int(n) for n in re.findall(r"\d+", error["message"])]
        if path == "/v1/messages":
            assert error["message"].startswith(FULL["anthropic"])
            assert numbers == ([prompt, length] if length else [prompt + 1, prompt])
        else:
            assert error["code"] == "context_length_exceeded"
            assert error["param"] == FIELDS.get(path, "messages")
            assert error["message"].startswith(FULL["openai"])
            most, least = length or prompt, 16 if path == "/v1/completions" else 1
            answer = wanted or least
            assert numbers == [most, prompt + answer, prompt, answer]
        assert ". Fix: " in error["message"]

    over_http(test)


@pytest.mark.parametrize(
    ("path", "prefix"),
    [
        ("/v1/chat/completions", "chatcmpl-"),
        ("/v1/completions", "cmpl-"),
        ("/v1/responses", "resp_"),
        ("/v1/messages", "msg_"),
    ],
)
def test_ids_and_counts_are_those_of_the_api_from_a_streams_beginning(
    path: str, prefix: str
) -> None:
    async def test(at: Endpoint) -> None:
        key, session, policy = at.session(f"hi{END}", f"hi{END}")
        whole = (await at.post(path, STREAMS[path][0], key))[1]
        async with at.http.post(
            at.url + path,
            json={**STREAMS[path][0], "stream": True},
            headers={"x-api-key": key},
        ) as got:
            first = events_of(await got.text())[0]
        begun = first.get("message") or first.get("response") or first
        assert whole["id"].startswith(f"{prefix}e-0")
        assert begun["id"].startswith(f"{prefix}e-1")
        assert [n.id for n in session.tree.nodes] == [whole["id"], begun["id"]]
        if path == "/v1/messages":
            assert begun["usage"]["input_tokens"] == len(policy.contexts[1])
            assert begun["usage"] | {"output_tokens": 3} == whole["usage"]

    over_http(test)


def test_a_wrong_path_is_told_the_right_one() -> None:
    async def test(at: Endpoint) -> None:
        _, said, _ = await at.post("/v1/chat/completion", QUESTION)
        assert "/v1/chat/completions" in said["error"]["message"]

    over_http(test)


@pytest.mark.parametrize(
    ("raised", "status", "again"),
    [
        (GONE, 502, "true"),
        (WaitTimeout("too long", where="server", fix="wait"), 502, "true"),
        (ValueError("oh"), 500, "false"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_fails_behind_it_says_whether_to_try_again(
    raised: Exception, status: int, again: str, stream: bool
) -> None:
    async def test(at: Endpoint) -> None:
        key, _, _ = at.session(raised, f"hi{END}")
        body = {**QUESTION, "stream": stream}
        got, said, headers = await at.post("/v1/chat/completions", body, key)
        assert (got, headers["x-should-retry"]) == (status, again)
        assert headers["Content-Type"].startswith("application/json")
        assert said["error"]["message"]
        again_said = await at.ask(key, x_stainless_retry_count="1")
        assert again_said["choices"][0]["message"]["content"] == "hi"

    over_http(test)


def test_a_session_that_is_over_is_gone_until_its_key_is_forgotten(monkeypatch) -> None:
    async def test(at: Endpoint) -> None:
        key, session, _ = at.session(f"hi{END}")
        await session.close()
        status, _, headers = await at.post("/v1/chat/completions", QUESTION, key)
        assert (status, headers["x-should-retry"]) == (410, "false")
        monkeypatch.setattr(session_registry, "_MOST_ENDED", 1)
        others = [at.session(f"hi{END}")[0] for _ in range(2)]
        at.registry.close(key)
        assert (await at.post("/v1/chat/completions", QUESTION, key))[0] == 410
        for other in others:
            at.registry.close(other)
        asked = [await at.post("/v1/chat/completions", QUESTION, k) for k in (key, *others)]
        assert [status for status, _, _ in asked] == [401, 401, 410]

    over_http(test)


def test_who_waits_when_the_session_ends_is_told_so() -> None:
    async def test(at: Endpoint) -> None:
        for stream in (False, True):
            key, session, policy = at.session(f"hi{END}", go=asyncio.Event())
            waiting = asyncio.create_task(
                at.post("/v1/chat/completions", {**QUESTION, "stream": stream}, key)
            )
            await until(lambda policy=policy: policy.contexts)
            await session.close()
            assert (await waiting)[0] == 410

    over_http(test)


def test_an_idempotency_key_is_of_one_request() -> None:
    async def test(at: Endpoint) -> None:
        key, _, policy = at.session(f"hi{END}")
        one, two = [await at.ask(key, Idempotency_Key="k") for _ in range(2)]
        assert one["id"] == two["id"]
        assert len(policy.contexts) == 1
        status, _, _ = await at.post(
            "/v1/chat/completions", {**QUESTION, "n": 2}, key, Idempotency_Key="k"
        )
        assert status == 400

    over_http(test)


# ---- streams


@pytest.mark.parametrize("path", STREAMS)
@pytest.mark.parametrize(
    "text", [f"hello 日本語 and more{END}", f"one STOP two{END}", "no end", END], ids=str
)
def test_a_stream_is_the_whole_answer(path: str, text: str) -> None:
    async def test(at: Endpoint) -> None:
        key, session, _ = at.session(text, text)
        body, text_of = STREAMS[path]
        if path != "/v1/responses":
            stop = "stop_sequences" if path == "/v1/messages" else "stop"
            body = {**body, stop: ["STOP"]}
        whole = (await at.post(path, body, key))[1]
        async with at.http.post(
            at.url + path, json={**body, "stream": True}, headers={"x-api-key": key}
        ) as got:
            assert got.status == 200
            assert got.headers["Content-Type"].startswith("text/event-stream")
            streamed = text_of(events_of(await got.text()))
        one, two = session.tree.nodes
        assert streamed == one.message.content == two.message.content
        assert json.dumps(streamed)[1:-1] in json.dumps(whole)
        assert (one.answer.tokens, one.delivered, two.delivered) == (two.answer.tokens, True, True)

    over_http(test)


def test_an_error_behind_a_streams_first_byte_ends_it_and_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its client waited for ever for the end of a reply of two beginnings."""

    def fails(self: Any, result: Any) -> bytes:
        raise RuntimeError("a mistake of ours")

    async def test(at: Endpoint) -> None:
        key, *_ = at.session(f"hello{END}")
        monkeypatch.setattr(ChatStream, "closing", fails)
        async with at.http.post(
            f"{at.url}/v1/chat/completions",
            json={**QUESTION, "stream": True},
            headers={"x-api-key": key},
        ) as got:
            events = events_of(await got.text())
        assert got.status == 200
        assert "error" in events[-1]
        assert any(record.exc_info for record in caplog.records)

    over_http(test)


def test_tokens_that_are_told_continue_the_answer_when_they_are_sent_back() -> None:
    async def test(at: Endpoint) -> None:
        key, session, policy = at.session(f"one{END}", f"two{END}", f"three{END}")
        told = await at.ask(key, {**QUESTION, "return_token_ids": True})
        tokens = told["prompt_token_ids"] + told["choices"][0]["token_ids"]
        assert tokens == [*policy.contexts[0], *policy.tokens(f"one{END}")]
        asked = {"prompt": [[*tokens, 9]], "return_token_ids": True}
        _, said, _ = await at.post("/v1/completions", asked, key)
        (choice,) = said["choices"]
        assert (choice["text"], choice["prompt_token_ids"]) == ("two", [*tokens, 9])
        asked["prompt"] = [*tokens, 9, *choice["token_ids"], 8]  # type: ignore[list-item]
        async with at.http.post(
            at.url + "/v1/completions",
            json={**asked, "stream": True},
            headers={"x-api-key": key},
        ) as got:
            events = events_of(await got.text())
        (last,) = events[-1]["choices"]
        assert last["token_ids"] == [*policy.tokens(f"three{END}")]
        (made,) = session.sequences(reward=1.0)
        assert list(made.tokens) == [*policy.contexts[2], *last["token_ids"]]
        assert sum(made.from_policy) == 4 + 4 + 6  # letters and ends

    over_http(test)


def test_text_comes_before_the_answer_is_whole() -> None:
    async def test(at: Endpoint) -> None:
        halfway = asyncio.Event()
        key, session, _ = at.session(f"hello world{END}", halfway=halfway)
        async with at.http.post(
            at.url + "/v1/chat/completions",
            json={**QUESTION, "stream": True},
            headers={"x-api-key": key},
        ) as got:
            begun = b""
            while b"hel" not in begun.replace(b'"}', b"") and b'"content":"l' not in begun:
                begun += await got.content.readany()
            assert session.tree.nodes == []
            halfway.set()
            text = (begun + await got.read()).decode()
        assert chat_text(events_of(text)) == "hello world"

    over_http(test)


@pytest.mark.parametrize("path", STREAMS)
def test_an_error_in_the_middle_of_a_stream_is_an_event(path: str) -> None:
    async def test(at: Endpoint) -> None:
        key, session, policy = at.session(f"hello world{END}", f"again{END}", breaks=GONE)
        async with at.http.post(
            at.url + path, json={**STREAMS[path][0], "stream": True}, headers={"x-api-key": key}
        ) as got:
            assert got.status == 200
            assert "server is gone" in await got.text()
        assert session.sequences(reward=1.0) == []
        policy.breaks = None
        assert (await at.post(path, STREAMS[path][0], key))[0] == 200

    over_http(test)


# ---- connections that break


@pytest.mark.parametrize(
    "headers", [{}, {"x_stainless_retry_count": "1"}, {"Idempotency_Key": "k"}]
)
@pytest.mark.parametrize("stream", [False, True])
def test_who_disconnects_and_asks_again_gets_the_same_answer(
    headers: dict[str, str], stream: bool
) -> None:
    async def test(at: Endpoint) -> None:
        go = asyncio.Event()
        key, session, policy = at.session(f"first{END}", f"second{END}", go=go)
        body = {**QUESTION, "stream": stream}
        first_headers = {k: v for k, v in headers.items() if k == "Idempotency_Key"}
        waiting = asyncio.create_task(at.post("/v1/chat/completions", body, key, **first_headers))
        await until(lambda: policy.contexts)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await until(lambda: not any(c.listeners for c in session._book.calls))
        go.set()
        await until(lambda: session.tree.nodes)
        assert session.sequences(reward=1.0) == []
        if stream:
            sent = {"x-api-key": key, **{k.replace("_", "-"): v for k, v in headers.items()}}
            async with at.http.post(
                at.url + "/v1/chat/completions", json=body, headers=sent
            ) as got:
                assert chat_text(events_of(await got.text())) == "first"
        else:
            said = await at.ask(key, body, **headers)
            assert said["choices"][0]["message"]["content"] == "first"
        assert len(policy.contexts) == 1
        assert len(session.sequences(reward=1.0)) == 1

    over_http(test)


def starts_with(path: str, text: str) -> Callable[[str], bool]:
    """Whether a stream so far has this text."""
    text_of = STREAMS[path][1]

    def has(begun: str) -> bool:
        return text_of(events_of(begun[: begun.rfind("\n\n") + 2])).startswith(text)

    return has


async def leave(at: Endpoint, path: str, key: str, until_it_has: Callable[[str], bool]) -> None:
    """Asks for a stream, reads it until it has so much, and closes the connection."""
    async with at.http.post(
        at.url + path, json={**STREAMS[path][0], "stream": True}, headers={"x-api-key": key}
    ) as got:
        begun = b""
        while not until_it_has(begun.decode()):
            begun += await got.content.readany()
        got.close()


@pytest.mark.parametrize("path", [path for path in STREAMS if path != "/v1/completions"])
def test_who_leaves_a_stream_has_what_it_got_trained_and_goes_on_with_it(path: str) -> None:
    async def test(at: Endpoint) -> None:
        key, session, policy = at.session(f"hello world{END}", f"yes{END}", halfway=asyncio.Event())
        await leave(at, path, key, starts_with(path, "hello "))
        policy.halfway = None
        said, more = {"role": "assistant", "content": "hello "}, {"role": "user", "content": "2"}
        messages = [*QUESTION["messages"], said, more]
        field = "input" if path == "/v1/responses" else "messages"
        body = {**STREAMS[path][0], field: messages}
        assert (await at.post(path, body, key))[
            0
        ] == 200  # at once: the leaving may not be noticed yet
        begun = policy.contexts[0] + policy.tokens("hello ")
        assert policy.contexts[1][: len(begun)] == begun
        (made,) = session.sequences(reward=1.0)
        assert sum(made.from_policy) == len("hello ") + len("yes") + 1
        assert session.figures()["unread_answers"] == 0

    over_http(test)


@pytest.mark.parametrize("path", STREAMS)
def test_who_leaves_a_stream_and_asks_again_gets_the_rest(path: str) -> None:
    async def test(at: Endpoint) -> None:
        key, session, policy = at.session(f"hello world{END}", f"you{END}", halfway=asyncio.Event())
        await leave(at, path, key, starts_with(path, "hello "))
        policy.halfway = None
        async with at.http.post(
            at.url + path, json={**STREAMS[path][0], "stream": True}, headers={"x-api-key": key}
        ) as got:
            assert STREAMS[path][1](events_of(await got.text())) == "hello you"
        (made,) = session.sequences(reward=1.0)
        assert sum(made.from_policy) == len("hello you") + 1

    over_http(test)


def test_who_has_left_before_a_whole_reply_was_written_has_not_read_it() -> None:
    async def test(at: Endpoint) -> None:
        key, session, policy = at.session(f"hello{END}", go=asyncio.Event())
        waiting = asyncio.create_task(at.post("/v1/chat/completions", QUESTION, key))
        await until(lambda: policy.contexts)
        waiting.cancel()
        await until(lambda: not any(c.listeners for c in session._book.calls))
        assert policy.go is not None
        policy.go.set()
        await until(lambda: session.tree.nodes)
        assert session.sequences(reward=1.0) == []
        assert (session.num_calls(), session.figures()["unread_answers"]) == (1, 1.0)

    over_http(test)


# ---- life of a session


def test_starting_a_session_needs_the_administrators_key() -> None:
    async def test(at: Endpoint) -> None:
        session, _ = at.unopened(f"hi{END}", id="q-1")
        at.source.waiting = [session]
        for key in ("", "sk-sess-x", ADMIN[:-1]):
            assert (await at.post("/rl/start_session", {}, key))[0] == 401
        assert at.source.waiting
        status, said, _ = await at.post("/rl/start_session", {"task_id": "q"}, ADMIN)
        assert status == 200
        assert said["session_id"] == "q-1"
        assert said["task"] == {"prompt": "1 + 1", "asked": "q"}
        assert said["base_url"] == f"{at.url}/v1"
        assert said["session_url"] == f"{at.url}/sessions/{said['api_key']}/v1"
        await at.ask(said["api_key"])
        assert (await at.post("/rl/set_reward", {"reward": 0.5}, said["api_key"]))[0] == 200
        status, ended, _ = await at.post("/rl/end_session", {}, said["api_key"])
        assert (status, ended) == (200, {"session_id": "q-1", "reward": 0.5})
        assert at.source.ended == ["q-1"]
        status, again, _ = await at.post("/rl/end_session", {}, said["api_key"])
        assert (status, again) == (200, ended)  # the first reply may have been lost
        assert at.source.ended == ["q-1"]
        assert (await at.post("/v1/chat/completions", QUESTION, said["api_key"]))[0] == 410

    over_http(test)


def test_without_room_clients_are_told_when_to_ask_again() -> None:
    async def test(at: Endpoint) -> None:
        status, said, headers = await at.post("/rl/start_session", {}, ADMIN)
        assert status == 429
        assert (headers["Retry-After"], headers["x-should-retry"]) == ("1", "true")
        assert said["error"]["message"]

    over_http(test)


def test_an_endpoint_without_an_administrator_starts_nothing() -> None:
    async def test(at: Endpoint) -> None:
        at.registry.admin_key = ""
        at.source.waiting = [at.unopened()[0]]
        for key in ("", "x"):
            assert (await at.post("/rl/start_session", {}, key))[0] == 401

    over_http(test)


def test_starting_with_a_key_ends_the_session_that_had_it() -> None:
    async def test(at: Endpoint) -> None:
        at.source.waiting = [at.unopened(f"{id}{END}", id=id)[0] for id in "ab"]
        for id in "ab":
            _, said, _ = await at.post("/rl/start_session", {"api_key": "mine-alone"}, ADMIN)
            assert (said["session_id"], said["api_key"]) == (id, "mine-alone")
        assert at.source.ended == ["a"]
        assert (await at.ask("mine-alone"))["choices"][0]["message"]["content"] == "b"

    over_http(test)


def test_two_who_start_with_one_key_at_once_leave_one_session_and_lose_none() -> None:
    async def test(at: Endpoint) -> None:
        at.source.go = asyncio.Event()
        at.source.waiting = [at.unopened(id=id)[0] for id in "ab"]
        starts = [
            asyncio.create_task(at.post("/rl/start_session", {"api_key": "mine-alone"}, ADMIN))
            for _ in range(2)
        ]
        await asyncio.sleep(0.1)
        at.source.go.set()
        made = await asyncio.gather(*starts)
        assert [status for status, _, _ in made] == [200, 200]
        assert len(at.source.ended) == 1  # the other one is open
        assert {at.source.ended[0], at.registry.find("mine-alone").id} == {"a", "b"}

    over_http(test)


def test_the_key_of_a_runners_session_is_taken() -> None:
    async def test(at: Endpoint) -> None:
        key, session, _ = at.session(f"hi{END}")
        at.source.waiting = [at.unopened(id="b")[0]]
        status, _, headers = await at.post("/rl/start_session", {"api_key": key}, ADMIN)
        assert (status, headers["x-should-retry"]) == (409, "false")
        assert not session.is_over
        assert len(at.source.waiting) == 1

    over_http(test)


def test_an_agent_ends_its_runners_session_and_may_do_so_twice() -> None:
    async def test(at: Endpoint) -> None:
        key, session, _ = at.session(f"hi{END}")
        await at.ask(key)
        for _ in range(2):
            status, said, _ = await at.post(f"/sessions/{key}/rl/end_session", {})
            assert (status, said) == (200, {"session_id": "e", "reward": None})
        assert (await at.post("/v1/chat/completions", QUESTION, key))[0] == 410
        assert (await at.post("/rl/set_reward", {"reward": 1}, key))[0] == 200  # a last word
        assert session.reward == 1.0
        assert len(session.sequences(reward=1.0)) == 1

    over_http(test)


@pytest.mark.parametrize("path", STREAMS)
def test_the_id_of_an_answer_takes_its_reward(path: str) -> None:
    async def test(at: Endpoint) -> None:
        key, session, _ = at.session(f"hi{END}", f"ho{END}")
        said = (await at.post(path, STREAMS[path][0], key))[1]
        await at.post(path, {**STREAMS[path][0], "temperature": 0.5}, key)
        status, _, _ = await at.post(
            "/rl/set_reward", {"reward": 0.5, "interaction_id": said["id"]}, key
        )
        assert status == 200
        assert [n.reward for n in session.tree.nodes] == [0.5, None]
        assert session.reward is None

    over_http(test)


# ---- many at once


def test_many_sessions_at_once_get_their_own_answers() -> None:
    async def test(at: Endpoint) -> None:
        opened = [at.session(*[f"{i} {n}{END}" for n in range(4)], id=f"e{i}") for i in range(20)]

        async def talk(i: int, key: str) -> None:
            messages = [{"role": "user", "content": f"{i}"}]
            for n in range(4):
                body = {"messages": messages}
                said = (await at.ask(key, body))["choices"][0]["message"]["content"]
                assert said == f"{i} {n}"
                messages += [
                    {"role": "assistant", "content": said},
                    {"role": "user", "content": "on"},
                ]

        await asyncio.gather(*(talk(i, key) for i, (key, _, _) in enumerate(opened)))
        for _, session, policy in opened:
            (made,) = session.sequences(reward=1.0)
            last = policy.tokens(policy.script[3])
            assert made.tokens == policy.contexts[3] + last

    over_http(test)


def test_equal_requests_at_once_are_samples_of_their_own() -> None:
    async def test(at: Endpoint) -> None:
        key, session, _ = at.session(*[f"{n}{END}" for n in range(8)])
        made = await asyncio.gather(*(at.ask(key) for _ in range(8)))
        texts = {m["choices"][0]["message"]["content"] for m in made}
        assert texts == {str(n) for n in range(8)}
        assert len({m["id"] for m in made}) == 8
        assert len(session.sequences(reward=1.0)) == 8

    over_http(test)


def test_a_header_of_any_bytes_is_just_not_the_administrators_key() -> None:
    registry = SessionRegistry(admin_key=ADMIN)
    assert registry.is_admin(ADMIN)
    assert not registry.is_admin("\udcff")  # as aiohttp reads a byte that is not UTF-8


# ---- who dawdles


@asynccontextmanager
async def raw(at: Endpoint) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection on which a test writes what it likes."""
    host, port = at.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()


async def answer(reader: asyncio.StreamReader) -> int:
    """Reads one answer whole; returns its status."""
    head = await reader.readuntil(b"\r\n\r\n")
    (length,) = [
        int(x.split(b":")[1]) for x in head.splitlines() if x.lower()[:15] == b"content-length:"
    ]
    await reader.readexactly(length)
    return int(head.split()[1])


def head(path: str, *lines: str, method: str = "GET") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: x", *lines, "", ""]).encode()


def test_a_connection_may_stay_idle_with_a_key_but_not_begin_a_request_and_stop() -> None:
    async def test(at: Endpoint) -> None:
        key, _, _ = at.session()
        async with raw(at) as (reader, writer):
            for _ in range(2):
                writer.write(head("/v1/models", f"Authorization: Bearer {key}"))
                assert await answer(reader) == 200
                await asyncio.sleep(0)
                pass_time(3 * SILENCE_S)  # a stranger has two
                await asyncio.sleep(0)
            writer.write(head("/health")[:-1])
            cut = asyncio.create_task(reader.read())
            while not cut.done():
                await asyncio.sleep(0.01)
                pass_time(SILENCE_S)
            assert cut.result() == b""

    over_http(test)


def test_a_body_that_does_not_come_takes_no_place_and_has_a_limit() -> None:
    async def test(at: Endpoint) -> None:
        key, _, _ = at.session()
        taken: list[str] = []
        lent = at.registry.lent
        at.registry.lent = lambda key: taken.append(key) or lent(key)  # type: ignore[method-assign,func-returns-value]
        async with raw(at) as (reader, writer):
            keys = (f"Authorization: Bearer {key}", f"Content-Length: {MAX_BODY_BYTES}")
            writer.write(head("/v1/chat/completions", *keys, method="POST") + b"{")
            answered = asyncio.create_task(answer(reader))
            while not answered.done():
                await asyncio.sleep(0.01)
                pass_time(BODY_S)
            assert answered.result() == 408
            assert taken == []

    over_http(test)


def test_a_packed_body_is_read_up_to_the_limit_of_others() -> None:
    async def test(at: Endpoint) -> None:
        key, _, policy = at.session(*[f"hi{END}"] * 2)
        plain = json.dumps(QUESTION).encode()
        for name, packed in (("gzip", gzip.compress(plain)), ("deflate", zlib.compress(plain))):
            await at.ask(key, packed, Content_Encoding=name)
        for name, sent, status in (
            ("gzip", gzip.compress(bytes(MAX_BODY_BYTES + 1)), 413),
            ("gzip", plain, 400),
            ("snappy", plain, 415),
        ):
            got, said, _ = await at.post(CHAT, sent, key, Content_Encoding=name)
            assert (got, name in said["error"]["message"]) == (status, True), said
        assert len(policy.contexts) == 2

    over_http(test)


@pytest.mark.parametrize(
    "lines", [["Content-Length: 1", "Transfer-Encoding: chunked"], [f"x{i}: y" for i in range(200)]]
)
def test_a_head_that_cant_be_read_is_refused_and_fills_no_log(
    lines: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    async def test(at: Endpoint) -> None:
        async with raw(at) as (reader, writer):
            writer.write(head("/health", *lines))
            assert (await reader.readline()).split()[1] == b"400"

    with caplog.at_level(logging.INFO):
        over_http(test)
    assert [record for record in caplog.records if record.exc_info] == []


def test_what_is_left_out_is_logged_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
    block = {"type": "image", "source": {"type": "url", "url": "u"}}
    claude = {"messages": [{"role": "user", "content": [block]}]}
    looked = {"messages": [{"role": "user", "content": [image, {"type": "text", "text": "1"}]}]}

    async def test(at: Endpoint) -> None:
        refusing, _, _ = at.session(f"no{END}")
        status, said, _ = await at.post("/v1/chat/completions", looked, refusing)
        assert (status, said["error"]["param"]) == (400, "messages[0].content[0]")
        for script in ((f"yes{END}", f"so{END}"), (f"well{END}", f"no{END}")):
            key, session, policy = at.session(*script)
            session.settings = replace(session.settings, unserved=Unserved.DROP)
            await at.ask(key, looked)
            await at.ask(key)
            assert "[image left out]1" in session.settings.decode(policy.contexts[0])
            counted, _, _ = await at.post("/v1/messages/count_tokens", claude, key)
            assert counted == 200
            figures = session.figures()
            assert (figures["left_out"], figures["calls"]) == (1.0, 2.0)
        key, session, _ = at.session(f"yes{END}")
        await at.ask(key)
        assert "left_out" not in session.figures()

    over_http(test)
    lines = [r.getMessage() for r in caplog.records if "unserved=drop" in r.getMessage()]
    assert [line.rpartition("=")[2] for line in lines] == ["image"]


def test_a_large_body_is_read_beside_other_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[bool] = []
    read = chat_completions.read

    def noted(*args: Any, **more: Any) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        return read(*args, **more)

    async def test(at: Endpoint) -> None:
        key, _, _ = at.session(*[f"hi{END}"] * 2)
        await at.ask(key)
        schema = {"enum": ["x" * LARGE_BODY_BYTES]}  # ignored
        await at.ask(key, {**QUESTION, "other": schema})
        assert threads == [True, False]

    monkeypatch.setattr(chat_completions, "read", noted)
    over_http(test)
