"""Bodies of /v1/completions: what is asked, whole answers and streams, by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from realsys.api.errors import DataError
from realsys.rollout.conversation.chat_messages import (
    ChatMessage,
    ChatReply,
    ChatRequest,
    ChatResult,
    FinishReason,
    TokenLogprob,
)
from realsys.rollout.dialects.text_completions import CompletionStream, body, read


def asked(headers: dict[str, str] | None = None, **fields: Any) -> ChatRequest:
    return read(json.dumps({"prompt": "a", **fields}).encode(), headers or {})


def reply(text: str, finish: FinishReason = FinishReason.STOP, **more: Any) -> ChatReply:
    return ChatReply(message=ChatMessage(role="assistant", content=text), finish=finish, **more)


def result(*replies: ChatReply, num_prompt_tokens: int = 5) -> ChatResult:
    return ChatResult(
        id="c1", created=7, model="m", replies=replies, num_prompt_tokens=num_prompt_tokens
    )


@pytest.mark.parametrize(
    ("prompt", "read_as"),
    [
        ("a b", ("a b",)),
        (["a", "b"], ("a", "b")),
        ([5, 6], ((5, 6),)),
        ([[5], [6, 7]], ((5,), (6, 7))),
        ([[5, 6]], ((5, 6),)),
        (["a"], ("a",)),
    ],
)
def test_a_prompt_is_text_or_tokens_or_several(prompt: Any, read_as: tuple[Any, ...]) -> None:
    request = asked(prompt=prompt)
    assert (request.prompts, request.messages) == (read_as, ())


@pytest.mark.parametrize(
    "prompt", [[], [[]], ["a", 5], [[5], "a"], [True], [1.5], [[5], []], [-1], [2**31], [[2**70]]]
)
def test_other_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(DataError) as caught:
        asked(prompt=prompt)
    assert caught.value.where == "prompt"


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"n": 17}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": 2}, "logprobs"),
        ({"enable_thinking": False}, "enable_thinking"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"guided_grammar": "x"}, "guided_grammar"),
        ({"add_special_tokens": False}, "add_special_tokens"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
    ],
)
def test_what_is_not_served_is_refused_by_its_field(fields: dict[str, Any], where: str) -> None:
    with pytest.raises(DataError) as caught:
        asked(**fields)
    assert caught.value.where == where


def test_defaults_are_the_apis() -> None:
    made = asked()
    assert (made.n, made.max_tokens, made.stop, made.logprobs, made.stream) == (
        *(1, 16, (), False, False),
    )
    assert (made.token_ids, made.has_form, made.retries) == (False, False, 0)
    assert asked(add_special_tokens=True) == made
    assert asked(logprobs=0).logprobs  # log-probs of the sampled token alone


def test_what_is_asked_reaches_the_request() -> None:
    made = asked(
        {"X-Stainless-Retry-Count": "2", "Idempotency-Key": "k"},
        return_token_ids=True,
        guided_regex="a+",
        stop="b",
        model="m",
        temperature=0,
    )
    assert (made.retries, made.idempotency_key, made.token_ids) == (2, "k", True)
    assert (made.pattern, made.must_hold, made.stop) == ("a+", True, ("b",))
    assert (made.model, made.sampling) == ("m", {"temperature": 0})


def test_a_whole_answer_has_a_choice_for_each_answer_and_counts_each_prompt_once() -> None:
    logprobs = tuple(
        TokenLogprob(text=t, logprob=x)
        for t, x in (("x", -1.0), ("y", float("-inf")), ("<e>", -0.5))
    )
    made = result(
        reply("xy", logprobs=logprobs, num_tokens=3), reply("z", FinishReason.LENGTH, num_tokens=1)
    )
    told = body(made, asked(n=2, logprobs=1))
    first, second = told["choices"]
    assert (first["text"], first["finish_reason"]) == ("xy", "stop")
    assert (second["index"], second["finish_reason"]) == (1, "length")
    assert first["logprobs"]["token_logprobs"] == [-1.0, -9999.0, -0.5]
    assert first["logprobs"]["text_offset"] == [0, 1, 2]
    assert told["usage"] == {"prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9}
    assert "token_ids" not in first


def test_tokens_are_told_with_each_choice() -> None:
    made = result(reply("x", token_ids=(7, 8), prompt_ids=(1, 2)))
    (choice,) = body(made, asked(return_token_ids=True))["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([1, 2], [7, 8])


def test_a_stream_sends_what_is_new_then_the_rest_and_why_it_ended() -> None:
    stream = CompletionStream(asked(stream=True, return_token_ids=True))
    sent = stream.opening("c1", 7, "m") + stream.text(0, "ab") + stream.text(0, "c")
    made = result(reply("abcd", token_ids=(7, 8), prompt_ids=(1,)))
    events = [line[6:] for line in (sent + stream.closing(made)).decode().split("\n\n") if line]
    assert events[-1] == "[DONE]"
    assert json.loads(events[0])["id"] == "c1"
    choices = [json.loads(event)["choices"][0] for event in events[:-1]]
    assert [c["text"] for c in choices] == ["ab", "c", "d"]
    assert [c["finish_reason"] for c in choices] == [None, None, "stop"]
    assert [c.get("token_ids", []) for c in choices] == [[], [], [7, 8]]
    assert choices[-1]["prompt_token_ids"] == [1]
