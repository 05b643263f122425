"""Accuracy and mean reward on held-out questions: greedy answers, scored by the reward rule."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from realsys.api.basics.reward import TASK_SOURCE, Score
from realsys.api.data import MicroBatchSpec
from realsys.api.model import GenerationHyperparameters, Model
from realsys.backends.hf.data_parallel import DataParallel
from realsys.data.sequence_sample import SequenceSample
from realsys.interfaces.answers import answer_lengths
from realsys.interfaces.completions import answered_records
from realsys.rewards.rule import rule_of
from realsys.rewards.set_aside import Answered, SetAsideRecords

NUM_SAMPLES = 8  # shown in the report


def evaluate_math(
    model: Model,
    eval_batches: Iterable[SequenceSample],
    *,
    gen: GenerationHyperparameters,
    reward: str,
    reward_args: Mapping[str, Any] | None = None,
    mb_spec: MicroBatchSpec,
) -> dict[str, Any]:
    """Evaluates greedy answers to held-out questions, over all ranks.

    Returns ``accuracy``, ``mean_reward``, ``num_problems``, ``response_length/mean`` and
    ``samples``: this rank's first records, with prompt and response as text; of a mixture also
    ``accuracy/<source>`` and ``num_problems/<source>``; ``num_unscored`` if there are any.
    Which answers are correct the rule says. A question whose answer it can't score is in no figure but
    ``num_unscored``. Every rank needs at least one batch: the first may gather sharded
    weights. At most as many rows are decoded at a time as ``mb_spec`` has tokens for; answers don't
    depend on it.

    Raises:
        RewardError: the rule can't score too many records.
    """
    judge, greedy = AnswerScorer(reward, reward_args), replace(gen, n=1, greedy=True)
    num_correct = num_tokens = num_problems = num_scored = num_unscored = 0
    reward_sum = 0.0
    by_source = {source: [0, 0] for source in judge.sources}  # correct, asked
    samples: list[dict[str, Any]] = []
    for batch in eval_batches:
        sample = model.module.generate(
            batch, tokenizer=model.tokenizer, gconfig=greedy, mb_spec=mb_spec
        )
        for record, scores in judge.scores(sample, model.tokenizer, asked=batch):
            correct = bool(scores) and scores[0].correct
            num_unscored += not scores
            num_correct += correct
            if by_source:
                counts = by_source[str(record.answers[0].record.get(TASK_SOURCE))]
                counts[0], counts[1] = counts[0] + correct, counts[1] + bool(scores)
            num_scored, reward_sum = (
                num_scored + len(scores),
                reward_sum + sum(score.value for score in scores),
            )
            if len(samples) < NUM_SAMPLES:
                samples.append(
                    {
                        "prompt": record.prompt(),
                        "response": record.answers[0].response,
                        "answer": record.answers[0].answer,
                        "correct": correct,
                    }
                )
        num_tokens += sum(answer_lengths(sample))
        num_problems += batch.batch_size
    own = [num_correct, num_tokens, num_problems, num_scored, num_unscored, reward_sum]
    own += [count for counts in by_source.values() for count in counts]
    sums = DataParallel.of(model).sum(torch.tensor(own, dtype=torch.float64)).tolist()
    correct_sum, token_sum, problem_sum, scored_sum, unscored_sum, reward_sum, *of_sources = sums
    return {
        "accuracy": correct_sum / max(problem_sum - unscored_sum, 1.0),
        "mean_reward": reward_sum / max(scored_sum, 1.0),
        "num_problems": int(problem_sum),
        "response_length/mean": token_sum / max(problem_sum, 1.0),
        **({"num_unscored": int(unscored_sum)} if unscored_sum else {}),
        **_of_sources(judge.sources, of_sources),
        "samples": samples,
    }


def _of_sources(sources: Sequence[str], sums: Sequence[float]) -> dict[str, float]:
    """Accuracy and number of the questions of each source; ``sums``: correct and asked, by turns."""
    found: dict[str, float] = {}
    for source, correct, asked in zip(sources, sums[::2], sums[1::2], strict=True):
        found[f"num_problems/{source}"] = asked
        if asked:
            found[f"accuracy/{source}"] = correct / asked
    return found


class AnswerScorer:
    """Scores the answers of one evaluation by the rules ``reward`` with their arguments."""

    def __init__(self, reward: str, reward_args: Mapping[str, Any] | None = None) -> None:
        self._rule, self._set_aside = rule_of(reward, reward_args), SetAsideRecords()
        self.sources = self._rule.sources  # of a mixture, else none

    def scores(
        self, data: SequenceSample, tokenizer: Any, *, asked: SequenceSample
    ) -> list[tuple[Answered, list[Score]]]:
        """Returns each record of ``asked`` with the scores of its answers in ``data``; none if it got none.

        Raises:
            RewardError: too many records have no score.
        """
        records = answered_records(data, tokenizer, self._rule.fields, asked=asked)
        given = self._set_aside.scores(self._rule, records)
        return [(record, scores or []) for record, scores in zip(records, given, strict=True)]
