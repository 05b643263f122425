"""What a user of tests/process/test_two_users.py does: ``python as_user.py VERB ROOT-OR-TRIAL TRIAL-NAME``.

``launch`` and ``resume`` are the launcher's own, through the real submitit and entry; only the supervisor
is a stand-in (``supervise`` below), which notes down who ran it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from launcher.submit import dispatch_job
from launcher.submit.planning import make_plan
from launcher.submit.submit import resubmit, submit
from realsys.api.errors import RealsysError
from realsys.api.plan import read_plan
from realsys.trial.folders import restrict_umask
from realsys.trial.records import TrialFiles


def supervise(trial_dir: str, plan_hash: str) -> int:
    """The stand-in: leaves a note, if the plan is the one that was launched."""
    files = TrialFiles(Path(trial_dir))
    read_plan(files.plan, expected_hash=plan_hash)
    note = files.root / ".ran"
    note.write_text(f"{os.getuid()}\n")
    note.rename(files.root / f"ran{len(list(files.root.glob('ran*')))}")
    return 0


def main() -> int:
    """The exit status of the command."""
    verb, where, trial = sys.argv[1:4]
    dispatch_job.SUPERVISOR = "as_user:supervise"
    restrict_umask()  # as the command line does
    try:
        if verb == "launch":
            os.environ["REALSYS_FILE_ROOT"] = where
            sys.stdout.write(str(submit(make_plan("ppo-math", [], trial=trial)).root))
        else:
            resubmit(TrialFiles(Path(where)))
    except RealsysError as error:
        sys.stderr.write(f"{error}\n")
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
