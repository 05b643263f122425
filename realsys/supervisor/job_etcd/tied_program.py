"""`python -m realsys.supervisor.job_etcd.tied_program PARENT_PID PROGRAM ARGUMENT…`: becomes the program.

The program ends when its parent does, see realsys/runtime/parent_death.py. The tie survives exec(2), so
it works for any program. Done by a program of its own because code between fork and exec (preexec_fn) is
not safe beside other threads.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from realsys.runtime.parent_death import die_with_parent


def tied(argv: Sequence[str]) -> list[str]:
    """Returns the command that starts ``argv`` as a child tied to this process. Start it from the main
    thread: the signal is sent when the starting thread ends."""
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
