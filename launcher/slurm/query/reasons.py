"""Explains why a job waits or ended: Slurm's reasons (squeue %r) as sentences with a fix.

Names are those of https://slurm.schedmd.com/job_reason_codes.html and job_state_reason.c, 22.05 to 26.11;
the controller may print a text of its own in their place (TEXTS). A reason that is in no table is passed
through unchanged.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_NEVER = "it does not start as it is: cancel it and launch again with"
_ADMIN = "ask the administrator"
_WAIT = "wait"


class Reason(NamedTuple):
    """The meaning of a reason, and what the user should do next."""

    words: str
    fix: str


_TABLE = {
    # the queue works
    "Priority": ("jobs of higher priority are ahead of it", _WAIT),
    "Resources": (
        "the nodes it needs are busy",
        f"{_WAIT}, or request fewer resources or less time",
    ),
    "Prolog": ("the site's prolog runs on its nodes", _WAIT),
    "Cleaning": ("its previous run is being cleaned up", _WAIT),
    "SchedDefer": ("it requested an immediate start; this site defers starts", _WAIT),
    "FedJobLock": ("the clusters of the federation agree on who runs it", _WAIT),
    "BurstBufferResources": ("the burst buffer is full", _WAIT),
    "BurstBufferStageIn": ("files are copied into the burst buffer", _WAIT),
    "MaxPoweredUpNodes": ("the site's limit on powered-up nodes is reached", _WAIT),
    "MpiPortsBusy": ("the ports reserved for MPI are in use", _WAIT),
    "NvidiaImexChannels": ("all channels for memory sharing between nodes are in use", _WAIT),
    "Licenses": ("the licences it needs are in use", f"{_WAIT} (scontrol show licenses)"),
    # what the job requested
    "BeginTime": ("its begin time has not come", f"{_WAIT}, or scontrol update StartTime=now"),
    "Dependency": ("it waits for another job", "realsys status of that trial shows its progress"),
    "DependencyNeverSatisfied": (
        "the job it waits for did not end as required",
        f"{_NEVER}out that dependency",
    ),
    "DeadLine": ("it could not end before its deadline", f"{_NEVER} a later deadline"),
    "JobArrayTaskLimit": ("its array's limit on tasks at a time is reached", _WAIT),
    "BadConstraints": (
        "no node has what it requests",
        f"{_NEVER} other constraint, GPUs, CPUs or memory",
    ),
    "Constraints": ("no free node has the features it requests", f"{_WAIT}, or request others"),
    "MaxMemPerLimit": (
        "it requests more memory per node or CPU than is allowed",
        f"{_NEVER} less memory",
    ),
    # nodes, partition, reservation
    "ReqNodeNotAvail": (
        "nodes that it needs are down, drained or reserved",
        f"{_WAIT}, or launch without nodelist",
    ),
    "NodeDown": ("a node that it needs is down", f"{_WAIT}, or launch without that node"),
    "PartitionDown": ("its partition starts no jobs", f"{_WAIT}, or choose another partition"),
    "PartitionInactive": ("its partition is inactive", f"{_ADMIN}, or choose another partition"),
    "PartitionNodeLimit": (
        "it requests more nodes than its partition allows, or some of them are down",
        f"{_NEVER} fewer nodes, or choose another partition (sinfo)",
    ),
    "PartitionTimeLimit": (
        "its time limit is over the partition's",
        f"{_NEVER} a shorter time limit",
    ),
    "PartitionConfig": (
        "its partition does not allow it",
        "scontrol show partition shows the limits",
    ),
    "Reservation": ("its reservation has not begun", f"{_WAIT} (scontrol show reservation)"),
    "ReservationDeleted": ("its reservation was deleted", f"{_NEVER} another reservation"),
    "ReservationInvalid": ("its reservation can't be used", f"{_NEVER} another reservation"),
    # held
    "JobHeldUser": ("it is held by its user", "scontrol release the job"),
    "JobHeldAdmin": ("it is held by an administrator", _ADMIN),
    "JobHoldMaxRequeue": (
        "it was requeued as often as the site allows",
        "read its logs; then scontrol release the job",
    ),
    # account and quality of service
    "InvalidAccount": ("its account does not exist, or is not yours", f"{_NEVER} another account"),
    "AccountNotAllowed": ("its partition refuses its account", f"{_NEVER} another account"),
    "InvalidQOS": ("its QOS does not exist, or is not yours", f"{_NEVER} another qos"),
    "QOSNotAllowed": ("its account or partition refuses its QOS", f"{_NEVER} another qos"),
    "QOSUsageThreshold": ("its QOS needs a better usage factor than yours", "use another qos"),
    "AccountingPolicy": ("a limit of its account or QOS is reached", _ADMIN),
    "AssociationJobLimit": ("your account's limit on jobs is reached", _WAIT),
    "AssociationResourceLimit": ("your account's limit on resources is reached", _WAIT),
    "AssociationTimeLimit": ("your account has used up its time", _ADMIN),
    "QOSJobLimit": ("its QOS's limit on jobs is reached", f"{_WAIT}, or use another qos"),
    "QOSResourceLimit": ("its QOS's limit on resources is reached", f"{_WAIT}, or use another qos"),
    "QOSTimeLimit": ("its QOS has used up its time", f"{_ADMIN}, or use another qos"),
    # why it ended
    "BurstBufferOperation": ("the burst buffer failed", _ADMIN),
    "SystemFailure": ("Slurm itself failed", f"realsys resume; if it fails again, {_ADMIN}"),
    "JobLaunchFailure": (
        "it could not be started, or its batch process was killed",
        "read its logs; realsys resume",
    ),
    "NonZeroExitCode": ("it ended with an exit code other than 0", "read its logs"),
    "RaisedSignal": ("a signal ended it", "read its logs"),
    "TimeLimit": ("it reached its time limit", "realsys resume continues from the last checkpoint"),
    "InactiveLimit": ("the site ended it as inactive", _ADMIN),
    "OutOfMemory": ("it used more memory than it requested", "launch with more memory"),
}
REASONS = {name: Reason(*known) for name, known in _TABLE.items()}

# Texts that the controller prints instead of a name; their detail is kept.
TEXTS: tuple[tuple[re.Pattern[str], Reason], ...] = (
    (re.compile(r"ReqNodeNotAvail,\W*(?P<detail>.+)"), REASONS["ReqNodeNotAvail"]),
    (re.compile(r"Nodes required for job are DOWN.*"), REASONS["ReqNodeNotAvail"]),
    (
        re.compile(r"job requeued in held state.*"),
        Reason("it was requeued, and is held", "scontrol release the job"),
    ),
    (
        re.compile(r"launch failed requeued held.*", re.I),
        Reason("it could not be started and is held", f"{_ADMIN}; then scontrol release the job"),
    ),
    (
        re.compile(r"Job is at or exceeds (?P<detail>.+)"),
        Reason("a limit of its account or QOS is reached", f"{_WAIT}, or request less"),
    ),
    (
        re.compile(r"(?P<detail>Reservation \S+), which .*has ended.*"),
        Reason("its reservation has ended", f"{_NEVER} another reservation"),
    ),
)

_NONE = frozenset({"", "none", "(null)", "n/a"})
_HELD = re.compile(r"JobHeld\w+|JobHoldMaxRequeue|ReservationDeleted|.*requeued (in )?held.*", re.I)
_LIMIT = re.compile(
    r"(?P<owner>QOS|Assoc)?(?P<kind>Grp|Max|Min)(?P<thing>[A-Z][A-Za-z]*?)"
    r"(?P<budget>Run(?:Minutes|Mins)|Minutes)?(?P<per>Per(?:Job|Node|User|Account))?(?:Limit)?"
    r"(?:NotSatisfied)?"
)
_THINGS = {
    "BB": "burst buffer", "Billing": "billing units", "Cpu": "CPUs", "CPU": "CPUs",
    "Energy": "energy", "GRES": "GPUs", "Job": "running jobs", "Jobs": "running jobs",
    "License": "licences", "Mem": "memory", "Memory": "memory", "Node": "nodes",
    "SubmitJob": "queued jobs", "SubmitJobs": "queued jobs", "Unknown": "a resource",
    "Wall": "time", "WallDuration": "time",
}  # fmt: skip


def reason_sentence(reason: str, *, restarts: int = 0) -> str:
    """Returns the sentence for users; empty without a reason, Slurm's own word if no table has it."""
    text = _plain(reason)
    if text.lower() in _NONE:
        return ""
    if text == "BeginTime" and restarts:
        return "it was requeued; Slurm waits (two minutes by default) before it starts again"
    known = _look_up(text)
    return known.words if known else text


