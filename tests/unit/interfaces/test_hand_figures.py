"""Figures of evaluations and batches, and what of a sequence is an answer: numbers worked out by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from estimators_named import estimator
from letter_chat import LetterTokenizer

from realsys.algorithms.sequence_sums import longest_runs
from realsys.api.basics.reward import Completion, Score
from realsys.api.data import MicroBatchSpec
from realsys.api.errors import ConfigError, DataError
from realsys.api.model import GenerationHyperparameters
from realsys.backends.hf.data_parallel import DataParallel
from realsys.data.sequence_sample import SequenceSample
from realsys.interfaces import math_evaluation
from realsys.interfaces.answers import INPUT, PROMPT_MASK, answer_mask
from realsys.interfaces.completions import answered_records
from realsys.interfaces.interface_arguments import PPOSettings
from realsys.interfaces.math_evaluation import evaluate_math
from realsys.interfaces.ppo.batch_checks import BEHAVIOUR, _check_numbers
from realsys.interfaces.ppo.batch_figures import mean_and_std
from realsys.interfaces.ppo.ppo_actor import PPOActorInterface
from realsys.interfaces.ppo.ppo_critic import PPOCriticInterface
from realsys.interfaces.ppo.ppo_experience import _equal, _penalise_length


def ranks(of_others: float = 0.0):
    """One rank and others, whose sums are ``of_others``."""
    return SimpleNamespace(sum=lambda x: x + of_others)


def sample(pieces: list[list[int]], logprobs: torch.Tensor | None = None) -> SequenceSample:
    num = sum(map(sum, pieces))
    data = {INPUT: torch.arange(num), PROMPT_MASK: torch.zeros(num, dtype=torch.bool)}
    data |= {} if logprobs is None else {BEHAVIOUR: logprobs}
    ids = [f"id{i}" for i in range(len(pieces))]
    return SequenceSample.from_tensors(ids, dict.fromkeys(data, pieces), data)


def test_mean_and_deviation_of_what_the_mask_has():
    x, mask = torch.tensor([1.0, 5.0, 99.0]), torch.tensor([True, True, False])
    assert mean_and_std(x, mask, ranks()) == (3.0, 2.0)
    assert [*map(math.isnan, mean_and_std(x, mask & ~mask, ranks()))] == [True, True]


def evaluated(monkeypatch: pytest.MonkeyPatch, batches: Any, sources: Any = ("a", "b", "c")) -> Any:
    """An evaluation of batches of (id of a source, scores), which are asked and answered at once."""

    class Judge:
        def __init__(self, reward: str, args: Any) -> None:
            self.sources = sources

        def scores(self, data: Any, tokenizer: Any, *, asked: SequenceSample) -> Any:
            for source, scores in batches[len(asked.ids) - 1]:
                answer = SimpleNamespace(response="so", answer="5", record={"task_source": source})
                yield SimpleNamespace(answers=[answer], prompt=lambda: "why"), scores

    monkeypatch.setattr(math_evaluation, "AnswerScorer", Judge)
    asked = [sample([[3 + i] for i in range(len(batch))]) for batch in batches]
    engine = SimpleNamespace(generate=lambda batch, **_: batch)
    groups = SimpleNamespace(data=None)
    model: Any = SimpleNamespace(module=engine, tokenizer=None, groups=groups, device="cpu")
    gen = GenerationHyperparameters()
    return evaluate_math(model, asked, gen=gen, reward="x", mb_spec=MicroBatchSpec())


def test_figures_of_an_evaluation_are_of_what_the_rule_scored(monkeypatch):
    monkeypatch.setattr(math_evaluation, "NUM_SAMPLES", 2)
    right, wrong = [Score(value=1.0, correct=True)], [Score(value=0.25, correct=False)]
    shown = {"prompt": "why", "response": "so", "answer": "5"}
    one = {"accuracy": 1.0, "mean_reward": 1.0, "num_problems": 1, "response_length/mean": 2.0}
    samples = [{**shown, "correct": True}]
    assert evaluated(monkeypatch, [[("a", right)]], ()) == {**one, "samples": samples}
    assert evaluated(monkeypatch, [[("a", wrong)], [("a", right), ("a", [])]]) == {
        "accuracy": 0.5,
        "mean_reward": 0.625,
        "num_problems": 3,
        "num_unscored": 1,
        "response_length/mean": (2 + 2 + 3) / 3,
        "num_problems/a": 2.0,
        "accuracy/a": 0.5,
        **{f"num_problems/{source}": 0.0 for source in "bc"},  # and no accuracy
        "samples": [{**shown, "correct": correct} for correct in (False, True)],
    }
    of_none = dict.fromkeys(one, 0.0) | {"samples": []}
    assert evaluated(monkeypatch, [], ()) == of_none
    none = {"accuracy": 0.0, "mean_reward": 0.0, "num_unscored": 1}
    assert none.items() <= evaluated(monkeypatch, [[("b", [])]]).items()


def test_a_rule_sees_of_an_answer_what_the_batch_has_of_it():
    rows, prompt = ["$?ab", "?", "?c"], [True, True, False, False, True, True, False]
    lengths = [[4, 1], [2]]
    tokens = {
        INPUT: torch.tensor([ord(x) for x in "".join(rows)]),
        PROMPT_MASK: torch.tensor(prompt),
    }
    tokens["seq_no_eos_mask"] = torch.tensor([True, False, False])
    sizes = {INPUT: lengths, PROMPT_MASK: lengths, "seq_no_eos_mask": [[1, 1], [1]]}
    data = SequenceSample.from_tensors(["x", "y"], sizes, tokens)
    known = {"answer": ["5", "7"], "question_text": ["five?", "seven?"]}
    records = [{"a": 1}, {"a": 2}]
    text = "".join(map(json.dumps, records)).encode()
    record = {"record": torch.tensor(list(text), dtype=torch.uint8)}
    whole = SequenceSample.from_tensors(["x", "y"], {"record": [[8], [8]]}, record, metadata=known)
    fields = {"response", "record", "finish_reason", "answer"}
    found = answered_records(data, LetterTokenizer(), fields, asked=whole)
    assert [(one.id, one.prompt()) for one in found] == [("x", "?"), ("y", "?")]
    asked = [
        {"answer": a, "record": r, "question": q}
        for a, r, q in zip(known["answer"], records, known["question_text"], strict=True)
    ]
    assert [one.answers for one in found] == [
        [
            Completion(
                response="ab", final="ab", token_ids=(97, 98), finish_reason="length", **asked[0]
            ),
            Completion(response="", final="", token_ids=(), finish_reason="stop", **asked[0]),
        ],
        [Completion(response="c", final="c", token_ids=(99,), finish_reason="stop", **asked[1])],
    ]
    (bare, *_), _ = (
        one.answers for one in answered_records(data, LetterTokenizer(), (), asked=data)
    )
    assert bare == Completion(response="ab", final="ab", token_ids=(97, 98), finish_reason="stop")
    for field in ("record", "answer"):
        with pytest.raises(DataError):
            answered_records(data, LetterTokenizer(), {field}, asked=data)


def test_long_answers_lose_score_if_a_buffer_is_set():
    data, score_B = sample([[3], [9]]), torch.tensor([1.0, 1.0])
    gen = GenerationHyperparameters(max_new_tokens=8)
    plain = PPOSettings(gen=gen, advantage=estimator("grpo"))
    assert _penalise_length(score_B, data, plain, DataParallel()) == (score_B, {})
    settings = replace(plain, overlong_buffer_len=4, overlong_penalty_factor=2.0)
    found, stats = _penalise_length(score_B, data, settings, DataParallel())
    assert (found.tolist(), stats) == ([1.0, -1.0], {"reward/overlong_penalty": -1.0})


def test_of_an_episode_its_longest_answer_is_overlong_or_not():
    """Each answer may have ``max_new_tokens``; together they may be longer."""
    turns = [0] * 5 + [1] * 60 + [0] * 10 + [1] * 60 + [0] * 10 + [1] * 60
    long = [0] * 5 + [1] * 10 + [0] * 10 + [1] * 95 + [0] * 10 + [1] * 60
    rows = [[0] + [1] * 90, turns, long, [0] * 4]
    mask = torch.tensor([not x for row in rows for x in row])
    data = sample([[len(row)] for row in rows])
    data.data[PROMPT_MASK][:] = mask
    gen = GenerationHyperparameters(max_new_tokens=100)
    settings = PPOSettings(gen=gen, advantage=estimator("grpo"), overlong_buffer_len=20)
    found, _ = _penalise_length(torch.zeros(4), data, settings, DataParallel())
    assert found.tolist() == [-0.5, 0.0, -0.75, 0.0]  # 90, 60, 95 and no tokens


def test_the_longest_run_of_each_sequence():
    torch.manual_seed(0)
    lengths = [0, 1, 2, 7, 0, 30, 1, 12, 0]
    for share in (0.0, 0.3, 0.7, 1.0):
        mask = torch.rand(sum(lengths)) < share
        wanted, start = [], 0
        for length in lengths:
            text = "".join(" x"[bool(b)] for b in mask[start : start + length])
            wanted.append(max(map(len, text.split()), default=0))
            start += length
        assert longest_runs(mask, lengths).tolist() == wanted
    assert longest_runs(torch.zeros(0, dtype=torch.bool), [0, 0]).tolist() == [0, 0]


def test_groups_of_equal_scores_whatever_their_sign():
    score_E = torch.tensor([-1.0, -1.0, 2.0, 3.0, -0.5, -0.5, 7.0])
    by_score_E = torch.tensor([0.0, 0.0, -1.0, 1.0, 0.0, 0.2, 0.0])
    group_E = torch.tensor([0, 0, 1, 1, 2, 2, 0])
    scored_E = torch.tensor([True] * 6 + [False])
    found = _equal(score_E, by_score_E, group_E, scored_E)
    assert found.tolist() == [True, True, False, False, False, False, True]


def test_first_tokens_are_no_answers_and_an_empty_sequence_has_none():
    assert answer_mask(sample([[3], [2, 0]])).tolist() == [False, True, True, False, True]


def test_datapoints_with_numbers_that_are_not_finite_are_named():
    logprobs = torch.tensor([0.0, float("nan")]).repeat(7)
    for data, others, where in (
        (sample([[2]] * 7, logprobs), 0.0, f"datapoints {[f'id{i}' for i in range(5)]}"),
        (sample([[2]], torch.zeros(2)), 1.0, "another data-parallel rank"),
    ):
        with pytest.raises(DataError) as refused:
            _check_numbers(data, ranks(others))
        assert refused.value.where == where


@pytest.mark.parametrize("interface", [PPOActorInterface, PPOCriticInterface])
def test_a_group_has_an_answer_at_least(interface):
    with pytest.raises(ConfigError) as refused:
        interface(group_size=0)
    assert refused.value.where == "group_size"
