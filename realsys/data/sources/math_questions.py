"""Questions with a known answer: prompts for PPO, prompt and answer for fine-tuning.

From a JSONL file (qa_records.py), or made on the spot (arithmetic_problems.py). Text becomes tokens when a
record is asked for, and they are not kept: each is used once an epoch, and a million of them is
gigabytes. The prompt's tokens are the same in both data sets, so that
PPO asks what fine-tuning has taught:

- with a chat template: the question as a user's message, and the template's opening of the answer;
- without: the question, ending in white space (a newline is added where it doesn't), behind a BOS
  token if the tokenizer puts one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch

from realsys.api.errors import DataError, did_you_mean
from realsys.data.sequence_sample import SequenceSample
from realsys.data.sources.arithmetic_problems import arithmetic_word_problems
from realsys.data.sources.qa_records import final_answer, read_records
from realsys.runtime.progress import tick

SPLITS = ("train", "test")
SETTINGS = {"prompt": "dataset.max_prompt_len", "answer": "max_answer_len"}  # of our experiments
_PROBE = "1 + 1 = ?"
_MARGIN = 64  # bytes by which a chat template may say more around one question than around another
_TICK_EVERY = 1000


@dataclass
class _MathRecords:
    """The records of one split, and their tokens.

    Args:
        seed: of the problems made when ``path`` is none.
        split: ``train``, or ``test`` for the held-out records.
        path: JSONL file, None for arithmetic.
        eval_path: JSONL of held-out records; None holds out the last ``eval_size`` of ``path``.
        train_size: problems to make when ``path`` is none.
        eval_size: held-out records.
        max_prompt_len: tokens of the longest prompt.
        slip_share: of the training problems made when ``path`` is none, see arithmetic_problems.py.
    """

    _: KW_ONLY
    tokenizer: Any
    seed: int
    split: str
    path: str | None = None
    eval_path: str | None = None
    train_size: int = 16384
    eval_size: int = 500
    max_prompt_len: int = 128
    slip_share: float = 0.0
    records: list[dict[str, str]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise DataError(
                f"no split {self.split!r}",
                where="data set",
                fix=did_you_mean(self.split, SPLITS),
            )
        self.records = self._read()
        if self.path is not None:
            self._check_prompts()

    def _check_prompts(self) -> None:
        """Finds prompts that are too long before the first step; a plan has looked at some only.

        A text has at least a byte for each token: what has few enough is not counted.
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
        """Tokens of the question of record ``index``, ready to be answered.

        Raises:
            DataError: there are more than ``max_prompt_len``.
        """
        tokens = tokenize_prompt(self.tokenizer, self.records[index]["prompt"])
        self._check_length(index, "prompt", tokens, self.max_prompt_len)
        return tokens

    def record(self, index: int) -> dict[str, str]:
        """Record ``index`` as an environment sees it: ``prompt`` as text, and the final ``answer``."""
        record = self.records[index]
        return {"prompt": record["prompt"], "answer": final_answer(record["answer"])}

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


@dataclass
class MathPrompts(_MathRecords):
    """Gives ``packed_prompts``, and the final answer as ``metadata["answer"]``."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Tensors of each datapoint."""
        return ("packed_prompts",)

    def batch(self, indices: Sequence[int], ids: Sequence[str]) -> SequenceSample:
        """The records at ``indices``, called ``ids``."""
        prompts = [self.prompt_tokens(i) for i in indices]
        return SequenceSample.from_tensors(
            ids,
            {"packed_prompts": [[len(p)] for p in prompts]},
            {"packed_prompts": _packed(prompts)},
            metadata={"answer": [final_answer(self.records[i]["answer"]) for i in indices]},
        )


@dataclass
class MathSFT(_MathRecords):
    """Gives ``packed_input_ids`` (prompt, answer, end token) and ``prompt_mask``.

    Args:
        max_answer_len: tokens of the longest answer, without the end token.
    """

    _: KW_ONLY
    max_answer_len: int = 128

    @property
    def keys(self) -> tuple[str, ...]:
        """Tensors of each datapoint."""
        return ("packed_input_ids", "prompt_mask")

    def answer_tokens(self, index: int) -> list[int]:
        """Tokens of the answer of record ``index`` and the end token.

        Raises:
            DataError: there are more than ``max_answer_len``, the end token not counted.
        """
        tokens = _token_ids(self.tokenizer, self.records[index]["answer"])
        self._check_length(index, "answer", tokens, self.max_answer_len)
        return [*tokens, self.tokenizer.eos_token_id]

    def batch(self, indices: Sequence[int], ids: Sequence[str]) -> SequenceSample:
        """The records at ``indices``, called ``ids``."""
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
    """Tokens of a question, up to where the answer begins."""
    tokens = _token_ids(tokenizer, prompt_text(tokenizer, prompt))
    return tokens if getattr(tokenizer, "chat_template", None) else [*_bos(tokenizer), *tokens]


def prompt_text(tokenizer: Any, prompt: str) -> str:
    """The text of a question as the model gets it, without a BOS token that a template doesn't put."""
    if getattr(tokenizer, "chat_template", None):
        text: str = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
        )
        return text
    return prompt if prompt[-1:].isspace() else prompt + "\n"


def _bos(tokenizer: Any) -> list[int]:
    """The BOS token if the tokenizer would put one itself. (Some would add an EOS as well.)"""
    with_special = tokenizer("a").input_ids
    return [with_special[0]] if with_special[:1] == [tokenizer.bos_token_id] else []


def _token_ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids


def _packed(rows: Sequence[Sequence[int]]) -> torch.Tensor:
    return torch.tensor([token for row in rows for token in row], dtype=torch.int64)
