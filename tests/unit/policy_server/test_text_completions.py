"""Bodies of /v1/completions: what is asked, whole answers and streams, by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from realsys.api.errors import DataError
from realsys.policy_server.text_completions import (
    Completed,
    CompletionRequest,
    CompletionStream,
    body,
    read,
)

HEAD: dict[str, Any] = {"id": "cmpl-1", "created": 7, "model": "m"}


def asked(**fields: Any) -> CompletionRequest:
    return read(json.dumps({"prompt": "a", **fields}).encode())


@pytest.mark.parametrize(
    ("prompt", "read_as"),
    [
        ("a b", ("a b",)),
        (["a", "b"], ("a", "b")),
        ([5, 6], ([5, 6],)),
        ([[5], [6, 7]], ([5], [6, 7])),
    ],
)
def test_a_prompt_is_text_or_tokens_or_several(prompt: Any, read_as: tuple[Any, ...]) -> None:
    assert asked(prompt=prompt).prompts == read_as


@pytest.mark.parametrize("prompt", [[], [[]], ["a", 5], [[5], "a"], [True], [1.5], [[5], []]])
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
    assert asked(logprobs=0).logprobs  # log-probs of the sampled token alone


def test_a_whole_answer_has_a_choice_for_each_answer_and_counts_each_prompt_once() -> None:
    made = [
        Completed(
            text="xy",
            stopped=True,
            num_tokens=3,
            num_prompt_tokens=5,
            token_texts=("x", "y", "<e>"),
            token_logprobs=(-1.0, float("-inf"), -0.5),
        ),
        Completed(text="z", stopped=False, num_tokens=1, num_prompt_tokens=5),
    ]
    told = body(made, asked(n=2, logprobs=1), **HEAD)
    first, second = told["choices"]
    assert (first["text"], first["finish_reason"]) == ("xy", "stop")
    assert (second["index"], second["finish_reason"]) == (1, "length")
    assert first["logprobs"]["token_logprobs"] == [-1.0, -9999.0, -0.5]
    assert first["logprobs"]["text_offset"] == [0, 1, 2]
    assert told["usage"] == {"prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9}


def test_a_stream_sends_what_is_new_then_the_rest_and_why_it_ended() -> None:
    stream = CompletionStream(asked(stream=True), **HEAD)
    sent = stream.text(0, "ab") + stream.text(0, "ab") + stream.text(0, "abc")
    made = [Completed(text="abcd", stopped=True, num_tokens=4, num_prompt_tokens=1)]
    events = [line[6:] for line in (sent + stream.closing(made)).decode().split("\n\n") if line]
    assert events[-1] == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in events[:-1]]
    assert [c["text"] for c in choices] == ["ab", "c", "d"]
    assert [c["finish_reason"] for c in choices] == [None, None, "stop"]
