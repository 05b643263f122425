"""Data sets of questions with a known answer: prompts for PPO, prompts and answers for fine-tuning.

Read from a JSONL file (qa_records.py) or generated (arithmetic_problems.py). A record is tokenized when
it is requested and its tokens are not cached: each is used once an epoch, and a million of them is
gigabytes. Prompt tokens are the same in both data sets, so that PPO prompts with what fine-tuning taught:

- with a chat template: the question as a user's message, and the template's opening of the answer;
- without: the question, ending in white space (a newline is added where it doesn't), behind a BOS
  token if the tokenizer puts one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from realsys.api import registry
from realsys.api.basics.choice import KIND
from realsys.api.errors import DataError, did_you_mean
from realsys.api.plain import from_plain
from realsys.data.record_bytes import RECORD, as_json, record_key
from realsys.data.sequence_sample import SequenceSample
from realsys.data.sources.arithmetic_problems import arithmetic_word_problems
from realsys.data.sources.dataset_arguments import MathRecordsArguments, MathSFTArguments
from realsys.data.sources.qa_records import final_answer, read_records
from realsys.runtime.progress import tick

SPLITS = ("train", "test")
SETTINGS = {
    "prompt": "task.max_prompt_len",
    "answer": "max_answer_len",
}  # settings of the built-in experiments
_PROBE = "1 + 1 = ?"
# Bytes by which a chat template's text around one question may exceed that around another.
_MARGIN = 64
_TICK_EVERY = 1000


@dataclass(frozen=True, kw_only=True, eq=False)
class _MathRecords(MathRecordsArguments):
    """Records of one split, and their tokens; ``seed`` is that of generated problems."""

    tokenizer: Any
    seed: int
    records: list[dict[str, str]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise DataError(
                f"no split {self.split!r}",
                where="data set",
                fix=did_you_mean(self.split, SPLITS),
            )
        object.__setattr__(self, "records", self._read())
        if self.path is not None or self.task is not None:
            self._check_prompts()

    def _check_prompts(self) -> None:
        """Checks all prompts against the limit before the first step; the plan checked only a sample.

        A text has at least one byte per token, so a short enough text is not tokenized.
        """
        around = len(prompt_text(self.tokenizer, _PROBE).encode()) - len(_PROBE) + _MARGIN
        for index, record in enumerate(self.records):
            if len(record["prompt"].encode()) + around > self.max_prompt_len:
                self.prompt_tokens(index)
            if index % _TICK_EVERY == 0:
                tick()

    def __len__(self) -> int:
        return len(self.records)

    def _read(self) -> list[dict[str, str]]:
        is_test = self.split == "test"
        if self.task is not None:
            task = from_plain(registry.find("task", self.task[KIND]), self.task, where="task")
            made: list[dict[str, str]] = task.records(self.split, self.seed)
            return made
        if self.path is None:
            return arithmetic_word_problems(
                num_problems=self.eval_size if is_test else self.train_size,
                seed=self.seed,
                split=self.split,
                slip_share=0.0 if is_test else self.slip_share,
            )
        if self.eval_path is not None:
            return (
                read_records(self.eval_path)[: self.eval_size]
                if is_test
                else read_records(self.path)
            )
        records = read_records(self.path)
        num_train = max(len(records) - self.eval_size, 0)
        return records[num_train:] if is_test else records[:num_train]

    def prompt_tokens(self, index: int) -> list[int]:
        """Tokenizes the question of record ``index``, up to where the answer begins.

        Raises:
            DataError: it has more than ``max_prompt_len`` tokens.
        """
        tokens = tokenize_prompt(self.tokenizer, self.records[index]["prompt"])
        self._check_length(index, "prompt", tokens, self.max_prompt_len)
        return tokens

    def record(self, index: int) -> dict[str, Any]:
        """Returns record ``index`` for environments and rules: all of it, with the final ``answer``."""
        record = self.records[index]
        return as_json({**record, "answer": final_answer(record["answer"])})

    def _check_length(self, index: int, what: str, tokens: Sequence[int], limit: int) -> None:
        if len(tokens) > limit:
            source = self.path if self.split == "train" else self.eval_path or self.path
            error = DataError(
                f"the {what} of record {index + 1} has {len(tokens)} tokens, the limit is {limit}",
                where=f"{self.split} records of {source or 'arithmetic'}",
                fix=f"raise max_{what}_len to {len(tokens)}, or drop the record",
            )
            error.resume_with = f"{SETTINGS[what]}={len(tokens)}"
            raise error


@dataclass(frozen=True, kw_only=True, eq=False)
class MathPrompts(_MathRecords):
    """Data set of ``packed_prompts``, with the final answer as ``metadata["answer"]``."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of each datapoint's tensors."""
        return ("packed_prompts", *((RECORD,) if self.with_record else ()))

    def batch(self, indices: Sequence[int], ids: Sequence[str]) -> SequenceSample:
        """Returns the records at ``indices`` under the names ``ids``."""
        prompts = [self.prompt_tokens(i) for i in indices]
        sample = SequenceSample.from_tensors(
            ids,
            {"packed_prompts": [[len(p)] for p in prompts]},
            {"packed_prompts": _packed(prompts)},
            metadata={"answer": [final_answer(self.records[i]["answer"]) for i in indices]},
        )
        if not self.with_record:
            return sample
        return sample.update(record_key(ids, [self.record(i) for i in indices]))


