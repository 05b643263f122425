"""Arguments of the built-in data sets, typed: what ``DatasetAbstraction.args`` are read into. No torch.

Each data set inherits the class of its arguments; a plan is checked against it (realsys.api.registry).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from realsys.api.options import option

REFUSE, DROP = "refuse", "drop"  # what becomes of prompts that are too long


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Names of a user's columns; a field within one is named with dots (``meta.solution``)."""

    prompt: str | None = option(None, "what is asked: a text or messages; none: prompt or question")
    answer: str | None = option(None, "what is known; none: answer, where there is one")
    messages: str | None = option(
        None, "conversations in place of prompt; none: messages, where there is no prompt"
    )
    tools: str | None = option(
        None, "tools that the chat template is given; none: tools, where they are such"
    )


@dataclass(frozen=True, kw_only=True)
class MathRecordsArguments:
    """Arguments of ``math_prompts``.

    Attributes:
        split: ``train``, or ``test`` for the held-out records.
        path: records (record_files.py), None for arithmetic.
        eval_path: held-out records; None holds out the last ``eval_size`` of ``path``.
        train_size: number of problems to generate if ``path`` is None.
        eval_size: number of held-out records.
        max_prompt_len: token limit of a prompt.
        long_prompts: what becomes of a record with a longer one: an error, or it is left out.
        slip_share: of the training problems generated if ``path`` is None, see arithmetic_problems.py.
        with_record: give the key ``record`` too, the whole record, for a reward rule that looks at it.
        with_question: give the question's text too, as metadata, for a rule that looks at it.
        task: a user's task with its settings under ``kind`` and their names; it makes the records.
        columns: which fields of a record are asked and known.
        system: system prompt put before messages that have none.
        template_args: keyword arguments of the tokenizer's chat template.
        marks_as_text: in whose texts the template's marks are text, see marks_as_text.py.
        keep: filters, by their registered names.
        transform: transforms, by their registered names.
        whole_answers: the known answer is all of it; else what follows the last ``####``.
        needs_answer: a record without an answer is refused.
        task_source: name of the source in a mixture, which records then have as a field.
    """

    split: Literal["train", "test"]
    path: str | None = None
    eval_path: str | None = None
    train_size: int = 16384
    eval_size: int = 500
    max_prompt_len: int = 128
    long_prompts: Literal["refuse", "drop"] = "refuse"
    slip_share: float = 0.0
    with_record: bool = False
    with_question: bool = False
    task: Mapping[str, Any] | None = None
    columns: Columns = Columns()
    system: str | None = None
    template_args: Mapping[str, Any] = field(default_factory=dict)
    marks_as_text: Literal["tools", "all", "none"] = "tools"
    keep: tuple[str, ...] = ()
    transform: tuple[str, ...] = ()
    whole_answers: bool = False
    needs_answer: bool = True
    task_source: str | None = None


@dataclass(frozen=True, kw_only=True)
class MathSFTArguments(MathRecordsArguments):
    """Arguments of ``math_sft``.

    Attributes:
        max_answer_len: token limit of an answer, without the end token; of a conversation, together with
            ``max_prompt_len``.
    """

    max_answer_len: int = 128


@dataclass(frozen=True, kw_only=True)
class MixtureArguments:
    """Arguments of ``mixture``.

    Attributes:
        split: ``train``, or ``test`` for the held-out records.
        of: data set that each source is.
        sources: source's name → arguments of its data set, without the split.
        weights: how many records of a source come per record of the others; none: ``temperature`` says it.
        temperature: sources come in proportion to ``size ** (1 / temperature)``.
        goes_on: an epoch goes on with a source's records where the last one ended, so that those that come
            twice are others each time; older revisions' plans lack it, and begin anew with the first.
    """

    split: Literal["train", "test"]
    of: Literal["math_prompts", "math_sft"]
    sources: Mapping[str, Mapping[str, Any]]
    weights: Mapping[str, float] = field(default_factory=dict)
    temperature: float = 1.0
    goes_on: bool = False


@dataclass(frozen=True, kw_only=True)
class RolloutDumpArguments:
    """Arguments of ``rollout_dump``.

    Attributes:
        folder: folder with the run's dump files and its master's ``run.json``.
        keys: tensors of each datapoint.
    """

    folder: str
    keys: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class PreferencePairsArguments(MathSFTArguments):
    """Arguments of ``preference_pairs``: the columns of the better and of the worse answer."""

    chosen: str = "chosen"
    rejected: str = "rejected"
