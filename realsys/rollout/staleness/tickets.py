"""What the staleness ledger is asked for and answers, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class StalenessPolicy(StrEnum):
    """Which of the answers make a batch."""

    WAIT = "wait"  # exactly the prompts whose turn it is
    WINDOW = "window"  # those finished first, as long as all can be trained in time
    DROP = "drop"  # those finished first; what gets too old meanwhile is made anew


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptGrant:
    """A prompt to give out. No token of its answers may come from weights older than ``min_version``."""

    number: int
    tries: int  # how often it was given out before
    min_version: int
    target_step: int


@dataclass(frozen=True, slots=True)
class TicketVerdict:
    """Whether something was accepted, and why not."""

    kept: bool
    why: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchStaleness:
    """Of the samples of one step: steps behind, and how many had their oldest token from which version."""

    step: int
    min: int
    mean: float
    max: int
    by_version: Mapping[int, int]
