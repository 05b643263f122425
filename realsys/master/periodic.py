"""Decides when to save, checkpoint and evaluate (pure: the time is passed in)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Periodic:
    """Due if any of its periods has passed since it was last done.

    Attributes:
        epochs, steps, seconds: the periods; None switches one off.
    """

    epochs: int | None
    steps: int | None
    seconds: float | None
    _epochs_done: int = 0
    _last_s: float | None = None

    def start(self, *, now_s: float, epochs_done: int) -> None:
        """Sets the clock at the start of an attempt."""
        self._last_s, self._epochs_done = now_s, epochs_done

    def due(self, *, step: int, epochs_done: int, now_s: float) -> bool:
        """Returns whether it is due after ``step`` (from 1); if so, restarts its periods."""
        due = (
            (self.steps is not None and step % self.steps == 0)
            or (
                self.epochs is not None
                and epochs_done // self.epochs > self._epochs_done // self.epochs
            )
            or (
                self.seconds is not None
                and self._last_s is not None
                and now_s - self._last_s >= self.seconds
            )
        )
        self._epochs_done = epochs_done
        if due:
            self._last_s = now_s
        return due
