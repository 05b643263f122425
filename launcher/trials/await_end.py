"""Waits until a trial is over: for `realsys wait` and for ``Trial.wait`` of the Python API."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing

from launcher.trials.render import POLL_S, wait_for_supervisor_exit
from launcher.trials.status import StatusReader
from launcher.trials.trial_view import TrialView
from realsys.api.errors import WaitTimeout
from realsys.trial.records import TrialFiles
from realsys.trial.trial_state import State


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
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    with closing(StatusReader(files)) as reader:
        unknown = ""
        while not (view := reader.brief_view()).is_over:
            if view.state is State.UNKNOWN and view.reason != unknown:
                warn(f"{view.trial} is {view.state.value}: {view.reason}; waiting")
            unknown = view.reason if view.state is State.UNKNOWN else ""
            if deadline is not None and time.monotonic() > deadline:
                raise WaitTimeout(
                    f"{view.trial} is still {view.state.value} after {timeout_s:g} s",
                    where=view.folder,
                    fix=f"wait longer, or look: realsys status {view.trial}",
                )
            time.sleep(POLL_S)
        whole = reader.view()
    wait_for_supervisor_exit(files)
    return whole if whole.is_over else view
