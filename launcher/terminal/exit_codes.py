"""The exit status table of `realsys`, for scripts, the docs and the tests.

Errors carry their own code (realsys.api.errors, ``exit_code``); a test keeps the two consistent.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit status of the command line."""

    OK = 0
    RUN_FAILED = 1
    USAGE = 2
    NO_SUCH_TRIAL = 3
    CONFIG_INVALID = 4
    CLUSTER_REFUSED = 5
    STORE_UNREACHABLE = 6
    TIMED_OUT = 7
    RUN_STOPPED = 8
    BUG = 70
    INTERRUPTED = 130


EXIT_CODES: dict[ExitCode, str] = {
    ExitCode.OK: "done; for launch, resume and wait: the run completed. `status` of a failed run "
    "and `stop` of a finished one are 0 too",
    ExitCode.RUN_FAILED: "the run failed or was lost, or the trial's state does not permit the command",
    ExitCode.USAGE: "the command line can't be parsed",
    ExitCode.NO_SUCH_TRIAL: "no trial of that name",
    ExitCode.CONFIG_INVALID: "the experiment's or cluster's configuration or data is wrong; "
    "nothing was started",
    ExitCode.CLUSTER_REFUSED: "the file system or scheduler refused (permission, disk full, …)",
    ExitCode.STORE_UNREACHABLE: "the name-resolution store does not answer",
    ExitCode.TIMED_OUT: "a deadline passed (wait --timeout)",
    ExitCode.RUN_STOPPED: "the run was stopped by a user; it can be resumed",
    ExitCode.BUG: "a bug in realsys; the traceback is on stderr",
    ExitCode.INTERRUPTED: "Ctrl-C; an attached run keeps running",
}
