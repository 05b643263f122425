"""How this process ends, as the record that the trial keeps of it (``Failure``)."""

from __future__ import annotations

import os
import socket
import time
import traceback

from realsys.api.errors import RealsysError
from realsys.api.users_code.users_frames import shown_error, users_error, users_place
from realsys.trial.records import Failure

EXITS_FIX = "raise an error where it calls sys.exit or exit; then realsys resume"


def failure_of(worker: str, error: BaseException, *, log: str = "") -> Failure:
    """Describes the error that ends this process, which is ``worker``."""
    known = error if isinstance(error, RealsysError) else None
    return Failure(
        worker=worker,
        host=socket.gethostname(),
        pid=os.getpid(),
        why=what_of(error),
        at=time.time(),
        kind="RemoteError" if known and known.from_worker else type(error).__name__,
        fix=known.fix if known else EXITS_FIX if isinstance(error, SystemExit) else "",
        log=log,
        resume_with=known.resume_with if known else "",
    )


def failure_by_order(worker: str, why: str, kind: str, *, pid: int | None = None) -> Failure:
    """Describes the end of a process (None: this one) on this host that was told to end."""
    return Failure(
        worker=worker,
        host=socket.gethostname(),
        pid=os.getpid() if pid is None else pid,
        why=why,
        at=time.time(),
        kind=kind,
    )


def first_line(error: BaseException) -> str:
    """Says what happened in one line of a log."""
    return what_of(error).partition("\n")[0][:200]


def what_of(error: BaseException) -> str:
    """Says what happened; an error of a user's code begins with its line there: ``my_env.py:3 in step: …``,
    also where one of ours is raised from it."""
    if isinstance(error, RealsysError):
        users = users_error(error)
        # One of ours that a user's code raised says itself what it is about
        if users is None or isinstance(users, RealsysError) or users_place(users) in error.what:
            return error.what
        return f"{shown_error(users)}: {error.what}"
    if not isinstance(error, SystemExit):
        return shown_error(error)
    what = f"{type(error).__name__}: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    where = f" (in {frames[-1].name}, {frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"code in it called exit: {what}{where}"
