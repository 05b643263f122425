"""Messages to reward workers: one tagged Struct each.

An answer travels as JSON, as its record does elsewhere (realsys.data.record_bytes): so a rule gets the same
values wherever it runs. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict, fields, is_dataclass
from typing import Any

import msgspec

from realsys.api.basics.reward import OF_RECORD, Completion, Score
from realsys.api.errors import DataError, RewardError
from realsys.transport.codec import ProtocolError
from realsys.transport.messages import ErrorInfo, error_to_info, info_to_error


class ScoreAnswers(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Asks for the scores of answers, each as ``answer_to_json`` gives it."""

    answers: tuple[str, ...]


class AskPresence(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Asks whether the worker is there; it replies at once, whatever it scores."""


class ScoredAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The score of one answer, or why it has none."""

    score: Score | None = None
    error: ErrorInfo | None = None


class ScoredAnswers(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The scores of the answers of a request, in order."""

    answers: tuple[ScoredAnswer, ...]


class Present(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The worker is there."""


ToRewardWorker = ScoreAnswers | AskPresence
FromRewardWorker = ScoredAnswers | Present


def answer_to_json(answer: Completion, looked_at: Collection[str]) -> str:
    """Returns the fields of ``answer`` that a rule looks at, as JSON.

    Raises:
        DataError: the record has a value that JSON has not.
    """
    names = {"response", *looked_at} | ({"record"} if OF_RECORD & set(looked_at) else set())
    try:
        found = {f.name: getattr(answer, f.name) for f in fields(answer) if f.name in names}
        return json.dumps(found, default=_plain)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"a record can't be sent to a reward worker: {error}",
            where=f"a record with the fields {sorted(answer.record)}",
            fix="use values that JSON has, or reward_workers=0",
        ) from error


def _plain(value: Any) -> dict[str, Any]:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return dict(value)


def answer_of_json(text: str) -> Completion:
    """Reads an answer. Raises ProtocolError: it has another form."""
    try:
        found = json.loads(text)
        if unknown := sorted(set(found) - {f.name for f in fields(Completion)}):
            raise ValueError(f"unknown fields {unknown}")
        return msgspec.convert(found, Completion)
    except (ValueError, TypeError, RecursionError, msgspec.MsgspecError) as error:
        raise ProtocolError(
            f"an answer can't be read: {error}",
            where="a request to a reward worker",
            fix="both workers must run the same version of realsys; else report this as a bug",
        ) from error


def scored_answer(result: Score | RewardError) -> ScoredAnswer:
    """Returns what is sent for a score or an error."""
    if isinstance(result, RewardError):
        return ScoredAnswer(error=error_to_info(result))
    return ScoredAnswer(score=result)


def result_of(sent: ScoredAnswer, worker: str) -> Score | RewardError:
    """Returns the score or error that ``worker`` sent."""
    if sent.score is not None:
        return sent.score
    if sent.error is not None and isinstance(
        error := info_to_error(sent.error, worker), RewardError
    ):
        return error
    raise ProtocolError(
        f"{worker} sent an answer with neither a score nor an error of its rule",
        where=worker,
        fix="both workers must run the same version of realsys; else report this as a bug",
    )
