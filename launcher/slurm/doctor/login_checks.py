"""Checks of Slurm from the login node: version, accounting, accounts, partitions, runtime, submission."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace

from launcher.job.time_spec import parse_time_limit
from launcher.slurm.discovery.discover import Discovered, discover_site
from launcher.slurm.discovery.site_facts import PartitionFacts, hosts_of
from launcher.slurm.doctor.findings import Finding, of_error, unchecked
from launcher.slurm.images.image_pull import PROGRAMS
from launcher.slurm.sbatch_refusals import refusal
from launcher.slurm.slurm_commands import last_error_line, run_slurm
from launcher.terminal.text import listed
from realsys.api.cluster import ClusterSpec, PartitionSpec
from realsys.api.errors import ClusterError, collected

OLDEST = (22, 5)
_MOST_NODES = 5
_ASK_FOR_ACCOUNT = "you have no account here: ask the site's administrators for one"
NAMES = ("accounting", "partitions", "container runtime", "submission")


def slurm_findings(spec: ClusterSpec, request: list[str]) -> Iterator[Finding]:
    """Yields all checks from the login node; if Slurm does not answer, the rest as not checked.

    Args:
        request: sbatch options of a small job with the site's partition, account and QOS.
    """
    try:
        site = discover_site(spec.name)
    except ClusterError as error:
        yield of_error("slurm", error)
        yield from unchecked(NAMES, "Slurm does not answer", error.fix)
        return
    yield version_finding(site.version)
    yield accounting_finding(spec, site)
    yield from account_findings(spec, site)
    yield from partition_findings(spec, site)
    if spec.container.runtime != "none":
        yield runtime_finding(spec, site)
    yield from submission_findings(spec, request)


def version_finding(version: str) -> Finding:
    """Checks that Slurm is at least version 22.05."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found and (int(found[1]), int(found[2])) < OLDEST:
        return Finding("slurm", False, f"Slurm {version} answers", "realsys needs 22.05 or later")
    return Finding("slurm", True, f"Slurm {version} answers")


def accounting_finding(spec: ClusterSpec, site: Discovered) -> Finding:
    """Checks that sacct works, and that the site file agrees."""
    configured, actual = spec.slurm.accounting, site.spec.slurm.accounting
    name = "accounting"
    if not actual:
        if configured:
            return Finding(name, False, "Slurm keeps no accounting", "set slurm.accounting: false")
        return Finding(name, True, "none; states come from squeue and the trials' own records")
    try:
        done = run_slurm(
            ["sacct", "--noheader", "--allocations", "--starttime=now", "--format=JobID"],
            timeout_s=20,
        )
    except ClusterError as error:
        return of_error(name, error)
    if done.returncode != 0:
        return Finding(
            name,
            False,
            f"sacct failed: {last_error_line(done.stderr)}",
            "set slurm.accounting: false, or ask the site",
        )
    if configured is False:
        return Finding(name, True, "sacct works; the site file says not to use it")
    return Finding(name, True, "sacct works")


def account_findings(spec: ClusterSpec, site: Discovered) -> Iterator[Finding]:
    """Checks that the user has the site file's account and QOS; yields nothing if Slurm keeps no accounts
    (pure).
    """
    mine = site.facts.accounts
    if mine is None or not (mine or site.facts.enforces_accounts):
        return
    names = list(dict.fromkeys(a.name for a in mine))
    default = site.facts.default_account
    wanted = spec.slurm.account or (default.name if default else None)
    available = f"yours: {', '.join(names)}" + (f" (default {default.name})" if default else "")
    if not names or (spec.slurm.account not in (None, *names) and site.facts.enforces_accounts):
        fix = f"set slurm.account to one of {', '.join(names)}" if names else _ASK_FOR_ACCOUNT
        what = (
            f"slurm.account is {spec.slurm.account}, which you do not have"
            if names
            else "you have no account"
        )
        yield Finding("account", False, what, fix)
        return
    yield Finding("account", True, available)
    qos = {q for a in mine if wanted in (None, a.name) for q in a.qos}
    if spec.slurm.qos and qos and spec.slurm.qos not in qos:
        yield Finding(
            "QOS",
            False,
            f"slurm.qos is {spec.slurm.qos}, which account {wanted} may not use",
            f"set slurm.qos to one of {', '.join(sorted(qos))}",
        )


def partition_findings(spec: ClusterSpec, site: Discovered) -> Iterator[Finding]:
    """Checks that the site file's partitions exist and have the resources it states (pure)."""
    there = site.spec.partitions
    wanted, unknown = spec.slurm.partition, "Slurm has no such partition"
    if wanted and wanted not in {*spec.partitions, *there}:
        fix = f"set slurm.partition to one of {', '.join(there)}"
        yield Finding(f"partition {wanted}", False, unknown, fix)
    for name, described in spec.partitions.items():
        title = f"partition {name}"
        if name not in there:
            fix = f"remove it from partitions; there are {', '.join(there)}"
            yield Finding(title, False, unknown, fix)
            continue
        lacks = list(_missing_resources(described, there[name]))
        shut = list(_access_problems(name, spec, site))
        out = site.facts.unavailable(h for k in site.kinds[name] for h in hosts_of(k.nodelist))
        if shut:
            fix = "choose another partition, account or QOS, or wait until the site opens it"
            yield Finding(title, False, "; ".join([*shut, *lacks]), fix)
        elif lacks:
            fix = "compare with `realsys clusters init`, and correct the site file"
            yield Finding(title, False, "; ".join(lacks), fix)
        else:
            yield Finding(title, True, _resources_text(described) + _unavailable_text(out))
    if not spec.partitions:
        what = "the site file describes none, so plans can't be checked before they are queued"
        yield Finding("partitions", False, what, "take them from `realsys clusters init`")


