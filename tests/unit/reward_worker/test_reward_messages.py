"""What travels to a reward worker and back."""

from __future__ import annotations

import json

import golden

from realsys.api.basics.reward import Completion, Score
from realsys.api.errors import DataError, RewardError
from realsys.transport.codec import ProtocolError, decode, encode
from realsys.transport.reward_messages import (
    FromRewardWorker,
    ScoredAnswer,
    ScoredAnswers,
    answer_of_json,
    answer_to_json,
    result_of,
    scored_answer,
)

ANSWER = Completion(
    response="half a pair \ud800, and 4",
    answer="4",
    record={
        "prompt": [{"role": "user", "content": "2+2"}],
        "big": 2**70,
        "part": 0.1,
        "none": None,
    },
    token_ids=(3, 1),
    finish_reason="length",
)
ALL = {"response", "answer", "record", "token_ids", "finish_reason"}


def test_an_answer_arrives_as_it_was() -> None:
    assert answer_of_json(answer_to_json(ANSWER, ALL)) == ANSWER


def test_only_what_the_rule_looks_at_travels() -> None:
    assert set(json.loads(answer_to_json(ANSWER, {"answer"}))) == {"response", "answer"}
    assert answer_of_json(answer_to_json(ANSWER, {"prompt"})).prompt == ANSWER.prompt


def test_scores_and_errors_arrive_as_they_were() -> None:
    score = Score(value=0.1 + 0.2, correct=True, parts={"b": 1e-300, "a": 2.0})
    error = RewardError("nan", where="rule 'x'", fix="mend it")
    sent = encode(ScoredAnswers(answers=(scored_answer(score), scored_answer(error))))
    same, named = (
        result_of(one, "reward_worker/1") for one in decode(sent, FromRewardWorker).answers
    )
    assert same == score
    assert isinstance(same, Score)
    assert list(same.parts) == ["b", "a"]
    assert isinstance(named, RewardError)
    golden.check((named.what, named.where))


def test_what_can_not_travel_is_refused_in_words() -> None:
    with golden.raises(DataError):
        answer_to_json(Completion(response="", record={"prompt": "", "x": object()}), {"record"})
    with golden.raises(ProtocolError):
        answer_of_json('{"response": "", "later": 1}')
    with golden.raises(ProtocolError):
        answer_of_json("[1")
    with golden.raises(ProtocolError):
        result_of(ScoredAnswer(), "reward_worker/0")
