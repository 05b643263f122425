"""A stream makes the whole answer, in whatever pieces it went out; a reply that comes back is the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import golden
import pytest
from dialect_streams import (
    MESSAGES,
    events,
    result_of,
    streamed,
    whole_chat,
    whole_message,
    whole_response,
)

from realsys.api.errors import ClusterError, InternalError
from realsys.rollout.conversation.chat_messages import (
    ChatMessage,
    ChatRequest,
    FinishReason,
    TokenLogprob,
)
from realsys.rollout.dialects import anthropic_messages, chat_completions, responses_api
from realsys.rollout.dialects.dialect import Dialect

USER = {"role": "user", "content": "hi"}
REQUEST = ChatRequest(
    messages=(ChatMessage(role="user", content="hi"),), stream_usage=True, stream=True
)
Whole = Callable[[bytes], dict[str, Any]]
WHOLE: dict[str, tuple[Dialect, Whole]] = {
    "chat": (chat_completions, whole_chat),
    "anthropic": (anthropic_messages, whole_message),
    "responses": (responses_api, whole_response),
}
LOST = ClusterError("no server answers", where="x", fix="try again")


@pytest.mark.parametrize("sent", ["", "reasoning", "reasoning and text"])
@pytest.mark.parametrize("finish", [None, FinishReason.LENGTH])
@pytest.mark.parametrize("shape", MESSAGES)
@pytest.mark.parametrize("api", WHOLE)
def test_a_stream_makes_the_whole_answer(
    api: str, shape: str, finish: FinishReason | None, sent: str
) -> None:
    dialect, whole = WHOLE[api]
    result = result_of(MESSAGES[shape], finish)
    told = whole(streamed(dialect, result, REQUEST, sent))
    assert told == dialect.body(result, REQUEST)


@pytest.mark.parametrize("api", ["anthropic", "responses"])
def test_reasoning_that_is_known_late_comes_after_the_text(api: str) -> None:
    dialect, whole = WHOLE[api]
    content = "content" if api == "anthropic" else "output"
    result = result_of(MESSAGES["calls"])
    told = whole(streamed(dialect, result, REQUEST, "text"))[content]
    wanted = dialect.body(result, REQUEST)[content]
    kinds = [entry["type"] for entry in wanted]
    assert [entry["type"] for entry in told] == [kinds[1], kinds[0], *kinds[2:]]


def test_an_anthropic_stream_opens_with_an_empty_message() -> None:
    encoder = anthropic_messages.stream(REQUEST)
    ((_, opening),) = events(encoder.opening("r1", 0, "policy", num_prompt_tokens=9, num_cached=4))
    message = opening.pop("message")
    assert opening == {"type": "message_start"}
    assert (message["role"], message["content"], message["stop_reason"]) == ("assistant", [], None)
    assert message["usage"] == {
        "input_tokens": 5,
        "output_tokens": 0,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
    }


def test_two_replies_are_streamed_side_by_side() -> None:
    request = replace(REQUEST, n=2, logprobs=True)
    result = result_of(MESSAGES["calls"], n=2)
    logprobs = (TokenLogprob(text="a", logprob=-1.0),)
    result = replace(result, replies=tuple(replace(r, logprobs=logprobs) for r in result.replies))
    stream = streamed(chat_completions, result, request, "reasoning and text")
    assert whole_chat(stream) == chat_completions.body(result, request)


def test_token_counts_of_a_chat_stream_come_only_if_they_were_asked_for() -> None:
    result = result_of(MESSAGES["text"])
    plain = [
        d
        for _, d in events(streamed(chat_completions, result, replace(REQUEST, stream_usage=False)))
    ]
    assert all("usage" not in data for data in plain[:-1])
    counted = [data for _, data in events(streamed(chat_completions, result, REQUEST))]
    assert counted[-2]["choices"] == []
    assert counted[-2]["usage"]["total_tokens"] == 17
    assert all(data["usage"] is None for data in counted[:-2])


@pytest.mark.parametrize("api", WHOLE)
def test_text_that_the_result_takes_back_is_a_bug(api: str) -> None:
    encoder = WHOLE[api][0].stream(REQUEST)
    encoder.opening("r1", 0, "policy")
    encoder.text(0, "Good")
    with golden.raises(InternalError):
        encoder.closing(result_of(MESSAGES["text"]))


def test_pings_are_comments_or_anthropics_event() -> None:
    assert (
        chat_completions.stream(REQUEST).ping()
        == responses_api.stream(REQUEST).ping()
        == b": ping\n\n"
    )
    assert anthropic_messages.stream(REQUEST).ping() == b'event: ping\ndata: {"type":"ping"}\n\n'


def test_a_failure_ends_a_chat_stream() -> None:
    told = list(events(chat_completions.stream(REQUEST).failed(LOST, 503)))
    assert told == [("", chat_completions.error(LOST, 503)), ("", None)]


def test_a_failure_ends_an_anthropic_stream() -> None:
    told = list(events(anthropic_messages.stream(REQUEST).failed(LOST, 500)))
    assert told == [("error", anthropic_messages.error(LOST, 500))]


def test_a_failure_ends_a_response() -> None:
    encoder = responses_api.stream(REQUEST)
    encoder.opening("r1", 0, "policy")
    (_, error), (name, failed) = events(encoder.failed(LOST, 503))
    message = "no server answers. Fix: try again"
    assert error == {
        "type": "error",
        "sequence_number": 2,
        "code": "server_error",
        "message": message,
        "param": None,
    }
    assert (name, failed["sequence_number"]) == ("response.failed", 3)
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": "server_error", "message": message}
    ((name, _),) = events(responses_api.stream(REQUEST).failed(LOST, 503))
    assert name == "error"


def sent_back(api: str, told: dict[str, Any]) -> ChatMessage:
    """The assistant's message of a next request, in which the client sends the answer back."""
    if api == "chat":
        body = {"messages": [USER, told["choices"][0]["message"], USER]}
    elif api == "anthropic":
        body = {"messages": [USER, {"role": "assistant", "content": told["content"]}, USER]}
    else:
        body = {"input": [USER, *told["output"], USER]}
    request = WHOLE[api][0].read(json.dumps(body).encode(), {})
    assert [message.role for message in request.messages] == ["user", "assistant", "user"]
    return request.messages[1]


@pytest.mark.parametrize("sent", ["", "text", "reasoning and text"])
@pytest.mark.parametrize("shape", MESSAGES)
@pytest.mark.parametrize("api", WHOLE)
def test_a_reply_that_comes_back_is_the_same(api: str, shape: str, sent: str) -> None:
    dialect, whole = WHOLE[api]
    result = result_of(MESSAGES[shape])
    assert sent_back(api, dialect.body(result, REQUEST)) == MESSAGES[shape]
    assert sent_back(api, whole(streamed(dialect, result, REQUEST, sent))) == MESSAGES[shape]