def _access_problems(name: str, spec: ClusterSpec, site: Discovered) -> Iterator[str]:
    """Yields the reasons why none of this user's jobs starts in the partition."""
    facts = site.facts.partitions.get(name, PartitionFacts())
    if facts.state != "UP":
        yield f"its state is {facts.state}: Slurm starts no jobs there"
    default = site.facts.default_account
    account = spec.slurm.account or (default.name if default else None)
    qos = spec.slurm.qos or (default.default_qos if default else None)
    yield from facts.access_problems(account, qos)
    hosts = [host for kind in site.kinds[name] for host in hosts_of(kind.nodelist)]
    out = site.facts.unavailable(hosts)
    if hosts and len(out) == len(set(hosts)):
        yield f"all its nodes are out{_unavailable_text(out)}"


def _unavailable_text(out: Mapping[str, str]) -> str:
    """Renders ``; down or drained: n3 (DRAIN: bad fan)``; empty if all nodes are up."""
    named = listed((f"{node} ({why})" for node, why in out.items()), _MOST_NODES)
    return f"; down or drained: {named}" if named else ""


def _missing_resources(configured: PartitionSpec, actual: PartitionSpec) -> Iterator[str]:
    for option in ("nodes", "cpus", "memory_mib", "gpus"):
        promised, found = getattr(configured, option), getattr(actual, option)
        if promised is not None and found is not None and promised > found:
            yield f"{option} is {promised} in the site file, Slurm reports {found}"
    if actual.default_time and not _same_time(configured.default_time, actual.default_time):
        yield (
            f"a job without a time limit gets {actual.default_time} (DefaultTime); default_time in the "
            f"site file is {configured.default_time or 'not set'}"
        )
    if configured.gpu_type and actual.gpu_type and configured.gpu_type != actual.gpu_type:
        yield f"gpu_type is {configured.gpu_type} in the site file, Slurm reports {actual.gpu_type}"


def _same_time(one: str | None, other: str) -> bool:
    with collected([]):
        return one is not None and parse_time_limit(one).minutes == parse_time_limit(other).minutes
    return False


def _resources_text(spec: PartitionSpec) -> str:
    nodes = f"{spec.nodes} nodes, each " if spec.nodes else "each node "
    gpus = f", {spec.gpus} × {spec.gpu_type or 'gpu'}" if spec.gpus else ""
    return f"{nodes}{spec.cpus} CPUs, {spec.memory_mib} MiB{gpus}"


def runtime_finding(spec: ClusterSpec, site: Discovered) -> Finding:
    """Checks that jobs can be started in container images."""
    runtime, name = spec.container.runtime, "container runtime"
    program = PROGRAMS[runtime]
    here = f"{program} is on PATH here"
    if not shutil.which(program):
        here = f"no {program} on this host: `realsys image pull` must run elsewhere"
    if runtime == "pyxis" and site.spec.container.runtime != "pyxis":
        return Finding(
            name,
            False,
            "this srun has no --container-image",
            "pyxis is not installed, or was built for another Slurm: ask the site; or set "
            "container.runtime: apptainer",
        )
    return Finding(
        name, True, ("srun takes --container-image; " if runtime == "pyxis" else "") + here
    )


def submission_findings(spec: ClusterSpec, request: list[str]) -> Iterator[Finding]:
    """Checks that Slurm accepts a small job, then one with the time limit that a launch would request."""
    first = submission_finding(request)
    yield first
    if first.ok:
        limit = [f"--time={spec.slurm.time_limit}"] if spec.slurm.time_limit else []
        as_launched = [option for option in request if not option.startswith("--time=")]
        second = submission_finding([*as_launched, *limit])
        if not second.ok:
            asks = f"with --time={spec.slurm.time_limit}" if limit else "without --time"
            what = f"a job {asks}, as a launch submits it, is refused: {second.what}"
            yield replace(second, name="time limit", what=what)


def submission_finding(request: list[str]) -> Finding:
    """Checks with `sbatch --test-only` that Slurm accepts a job: account, QOS, partition, limits."""
    try:
        done = run_slurm(["sbatch", "--test-only", *request, "--wrap=true"], timeout_s=30)
    except ClusterError as error:
        return of_error("submission", error)
    if done.returncode != 0:
        return of_error("submission", refusal(done.stderr, where="sbatch --test-only"))
    answer = (done.stderr or done.stdout).strip().splitlines()
    return Finding(
        "submission", True, answer[-1].removeprefix("sbatch: ") if answer else "accepted"
    )
