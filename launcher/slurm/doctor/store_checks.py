"""Checks that the site's name-resolution store can be used, from this host and from a compute node.

For doctor.py, node_job.py and node_checks.py. Nothing is written, not even to an etcd: a transaction
whose condition can't hold is still refused if the permission is missing.
"""

from __future__ import annotations

import datetime
import shutil
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from launcher.sites import places
from launcher.slurm.doctor.findings import Finding, of_error
from realsys.api.cluster import ClusterSpec, EtcdSpec
from realsys.api.errors import RealsysError

if TYPE_CHECKING:
    from realsys.name_resolve.etcd.access import EtcdAccess

HERE, THERE = "name resolution", "name resolution there"
ETCD, JOB_ETCD = "etcd://", "etcd+job://"
PROGRAM = "etcd"


def local_store_finding(spec: ClusterSpec) -> Finding:
    """Checks that the store answers on this host and admits this user."""
    url = spec.name_resolve or ""
    if url == JOB_ETCD:
        return _job_etcd(spec)
    if url.startswith(ETCD):
        return _etcd(spec, url)
    return _file_or_memory(url)


def node_store_probe(spec: ClusterSpec) -> dict[str, Any]:
    """Lists what node_probe.py must test on a compute node: folder, endpoints, files, programs."""
    url = spec.name_resolve or ""
    probe: dict[str, Any] = {"folder": None, "endpoints": [], "files": [], "programs": []}
    if url.startswith("file://"):
        probe["folder"] = unquote(url.removeprefix("file://"))
    elif url == JOB_ETCD:
        probe["programs"] = [PROGRAM]
    elif url.startswith(ETCD):
        from realsys.name_resolve.etcd.access import endpoints_of

        probe["endpoints"] = list(endpoints_of(url))
        probe["files"] = _files(spec.etcd)
    return probe


def node_store_finding(spec: ClusterSpec, problems: list[str]) -> Finding:
    """Makes the finding from the problems that the node reported (pure)."""
    url = spec.name_resolve or ""
    if not problems and url.startswith("file://"):
        return Finding(THERE, True, f"{url} can be written there")
    if not problems:
        what = "etcd is on PATH there" if url == JOB_ETCD else f"{url} is reached from there"
        return Finding(THERE, True, what)
    return Finding(THERE, False, f"{url}: {'; '.join(problems)}", _fix(url))


def _fix(url: str) -> str:
    otherwise = "leave name_resolve out of the site file: then a folder in the file root is used"
    if url == JOB_ETCD:
        return f"install etcd 3.4 or later on the nodes, put it on PATH in `setup`, or {otherwise}"
    if url.startswith(ETCD):
        return (
            "open etcd's port to the compute nodes in the firewall, put the files of the etcd section "
            f"where nodes can read them, or {otherwise}"
        )
    return otherwise


def _files(spec: EtcdSpec) -> list[str]:
    """Lists the files named in the site's etcd section."""
    named = (getattr(spec, f.name) for f in fields(spec) if f.name.endswith("_file"))
    return [str(Path(path).expanduser()) for path in named if path is not None]


def _file_or_memory(url: str) -> Finding:
    from realsys.name_resolve.open import open_store

    folder = Path(unquote(url.removeprefix("file://")))
    if url.startswith("file://") and not folder.exists():
        return Finding(HERE, True, f"{url}: the first trial creates it")
    try:
        with closing(open_store(url)) as store:
            store.revision()
    except RealsysError as error:
        return of_error(HERE, error)
    return Finding(HERE, True, f"{url} answers")


def _job_etcd(spec: ClusterSpec) -> Finding:
    """Checks the program etcd on this host; on Slurm it runs on a node, whose own check covers it."""
    if spec.scheduler == "slurm" or shutil.which(PROGRAM):
        return Finding(HERE, True, f"{JOB_ETCD}: each run starts an etcd of its own")
    fix = "install etcd 3.4 or later, or leave name_resolve out of the site file"
    return Finding(HERE, False, f"{JOB_ETCD}: no program {PROGRAM} on PATH", fix)


def _etcd(spec: ClusterSpec, url: str) -> Finding:
    """Checks that etcd is reachable, by TLS, accepts the login, and permits writing this user's keys."""
    from realsys.name_resolve.etcd.access import EtcdAccess, endpoints_of
    from realsys.name_resolve.key_table import TrialKeys
    from realsys.name_resolve.open import open_store
    from realsys.name_resolve.store import Compare, Put

    user = places.user_name()
    try:
        keys = TrialKeys(cluster=spec.name, user=user, experiment="doctor", trial="never")
        access = EtcdAccess.from_spec(endpoints_of(url), spec.etcd)
        with closing(open_store(url, access=access)) as store:
            never = Compare.at_revision(keys.stop, 1)  # never true: revision 1 is etcd's own
            store.transaction([never], puts=[Put(keys.stop, b"")])
            store.get_subtree(keys.root)
    except RealsysError as error:
        return of_error(HERE, error)
    how = "by TLS" if access.is_encrypted else "without TLS"
    who = f"as {access.user}" if access.user else "without a user name"
    if soon := _ending_soon(access):
        return Finding(HERE, False, soon, "renew it under the same file name: runs read it again")
    return Finding(HERE, True, f"{url} answers {how}, {who}, and permits writing your keys")


def _ending_soon(access: EtcdAccess) -> str:
    """Returns the most urgent warning of certificates that expire; "" if none does within a week."""
    from realsys.name_resolve.etcd.expiry import endings, warning_of

    now = datetime.datetime.now(datetime.UTC)
    return max((warning_of(ending, now) for ending in endings(access)), default=(0, ""))[1]