def reason_fix(reason: str) -> str:
    """Returns what to do about the reason; empty if nothing is known."""
    known = _look_up(_plain(reason))
    return known.fix if known else ""


def is_hold(reason: str) -> bool:
    """Whether a pending job with this reason waits for a release by a person."""
    return bool(_HELD.fullmatch(_plain(reason)))


def is_shared_limit(reason: str) -> bool:
    """Whether the reason is a limit on several jobs together, which one job may exceed alone."""
    text = _plain(reason)
    found = None if text in REASONS else _LIMIT.fullmatch(text)
    if found is None or found["thing"] not in _THINGS or found["kind"] == "Min":
        return False
    return not _is_own_limit(found)


def is_about_nodes(reason: str) -> bool:
    """Whether the job waits for nodes that are down, drained or reserved."""
    text = _plain(reason)
    return text.startswith(("ReqNodeNotAvail", "NodeDown", "Nodes required for job are DOWN"))


def resource_name(tres: str) -> str:
    """Names a TRES for users: ``gres/gpu:h200`` → GPUs (h200), ``cpu`` → CPUs."""
    name, _, kind = tres.partition(":")
    known = {"cpu": "CPUs", "mem": "MiB of memory", "node": "nodes", "gres/gpu": "GPUs"}
    return known.get(name, name) + (f" ({kind})" if kind else "")


