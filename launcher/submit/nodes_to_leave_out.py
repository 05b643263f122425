"""`realsys resume` after a node failed: which nodes to leave out, with the evidence, and doing so.

The evidence is the attempt's own (workers that fell silent there) and Slurm's (the node is down or drained
now). Nothing is left out unless somebody says so: a node that is mended may be the only one.
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


def offers(files: TrialFiles, trial: str) -> Iterator[str]:
    """For a resume that leaves out nothing: the nodes that failed the last attempt, and the command."""
    attempts = files.all_attempts()
    if not attempts:
        return
    with suppress(RealsysError):  # the resume itself says what is wrong with its records
        attempt = read_record(AttemptRecord, attempts[-1].record)
        marker = read_record(ExitMarker, attempts[-1].exit)
        if attempt is not None and attempt.nodes:
            told = {**_by_slurm(attempt.nodes), **lost_nodes(marker, attempt.nodes)}
            if told:
                yield offer(told, trial)


def offer(told: dict[str, str], trial: str) -> str:
    """A sentence with the evidence and the command (pure)."""
    return (
        f"the last attempt ran on nodes that failed: {evidence(told)}; to take others: "
        f"realsys resume {trial} --exclude {compress(sorted(told))}"
    )


def excluding(plan: LaunchPlan, hosts: str) -> LaunchPlan:
    """The plan, for nodes other than ``hosts`` (pure).

    Raises:
        ConfigError: no hostlist, no Slurm job, or too few nodes would be left.
    """
    if plan.job is None:
        raise ConfigError(
            f"{plan.trial} runs on this machine, which has no other nodes",
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
            f"without {hosts} {left} nodes are left for {component.name}, it needs {component.nodes}",
            where=_WHERE,
            fix="leave out fewer, or launch a new trial on another partition or nodelist",
        )
    nodelist = compress(pinned) if component.nodelist else None
    return replace(component, exclude=compress(gone), nodelist=nodelist)


def _by_slurm(nodes: str) -> dict[str, str]:
    """Nodes of the attempt that Slurm calls down or drained now."""
    try:
        argv = ["sinfo", "--noheader", "--Node", f"--nodes={nodes}", "--format=%N|%T|%E|%H"]
        lines = run_slurm(argv, timeout_s=20).stdout
    except ClusterError:
        return {}
    told = dict.fromkeys(unavailable_nodes(lines))
    return {line.partition(" ")[0]: line.partition(" ")[2].removeprefix("is ") for line in told}
