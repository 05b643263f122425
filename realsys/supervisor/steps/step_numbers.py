"""Skips the step numbers of a requeued job's earlier incarnations, so that no step of ours has one.

Slurm counts the steps of a requeued job from 0 again. A surviving srun of an earlier incarnation asks
slurmctld to end "step 123.0" as soon as it learns that its node was given up, and slurmctld ends
whichever step has that number (seen with 22.05). srun is not our code, and may be the first thing that
runs when a suspended node resumes; so the numbers must differ. An empty step uses up one number. The
components of a het job share one count, so a step in its first one suffices.
"""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from realsys.slurm.step_command import step_environment
from realsys.trial.records import AttemptFiles, TrialFiles
from realsys.worker.requeued import former_attempts_of_same_job

logger = logging.getLogger(__name__)

SPARE = 8  # for unrecorded steps: `realsys exec`, or by hand
AT_ONCE = 8  # measured: 8 empty steps take 0.14 s, one takes 0.05 s
TIMEOUT_S = 60.0
NAME = "unused"  # of these steps, in Slurm's lists and in ours


def numbers_to_skip(used: Iterable[int]) -> int:
    """Returns how many numbers from 0 on must not be used (pure).

    Args:
        used: how many each earlier incarnation used, including those it skipped.
    """
    most = max(used, default=None)
    return 0 if most is None else most + SPARE


def skip_former_numbers(attempt: AttemptFiles, environ: Mapping[str, str]) -> int:
    """Uses up the numbers that earlier incarnations of this job may have used; returns how many.

    Call it before the first step of an attempt. It takes at most ``TIMEOUT_S``; failures are only logged,
    since they matter only if processes of a lost node survive.

    Args:
        environ: for srun; variables that it would read as options are left out.
    """
    if _num_steps(attempt):
        return 0  # done already: a preflight was before the workers' first step
    files = TrialFiles(attempt.root.parent.parent)
    former = former_attempts_of_same_job(files, attempt.number)
    wanted = numbers_to_skip(_num_steps(one) for one in former)
    if not wanted:
        return 0
    began_s = time.monotonic()
    argv = _argv()
    note_steps(attempt, [{"phase": "", "step": NAME, "argv": argv}] * wanted)
    trouble = _run_all([argv] * wanted, step_environment(environ), began_s + TIMEOUT_S)
    took_s = time.monotonic() - began_s
    if trouble:
        logger.warning(
            "step numbers may be used twice wanted=%d failed=%d seconds=%.1f first=%s",
            wanted,
            len(trouble),
            took_s,
            trouble[0],
        )
    else:
        logger.info("step numbers skipped number=%d seconds=%.1f", wanted, took_s)
    return wanted


def note_steps(attempt: AttemptFiles, steps: Sequence[Mapping[str, object]]) -> None:
    """Records steps that are about to be started, a line each: each uses up a number."""
    with attempt.steps.open("a", encoding="utf-8") as file:
        file.write("".join(json.dumps(step) + "\n" for step in steps))


def _num_steps(attempt: AttemptFiles) -> int:
    try:
        return len(attempt.steps.read_bytes().splitlines())
    except OSError:
        return 0  # it started none


def _argv() -> list[str]:
    """Returns an srun that takes no resources from running steps, and waits for none of them."""
    wants = ["--nodes=1", "--ntasks=1", "--overlap", "--mem=0", "--gres=none"]
    quiet = ["--mpi=none", "--export=NONE", "--chdir=/", "--input=none", "--output=none"]
    return ["srun", f"--job-name={NAME}", *wants, *quiet, shutil.which("true") or "/bin/true"]


def _run_all(
    argvs: Sequence[Sequence[str]], environ: Mapping[str, str], deadline_s: float
) -> list[str]:
    """Runs the commands, some at a time; returns an error line for each that failed."""
    trouble = []
    for start in range(0, len(argvs), AT_ONCE):
        some: list[subprocess.Popen[bytes]] = []
        try:
            for argv in argvs[start : start + AT_ONCE]:
                some.append(_start(argv, environ))
        except OSError as error:
            trouble.append(str(error))
        trouble += [error_line for process in some if (error_line := _end_of(process, deadline_s))]
        if time.monotonic() > deadline_s:
            left = len(argvs) - start - len(some)
            return trouble + ["no time was left"] * max(0, left)
    return trouble


def _start(argv: Sequence[str], environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        argv,
        env=dict(environ),
        cwd=Path("/"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def _end_of(process: subprocess.Popen[bytes], deadline_s: float) -> str:
    """Waits for a command; returns its error, "" if it succeeded."""
    try:
        _, output = process.communicate(timeout=max(0.1, deadline_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return f"srun did not end in {TIMEOUT_S:g} s"
    if process.returncode == 0:
        return ""
    words = output.decode("utf-8", "replace").split("\n")[0].strip()
    return f"srun ended with {process.returncode}: {words}"