def _is_own_limit(found: re.Match[str]) -> bool:
    """Whether the limit is per job or node, so that waiting for other jobs does not help."""
    per = (found["per"] or "").removeprefix("Per").lower()
    return found["kind"] == "Max" and (per in {"job", "node"} or found["thing"] == "WallDuration")


def _plain(reason: str) -> str:
    """Strips the parentheses of squeue's NODELIST(REASON)."""
    text = reason.strip()
    return text[1:-1] if text.startswith("(") and text.endswith(")") and text != "(null)" else text


def _look_up(text: str) -> Reason | None:
    if known := REASONS.get(text):
        return known
    for pattern, meant in TEXTS:
        if found := pattern.fullmatch(text):
            detail = found.groupdict().get("detail")
            return meant._replace(words=f"{meant.words} ({detail})") if detail else meant
    if (found := _LIMIT.fullmatch(text)) and found["thing"] in _THINGS:
        return _limit(found, text)
    return None


def _limit(found: re.Match[str], text: str) -> Reason:
    """Explains names like QOSMaxGRESPerUser: the limit's owner, resource and scope, and the fix."""
    thing = _THINGS[found["thing"]]
    budget = found["budget"] or ""
    per = (found["per"] or "").removeprefix("Per").lower()
    owner = "your account" if found["owner"] == "Assoc" or per == "account" else "its QOS"
    name = f" ({text})"
    if found["kind"] == "Min":
        return Reason(
            f"it requests less {thing} than {owner} requires{name}",
            f"{_NEVER} more, or another qos",
        )
    if _is_own_limit(found):
        of = f"{thing} of one {per or 'job'}" + (" times its time limit" if budget else "")
        return Reason(
            f"it exceeds the limit of {owner} on {of}{name}", f"{_NEVER} less, or use another qos"
        )
    limited_jobs = (
        "your jobs"
        if per == "user" or (found["kind"] == "Max" and per != "account")
        else f"all jobs of {owner}"
    )
    if budget == "Minutes":
        return Reason(
            f"{limited_jobs} have used up their minutes of {thing}{name}",
            f"{_ADMIN}, or use another account or qos",
        )
    of = f"{thing} times time left" if budget else thing
    return Reason(
        f"{limited_jobs} together are at the limit on {of}{name}", f"{_WAIT} until some of them end"
    )
