"""Opens the store named in a trial's plan, with the credentials it needs.

For every process of a trial and for the launcher's verbs. ``etcd+job://`` is an etcd that the
trial's supervisor runs on the job's first node: each attempt has its own, whose access file is in
the attempt's folder.
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

if TYPE_CHECKING:  # a heartbeat process does not need them, and they are slow to import
    from realsys.api.cluster import EtcdSpec
    from realsys.api.plan import LaunchPlan
    from realsys.trial.plan_summary import PlanSummary
    from realsys.trial.records import AttemptFiles

JOB_ETCD = "etcd+job://"


def has_job_etcd(plan: LaunchPlan | PlanSummary) -> bool:
    """Returns whether the trial's supervisor runs its own etcd."""
    return plan.name_resolve_url == JOB_ETCD


def open_trial_store(plan: LaunchPlan | PlanSummary, attempt: AttemptFiles | None) -> NameResolve:
    """Returns an open store; the caller closes it.

    Args:
        attempt: the owner of the etcd; used for ``etcd+job://`` only. None: no attempt has begun.
    Raises:
        StoreUnavailable: the store does not answer, or the attempt's etcd has not started.
        ConfigError: a file with a password or certificate can't be used.
    """
    if attempt is not None:
        _refuse_other_users(attempt.root.parent.parent)
    return open_store_at(
        plan.name_resolve_url,
        etcd=lambda: plan.cluster.etcd,
        access_file=attempt.etcd_access if attempt is not None else None,
    )


def _refuse_other_users(trial: Path) -> None:
    """Refuses another user's plan: it names a server and a password file, so it could make us send
    our password to a server of that user."""
    try:
        owner = os.lstat(trial).st_uid
    except OSError:
        return  # reported where the folder is needed
    if owner not in (os.getuid(), 0):
        from realsys.trial.folders import user_of

        raise StoreUnavailable(
            f"the trial belongs to {user_of(owner)}: its store is not opened with your credentials",
            where=str(trial),
            fix="ask its owner; its logs, metrics and report can still be read",
        )


def open_store_at(
    url: str, *, etcd: Callable[[], EtcdSpec], access_file: Path | None
) -> NameResolve:
    """Opens a store as ``open_trial_store`` does, for a process that has not read the plan (a
    heartbeat process must start quickly).

    Args:
        etcd: the cluster's ``etcd`` section.
        access_file: credentials of an attempt's own etcd.
    """
    if not url.startswith("etcd"):
        return open_store(url)
    from realsys.name_resolve.etcd.access import EtcdAccess, endpoints_of

    if url != JOB_ETCD:
        return open_store(url, access=EtcdAccess.from_spec(endpoints_of(url), etcd()))
    if access_file is not None:
        fresh(access_file.parent)  # a supervisor on another host may just have written it
    if access_file is None or not access_file.exists():
        raise StoreUnavailable(
            "the job's own etcd has not started yet",
            where=str(access_file or url),
            fix="wait until the job runs; `realsys status` shows its progress",
        )
    access = EtcdAccess.from_file(access_file)
    return open_store("etcd://" + ",".join(access.endpoints), access=access)
