"""Details behind Slurm's reason for a pending job: limits with numbers, nodes, reservation times.

For a single trial that a user examines, not for lists: each answer costs Slurm one to three queries, made
once per job and reason. Four things are looked up: a limit of a QOS or an account that the job exceeds on
its own (then it never starts), why nodes are drained or down, when a reservation begins, and which
reservation holds the nodes. Parsing and deciding are pure; a failed query only means that no more is
known than before.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from launcher.job.time_spec import parse_time_limit
from launcher.sites.places import user_name
from launcher.slurm.query import reasons
from launcher.slurm.query.job_rows import JobInfo
from launcher.slurm.query.states import NODE_IS_OUT
from launcher.slurm.slurm_commands import run_slurm
from realsys.api.errors import ClusterError, ConfigError
from realsys.slurm.hostlist import expand
from realsys.trial.trial_state import JobState

MAX_DETAILS = 3  # nodes or reservations
TIMEOUT_S = 20.0

RunQuery = Callable[[Sequence[str]], str]
_LIMITS = ("GrpTRES", "GrpTRESMins", "GrpTRESRunMins", "MaxTRESPerJob", "MaxTRESMinsPerJob")
_OF_QOS = (*_LIMITS, "MaxTRESPerUser", "MaxTRESPerAccount")
_LIMITED = {
    "GrpTRES": "all its jobs together",
    "GrpTRESMins": "all its jobs together",
    "GrpTRESRunMins": "all its jobs together",
    "MaxTRESPerUser": "all jobs of a user together",
    "MaxTRESPerAccount": "all jobs of an account together",
    "MaxTRESPerJob": "a job",
    "MaxTRESMinsPerJob": "a job",
}
_UNITS = {"": 1, "K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2, "P": 1024**3}  # of memory, in MiB
_MEMORY = re.compile(r"([\d.]+)([KMGTP]?)[nc]?", re.I)
_MOST_PARENTS = 10


@dataclass(frozen=True)
class Detail:
    """``words`` are appended to the reason's; with a ``fix``, both replace the reason's own."""

    words: str
    fix: str = ""


def with_detail(job: JobInfo, *, ask: RunQuery | None = None) -> JobInfo:
    """Returns the job with a more detailed reason if more can be found out; never raises."""
    if job.state not in (JobState.WAITING, JobState.HELD):
        return job
    found = None
    with suppress(ClusterError, ConfigError, ValueError, KeyError):
        found = _detail(job, ask or _output)
    if found is None:
        return job
    if found.fix:
        return replace(job, reason_words=f"{found.words} ({job.reason})", fix=found.fix)
    return replace(job, reason_words=f"{job.reason_words or job.reason}: {found.words}")


def _detail(job: JobInfo, ask: RunQuery) -> Detail | None:
    if reasons.is_shared_limit(job.reason):
        return _never(job, ask)
    if job.reason == "Reservation":
        return _own_reservation(job, ask)
    if reasons.is_about_nodes(job.reason):
        return _nodes(job, ask)
    return None


# ---- limits that the job exceeds alone ------------------------------------------------------


def _never(job: JobInfo, ask: RunQuery) -> Detail | None:
    facts = _facts(job, ask)
    wanted = tres(facts.get("ReqTRES") or facts.get("TRES", ""))  # the former since 23.02
    minutes = parse_time_limit(facts.get("TimeLimit", "UNLIMITED")).minutes
    if job.reason.startswith("Assoc"):
        rows, options = _associations(facts.get("Account", ""), ask), "account, or request less"
    else:
        rows, options = _qos(facts, ask), "qos, or request less"
    for name, row in rows:
        for limit, text in row.items():
            for words in exceeded(wanted, minutes, limit, tres(text)):
                sentence = f"it can never start: {words} ({limit} of {name})"
                return Detail(sentence, f"cancel it and launch again with another {options}")
    return None


def exceeded(
    wanted: Mapping[str, float], minutes: int | None, limit: str, allowed: Mapping[str, float]
) -> Iterator[str]:
    """Yields what a job requests beyond a limit that it exceeds on its own (pure).

    Args:
        wanted, allowed: TRES by name, memory in MiB.
        minutes: the job's time limit, for limits on TRES minutes.
        limit: sacctmgr's name of the limit.
    """
    for name, most in allowed.items():
        requested = wanted.get(name, 0.0)
        thing = reasons.resource_name(name)
        if "Mins" in limit:
            requested *= minutes or 0
            thing = f"minutes of {thing}"
        if requested > most:
            yield f"it requests {requested:g} {thing}, {_LIMITED[limit]} may have {most:g}"


def tres(text: str) -> dict[str, float]:
    """Parses ``cpu=4,mem=1.5G,gres/gpu=2`` into numbers, memory in MiB; unset ones (-1) are left out
    (pure).
    """
    found = {}
    for pair in text.split(","):
        name, _, value = pair.partition("=")
        number = _MEMORY.fullmatch(value.strip())
        if number:
            factor = _UNITS[number[2].upper()] if name == "mem" else 1
            found[name.strip()] = float(number[1]) * factor
    return found


def _qos(facts: Mapping[str, str], ask: RunQuery) -> Iterator[tuple[str, dict[str, str]]]:
    """Yields (name, limits) of the job's QOS, then of its partition's."""
    argv = ["sacctmgr", "--noheader", "--parsable2", "show", "qos"]
    partition = one_line(ask(["scontrol", "show", "partition", "--oneliner", facts["Partition"]]))
    names = dict.fromkeys((facts.get("QOS", ""), partition.get("QoS", "")))
    for name in names:
        if name and name not in ("N/A", "(null)"):
            output = ask([*argv, "where", f"name={name}", f"format={','.join(_OF_QOS)}"])
            yield f"QOS {name}", _row(output, _OF_QOS)


def _associations(account: str, ask: RunQuery) -> Iterator[tuple[str, dict[str, str]]]:
    """Yields (name, limits) of the user's association and of the accounts above it."""
    argv = ["sacctmgr", "--noheader", "--parsable2", "show", "assoc", "where"]
    columns = ("Account", "User", "ParentName", *_LIMITS)
    for _ in range(_MOST_PARENTS):
        output = ask([*argv, f"account={account}", f"format={','.join(columns)}"])
        parent = ""
        for line in output.splitlines():
            row = _row(line, columns)
            if row:
                parent = row.pop("ParentName", "") or parent
                user = row.pop("User", "")
                row.pop("Account", "")
                if not user or user == user_name():
                    yield f"account {account}" + (f", user {user}" if user else ""), row
        if not parent or parent == account:
            return
        account = parent


