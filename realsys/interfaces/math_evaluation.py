"""Accuracy and mean reward on held-out questions: greedy answers, scored by the reward rule."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from realsys.api.data import MicroBatchSpec
from realsys.api.model import GenerationHyperparameters, Model
from realsys.api.registry import find_reward, right_score
from realsys.backends.hf.data_parallel import DataParallel
from realsys.data.sequence_sample import SequenceSample
from realsys.interfaces.answers import answer_lengths, answer_texts
from realsys.interfaces.math_reward import known_answers
from realsys.rewards.scores import SetAsideRecords, score

NUM_SAMPLES = 8  # shown in the report


def evaluate_math(
    model: Model,
    eval_batches: Iterable[SequenceSample],
    *,
    gen: GenerationHyperparameters,
    reward: str,
    mb_spec: MicroBatchSpec,
) -> dict[str, Any]:
    """Evaluates greedy answers to held-out questions, over all ranks.

    Returns ``accuracy``, ``mean_reward``, ``num_problems``, ``response_length/mean`` and
    ``samples``: this rank's first records, with prompt and response as text. An answer is correct
    if its score reaches ``right_score``. An answer that the rule can't score counts as wrong and is
    left out of the mean reward. Every rank needs at least one batch: the first may gather sharded
    weights. At most as many rows are decoded at a time as ``mb_spec`` has tokens for; answers don't
    depend on it.

    Raises:\n        RewardError: the rule can't score too many records.
    """
    judge, greedy = AnswerScorer(reward), replace(gen, n=1, greedy=True)
    num_correct = num_tokens = num_problems = num_scored = 0
    reward_sum = 0.0
    samples: list[dict[str, Any]] = []
    for batch in eval_batches:
        sample = model.module.generate(
            batch, tokenizer=model.tokenizer, gconfig=greedy, mb_spec=mb_spec
        )
        responses = list(answer_texts(sample, model.tokenizer))
        for id_, prompt, response, answer in zip(
            batch.ids,
            prompt_texts(batch, model.tokenizer),
            responses,
            known_answers(batch),
            strict=True,
        ):
            worth = judge.score(response, answer, id=id_, prompt=prompt)
            correct = judge.is_right(worth)
            num_correct += correct
            if not math.isnan(worth):
                num_scored, reward_sum = num_scored + 1, reward_sum + worth
            if len(samples) < NUM_SAMPLES:
                samples.append(
                    {"prompt": prompt, "response": response, "answer": answer, "correct": correct}
                )
        num_tokens += sum(answer_lengths(sample))
        num_problems += batch.batch_size
    own = [num_correct, num_tokens, num_problems, num_scored, reward_sum]
    sums = DataParallel.of(model).sum(torch.tensor(own, dtype=torch.float64)).tolist()
    correct_sum, token_sum, problem_sum, scored_sum, reward_sum = sums
    return {
        "accuracy": correct_sum / max(problem_sum, 1.0),
        "mean_reward": reward_sum / max(scored_sum, 1.0),
        "num_problems": int(problem_sum),
        "response_length/mean": token_sum / max(problem_sum, 1.0),
        "samples": samples,
    }


class AnswerScorer:
    """Scores the answers of one evaluation by the reward rule ``reward``."""

    def __init__(self, reward: str) -> None:
        self._call = partial(score, reward, find_reward(reward))
        self._right, self._set_aside = right_score(reward), SetAsideRecords()

    def score(self, response: str, answer: str, *, id: str, prompt: str) -> float:
        """Returns the rule's score; NaN if it gives no number, after one retry.

        Raises:
            RewardError: too many records have no score.
        """
        self._set_aside.num_records += 1
        return self._set_aside.score_with_retry(
            partial(self._call, response=response, answer=answer), id=id, prompt=lambda: prompt
        )

    def is_right(self, worth: float) -> bool:
        """True if an answer of this score is correct."""
        return worth >= self._right


def prompt_texts(batch: SequenceSample, tokenizer: Any) -> list[str]:
    ids = torch.split(batch.data["packed_prompts"], batch.piece_lengths("packed_prompts"))
    return [tokenizer.decode(prompt.tolist(), skip_special_tokens=True) for prompt in ids]
