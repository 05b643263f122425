"""Evaluates one saved model on a task's held-out questions, for ``realsys eval``.

The launcher finds this by name, since it needs torch (launcher/serving/model_evaluation.py). Loading,
answering and scoring are the evaluator worker's (evaluating.py, played_questions.py).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from realsys.api import registry
from realsys.api.errors import DataError
from realsys.api.worker_configs import Evaluator, RolloutWorker
from realsys.devices.cuda_settings import apply, settings_for
from realsys.devices.model_place import model_place
from realsys.evaluator.answer_statistics import Estimate, QuestionResult, figures_of
from realsys.evaluator.evaluating import answered_questions, load_model
from realsys.evaluator.played_questions import Match, play, prepared, share_of_right
from realsys.models.hf import load_hf_config
from realsys.policy_server.load_policy import load_policy

MOST_TOKENS = 1024  # of an answer, where neither the user nor the model says less
_ANSWERS_AT_ONCE = 256
_REPORT_S = 5.0  # between two lines that say how far it is


@dataclass(frozen=True, kw_only=True)
class EvaluatedModel:
    """What was found.

    Attributes:
        max_new_tokens: that each answer was allowed.
        num_unscored: questions without a reward.
        seconds: of answering and scoring, without loading.
        results: one a question.
    """

    device: str
    dtype: str
    num_questions: int
    num_held_out: int
    max_new_tokens: int
    num_unscored: int
    seconds: float
    figures: dict[str, Estimate]
    results: tuple[QuestionResult, ...]


def evaluate_model(
    path: Path,
    config: Evaluator,
    *,
    longest_prompt: int,
    max_new_tokens: int | None,
    limit: int | None,
    device: str | None,
    dtype: str | None,
    report: Callable[[str], None],
) -> EvaluatedModel:
    """Answers the questions of the one benchmark ``n`` times each, and scores them.

    Args:
        config: ``gconfig`` samples the answers; its ``n`` and ``max_new_tokens`` do not count.
        longest_prompt: tokens of the longest question that the task allows.
        max_new_tokens: None: ``MOST_TOKENS``, or as many as the model's positions leave.
        limit: most questions; a seeded choice of them.
        device, dtype: None: a GPU with bfloat16 if there is one, else the CPU with float32.
        report: gets a line now and then.
    Raises:
        CheckpointError: the directory is not whole. DataError: no questions. Whatever the task raises.
    """
    device, dtype = model_place(device, dtype)
    apply(settings_for(device))
    torch.manual_seed(config.base_seed)  # nothing draws from it; a plug-in might
    model = load_model(path, replace(config, dtype=dtype), device=device)
    allowed = max_new_tokens or _room(path, longest_prompt)
    (benchmark,) = config.benchmarks.values()
    n = benchmark.n
    gconfig = replace(config.gconfig, n=n, max_new_tokens=allowed)
    dataset = registry.make_dataset(
        benchmark.dataset, tokenizer=model.tokenizer, seed=config.base_seed
    )
    indices = chosen_questions(len(dataset), limit, seed=config.base_seed)
    size = max(1, min(config.batch_size, _ANSWERS_AT_ONCE // n))
    began = reported = time.perf_counter()
    results: list[QuestionResult] = []
    for start in range(0, len(indices), size):
        some = indices[start : start + size]
        batch = dataset.batch(some, [f"eval-{i}" for i in some])  # as the trainer names them
        results += answered_questions(
            model, batch, benchmark, gconfig=gconfig, mb_spec=config.mb_spec
        )
        if time.perf_counter() - reported > _REPORT_S:
            reported = time.perf_counter()
            report(f"{len(results):,} of {len(indices):,} questions")
    return EvaluatedModel(
        device=device,
        dtype=dtype,
        num_questions=len(results),
        num_held_out=len(dataset),
        max_new_tokens=allowed,
        num_unscored=sum(not result.rewards for result in results),
        seconds=time.perf_counter() - began,
        figures=figures_of(results, num_answers=n, seed=config.base_seed),
        results=tuple(results),
    )


def evaluate_episodes(
    path: Path,
    config: RolloutWorker,
    *,
    longest_prompt: int,
    max_new_tokens: int | None,
    limit: int | None,
    device: str | None,
    dtype: str | None,
    logs: Path,
    report: Callable[[str], None],
) -> EvaluatedModel:
    """Has an agent play each question ``config.group_size`` times, and returns what became of them.

    Args:
        config: as a rollout worker would have it. Its ``max_concurrent_rollouts`` bounds episodes here, not
            questions, and ``gconfig.max_new_tokens`` does not count.
        longest_prompt, max_new_tokens, limit, device, dtype, report: as of ``evaluate_model``.
        logs: folder for what the agent's programs write.
    Raises:
        CheckpointError: the directory is not whole. ConfigError: agent or environment refuse their
            arguments. DataError: no questions. RolloutError: no episode of the first ones could be played.
    """
    device, dtype = model_place(device, dtype)
    apply(settings_for(device))
    torch.manual_seed(config.base_seed)  # nothing draws from it; a plug-in might
    allowed = max_new_tokens or _room(path, longest_prompt)
    config = replace(config, gconfig=replace(config.gconfig, max_new_tokens=allowed))
    parts = prepared(path, config)
    indices = chosen_questions(len(parts.dataset), limit, seed=config.base_seed)
    policy = load_policy(path, name=path.name, dtype=dtype, device=device)
    began = reported = time.perf_counter()

    def note(done: int) -> None:
        nonlocal reported
        if time.perf_counter() - reported > _REPORT_S:
            reported = time.perf_counter()
            report(f"{done:,} of {len(indices):,} questions")

    match = Match(parts=parts, config=config, indices=indices, logs=logs, note=note)
    (results,) = play(policy.engine, [match])
    return EvaluatedModel(
        device=device,
        dtype=dtype,
        num_questions=len(results),
        num_held_out=len(parts.dataset),
        max_new_tokens=allowed,
        num_unscored=sum(not result.rewards for result in results),
        seconds=time.perf_counter() - began,
        figures=figures_of(
            results,
            num_answers=config.group_size,
            seed=config.base_seed,
            right=share_of_right(config),
        ),
        results=tuple(results),
    )


def chosen_questions(size: int, limit: int | None, *, seed: int) -> Sequence[int]:
    """Returns which of ``size`` questions are asked, ascending; the same for the same seed.

    Raises:
        DataError: there are none.
    """
    if not size:
        raise DataError(
            "the task holds out no questions", where="task.eval_size", fix="set task.eval_size=100"
        )
    if limit is None or limit >= size:
        return range(size)
    return sorted(random.Random(seed).sample(range(size), limit))


def _room(path: Path, longest_prompt: int) -> int:
    """Tokens of an answer that fit behind the longest question."""
    positions = getattr(load_hf_config(path), "max_position_embeddings", None)
    return (
        MOST_TOKENS if positions is None else max(1, min(MOST_TOKENS, positions - longest_prompt))
    )
