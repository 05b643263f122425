"""JSON of the generation server's API: what is read, what is refused, and with which words."""

from __future__ import annotations

import json
from typing import Any

import golden
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from realsys.api.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    InternalError,
    RealsysError,
    RemoteError,
    WaitTimeout,
    WorkerLost,
)
from realsys.generation.http.http_answers import (
    TokenSpan,
    answer_json,
    error_json,
    read_answer,
    read_error,
    spans_of,
    status_of,
    versions_of,
)
from realsys.generation.http.http_json import generate_body, read_generate
from realsys.generation.http.served_engine import EngineAnswer
from realsys.transport.generation_messages import Finish, GenerateRequest, Sampling


def read(**body: Any) -> tuple[GenerateRequest, ...]:
    return read_generate(json.dumps(body).encode()).requests


@pytest.mark.parametrize(
    "body",
    [
        b"[1]",
        b"{",
        b"",
        b'{"input_id": [1]}',
        b'{"input_ids": [1], "sampling_params": {"topp": 1}}',
        b'{"input_ids": []}',
        b'{"input_ids": [[1], []]}',
        b'{"input_ids": [1, [2]]}',
        b'{"input_ids": [[1], 2]}',
        b'{"input_ids": [[1, [2]]]}',
        b'{"input_ids": [-1]}',
        b'{"input_ids": [1.5]}',
        b'{"input_ids": [1], "sampling_params": {"max_new_tokens": 0}}',
        b'{"input_ids": [1], "sampling_params": {"min_new_tokens": 200}}',
        b'{"input_ids": [1], "sampling_params": {"top_p": 0}}',
        b'{"input_ids": [1], "sampling_params": {"top_k": 0}}',
        b'{"input_ids": [1], "sampling_params": {"n": 100000}}',
        b'{"input_ids": [1], "sampling_params": {"position": -1}}',
        b'{"input_ids": [1], "sampling_params": {"sampling_seed": 9223372036854775808}}',
        b'{"input_ids": [1], "sampling_params": {"repetition_penalty": 1.1}}',
        b'{"input_ids": [1], "text": "hello"}',
        b'{"input_ids": [[1], [2]], "rid": ["a"]}',
        b'{"input_ids": [[1], [2]], "rid": ["a", "a"]}',
    ],
)
def test_what_is_wrong_is_said(body: bytes) -> None:
    with golden.raises(DataError) as caught:
        read_generate(body)
    assert caught.value.where.startswith("/generate")


def test_defaults_are_sglangs() -> None:
    (request,) = read(input_ids=[3, 4])
    assert request.sampling == Sampling(max_new_tokens=128, temperature=1.0, top_k=-1)
    assert request.input_ids == (3, 4)
    assert len(request.rid) == 32


def test_fields_that_change_nothing_are_taken() -> None:
    sampling = {"repetition_penalty": 1.0, "min_p": 0, "stop": "x", "skip_special_tokens": False}
    (request,) = read(input_ids=[1], text=None, logprob_start_len=-1, sampling_params=sampling)
    assert request.sampling.stop == ("x",)


def test_a_batch_has_its_own_rids_and_settings() -> None:
    params = [{"max_new_tokens": 1}, {"max_new_tokens": 2}]
    call = read_generate(
        json.dumps({"input_ids": [[1], [2, 3]], "rid": "b", "sampling_params": params}).encode()
    )
    assert call.batch
    assert [r.rid for r in call.requests] == ["b_0", "b_1"]
    assert [r.sampling.max_new_tokens for r in call.requests] == [1, 2]


def test_n_answers_with_a_seed_differ() -> None:
    big = (1 << 63) - 1
    requests = read(input_ids=[1], rid="r", sampling_params={"n": 3, "sampling_seed": big})
    assert [r.rid for r in requests] == ["r-0", "r-1", "r-2"]
    assert [r.sampling.sampling_seed for r in requests] == [big, -big - 1, -big]


@given(
    st.builds(
        Sampling,
        max_new_tokens=st.integers(8, 1000),
        min_new_tokens=st.integers(0, 8),
        temperature=st.floats(0, 3),
        top_p=st.floats(0.01, 1),
        top_k=st.sampled_from([-1, 1, 50]),
        stop=st.lists(st.text(min_size=1, max_size=3), max_size=2).map(tuple),
        stop_token_ids=st.lists(st.integers(0, 99), max_size=3).map(tuple),
        ignore_eos=st.booleans(),
        sampling_seed=st.none() | st.integers(-(1 << 63), (1 << 63) - 1),
        position=st.integers(0, 1000),
        return_kept=st.booleans(),
    ),
    st.lists(st.integers(0, 1 << 20), min_size=1, max_size=5),
)
def test_a_request_comes_as_it_was_sent(sampling: Sampling, ids: list[int]) -> None:
    sent = GenerateRequest(rid="r", input_ids=tuple(ids), sampling=sampling)
    call = read_generate(msgspec.json.encode(generate_body(sent, stream=True)))
    assert call.requests == (sent,)
    assert (call.batch, call.stream) == (False, True)


