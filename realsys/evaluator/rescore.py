"""Scores the answers that a trial's rollout workers have stored, by another reward rule.

No model is loaded and nothing is sampled. The launcher finds this by name, since it needs torch
(launcher/control/rescore_trial.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from realsys.api import registry
from realsys.api.basics.reward import OF_RECORD, QUESTION, QUESTION_TEXT, Score
from realsys.api.errors import DataError, RewardError
from realsys.api.worker_configs import RolloutWorker
from realsys.data.record_bytes import RECORD, record_key
from realsys.data.rollout_dump import RolloutDump
from realsys.data.sequence_sample import SequenceSample
from realsys.interfaces.answers import INPUT, answer_mask
from realsys.interfaces.completions import answered_records
from realsys.models.hf import load_tokenizer
from realsys.rewards.rule import rule_of
from realsys.trial.dump_records import SUFFIX

DATAPOINTS_AT_ONCE = 16  # read and scored together
_ID = re.compile(r"\d+-(\d+)(?:\.\d+)?")  # <epoch>-<index>[.<tries>]


@dataclass(frozen=True, kw_only=True)
class RescoredDatapoint:
    """A stored datapoint with its old rewards and its new ones, one per answer.

    Attributes:
        version: newest version of the weights that sampled it.
        new: rewards in float32, as they would be trained on; empty: an answer got no score, and a run
            would have set the record aside (``problem`` says why).
        correct: whether the new rule counts the answer as right.
        parts: named parts of the new rewards.
    """

    id: str
    version: int
    old: tuple[float, ...]
    new: tuple[float, ...] = ()
    correct: tuple[bool, ...] = ()
    parts: tuple[Mapping[str, float], ...] = ()
    problem: str = ""


class StoredRollouts:
    """All datapoints in a trial's dump, to be scored by ``reward`` one after the other.

    Args:
        config: of the trial's rollout workers: tokenizer, data set and its seed.
        folder: the phase's ``rollout_dump``.
        reward, reward_args: registered rules, and the arguments of those that take some; attributes too.
    Raises:
        ConfigError: the rule can't be made. DataError: the data set can't be read any more.
    """

    def __init__(
        self, config: RolloutWorker, folder: Path, reward: str, reward_args: Mapping[str, Any]
    ) -> None:
        self.reward, self.reward_args = reward, reward_args
        self._rule = rule_of(reward, reward_args)
        self._dump = RolloutDump(sorted(folder.glob(f"*{SUFFIX}")))
        self._tokenizer = load_tokenizer(config.tokenizer_path)
        (data,) = config.datasets
        self._dataset = registry.make_dataset(
            data, tokenizer=self._tokenizer, seed=config.base_seed
        )

    def __len__(self) -> int:
        return len(self._dump)

    def __iter__(self) -> Iterator[RescoredDatapoint]:
        """Raises DataError: a datapoint can't be read, its record is another now, or its answers were
        given in several turns."""
        ids = self._dump.ids
        for start in range(0, len(ids), DATAPOINTS_AT_ONCE):
            yield from self._scored(self._dump.read(ids[start : start + DATAPOINTS_AT_ONCE]))

    def _scored(self, data: SequenceSample) -> list[RescoredDatapoint]:
        asked = self._asked(data)
        records = answered_records(data, self._tokenizer, self._rule.fields, asked=asked)
        given = iter(self._rule.score_twice([a for r in records for a in r.answers]))
        return [
            _rescored(data.take([i]), [next(given) for _ in record.answers])
            for i, record in enumerate(records)
        ]

    def _asked(self, data: SequenceSample) -> SequenceSample:
        """Reads the records of the datapoints, as a rollout worker does."""
        indices = [self._index(id_) for id_ in data.ids]
        asked: SequenceSample = self._dataset.batch(indices, data.ids)
        for i, id_ in enumerate(data.ids):
            _check(data.take([i]), asked.take([i]).data["packed_prompts"], id_)
        text = getattr(self._dataset, "question_text", None)
        if QUESTION in self._rule.fields and QUESTION_TEXT not in asked.meta.metadata and text:
            text_of = getattr(self._dataset, "question_text_of", lambda index, id_: text(index))
            texts = {QUESTION_TEXT: [text_of(*one) for one in zip(indices, data.ids, strict=True)]}
            asked = asked.update(SequenceSample.from_tensors(data.ids, {}, {}, metadata=texts))
        read = getattr(self._dataset, "record", None)
        if not OF_RECORD & self._rule.fields or RECORD in asked.keys or read is None:
            return asked
        known = asked.meta.metadata
        read_of = getattr(self._dataset, "record_of", lambda index, id_: read(index))
        records = [
            {
                **read_of(index, data.ids[i]),
                **{name: values[i] for name, values in known.items() if name != QUESTION_TEXT},
            }
            for i, index in enumerate(indices)
        ]
        return asked.update(record_key(data.ids, records))

    def _index(self, id_: str) -> int:
        found = _ID.fullmatch(id_)
        if found is None or int(found[1]) >= len(self._dataset):
            raise _other_data(id_, f"the data set has {len(self._dataset)} records")
        return int(found[1])


def _check(datapoint: SequenceSample, prompt: torch.Tensor, id_: str) -> None:
    """Raises DataError: its prompt is not the record's, or the policy wrote it in several pieces."""
    pieces = datapoint.piece_lengths(INPUT)
    tokens = torch.split(datapoint.data[INPUT], pieces)
    masks = torch.split(answer_mask(datapoint), pieces)
    for row, mask in zip(tokens, masks, strict=True):
        first = int(mask.nonzero()[0])
        if row[:first].tolist() != prompt.tolist():
            raise _other_data(id_, "its prompt is not that of the record now")
        if not bool(mask[first:].all()):
            raise DataError(
                "an answer was given in several turns, and a rule sees no more than the last",
                where=f"datapoint {id_}",
                fix="launch it again with the new rule; episodes of one turn can be rescored",
            )


def _other_data(id_: str, what: str) -> DataError:
    fix = "put back the data and the tokenizer that the trial was launched with"
    return DataError(f"the record of a stored answer has changed: {what}", where=id_, fix=fix)


def _rescored(datapoint: SequenceSample, given: list[Score | RewardError]) -> RescoredDatapoint:
    old = RescoredDatapoint(
        id=datapoint.ids[0],
        version=int(datapoint.data["packed_versions"].max()),
        old=tuple(datapoint.data["rewards"].tolist()),
    )
    scores: list[Score] = []
    for result in given:
        if isinstance(result, RewardError):
            return replace(old, problem=f"{result.what} ({result.where})")
        scores.append(result)
    return replace(
        old,
        new=tuple(torch.tensor([s.value for s in scores], dtype=torch.float32).tolist()),
        correct=tuple(s.correct for s in scores),
        parts=tuple(dict(s.parts) for s in scores),
    )
