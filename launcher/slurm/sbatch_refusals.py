"""Explains why sbatch refused a job, with what to do (pure).

Slurm's own message is always shown; the fix names the option concerned and where it is set.
"""

from __future__ import annotations

import re

from realsys.api.errors import ClusterError

# Pattern of a part of Slurm's message (man sbatch, slurm_strerror) → what to do.
_FIXES = (
    (
        "invalid account",
        "set slurm.account in the cluster spec or --account; yours: "
        "sacctmgr show assoc user=$USER format=account,partition,qos",
    ),
    ("invalid partition", "set slurm.partition or --partition to one of `sinfo -s`"),
    (
        "invalid qos|invalid qualit",
        "set slurm.qos or --qos; yours: sacctmgr show assoc user=$USER format=qos",
    ),
    ("invalid feature", "check --constraint against `sinfo -o '%f'`"),
    ("invalid node name", "check --nodelist against `sinfo -N`"),
    (
        "invalid dependency",
        "Slurm no longer knows the job of the trial named by --after: launch without --after if "
        "`realsys status` shows that it has ended",
    ),
    (
        "time limit specification required",
        "this site requires a time limit for every job: give --time, or set slurm.time_limit in the "
        "cluster spec",
    ),
    ("requested reservation is invalid", "check --reservation against `scontrol show reservation`"),
    ("access denied to requested reservation", "ask who owns it, or leave --reservation out"),
    (
        "node configuration is not available",
        "no node has what the job requests: compare "
        "`realsys plan` with `sinfo -o '%P %c %m %G %f'`, and correct partitions: in the cluster spec "
        "(realsys clusters init)",
    ),
    (
        "time limit is invalid",
        "shorten the time limit, or move the deadline: Slurm prints this also for a "
        "deadline that can't be met",
    ),
    ("exceeds partition time limit", "shorten --time, see `sinfo -o '%P %l'`"),
    ("more processors requested than permitted", "request fewer cores, see `sinfo -o '%P %c'`"),
    (
        "job violates accounting/qos policy",
        "a limit of your account or QOS is reached: "
        "sacctmgr show assoc user=$USER; wait for other jobs, or request less",
    ),
    ("submission limit", "you have as many jobs as the site allows: wait, or stop some"),
    (
        "maxjobcount|temporarily unable to accept job|resource temporarily unavailable",
        "the cluster's queue is full (MaxJobCount): try again later",
    ),
    ("job array", "the site's MaxArraySize is smaller: sweep over fewer values at a time"),
    (
        "unrecognized option",
        "this Slurm lacks the option: is the container plug-in (pyxis) installed? realsys doctor",
    ),
    (
        "unable to contact slurm controller",
        "slurmctld does not answer: try again, then ask the site",
    ),
    ("socket timed out", "slurmctld is overloaded or down: try again in a minute"),
    (
        "batch job submission failed",
        "see `realsys doctor` and the script in the trial's submitit folder",
    ),
)


def refusal(stderr: str, *, where: str) -> ClusterError:
    """Makes the error from sbatch's stderr."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    text = "; ".join(line.removeprefix("sbatch: ").removeprefix("error: ") for line in lines)
    unknown = "check the script with `sbatch --test-only`"
    fix = next((fix for part, fix in _FIXES if re.search(part, text, re.I)), unknown)
    return ClusterError(
        f"Slurm refused the job: {text or 'it gave no reason'}", where=where, fix=fix
    )