def test_position_is_sent_only_where_it_counts() -> None:
    body = generate_body(GenerateRequest(rid="r", input_ids=(1,)))
    assert not {"position", "return_kept"} & body["sampling_params"].keys()


def test_another_engine_gets_no_extension() -> None:
    sampling = Sampling(position=3, return_kept=True)
    sent = GenerateRequest(rid="r", input_ids=(1,), sampling=sampling)
    body = generate_body(sent, extended=False)
    assert not {"position", "return_kept"} & body["sampling_params"].keys()


@given(
    st.lists(st.tuples(st.integers(0, 99), st.floats(-50, 0, width=32), st.integers(0, 3))),
    st.sampled_from([None, *Finish]),
    st.none() | st.binary(max_size=12),
)
def test_an_answer_comes_as_it_was_made(
    tokens: list[tuple[int, float, int]], finish: Finish | None, kept: bytes | None
) -> None:
    ids, logprobs, versions = (list(x) for x in zip(*tokens, strict=True)) if tokens else ([],) * 3
    answer = EngineAnswer(
        rid="r",
        output_ids=ids,
        logprobs=logprobs,
        versions=versions,
        finish=finish,
        prompt_tokens=3,
        cached_tokens=2,
        kept=[] if kept is None else [kept] * len(ids),
        context_length=0 if ids else 7,
    )
    data = msgspec.json.encode(answer_json(answer, seconds=0.5))
    assert read_answer(data, rid="other") == answer


def test_an_answer_of_sglangs_is_read() -> None:
    meta = {
        "id": "r",
        "finish_reason": {"type": "abort", "message": "Abort in pause", "status_code": None},
        "weight_version": "4",
        "weight_versions": [
            {"version": "default", "start": 0, "end": 1},
            {"version": "4", "start": 1, "end": 3},
        ],
        "output_token_logprobs": [[-0.5, 7, None], [-1.5, 8, None], [-2.0, 9, None]],
        "queue_time": 0.1,
    }
    data = json.dumps({"output_ids": [7, 8, 9], "meta_info": meta}).encode()
    answer = read_answer(data, rid="r")
    assert answer.versions == [0, 4, 4]
    assert answer.logprobs == [-0.5, -1.5, -2.0]
    assert answer.finish is Finish.ABORT


def test_spans_by_hand() -> None:
    assert spans_of([3, 3, 4]) == [TokenSpan("3", 0, 2), TokenSpan("4", 2, 3)]
    assert versions_of([TokenSpan("3", 0, 2), TokenSpan("4", 2, 2), TokenSpan("5", 2, 3)], 3) == [
        3,
        3,
        5,
    ]
    with golden.raises(ValueError):
        versions_of([TokenSpan("3", 0, 2)], 3)
    with golden.raises(ValueError):
        versions_of([TokenSpan("3", 0, 2), TokenSpan("4", 1, 3)], 3)


@pytest.mark.parametrize("data", [b"", b"null", b"{}", b'{"output_ids": [1], "meta_info": {}}'])
def test_half_an_answer_is_refused(data: bytes) -> None:
    with golden.raises(DataError):
        read_answer(data, rid="r")


@pytest.mark.parametrize(
    ("kind", "status", "comes_as"),
    [
        (DataError, 400, DataError),
        (ConfigError, 400, RemoteError),
        (CheckpointError, 400, RemoteError),
        (WaitTimeout, 504, RemoteError),
        (WorkerLost, 503, WorkerLost),
        (InternalError, 500, RemoteError),
    ],
)
def test_errors_cross_the_wire(
    kind: type[RealsysError], status: int, comes_as: type[RealsysError]
) -> None:
    error = kind("it broke", where="here", fix="mend it")
    assert status_of(error) == status
    data = msgspec.json.encode(error_json(error, status=status))
    came = read_error(data, status=status, server="generation_server/3", where="https://h/x")
    assert type(came) is comes_as
    assert came.from_worker == "generation_server/3"
    assert came.what == f"generation_server/3 refused ({status}): it broke"
    assert (came.where, came.fix) == ("https://h/x: here", "mend it")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "HTTP status 502"),
        (b"<html>Bad gateway</html>", "Bad gateway"),
        (b'{"error": "unknown field `x`"}', "unknown field"),  # SGLang's other shape
        (b'{"error": {"message": "no", "type": "BadRequest", "code": 1}}', "no"),
        (b'{"object": "error", "message": "gone"}', "gone"),
        (b"[1]", r"[1]"),
    ],
)
def test_errors_of_others_are_told(data: bytes, words: str) -> None:
    error = read_error(data, status=502, server="generation_server/0", where="u")
    assert type(error) is RemoteError
    assert words in error.what
