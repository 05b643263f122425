"""Benchmarks: tasks that every saved checkpoint is evaluated on, by names: ``benchmarks.hard=file``.

Of a benchmark all questions are asked, up to its ``eval_size``; none is trained on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from experiments.parts.evaluation import EvaluationOptions
from experiments.parts.model_files import position_remarks
from experiments.task import FROM_OUTSIDE, Task, at_setting
from realsys.api.errors import ConfigError
from realsys.api.worker_configs import HELD_OUT, Benchmark

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
# Figures of the task's own questions, also as ``accuracy/<source>`` and ``agent/<name>``.
_TAKEN = (
    *(HELD_OUT, "accuracy", "mean_reward", "num_problems", "num_unscored", "response_length"),
    *("success", "truncated", "agent", "reward"),
)


def benchmarks_of(
    task: Task,
    others: Mapping[str, Task],
    options: EvaluationOptions,
    *,
    environment_s: float | None,
) -> dict[str, Benchmark]:
    """Returns what the evaluator asks: the held-out questions of the task, if any, and the others'.

    Args:
        environment_s: most time of a call of an environment; None: the usual one.
    """
    limits = {} if environment_s is None else {"rollout_request_timeout": environment_s}
    asked = {HELD_OUT: task} if can_be_asked(task) else {}
    asked |= {name: other.as_benchmark() for name, other in others.items()}
    return {
        name: Benchmark(
            dataset=one.prompts("test"),
            n=options.n_of.get(name, options.n),
            player=one.player("test", **limits) if one.is_played else None,
            **one.reward_rule,
        )
        for name, one in asked.items()
    }


def can_be_asked(task: Task) -> bool:
    """Whether an evaluation can ask the task's held-out questions: there are some, and no clients from
    outside would have to play them."""
    return task.num_held_out > 0 and task.agent != FROM_OUTSIDE


def held_out_warnings(task: Task, *, auto_eval: bool) -> Iterator[str]:
    """Reports held-out questions that nobody asks while the policy is trained."""
    if not task.num_held_out or not task.is_played:
        return
    if not can_be_asked(task):
        yield (
            f"the {task.num_held_out:,} held-out questions are not asked, and there is no held-out score: "
            f"the clients of agent {FROM_OUTSIDE!r} start their episodes themselves"
        )
    elif not auto_eval:
        player = f"agent {task.agent!r}"
        if task.agent not in task.own_agents:  # those play without one
            player += f" in environment {task.env!r}"
        yield (
            f"the {task.num_held_out:,} held-out questions are not asked during training: {player} plays "
            "them, and the trainer can't have it do so. auto_eval=true exp_ctrl.save_freq_steps=20 has "
            "every saved checkpoint play them, `realsys eval TRIAL` the last one"
        )


def benchmark_problems(
    others: Mapping[str, Task], *, tokenizer_dir: str | None
) -> Iterator[ConfigError]:
    """Yields names that can't be used, and what is wrong with each benchmark's task."""
    for name, given in others.items():
        path = f"benchmarks.{name}"
        if not _NAME.fullmatch(name) or name in _TAKEN:
            yield ConfigError(
                f"a benchmark can't have the name {name!r}",
                where=path,
                fix=f"use letters, digits, - and _, but none of {', '.join(_TAKEN)}",
            )
        if given.agent == FROM_OUTSIDE:
            yield ConfigError(
                f"the clients of agent {FROM_OUTSIDE!r} start their episodes themselves",
                where=f"{path}.agent",
                fix="name another agent, or leave it out",
            )
        task = given.as_benchmark()
        found = [
            *task.problems(batch_size=1, tokenizer_dir=tokenizer_dir),
            *task.reward_problems(),
        ]
        yield from (at_setting(problem, task, path) for problem in found)
        if not found and not task.num_held_out:
            yield ConfigError(
                "a benchmark without questions",
                where=f"{path}.eval_size",
                fix="set it to the number of questions, 1 or more",
            )


def benchmark_warnings(
    others: Mapping[str, Task], *, model: str | None, answers: int
) -> Iterator[str]:
    """Reports benchmarks that ask only some of their questions, and prompts without room for an answer."""
    for name, given in others.items():
        task, path = given.as_benchmark(), f"benchmarks.{name}"
        total = task.counted_questions()
        if total is not None and not task.is_generated and total > task.num_held_out:
            yield (
                f"{path} asks the first {task.num_held_out:,} of its {total:,} questions; "
                f"{path}.eval_size={total} asks all"
            )
        yield from position_remarks(
            model,
            prompt=task.longest_prompt,
            answers=answers,
            setting=f"{path}.max_prompt_len",
        )
