"""Values exchanged with the staleness ledger."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class StalenessPolicy(StrEnum):
    """Rule that selects which answers form a batch."""

    WAIT = "wait"  # exactly the next prompts in order
    WINDOW = "window"  # in order of completion, as long as all can be trained in time
    DROP = "drop"  # in order of completion; samples that become too stale are generated again


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptGrant:
    """A prompt to dispatch. No token of its answers may come from weights older than ``min_version``."""

    number: int
    tries: int  # number of earlier dispatches
    min_version: int
    target_step: int


@dataclass(frozen=True, slots=True)
class TicketVerdict:
    """Whether a delivery was accepted, and why not."""

    kept: bool
    why: str = ""
