"""Conversations of files as fine-tuning would have them, for the plan: how many sequences, and how long."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import compress
from pathlib import Path

from experiments.parts.question_files import SampledQuestions, sample_of
from realsys.api.basics.record_names import is_hub_name
from realsys.api.errors import CheckpointError, ConfigError, DataError
from realsys.data.sources.dataset_arguments import DROP, MathRecordsArguments

MOST_COUNTED = 32  # conversations of a file whose turns a plan reads: half of them the longest


@dataclass(frozen=True, kw_only=True)
class CountedConversations:
    """Conversations of a file, as fine-tuning would have them, of those that a plan counts.

    Attributes:
        counted: their number. several: those that become more than one sequence.
        most: sequences of one. longest: tokens of the longest sequence, which is of record ``where``.
        empty: the first of which nothing can be trained; "": there is none.
    """

    counted: int
    several: int
    most: int
    longest: int
    where: str
    empty: str


def conversation_problems(
    data: MathRecordsArguments, tokenizer_dir: str | None, *, max_answer_len: int
) -> Iterator[ConfigError]:
    """Yields the longest conversation over the limit, of those that a plan counts."""
    limit = data.max_prompt_len + max_answer_len
    for name, found in _counted_conversations(data, tokenizer_dir):
        if found.empty:
            yield ConfigError(
                "the chat template refuses the conversation, or writes no turn of its assistant",
                where=f"task.{name}, {found.empty}",
                fix="give messages that this model's template takes, or drop the record (task.keep)",
            )
        if found.longest > limit:
            yield ConfigError(
                f"a conversation has {found.longest} tokens, the limit is {limit}: task.max_prompt_len + "
                "max_answer_len",
                where=f"task.{name}, {found.where}",
                fix=f"set max_answer_len={found.longest - data.max_prompt_len}, or drop the record "
                "(task.keep)",
            )


def conversation_warnings(data: MathRecordsArguments, tokenizer_dir: str | None) -> Iterator[str]:
    """Reports conversations that become several sequences."""
    for name, found in _counted_conversations(data, tokenizer_dir):
        if found.several:
            yield (
                f"{found.several} of {found.counted} conversations counted of task.{name} become several "
                f"sequences each, at most {found.most}: the chat template writes earlier turns otherwise "
                "than the last one"
            )


def _counted_conversations(
    data: MathRecordsArguments, tokenizer_dir: str | None
) -> Iterator[tuple[str, CountedConversations]]:
    """Yields those of each file; what can't be read or counted is reported by other checks."""
    for name, file in (("path", data.path), ("eval_path", data.eval_path)):
        if file is None or is_hub_name(file) or tokenizer_dir is None:
            continue
        with suppress(DataError, ConfigError, CheckpointError, ZeroDivisionError):
            if (counted := _counted(SampledQuestions(data, file), data, tokenizer_dir)) is not None:
                yield name, counted


def _counted(
    found: SampledQuestions, data: MathRecordsArguments, tokenizer_dir: str
) -> CountedConversations | None:
    from realsys.models.conversation_lengths import conversation_lengths

    questions = ((i, found.question(i)) for i in range(len(found.kept)))
    chats = [(i, q.messages, q.tools) for i, q in questions if q.messages is not None]
    sizes = [len(repr(messages)) + len(repr(tools)) for _, messages, tools in chats]
    chosen = [chats[i] for i in sample_of(sizes, most=MOST_COUNTED)]
    if data.long_prompts == DROP:
        prompts = found.tokens([index for index, _, _ in chosen], tokenizer_dir) or []
        fits = [length <= data.max_prompt_len for length in prompts]
        chosen = list(compress(chosen, fits))
    lengths = chosen and conversation_lengths(
        Path(tokenizer_dir).expanduser(),
        [messages for _, messages, _ in chosen],
        system=data.system,
        template_args=data.template_args,
        marks_as_text=data.marks_as_text,
        tools=[tools for _, _, tools in chosen],
    )
    if not lengths:
        return None
    longest, record = max((n, index) for (_, n), (index, _, _) in zip(lengths, chosen, strict=True))
    return CountedConversations(
        counted=len(lengths),
        several=sum(count > 1 for count, _ in lengths),
        most=max(count for count, _ in lengths),
        longest=longest,
        where=found.kept.where(record),
        empty=next(
            (found.kept.where(c[0]) for c, (n, _) in zip(chosen, lengths, strict=True) if not n), ""
        ),
    )
