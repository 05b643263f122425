"""The first process of a job: calls the function named on its command line, after checking the trial's
folders.

``python -m realsys.supervisor.job_entry MODULE:FUNCTION TRIAL PLAN_HASH [NUMBER …]``, or for an element
of a job array ``… --elements=FILE --sha256=HASH``. submitit starts it, but its pickled call is not used:
a pickle could be replaced by code. The plan is data, and its hash is on the command line.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType

from realsys.api.errors import RealsysError, TrialError
from realsys.trial.folders import check_trial, restrict_umask
from realsys.trial.records import TrialFiles


def main() -> int:
    """Runs the job; returns its exit status."""
    restrict_umask()
    # Until the supervisor listens, as to SIGUSR2 in the script
    signal.signal(signal.SIGTERM, _on_early_sigterm)
    try:
        args = _parse()
        trial, plan_hash = args.trial, args.plan_hash
        if args.elements is not None:
            trial, plan_hash = element(args.elements.read_bytes(), args.sha256, os.environ)
        check_trial(TrialFiles(Path(trial)))
        return _function(args.function)(trial, plan_hash, *args.numbers)
    except RealsysError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1


def element(data: bytes, sha256: str, environ: Mapping[str, str]) -> tuple[str, str]:
    """Returns (trial, plan's hash) of the array element that this process is.

    Raises:
        TrialError: the file differs from the submitted one.
    """
    if (found := hashlib.sha256(data).hexdigest()) != sha256:
        raise TrialError(
            f"the list of the array's trials was changed: its hash is {found[:12]}, not {sha256[:12]}",
            where="submitit/elements.json of the sweep's first trial",
            fix="find out who changed it, then realsys resume each trial",
        )
    trial, plan_hash = json.loads(data)[environ["SLURM_ARRAY_TASK_ID"]]
    return str(trial), str(plan_hash)


def _function(name: str) -> Callable[..., int]:
    module, _, attribute = name.partition(":")
    function: Callable[..., int] = getattr(importlib.import_module(module), attribute)
    return function


def _on_early_sigterm(number: int, frame: FrameType | None) -> None:
    sys.stderr.write("SIGTERM received before an attempt existed\n")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("function")
    parser.add_argument("trial", nargs="?")
    parser.add_argument("plan_hash", nargs="?")
    parser.add_argument("numbers", nargs="*", type=int)
    parser.add_argument("--elements", type=Path)
    parser.add_argument("--sha256", default="")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
