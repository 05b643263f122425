"""Evaluates one checkpoint: loads it, answers the questions of benchmarks, scores them by their rules.

Gives the same answers as the trainer's own evaluation with these weights: the embedded engine, greedy.
Benchmarks with an agent are played (played_questions.py).
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from realsys.api import registry
from realsys.api.basics.reward import TASK_SOURCE
from realsys.api.data import MicroBatchSpec
from realsys.api.errors import RewardError
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
from realsys.api.worker_configs import HELD_OUT, Benchmark, Evaluator, RolloutWorker
from realsys.data.sequence_sample import SequenceSample
from realsys.evaluator.answer_statistics import (
    QuestionResult,
    figures_of,
    mean_pass_at_k,
    scored_ones,
)
from realsys.evaluator.evaluation_errors import BenchmarksFailed, LeaveRequested
from realsys.evaluator.played_questions import Match, play, prepared, share_of_right
from realsys.interfaces.answers import answer_lengths
from realsys.interfaces.completions import NO_EOS
from realsys.interfaces.math_evaluation import AnswerScorer, evaluate_math
from realsys.policy_server.load_policy import load_policy

logger = logging.getLogger(__name__)


_NO_TRAINING = FinetuneSpec(total_train_epochs=1, dataset_size=1, train_batch_size=1)


def evaluate_checkpoint(
    path: Path,
    config: Evaluator,
    *,
    device: str,
    before_batch: Callable[[], None],
    logs: Path,
    opened: dict[str, Any] | None = None,
) -> dict[str, float]:
    """Returns what ``evaluate_math`` returns, without samples; with ``n`` above 1 also ``pass@k``.

    All but those of the task's own questions have the benchmark's name in front.

    Args:
        before_batch: called before each batch of questions, and every second while an agent plays; may
            raise LeaveRequested.
        logs: folder for what agents' programs write.
        opened: the benchmarks' data sets, kept for later checkpoints, which are asked the same.
    Raises:
        CheckpointError: the directory is not whole.
        BenchmarksFailed: some of several benchmarks raised.
        Whatever data set, model and reward raise.
    """
    opened = {} if opened is None else opened
    model: Model | None = None
    try:
        figures: dict[str, float] = {}
        errors: dict[str, Exception] = {}
        for name, benchmark in config.benchmarks.items():
            prefix = "" if name == HELD_OUT else f"{name}/"
            if model is None and benchmark.player is None:
                model = load_model(path, config, device=device)
            try:
                if benchmark.player is not None:
                    found = _played_figures(
                        *(path, benchmark.player, benchmark.n, config),
                        device=device,
                        look=before_batch,
                        logs=logs / name,
                    )
                else:
                    assert model is not None  # loaded above
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
        if model is not None:
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
        results = [
            result
            for batch in announced()
            for result in answered_questions(
                model, batch, benchmark, gconfig=sampled, mb_spec=config.mb_spec
            )
        ]
        found |= _pass_at_k(results, benchmark.n)
    return found


def _played_figures(
    path: Path,
    player: RolloutWorker,
    n: int,
    config: Evaluator,
    *,
    device: str,
    look: Callable[[], None],
    logs: Path,
) -> dict[str, Any]:
    """Figures of a benchmark that an agent plays: greedily, and for pass@k as in training."""

    def match(num_episodes: int, gconfig: GenerationHyperparameters) -> Match:
        worker = replace(
            player,
            base_seed=config.base_seed,
            gconfig=gconfig,
            group_size=num_episodes,
            max_concurrent_rollouts=config.batch_size,
        )
        parts = prepared(path, worker)
        indices = range(len(parts.dataset))
        return Match(parts=parts, config=worker, indices=indices, logs=logs, place=str(logs))

    matches = [match(1, config.gconfig)]
    if n > 1:
        matches.append(match(n, replace(config.gconfig, greedy=False)))
    policy = load_policy(path, name=config.role, dtype=config.dtype, device=device)
    results, *sampled = play(policy.engine, matches, look=look)
    right = share_of_right(player)
    estimates = figures_of(results, num_answers=1, seed=config.base_seed, right=right)
    found: dict[str, Any] = {name: estimate.value for name, estimate in estimates.items()}
    found["num_problems"] = len(results)
    if num_unscored := sum(not result.rewards for result in results):
        found["num_unscored"] = num_unscored
    for several in sampled:
        found |= _pass_at_k(several, n)
    return found


def _pass_at_k(results: Sequence[QuestionResult], n: int) -> dict[str, float]:
    """Means over the questions that have a score; nothing if there are none."""
    scored = scored_ones(results)
    return mean_pass_at_k([result.num_correct for result in scored], n) if scored else {}


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
