"""`python -m realsys.supervisor.job_etcd.tied_program PARENT_PID PROGRAM ARGUMENT…`: becomes the program.

Its life is tied to its parent's, see realsys/runtime/parent_death.py.

The tie outlives exec(2), so a program that knows nothing of it can be started this way. Done by a program
of its own because code between fork and exec (preexec_fn) is not safe beside other threads.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from realsys.runtime.parent_death import die_with_parent


def tied(argv: Sequence[str]) -> list[str]:
    """The command that starts ``argv`` as a child of this process. Start it from the main thread: the
    signal comes when the thread that started it ends."""
    return [
        sys.executable,
        "-m",
        "realsys.supervisor.job_etcd.tied_program",
        str(os.getpid()),
        *argv,
    ]


def main() -> None:
    parent, *argv = sys.argv[1:]
    die_with_parent(int(parent))
    os.execvp(argv[0], argv)


if __name__ == "__main__":
    main()
