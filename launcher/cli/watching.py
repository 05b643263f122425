"""The live view of a trial until it is over, for the verbs that end in it: launch, resume, watch."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from launcher.terminal.exit_codes import ExitCode

if TYPE_CHECKING:
    from realsys.trial.records import TrialFiles


def watch_until_over(files: TrialFiles, trial: str) -> int:
    """The live view on stderr, then the summary; the exit status of the run."""
    from launcher.terminal import output
    from launcher.trials.render import exit_code, follow, settle, summary

    try:
        view = follow(files, sys.stderr)
        settle(files)
    except KeyboardInterrupt:
        output.say(f"\n{trial} goes on.  watch: realsys watch {trial}   stop: realsys stop {trial}")
        return ExitCode.INTERRUPTED
    for line in summary(view, files):
        output.say(line)
    return exit_code(view)
