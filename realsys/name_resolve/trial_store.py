"""Opens the store that a trial's plan names, with what it takes to enter it.

For every process of a trial and for the launcher's verbs. ``etcd+job://`` is an etcd that the trial's
supervisor runs on the job's first node: each attempt has its own, and says in its folder how to reach it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from realsys.api.errors import StoreUnavailable
from realsys.name_resolve.open import open_store
from realsys.name_resolve.store import NameResolve
from realsys.trial.records import fresh

if TYPE_CHECKING:  # a heartbeat process has no use for them, and they take a while to load
    from realsys.api.cluster import EtcdSpec
    from realsys.api.plan import LaunchPlan
    from realsys.trial.records import AttemptFiles

JOB_ETCD = "etcd+job://"


def has_job_etcd(plan: LaunchPlan) -> bool:
    """True when the trial's supervisor runs its own etcd."""
    return plan.name_resolve_url == JOB_ETCD


def open_trial_store(plan: LaunchPlan, attempt: AttemptFiles | None) -> NameResolve:
    """Returns an open store; the caller closes it.

    Args:
        attempt: whose own etcd it is; asked for ``etcd+job://`` only. None: no attempt has begun.
    Raises:
        StoreUnavailable: the place does not answer, or the attempt's etcd has not started.
        ConfigError: a file with a password or certificate can't be used.
    """
    if attempt is not None:
        _refuse_strangers(attempt.root.parent.parent)
    return open_store_at(
        plan.name_resolve_url,
        etcd=lambda: plan.cluster.etcd,
        access_file=attempt.etcd_access if attempt is not None else None,
    )


def _refuse_strangers(trial: Path) -> None:
    """A plan names a server and the file with the password for it: another user's plan would have ours
    sent to a server of his."""
    try:
        owner = os.lstat(trial).st_uid
    except OSError:
        return  # whoever needs the folder says so
    if owner not in (os.getuid(), 0):
        from realsys.trial.folders import user_of

        raise StoreUnavailable(
            f"the trial belongs to {user_of(owner)}: its store is not entered in your name",
            where=str(trial),
            fix="ask its owner; its logs, metrics and report can be read all the same",
        )


def open_store_at(
    url: str, *, etcd: Callable[[], EtcdSpec], access_file: Path | None
) -> NameResolve:
    """The same for a process that has not read the plan: a heartbeat process must be there soon.

    Args:
        etcd: the cluster's ``etcd`` section.
        access_file: how an attempt's own etcd is reached.
    """
    if not url.startswith("etcd"):
        return open_store(url)
    from realsys.name_resolve.etcd.access import EtcdAccess, endpoints_of

    if url != JOB_ETCD:
        return open_store(url, access=EtcdAccess.from_spec(endpoints_of(url), etcd()))
    if access_file is not None:
        fresh(access_file.parent)  # its supervisor, on another host, may just have written it
    if access_file is None or not access_file.exists():
        raise StoreUnavailable(
            "the job's own etcd has not started yet",
            where=str(access_file or url),
            fix="wait until the job runs; `realsys status` says how far it is",
        )
    access = EtcdAccess.from_file(access_file)
    return open_store("etcd://" + ",".join(access.endpoints), access=access)
