"""Evaluates one checkpoint: loads it, answers the held-out questions, scores them with the reward rule.

Gives the same answers as the trainer's own evaluation with these weights: the embedded engine, greedy.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from realsys.api import registry
from realsys.api.errors import InternalError
from realsys.api.model import (
    DatasetAbstraction,
    FinetuneSpec,
    Model,
    ModelAbstraction,
    ModelBackendAbstraction,
    ModelName,
    ParallelGroups,
    ProcessTopology,
)
from realsys.api.worker_configs import Evaluator
from realsys.data.sequence_sample import SequenceSample
from realsys.interfaces.math_evaluation import AnswerScorer, evaluate_math

_NO_TRAINING = FinetuneSpec(total_train_epochs=1, dataset_size=1, train_batch_size=1)


def evaluate_checkpoint(
    path: Path, config: Evaluator, *, device: str, before_batch: Callable[[], None]
) -> dict[str, float]:
    """Returns what ``evaluate_math`` returns, without samples; with ``n`` above 1 also ``pass@k``.

    Of several data sets each figure has the data set's name in front.

    Args:
        before_batch: called before each batch of questions; what it raises ends the evaluation.
    Raises:
        CheckpointError: the directory is not whole.
        Whatever data set, model and reward raise.
    """
    model = load_model(path, config, device=device)
    try:
        figures: dict[str, float] = {}
        for name, abstraction in config.datasets.items():
            batches = list(_batches(abstraction, model, config))
            prefix = f"{name}/" if len(config.datasets) > 1 else ""
            found = _figures(model, batches, config, before_batch=before_batch)
            figures |= {prefix + key: float(value) for key, value in found.items()}
        return figures
    finally:
        model.module = None
        gc.collect()  # the next checkpoint must find the memory free
        if device == "cuda":
            torch.cuda.empty_cache()


def load_model(path: Path, config: Evaluator, *, device: str) -> Model:
    """Loads the language model in ``path`` into this process, ready to generate."""
    made: Model = registry.make_model(
        ModelAbstraction("hf_causal_lm", {"path": str(path), "dtype": config.dtype}),
        name=ModelName(config.role),
        device=device,
        topology=ProcessTopology(),
        rank=0,
        groups=ParallelGroups(),
        base_seed=config.base_seed,
    )
    backend = registry.make_backend(ModelBackendAbstraction("inference"))
    return backend.initialize(made, _NO_TRAINING)


def _batches(
    abstraction: DatasetAbstraction, model: Model, config: Evaluator
) -> Iterator[SequenceSample]:
    dataset = registry.make_dataset(abstraction, tokenizer=model.tokenizer, seed=config.base_seed)
    everything = range(len(dataset))
    for start in range(0, len(dataset), config.batch_size):
        indices = everything[start : start + config.batch_size]
        # The names that the trainer's evaluation gives: sampled answers belong to them.
        yield dataset.batch(indices, [f"eval-{i}" for i in indices])


def _figures(
    model: Model,
    batches: Sequence[SequenceSample],
    config: Evaluator,
    *,
    before_batch: Callable[[], None],
) -> dict[str, Any]:
    def announced() -> Iterator[SequenceSample]:
        for batch in batches:
            before_batch()
            yield batch

    found = evaluate_math(
        model,
        announced(),
        gen=config.gconfig,
        reward=config.reward,
        reward_args=config.reward_args,
        mb_spec=config.mb_spec,
    )
    found.pop("samples")
    if config.n > 1:
        correct = [c for batch in announced() for c in _num_correct(model, batch, config)]
        found |= mean_pass_at_k(correct, config.n)
    return found


def _num_correct(model: Model, batch: SequenceSample, config: Evaluator) -> list[int]:
    """Returns the number of correct answers among ``n`` sampled ones for each question."""
    judge = AnswerScorer(config.reward, config.reward_args)
    sampled = replace(config.gconfig, n=config.n, greedy=False)
    answers = model.module.generate(
        batch, tokenizer=model.tokenizer, gconfig=sampled, mb_spec=config.mb_spec
    )
    return [
        sum(score.correct for score in scores)
        for _, scores in judge.scores(answers, model.tokenizer, asked=batch)
    ]


# ---- Unbiased pass@k from n sampled answers per question (Chen et al., arXiv:2107.03374, section 2.1).


def pass_at_k(num_answers: int, num_correct: int, k: int) -> float:
    """Returns the probability that one of ``k`` answers, drawn without replacement from ``num_answers``,
    is correct.

    Raises:
        InternalError: not 0 <= num_correct <= num_answers, or not 1 <= k <= num_answers.
    """
    if not (0 <= num_correct <= num_answers and 1 <= k <= num_answers):
        raise InternalError(
            f"pass@{k} of {num_correct} right answers out of {num_answers}", where="pass_at_k"
        )
    # Of whole numbers, so that nothing cancels; comb is 0 where fewer than k are wrong.
    return 1.0 - math.comb(num_answers - num_correct, k) / math.comb(num_answers, k)


def mean_pass_at_k(num_correct: Sequence[int], num_answers: int) -> dict[str, float]:
    """Returns ``pass@1``, ``pass@2``, ``pass@4``, … and ``pass@n``: means over the questions.

    Args:
        num_correct: right answers to each question, of ``num_answers``.
    """
    ks = sorted({num_answers, *(2**i for i in range(num_answers.bit_length()))})
    return {
        f"pass@{k}": math.fsum(pass_at_k(num_answers, c, k) for c in num_correct)
        / max(len(num_correct), 1)
        for k in ks
        if k <= num_answers
    }
