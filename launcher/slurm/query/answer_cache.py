"""Caches Slurm's last answer about the user's jobs in a file, so that concurrent watchers query it once.

A fault of the file or its folder is never an error: the caller then queries Slurm itself. A failed answer
is cached as well, because further queries would only add load to a controller in trouble.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from launcher.sites import places
from launcher.slurm.query.job_rows import JobInfo
from realsys.trial.temporary_names import replace_text
from realsys.trial.trial_state import JobState

FORMAT = 2  # of the file; a file of another format is ignored


@dataclass(frozen=True, kw_only=True)
class CachedAnswer:
    """Slurm's answer about a set of jobs.

    Attributes:
        jobs: by the ids asked for, and by the names of their parts.
        asked_at: seconds since 1970, this host's clock.
        problems: sentences for the user: which program did not answer, what could not be read.
        reached: the controller answered, and its whole answer could be read.
        accounting_off: sacct reported that the cluster keeps no accounting.
    """

    jobs: Mapping[str, JobInfo] = field(default_factory=dict)
    asked_at: float
    problems: tuple[str, ...] = ()
    reached: bool = True
    accounting_off: bool = False


def cache_file(cluster: str | None = None) -> Path:
    """Returns the cache file of this host; each slurm.conf and each cluster (run_slurm's) has its own."""
    asked = os.environ.get("SLURM_CLUSTERS", "") if cluster is None else f"={cluster}"
    which = f"{os.environ.get('SLURM_CONF', '')}\0{asked}"
    name = re.sub(r"[^A-Za-z0-9.-]", "_", socket.gethostname()).lstrip(".") or "_"
    digest = hashlib.sha256(f"{os.geteuid()}\0{which}".encode(errors="replace")).hexdigest()[:8]
    return Path(places.state_home(), "slurm", f"{name}-{digest}.json")


def load(path: Path, *, max_age_s: float) -> CachedAnswer | None:
    """Reads the cached answer; None if it is too old, from the future, or malformed."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if raw.pop("format") != FORMAT or not 0 <= time.time() - raw["asked_at"] <= max_age_s:
            return None
        jobs = {name: _job(info) for name, info in raw.pop("jobs").items()}
        return CachedAnswer(jobs=jobs, problems=tuple(raw.pop("problems")), **raw)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def save(path: Path, answer: CachedAnswer) -> None:
    """Writes the answer atomically. A failure to write is ignored."""
    text = json.dumps({"format": FORMAT, **asdict(answer)})
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, text)


@contextmanager
def query_lock(path: Path, *, timeout_s: float) -> Iterator[None]:
    """Waits until no other process of this user queries Slurm; proceeds if files can't be locked."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        yield
        return
    try:
        _wait_for(lock, time.monotonic() + timeout_s)
        yield
    finally:
        os.close(lock)  # also releases the lock


def _wait_for(lock: int, deadline: float) -> None:
    while time.monotonic() < deadline:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.1)
        except OSError:  # a file system without locks
            return
        else:
            return


def _job(raw: dict[str, Any]) -> JobInfo:
    others = {name: tuple(map(_job, raw[name])) for name in ("earlier", "namesakes")}
    return JobInfo(**{**raw, **others, "state": JobState(str(raw["state"]))})