@dataclass(frozen=True, kw_only=True, eq=False)
class MathSFT(_MathRecords, MathSFTArguments):
    """Data set of ``packed_input_ids`` (prompt, answer, end token) and ``prompt_mask``."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of each datapoint's tensors."""
        return ("packed_input_ids", "prompt_mask")

    def answer_tokens(self, index: int) -> list[int]:
        """Tokenizes the answer of record ``index`` and appends the end token.

        Raises:
            DataError: it has more than ``max_answer_len`` tokens, the end token not counted.
        """
        tokens = _token_ids(self.tokenizer, self.records[index]["answer"])
        self._check_length(index, "answer", tokens, self.max_answer_len)
        return [*tokens, self.tokenizer.eos_token_id]

    def batch(self, indices: Sequence[int], ids: Sequence[str]) -> SequenceSample:
        """Returns the records at ``indices`` under the names ``ids``."""
        pairs = [(self.prompt_tokens(i), self.answer_tokens(i)) for i in indices]
        lengths = [[len(prompt) + len(answer)] for prompt, answer in pairs]
        masks = [[True] * len(prompt) + [False] * len(answer) for prompt, answer in pairs]
        return SequenceSample.from_tensors(
            ids,
            {"packed_input_ids": lengths, "prompt_mask": lengths},
            {
                "packed_input_ids": _packed([prompt + answer for prompt, answer in pairs]),
                "prompt_mask": torch.tensor([m for mask in masks for m in mask], dtype=torch.bool),
            },
        )


def tokenize_prompt(tokenizer: Any, prompt: str) -> list[int]:
    """Tokenizes a question, up to where the answer begins."""
    tokens = _token_ids(tokenizer, prompt_text(tokenizer, prompt))
    return tokens if getattr(tokenizer, "chat_template", None) else [*_bos(tokenizer), *tokens]


def prompt_text(tokenizer: Any, prompt: str) -> str:
    """Formats a question as the model's input text, without a BOS token that a template doesn't put."""
    if getattr(tokenizer, "chat_template", None):
        text: str = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
        )
        return text
    return prompt if prompt[-1:].isspace() else prompt + "\n"


def _bos(tokenizer: Any) -> list[int]:
    """Returns the BOS token if the tokenizer adds one itself. (Some would add an EOS as well.)"""
    with_special = tokenizer("a").input_ids
    return [with_special[0]] if with_special[:1] == [tokenizer.bos_token_id] else []


def _token_ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids


def _packed(rows: Sequence[Sequence[int]]) -> torch.Tensor:
    return torch.tensor([token for row in rows for token in row], dtype=torch.int64)
