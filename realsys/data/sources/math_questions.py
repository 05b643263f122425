"""Data sets of questions: prompts to sample from; with answers, or as conversations, to fine-tune on.

Records come from files (record_files.py) or are made (arithmetic_problems.py, a user's task), pass a user's
filters and transforms (chosen_records.py) and become questions (record_shape.py). A record is read and
tokenized when it is requested and neither is kept: each is used once an epoch, and ten million of them are
gigabytes. Prompt tokens are the same in both data sets, so that sampling begins with what fine-tuning
taught (chat_tokens.py).
"""

from __future__ import annotations

import functools
import json
import logging
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from realsys.api import registry
from realsys.api.basics.choice import KIND
from realsys.api.basics.reward import QUESTION_TEXT, TASK_SOURCE
from realsys.api.errors import DataError, did_you_mean
from realsys.api.plain import from_plain
from realsys.data.record_bytes import RECORD, record_key
from realsys.data.sequence_sample import SequenceSample
from realsys.data.sources.arithmetic_problems import arithmetic_word_problems
from realsys.data.sources.chat_tokens import PROBE, PromptTokenizer, TrainedSequence
from realsys.data.sources.chosen_records import chosen_records
from realsys.data.sources.dataset_arguments import DROP, MathRecordsArguments, MathSFTArguments
from realsys.data.sources.record_files import open_records
from realsys.data.sources.record_parts import ListedRecords, PartOfRecords, RecordSource
from realsys.data.sources.record_shape import (
    Message,
    Question,
    Tool,
    asked_text,
    final_answer,
    plain_record,
    prompt_texts,
    question_of,
)
from realsys.runtime.progress import tick

logger = logging.getLogger(__name__)
SPLITS = ("train", "test")
SETTINGS = {
    "prompt": "task.max_prompt_len",
    "answer": "max_answer_len",
}  # settings of the built-in experiments
# Bytes by which a chat template's text around one question may exceed that around another.
_MARGIN = 64
_TICK_EVERY = 1000
MOST_CHECKED = 1_000_000  # prompts that are measured before the first step, evenly spread


def records_of(args: MathRecordsArguments, seed: int) -> RecordSource:
    """Opens the records of a split, or makes them; ``seed`` is that of made ones.

    Raises:
        DataError: they can't be read, or made.
    """
    is_test = args.split == "test"
    if args.task is not None:
        task = from_plain(registry.find("task", args.task[KIND]), args.task, where="task")
        return ListedRecords(task.records(args.split, seed), f"task {task.kind}")
    if args.path is None:
        return ListedRecords(
            arithmetic_word_problems(
                num_problems=args.eval_size if is_test else args.train_size,
                seed=seed,
                split=args.split,
                slip_share=0.0 if is_test else args.slip_share,
            ),
            "arithmetic",
        )
    path = args.eval_path if is_test and args.eval_path is not None else args.path
    records = chosen_records(
        open_records(path), keep=args.keep, transform=args.transform, name=path
    )
    if args.eval_path is not None:
        end = min(args.eval_size, len(records)) if is_test else len(records)
        return PartOfRecords(records, range(end))
    num_train = max(len(records) - args.eval_size, 0)
    return PartOfRecords(records, range(num_train, len(records)) if is_test else range(num_train))


