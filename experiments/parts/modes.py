"""Modes: who samples, whether anything trains, and how far generation may run ahead (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from realsys.api.errors import ConfigError

# Settings that mean nothing where nothing trains.
ABOUT_TRAINING = ("max_staleness", "replay_from", "ref_ema_eta", "auto_eval")


@dataclass(frozen=True, kw_only=True)
class Mode:
    """How a run is driven.

    Attributes:
        has_rollouts: answers come from rollout workers, now or in a run that is replayed.
        trains: something learns from the answers.
        staleness: where ``max_staleness`` is none.
        least, most: that ``max_staleness`` may be; most None: any.
    """

    name: str
    has_rollouts: bool = False
    trains: bool = True
    staleness: int = 0
    least: int = 0
    most: int | None = None


MODES = {
    mode.name: mode
    for mode in (
        Mode(name="sync", most=1),
        Mode(name="one_step_off", staleness=1, least=1, most=1),
        Mode(name="async", has_rollouts=True, staleness=1),
        Mode(name="rollout", has_rollouts=True, trains=False),
    )
}


def mode_problems(
    mode: Mode, *, max_staleness: int | None, settings: Mapping[str, Any]
) -> Iterator[ConfigError]:
    """Settings that a mode has no use for.

    Args:
        settings: those of ``ABOUT_TRAINING``, by name.
    """
    if not mode.trains:
        for name in ABOUT_TRAINING:
            if settings[name]:
                yield ConfigError(
                    f"nothing trains with mode={mode.name}: the servers keep the weights that they start "
                    "with",
                    where=f"{name} and mode",
                    fix=f"leave {name} out, or use mode=async",
                )
    elif max_staleness is not None and (
        max_staleness < mode.least or (mode.most is not None and max_staleness > mode.most)
    ):
        yield ConfigError(
            f"max_staleness is {max_staleness}, and with mode={mode.name} generation runs at most one step "
            "ahead",
            where="max_staleness and mode",
            fix="use mode=async, or leave max_staleness out",
        )
