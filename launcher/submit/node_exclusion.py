"""`realsys resume` after a node failure: proposes nodes to exclude, with evidence, and excludes them.

The evidence is the attempt's own (workers on the node became silent) and Slurm's (the node is down or
drained now). Nothing is excluded unless the user requests it: a repaired node may be the only one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from launcher.slurm.query.waiting import unavailable_nodes
from launcher.slurm.slurm_commands import run_slurm
from realsys.api.errors import ClusterError, ConfigError, RealsysError
from realsys.api.plan import JobComponent, LaunchPlan
from realsys.slurm.hostlist import check_nodelist, compress, expand
from realsys.slurm.lost_nodes import evidence, lost_nodes
from realsys.trial.records import AttemptRecord, ExitMarker, TrialFiles, read_record

_WHERE = "command line --exclude"


def exclusion_hints(files: TrialFiles, trial: str) -> Iterator[str]:
    """Proposes to exclude the nodes that failed the last attempt, for a resume without --exclude."""
    attempts = files.all_attempts()
    if not attempts:
        return
    with suppress(RealsysError):  # the resume itself reports damaged records
        attempt = read_record(AttemptRecord, attempts[-1].record)
        marker = read_record(ExitMarker, attempts[-1].exit)
        if attempt is not None and attempt.nodes:
            failed = {**_by_slurm(attempt.nodes), **lost_nodes(marker, attempt.nodes)}
            if failed:
                yield exclusion_hint(failed, trial)


def exclusion_hint(failed: dict[str, str], trial: str) -> str:
    """Renders the evidence (node → reason) and the command (pure)."""
    return (
        f"the last attempt ran on nodes that failed: {evidence(failed)}; to use others: "
        f"realsys resume {trial} --exclude {compress(sorted(failed))}"
    )


def with_excluded_nodes(plan: LaunchPlan, hosts: str) -> LaunchPlan:
    """Returns the plan with ``hosts`` excluded (pure).

    Raises:
        ConfigError: malformed hostlist, no Slurm job, or too few nodes left.
    """
    if plan.job is None:
        raise ConfigError(
            f"{plan.trial} runs on this machine alone",
            where=_WHERE,
            fix="leave --exclude out",
        )
    parts = tuple(_excluding(c, hosts, plan) for c in plan.job.components)
    return replace(plan, job=replace(plan.job, components=parts))


def _excluding(component: JobComponent, hosts: str, plan: LaunchPlan) -> JobComponent:
    partition = plan.cluster.partitions.get(component.partition or "")
    known = expand(partition.nodelist) if partition and partition.nodelist else None
    everywhere = {
        node
        for p in plan.cluster.partitions.values()
        for node in (expand(p.nodelist) if p.nodelist else ())
    }
    for problem in check_nodelist(hosts, known=tuple(everywhere) or None, where=_WHERE):
        raise problem
    gone = sorted({*(expand(component.exclude) if component.exclude else ()), *expand(hosts)})
    pinned = [n for n in expand(component.nodelist or "") if n not in gone]
    left = len([n for n in known if n not in gone]) if known else None
    if component.nodelist and len(pinned) < component.nodes:
        left = len(pinned)
    if left is not None and left < component.nodes:
        raise ConfigError(
            f"without {hosts}, {left} nodes are left for {component.name}, which needs {component.nodes}",
            where=_WHERE,
            fix="exclude fewer, or launch a new trial on another partition or nodelist",
        )
    nodelist = compress(pinned) if component.nodelist else None
    return replace(component, exclude=compress(gone), nodelist=nodelist)


def _by_slurm(nodes: str) -> dict[str, str]:
    """Lists the attempt's nodes that Slurm reports as down or drained: node → reason."""
    try:
        argv = ["sinfo", "--noheader", "--Node", f"--nodes={nodes}", "--format=%N|%T|%E|%H"]
        lines = run_slurm(argv, timeout_s=20).stdout
    except ClusterError:
        return {}
    found = dict.fromkeys(unavailable_nodes(lines))
    return {line.partition(" ")[0]: line.partition(" ")[2].removeprefix("is ") for line in found}
