"""The exit statuses of `realsys`; docs/cli.md says what each means.

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
