"""Asks Slurm, from inside a job, whether the ids that the supervisor acts on are still its trial's jobs.

A supervisor that was cut off, or whose controller lost its state, may outlive its job; the id can be
another job's by then. realsys/slurm/job_identity.py decides.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
from collections.abc import Sequence

from realsys.slurm.job_identity import JobIdentity, JobTraits, Ownership, ownership
from realsys.slurm.no_answer import NO_CONTROLLER

logger = logging.getLogger(__name__)

_END, _ROW = "\x1f", "\x1e"
_CLUSTER = re.compile(r"^CLUSTER: [^\n]*\n+", re.MULTILINE)  # before each one's rows
_NO_JOB = re.compile("invalid job id", re.I)
_FIELDS = ("JobArrayID", "JobID", "SubmitTime", "RestartCnt", "Comment")


def ownerships(
    identities: Sequence[JobIdentity], *, timeout_s: float
) -> dict[str, Ownership] | None:
    """Returns job id → whose the job is; None if Slurm does not answer."""
    if not identities:
        return {}
    ids = [one.job_id for one in identities]
    fields = f":{_END},".join(_FIELDS) + f":{_ROW}"
    argv = ["squeue", f"--jobs={','.join(ids)}", "--all", "--noheader", "--array", "--states=all"]
    try:
        done = subprocess.run(
            [*argv, f"--Format={fields}"],
            env={**_environment(), "SLURM_TIME_FORMAT": "%s", "LC_ALL": "C"},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        logger.warning("jobs not identified jobs=%s error=%s", ",".join(ids), error)
        return None
    is_answer = not done.returncode or _NO_JOB.search(done.stderr)
    if not is_answer or (done.returncode and NO_CONTROLLER.search(done.stderr)):
        logger.warning("jobs not identified jobs=%s error=%s", ",".join(ids), done.stderr.strip())
        return None
    found = _jobs(done.stdout)
    answers = {one.job_id: ownership(one, found.get(one.job_id)) for one in identities}
    for job_id, whose in answers.items():
        if whose in (Ownership.NOT_OURS, Ownership.UNKNOWN):
            logger.warning("job is not taken for the trial's job=%s ownership=%s", job_id, whose)
    return answers


def _environment() -> dict[str, str]:
    """Returns this process's environment without a user's filters and formats of squeue."""
    return {k: v for k, v in os.environ.items() if not k.startswith("SQUEUE_")}


def _jobs(text: str) -> dict[str, JobTraits]:
    """Parses squeue's rows; a heterogeneous job counts by its leader, whose raw id is its id."""
    jobs: dict[str, JobTraits] = {}
    for row in text.split(_ROW):
        name, sign, rest = row.strip("\n").partition(_END)
        name = _CLUSTER.sub("", name)
        values = rest.split(_END, len(_FIELDS) - 2)
        if not sign or len(values) < len(_FIELDS) - 1:
            continue
        raw_id, submitted, restarts, comment = values
        traits = JobTraits(
            comment="" if comment == "(null)" else comment,
            submitted_at=float(submitted) if submitted.isdecimal() else None,
            restarts=int(restarts) if restarts.isdecimal() else None,
        )
        jobs[name] = traits
        if "_" not in name:
            jobs.setdefault(raw_id, traits)
    return jobs
