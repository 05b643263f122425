"""Evaluates one checkpoint: loads it, answers the questions of benchmarks, scores them by their rules.

Gives the same answers as the trainer's own evaluation with these weights: the embedded engine, greedy.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from realsys.api import registry
from realsys.api.basics.reward import TASK_SOURCE
from realsys.api.data import MicroBatchSpec
from realsys.api.errors import RealsysError, RewardError, encodable
from realsys.api.model import (
    FinetuneSpec,
    GenerationHyperparameters,
    Model,
    ModelAbstraction,
    ModelBackendAbstraction,
    ModelName,
    ParallelGroups,
    ProcessTopology,
)
from realsys.api.worker_configs import HELD_OUT, Benchmark, Evaluator
from realsys.data.sequence_sample import SequenceSample
from realsys.evaluator.answer_statistics import QuestionResult, mean_pass_at_k
from realsys.interfaces.answers import answer_lengths
from realsys.interfaces.completions import NO_EOS
from realsys.interfaces.math_evaluation import AnswerScorer, evaluate_math

logger = logging.getLogger(__name__)


class LeaveRequested(Exception):
    """Raised before a batch to leave in the middle of an evaluation."""


class BenchmarksFailed(Exception):
    """Some benchmarks could not be evaluated; ``figures`` are those of the others."""

    def __init__(self, errors: Mapping[str, Exception], figures: Mapping[str, float]) -> None:
        super().__init__("; ".join(f"{name}: {one_line(e)}" for name, e in errors.items()))
        self.figures = dict(figures)


def one_line(error: Exception) -> str:
    """Returns the error's text on one line."""
    if isinstance(error, RealsysError):
        text = error.what
    elif isinstance(error, BenchmarksFailed):
        text = str(error)
    else:
        text = f"{type(error).__name__}: {error}"
    return " ".join(encodable(text).split())[:500]


_NO_TRAINING = FinetuneSpec(total_train_epochs=1, dataset_size=1, train_batch_size=1)


def evaluate_checkpoint(
    path: Path,
    config: Evaluator,
    *,
    device: str,
    before_batch: Callable[[], None],
    opened: dict[str, Any] | None = None,
) -> dict[str, float]:
    """Returns what ``evaluate_math`` returns, without samples; with ``n`` above 1 also ``pass@k``.

    All but those of the task's own questions have the benchmark's name in front.

    Args:
        before_batch: called before each batch of questions; may raise LeaveRequested.
        opened: the benchmarks' data sets, kept for later checkpoints, which are asked the same.
    Raises:
        CheckpointError: the directory is not whole.
        BenchmarksFailed: some of several benchmarks raised.
        Whatever data set, model and reward raise.
    """
    model, opened = load_model(path, config, device=device), {} if opened is None else opened
    try:
        figures: dict[str, float] = {}
        errors: dict[str, Exception] = {}
        for name, benchmark in config.benchmarks.items():
            prefix = "" if name == HELD_OUT else f"{name}/"
            try:
                if name not in opened:
                    opened[name] = registry.make_dataset(
                        benchmark.dataset, tokenizer=model.tokenizer, seed=config.base_seed
                    )
                batches = list(_batches(opened[name], config))
                found = _figures(model, batches, benchmark, config, before_batch=before_batch)
            except LeaveRequested:
                raise
            except Exception as error:  # data and rules are a user's, and may raise anything
                if len(config.benchmarks) == 1:
                    raise
                logger.warning("benchmark failed name=%s", name, exc_info=True)
                errors[name] = error
                continue
            figures |= {prefix + key: float(value) for key, value in found.items()}
        if errors:
            raise BenchmarksFailed(errors, figures)
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


def _batches(dataset: Any, config: Evaluator) -> Iterator[SequenceSample]:
    everything = range(len(dataset))
    for start in range(0, len(dataset), config.batch_size):
        indices = everything[start : start + config.batch_size]
        # The names that the trainer's evaluation gives: sampled answers belong to them.
        yield dataset.batch(indices, [f"eval-{i}" for i in indices])


def _figures(
    model: Model,
    batches: Sequence[SequenceSample],
    benchmark: Benchmark,
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
        reward=benchmark.reward,
        reward_args=benchmark.reward_args,
        mb_spec=config.mb_spec,
    )
    found.pop("samples")
    if found.get("num_unscored") == found["num_problems"]:
        raise RewardError(
            f"none of the {found['num_problems']} questions got a score",
            where=f"rule {benchmark.reward!r}",
            fix="see the evaluator's log for what the rule said of each",
        )
    if benchmark.n > 1:
        sampled = replace(config.gconfig, n=benchmark.n, greedy=False)
        correct = [
            result.num_correct
            for batch in announced()
            for result in answered_questions(
                model, batch, benchmark, gconfig=sampled, mb_spec=config.mb_spec
            )
        ]
        found |= mean_pass_at_k(correct, benchmark.n)
    return found


def answered_questions(
    model: Model,
    batch: SequenceSample,
    benchmark: Benchmark,
    *,
    gconfig: GenerationHyperparameters,
    mb_spec: MicroBatchSpec,
) -> list[QuestionResult]:
    """Answers and scores questions of a benchmark, ``gconfig.n`` times each."""
    judge = AnswerScorer(benchmark.reward, benchmark.reward_args)
    answers = model.module.generate(
        batch, tokenizer=model.tokenizer, gconfig=gconfig, mb_spec=mb_spec
    )
    lengths, cut_off = answer_lengths(answers), answers.data[NO_EOS].tolist()
    found = []
    for record, scores in judge.scores(answers, model.tokenizer, asked=batch):
        count = len(record.answers)
        found.append(
            QuestionResult(
                id=record.id,
                rewards=tuple(float(score.value) for score in scores),
                num_correct=sum(score.correct for score in scores),
                lengths=tuple(int(x) for x in lengths[:count]),
                truncated=tuple(map(bool, cut_off[:count])),
                source=str(record.answers[0].record.get(TASK_SOURCE, "")),
            )
        )
        lengths, cut_off = lengths[count:], cut_off[count:]
    return found