@dataclass(frozen=True, kw_only=True, eq=False)
class _MathRecords(MathRecordsArguments):
    """Records of one split, and their tokens; ``seed`` is that of generated problems."""

    tokenizer: Any
    seed: int
    records: RecordSource = field(init=False, repr=False)
    _prompts: PromptTokenizer = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise DataError(
                f"no split {self.split!r}",
                where="data set",
                fix=did_you_mean(self.split, SPLITS),
            )
        prompts = PromptTokenizer(
            self.tokenizer,
            system=self.system,
            template_args=self.template_args,
            marks_as_text=self.marks_as_text,
        )
        object.__setattr__(self, "_prompts", prompts)
        object.__setattr__(self, "records", records_of(self, self.seed))
        if self.path is None and self.task is None:
            return
        if self.long_prompts == DROP:
            object.__setattr__(self, "records", self._without_long_prompts())
        else:
            self._check_prompts()

    def _check_prompts(self) -> None:
        """Checks all prompts against the limit before the first step; the plan checked only a sample. Of
        more than MOST_CHECKED records an even spread is checked.
        """
        step = -(-len(self.records) // MOST_CHECKED) or 1
        for index in self._may_be_long(range(0, len(self.records), step)):
            self.prompt_tokens(index)

    def _without_long_prompts(self) -> RecordSource:
        """The records whose prompts are within the limit, the same ones on every worker. All are checked,
        as the order of an epoch depends on their number; 4 bytes are held for each.

        Raises:
            DataError: none is left of those that there are.
        """
        everything = range(len(self.records))
        long = {
            index
            for index in self._may_be_long(everything)
            if len(self._tokens(self.question(index))) > self.max_prompt_len
        }
        if not long:
            return self.records
        source = (self.path if self.split == "train" else self.eval_path or self.path) or "made"
        logger.warning(
            "records left out, as their prompts are too long source=%s split=%s kept=%d dropped=%d "
            "max_prompt_len=%d",
            source,
            self.split,
            len(self.records) - len(long),
            len(long),
            self.max_prompt_len,
        )
        if len(long) == len(self.records):
            raise DataError(
                f"all {len(long):,} records have prompts of more than {self.max_prompt_len} tokens",
                where=f"{self.split} records of {source}",
                fix=f"raise {self._named(SETTINGS['prompt'])}",
            )
        return PartOfRecords(self.records, array("I", (i for i in everything if i not in long)))

    def _may_be_long(self, indices: Sequence[int]) -> Iterator[int]:
        """Yields records whose prompts have to be tokenized: a text has at least one byte per token."""
        around = len(self._prompts.text(PROBE).encode()) - len(PROBE) + _MARGIN
        for number, index in enumerate(indices):
            question = self.question(index)
            texts = prompt_texts(question.prompt)
            texts += [json.dumps(question.tools, indent=4)] * 2 * bool(question.tools)
            if sum(len(text.encode()) + around for text in texts) > self.max_prompt_len:
                yield index
            if number % _TICK_EVERY == 0:
                tick()

    def _named(self, setting: str) -> str:
        """The name of a task's setting, in a mixture that of the source."""
        if self.task_source is None:
            return setting
        return setting.replace("task.", f"task.sources.{self.task_source}.")

    def __len__(self) -> int:
        return len(self.records)

    def question(self, index: int) -> Question:
        """Reads the question of record ``index``.

        Raises:
            DataError: the record can't be read, or lacks what is asked or known.
        """
        where = self.records.where(index)
        return question_of(self.records[index], self.columns, where, needs_answer=self.needs_answer)

    def prompt_tokens(self, index: int) -> list[int]:
        """Tokenizes the question of record ``index``, up to where the answer begins.

        Raises:
            DataError: it has more than ``max_prompt_len`` tokens.
        """
        return self._prompt_tokens(index, self.question(index))

    def _prompt_tokens(self, index: int, question: Question) -> list[int]:
        tokens = self._tokens(question)
        self._check_length(index, "prompt", tokens, self.max_prompt_len)
        return tokens

    def _tokens(self, question: Question) -> list[int]:
        return self._prompts.tokens(question.prompt, question.tools)

    def record(self, index: int) -> dict[str, Any]:
        """Returns record ``index`` for environments and rules, with ``prompt`` and the known ``answer``."""
        question = self.question(index)
        whole = {**question.record, "prompt": question.prompt, "answer": self.known(question)}
        whole |= {TASK_SOURCE: self.task_source} if self.task_source is not None else {}
        return plain_record(whole, self.records.where(index))

    def known(self, question: Question) -> str:
        """Returns the answer that rules compare with; empty if there is none."""
        answer = question.answer or ""
        return answer if self.whole_answers else final_answer(answer)

    def question_text(self, index: int) -> str:
        """Returns what record ``index`` asks, as text."""
        return asked_text(self.question(index).prompt)

    def _check_length(self, index: int, what: str, tokens: Sequence[int], limit: int) -> None:
        if len(tokens) > limit:
            source = self.path if self.split == "train" else self.eval_path or self.path
            error = DataError(
                f"the {what} of record {index + 1} has {len(tokens)} tokens, the limit is {limit}",
                where=f"{self.split} records of {source or 'arithmetic'}",
                fix=f"raise max_{what}_len to {len(tokens)}, or drop the record"
                + " (long_prompts=drop)" * (what == "prompt"),
            )
            error.resume_with = f"{self._named(SETTINGS[what])}={len(tokens)}"
            raise error


@dataclass(frozen=True, kw_only=True, eq=False)
class MathPrompts(_MathRecords):
    """Data set of ``packed_prompts``; metadata are the known answer, and the question's text if asked."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of each datapoint's tensors."""
        return ("packed_prompts", *((RECORD,) if self.with_record else ()))

    def batch(self, indices: Sequence[int], ids: Sequence[str]) -> SequenceSample:
        """Returns the records at ``indices`` under the names ``ids``."""
        questions = [self.question(i) for i in indices]
        asked = (
            {QUESTION_TEXT: [asked_text(q.prompt) for q in questions]} if self.with_question else {}
        )
        prompts = [self._prompt_tokens(i, q) for i, q in zip(indices, questions, strict=True)]
        sample = SequenceSample.from_tensors(
            ids,
            {"packed_prompts": [[len(p)] for p in prompts]},
            {"packed_prompts": _packed(prompts)},
            metadata={"answer": [self.known(q) for q in questions], **asked},
        )
        if not self.with_record:
            return sample
        return sample.update(record_key(ids, [self.record(i) for i in indices]))


@dataclass(frozen=True, kw_only=True, eq=False)
class MathSFT(_MathRecords, MathSFTArguments):
    """Data set of ``packed_input_ids`` and ``prompt_mask``: prompt, answer and end token, or conversations.

    In a conversation every assistant turn has a loss; it may take several sequences, all of one datapoint
    (``PromptTokenizer.conversation``).
    """

    _left_out: set[str] = field(init=False, repr=False, default_factory=set)

    @functools.cached_property
    def _end_ids(self) -> list[int]:
        return self._prompts.end_ids()

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of each datapoint's tensors."""
        return ("packed_input_ids", "prompt_mask")

    def answer_tokens(self, index: int) -> list[int]:
        """Tokenizes the answer of record ``index`` and appends the end token.

        Raises:
            DataError: it has more than ``max_answer_len`` tokens, the end token not counted.
        """
        return self._answer_tokens(index, self.question(index))

    def _answer_tokens(self, index: int, question: Question) -> list[int]:
        if not question.answer:
            raise DataError(
                "the record has no answer to learn",
                where=self.records.where(index),
                fix="give answers or whole conversations (messages), or leave it out by a filter",
            )
        tokens = self._prompts.ids(question.answer)
        self._check_length(index, "answer", tokens, self.max_answer_len)
        return [*tokens, *self._end_ids]

    def sequences(self, index: int) -> list[TrainedSequence]:
        """Tokenizes record ``index`` as it is trained on.

        Raises:
            DataError: it has no answer, or is longer than the limits.
        """
        question = self.question(index)
        if question.messages is not None:
            return self._conversation(index, question.messages, question.tools)
        sequence = TrainedSequence([], [])
        sequence.add(self._prompt_tokens(index, question), no_loss=True)
        sequence.add(self._answer_tokens(index, question), no_loss=False)
        return [sequence]

    def _conversation(
        self, index: int, messages: Sequence[Message], tools: Sequence[Tool]
    ) -> list[TrainedSequence]:
        try:
            sequences, left_out = self._prompts.conversation(messages, tools)
        except DataError as error:
            where = f"{self.records.where(index)}, {error.where}"
            raise DataError(error.what, where=where, fix=error.fix) from error
        for name in {*left_out} - self._left_out:
            self._left_out.add(name)
            logger.warning(
                "the chat template leaves out an assistant's text, which is not trained record=%s field=%s",
                self.records.where(index),
                name,
            )
        limit = self.max_prompt_len + self.max_answer_len
        longest = max(len(sequence.tokens) for sequence in sequences)
        if longest > limit:
            raise DataError(
                f"the conversation has {longest} tokens, the limit is {limit}: max_prompt_len + "
                "max_answer_len",
                where=self.records.where(index),
                fix=f"raise max_answer_len to {longest - self.max_prompt_len}, or drop the record",
            )
        return sequences

    def batch(self, indices: Sequence[int], ids: Sequence[str]) -> SequenceSample:
        """Returns the records at ``indices`` under the names ``ids``."""
        rows = [self.sequences(i) for i in indices]
        lengths = [[len(sequence.tokens) for sequence in row] for row in rows]
        every = [sequence for row in rows for sequence in row]
        return SequenceSample.from_tensors(
            ids,
            {"packed_input_ids": lengths, "prompt_mask": lengths},
            {
                "packed_input_ids": _packed([sequence.tokens for sequence in every]),
                "prompt_mask": torch.tensor(
                    [m for sequence in every for m in sequence.no_loss], dtype=torch.bool
                ),
            },
        )


def _packed(rows: Sequence[Sequence[int]]) -> torch.Tensor:
    return torch.tensor([token for row in rows for token in row], dtype=torch.int64)
