"""Modes: source of samples, whether a model is trained, and how far generation may run ahead (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from realsys.api.errors import ConfigError

# Settings without a meaning if no model is trained.
ABOUT_TRAINING = ("max_staleness", "replay_from", "ref_ema_eta", "auto_eval")


@dataclass(frozen=True, kw_only=True)
class Mode:
    """A run's mode.

    Attributes:
        has_rollouts: answers come from rollout workers, in this run or in the replayed one.
        trains: a model is trained on the answers.
        staleness: default of ``max_staleness``.
        least, most: range of ``max_staleness``; most None: unlimited.
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
    """Yields settings that a mode does not use.

    Args:
        settings: the settings in ``ABOUT_TRAINING``, by name.
    """
    if not mode.trains:
        for name in ABOUT_TRAINING:
            if settings[name]:
                yield ConfigError(
                    f"nothing trains with mode={mode.name}: the servers keep their initial weights",
                    where=f"{name} and mode",
                    fix=f"leave {name} out, or use mode=async",
                )
    elif max_staleness is not None and (
        max_staleness < mode.least or (mode.most is not None and max_staleness > mode.most)
    ):
        yield ConfigError(
            f"max_staleness is {max_staleness}, but with mode={mode.name} generation runs at most one step "
            "ahead",
            where="max_staleness and mode",
            fix="use mode=async, or leave max_staleness out",
        )