def _row(output: str, columns: Sequence[str]) -> dict[str, str]:
    """Parses the set values of sacctmgr's first line."""
    values = output.partition("\n")[0].split("|")
    if len(values) != len(columns):
        return {}
    return {name: value for name, value in zip(columns, values, strict=True) if value}


# ---- nodes and reservations -----------------------------------------------------------------


def _nodes(job: JobInfo, ask: RunQuery) -> Detail | None:
    """Explains why the nodes that the job waits for are unavailable."""
    facts = _facts(job, ask)
    named = re.search(r"UnavailableNodes:\s*(\S+)", job.reason)
    wanted = named[1] if named else facts.get("ReqNodeList", "")
    where = [f"--nodes={wanted}"] if wanted not in ("", "(null)") else []
    where += [f"--partition={facts['Partition']}"]
    output = ask(["sinfo", "--noheader", "--Node", "--format=%N|%T|%E|%H", *where])
    found = list(dict.fromkeys(unavailable_nodes(output)))
    if wanted not in ("", "(null)") or not found:
        found += _conflicting_reservations(wanted, ask)
    return Detail(_few(found)) if found else None


def unavailable_nodes(output: str) -> Iterator[str]:
    """Yields ``n3 is drained since 2026-11-23 03:05:20: bad fan`` from sinfo's lines (pure)."""
    for line in output.splitlines():
        name, state, reason, since = (line.split("|") + [""] * 3)[:4]
        if NODE_IS_OUT.search(state):
            when = f" since {since.replace('T', ' ')}" if since[:1].isdigit() else ""
            why = f": {reason.strip()}" if reason.strip() not in ("", "none") else ""
            answers = "does not answer, " if state.endswith("*") else ""
            yield f"{name} {answers}is {state}{when}{why}"


def _conflicting_reservations(wanted: str, ask: RunQuery) -> Iterator[str]:
    """Yields reservations that hold the requested nodes, or all of them if no node was requested."""
    nodes = set(expand(wanted)) if wanted not in ("", "(null)") else set()
    for line in ask(["scontrol", "show", "reservation", "--oneliner"]).splitlines():
        facts = one_line(line)
        if "ReservationName" in facts and "Nodes" in facts:
            held = facts["Nodes"]
            if held != "(null)" and (not nodes or nodes & set(expand(held))):
                yield f"reservation {facts['ReservationName']} holds {held}{_from_to(facts)}"


def _own_reservation(job: JobInfo, ask: RunQuery) -> Detail | None:
    name = _facts(job, ask).get("Reservation", "(null)")
    if name == "(null)":
        return None
    facts = one_line(ask(["scontrol", "show", "reservation", "--oneliner", name]))
    return Detail(f"{name} lasts{_from_to(facts)}") if "StartTime" in facts else None


def _from_to(facts: Mapping[str, str]) -> str:
    begin, end = (facts.get(name, "?").replace("T", " ") for name in ("StartTime", "EndTime"))
    return f" from {begin} to {end}"


# ---- queries --------------------------------------------------------------------------------


def one_line(text: str) -> dict[str, str]:
    """Parses ``Name=value`` pairs of the first of `scontrol --oneliner`'s lines; values may hold blanks
    (pure).
    """
    pairs = re.split(r"\s+(?=[A-Za-z][\w/:]*=)", text.partition("\n")[0].strip())
    return {name: value for name, sign, value in (pair.partition("=") for pair in pairs) if sign}


def _facts(job: JobInfo, ask: RunQuery) -> dict[str, str]:
    return one_line(ask(["scontrol", "show", "job", "--oneliner", job.job_id]))


def _output(argv: Sequence[str]) -> str:
    done = run_slurm(argv, timeout_s=TIMEOUT_S)
    return done.stdout if done.returncode == 0 else ""


def _few(sentences: Sequence[str]) -> str:
    more = len(sentences) - MAX_DETAILS
    return "; ".join(sentences[:MAX_DETAILS]) + (f"; and {more} more" if more > 0 else "")
