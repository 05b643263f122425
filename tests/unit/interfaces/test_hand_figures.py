"""Figures of evaluations and batches, and what of a sequence is an answer: numbers worked out by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from realsys.api.errors import ConfigError, DataError
from realsys.data.sequence_sample import SequenceSample
from realsys.interfaces.answers import INPUT, PROMPT_MASK, answer_mask
from realsys.interfaces.math_evaluation import _of_sources
from realsys.interfaces.ppo.batch_checks import BEHAVIOUR, _check_numbers
from realsys.interfaces.ppo.batch_figures import mean_and_std
from realsys.interfaces.ppo.ppo_actor import PPOActorInterface
from realsys.interfaces.ppo.ppo_critic import PPOCriticInterface
from realsys.interfaces.ppo.ppo_experience import _equal


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


def test_a_source_without_questions_has_no_accuracy():
    found = _of_sources(["a", "b"], [1.0, 2.0, 0.0, 0.0])
    assert found == {"num_problems/a": 2.0, "accuracy/a": 0.5, "num_problems/b": 0.0}


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
