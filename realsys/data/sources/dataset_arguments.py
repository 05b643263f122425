"""Arguments of the built-in data sets, typed: what ``DatasetAbstraction.args`` are read into. No torch.

Each data set inherits the class of its arguments; a plan is checked against it (realsys.api.registry).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class MathRecordsArguments:
    """Arguments of ``math_prompts``.

    Attributes:
        split: ``train``, or ``test`` for the held-out records.
        path: JSONL file, None for arithmetic.
        eval_path: JSONL of held-out records; None holds out the last ``eval_size`` of ``path``.
        train_size: number of problems to generate if ``path`` is None.
        eval_size: number of held-out records.
        max_prompt_len: token limit of a prompt.
        slip_share: of the training problems generated if ``path`` is None, see arithmetic_problems.py.
        with_record: give the key ``record`` too, the whole record, for a reward rule that looks at it.
        task: a user's task with its settings under ``kind`` and their names; it makes the records.
    """

    split: Literal["train", "test"]
    path: str | None = None
    eval_path: str | None = None
    train_size: int = 16384
    eval_size: int = 500
    max_prompt_len: int = 128
    slip_share: float = 0.0
    with_record: bool = False
    task: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class MathSFTArguments(MathRecordsArguments):
    """Arguments of ``math_sft``; ``max_answer_len`` limits an answer's tokens, without the end token."""

    max_answer_len: int = 128


@dataclass(frozen=True, kw_only=True)
class RolloutDumpArguments:
    """Arguments of ``rollout_dump``.

    Attributes:
        folder: folder with the run's dump files and its master's ``run.json``.
        keys: tensors of each datapoint.
    """

    folder: str
    keys: tuple[str, ...]
