"""Accuracy on held-out questions: greedy answers, judged by the reward rule."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from realsys.api.data import MicroBatchSpec
from realsys.api.model import GenerationHyperparameters, Model
from realsys.api.registry import find_reward
from realsys.backends.data_parallel import DataParallel
from realsys.data_plane.sequence_sample import SequenceSample
from realsys.interfaces.answers import answer_lengths, answer_texts
from realsys.interfaces.math_reward import known_answers

NUM_SAMPLES = 8  # shown in the report
CORRECT_ABOVE = 0.5  # a score above it is right; rules give 1 or 0


def evaluate_math(
    model: Model,
    eval_batches: Iterable[SequenceSample],
    *,
    gen: GenerationHyperparameters,
    reward: str,
    mb_spec: MicroBatchSpec,
) -> dict[str, Any]:
    """``accuracy``, ``num_problems``, ``response_length/mean`` over all ranks, and ``samples``.

    ``samples`` are this rank's first records, with prompt and response as text. Every rank needs
    at least one batch: the first one may gather sharded weights. No more rows are decoded at a time than
    ``mb_spec`` has tokens for: the answers don't depend on it.
    """
    rule, greedy = find_reward(reward), replace(gen, n=1, greedy=True)
    num_correct = num_tokens = num_problems = 0
    samples: list[dict[str, Any]] = []
    for batch in eval_batches:
        sample = model.module.generate(
            batch, tokenizer=model.tokenizer, gconfig=greedy, mb_spec=mb_spec
        )
        responses = list(answer_texts(sample, model.tokenizer))
        for prompt, response, answer in zip(
            _prompts(batch, model.tokenizer), responses, known_answers(batch), strict=True
        ):
            correct = rule(response=response, answer=answer) > CORRECT_ABOVE
            num_correct += correct
            if len(samples) < NUM_SAMPLES:
                samples.append(
                    {"prompt": prompt, "response": response, "answer": answer, "correct": correct}
                )
        num_tokens += sum(answer_lengths(sample))
        num_problems += batch.batch_size
    own = torch.tensor([num_correct, num_tokens, num_problems], dtype=torch.float64)
    correct_sum, token_sum, problem_sum = DataParallel.of(model).sum(own).tolist()
    return {
        "accuracy": correct_sum / max(problem_sum, 1.0),
        "num_problems": int(problem_sum),
        "response_length/mean": token_sum / max(problem_sum, 1.0),
        "samples": samples,
    }


def _prompts(batch: SequenceSample, tokenizer: Any) -> list[str]:
    ids = torch.split(batch.data["packed_prompts"], batch.piece_lengths("packed_prompts"))
    return [tokenizer.decode(prompt.tolist(), skip_special_tokens=True) for prompt in ids]
