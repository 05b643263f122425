"""Watches a trial until it has ended, for launch, resume and watch."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from launcher.terminal.exit_codes import ExitCode

if TYPE_CHECKING:
    from realsys.trial.records import TrialFiles


def watch_until_over(files: TrialFiles, trial: str) -> int:
    """Shows the live view on stderr, then the summary; returns the run's exit status."""
    from launcher.terminal import output
    from launcher.trials.await_end import wait_for_supervisor_exit
    from launcher.trials.render import exit_code, follow, summary

    try:
        view = follow(files, sys.stderr)
        wait_for_supervisor_exit(files)
    except KeyboardInterrupt:
        output.say(
            f"\n{trial} keeps running.  watch: realsys watch {trial}   stop: realsys stop {trial}"
        )
        return ExitCode.INTERRUPTED
    output.say(*summary(view, files))
    return exit_code(view)
