"""Polls a trial until it is over, for launch, resume, watch, wait, stop and the Python API."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing

from launcher.trials.status import StatusReader
from launcher.trials.trial_view import TrialView
from realsys.api.errors import WaitTimeout
from realsys.trial.liveness import Liveness
from realsys.trial.records import TrialFiles
from realsys.trial.trial_reader import TrialReader
from realsys.trial.trial_state import State

POLL_S = 0.5
SETTLE_S = 30.0


def views_until_over(
    reader: StatusReader,
    *,
    brief: bool = False,
    timeout_s: float | None = None,
    pause_s: float | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[TrialView]:
    """Yields the trial's present view again and again; the last one is over, or read after the time-out.

    Args:
        brief: leave out workers, unless the state depends on them: those of thousands take megabytes.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        view = reader.brief_view() if brief else reader.view()
        yield view
        if view.is_over or (deadline is not None and time.monotonic() > deadline):
            return
        sleep(POLL_S if pause_s is None else pause_s)


def await_end(
    files: TrialFiles,
    *,
    timeout_s: float | None = None,
    warn: Callable[[str], None] = lambda text: None,
) -> TrialView:
    """Returns the trial's last view once nothing more will happen by itself.

    Args:
        warn: gets a line each time the trial's state becomes unknown for a new reason.
    Raises:
        WaitTimeout: it is not over after ``timeout_s``.
    """
    with closing(StatusReader(files)) as reader:
        unknown = ""
        for view in views_until_over(reader, brief=True, timeout_s=timeout_s):
            is_unknown = view.state is State.UNKNOWN and not view.is_over
            if is_unknown and view.reason != unknown:
                warn(f"{view.trial} is {view.state.value}: {view.reason}; waiting")
            unknown = view.reason if is_unknown else ""
        if not view.is_over:
            raise WaitTimeout(
                f"{view.trial} is still {view.state.value} after {timeout_s:g} s",
                where=view.folder,
                fix=f"wait longer, or look: realsys status {view.trial}",
            )
        whole = reader.view()
    wait_for_supervisor_exit(files)
    return whole if whole.is_over else view


def wait_for_supervisor_exit(files: TrialFiles, *, timeout_s: float = SETTLE_S) -> None:
    """Waits until the supervisor has exited: after its exit marker it still writes the report page."""
    deadline = time.monotonic() + timeout_s
    reader = TrialReader(files)
    while (last := reader.last_attempt()) is not None and last.supervisor is Liveness.ALIVE:
        if time.monotonic() > deadline:
            return
        time.sleep(POLL_S / 5)
