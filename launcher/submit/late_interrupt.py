"""Keeps Ctrl-C from separating a job that Slurm accepts from the command that submits it.

sbatch may answer after seconds. A launch that ended meanwhile would remove the trial's folder, and the
job would fail on its nodes later. So the first Ctrl-C waits for the answer, and the job is cancelled
then; a second one does not wait.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

WAITS = "interrupted: waiting for Slurm's answer, to cancel the job (Ctrl-C again: don't wait)"


class SubmissionInterrupted(KeyboardInterrupt):
    """Ctrl-C during a submission; the text says what became of the job."""


@dataclass
class LateInterrupt:
    """Whether Ctrl-C came while it was kept back."""

    came: bool = False


@contextmanager
def kept_back(say: Callable[[str], None]) -> Iterator[LateInterrupt]:
    """Keeps back the first Ctrl-C; the caller looks afterwards whether it came.

    Args:
        say: called with a line for the user when it comes.
    Raises:
        KeyboardInterrupt: a second one came.
    """
    late = LateInterrupt()
    if threading.current_thread() is not threading.main_thread():
        yield late  # Python raises it in the main thread only
        return
    before = signal.getsignal(signal.SIGINT)
    if not callable(before):  # ignored, or of another program: not ours to change
        yield late
        return

    def on_signal(number: int, frame: FrameType | None) -> None:
        if late.came:
            before(number, frame)
            return
        late.came = True
        say(WAITS)

    signal.signal(signal.SIGINT, on_signal)
    try:
        yield late
    finally:
        signal.signal(signal.SIGINT, before)
