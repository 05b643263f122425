"""Checks a group's node and job requests against the site (pure): problems and warnings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from launcher.job.component_nodes import NodeLimit, node_shape, threads_are_known
from launcher.job.groups import PlacedGroup
from launcher.job.sbatch_options import extra_problems
from launcher.job.task_placement import Misfit, TaskDemand, place
from realsys.api.cluster import ClusterSpec, PartitionSpec
from realsys.api.errors import ConfigError, collected
from realsys.api.plan import JobComponent, JobLayout
from realsys.slurm.containers import image_problems, image_warnings
from realsys.slurm.hostlist import check_nodelist, expand

_NO_FEATURE = re.compile(r"[&|,()\[\]!\s]+|\*\d+")  # operators and counts of a constraint


def group_problems(
    group: PlacedGroup, cluster: ClusterSpec, *, dependency: bool
) -> Iterator[ConfigError]:
    """Checks node lists, further sbatch options, and the group's own image."""
    known = _names(group.partition.nodelist) if group.partition else None
    for name in ("nodelist", "exclude"):
        if (text := getattr(group.task, name)) is not None:
            yield from check_nodelist(text, known=known, where=group.where(name))
    yield from extra_problems(group.task.extra, where=group.where("extra"), dependency=dependency)
    image = group.task.container_image
    if image not in (cluster.cpu_image, cluster.gpu_image, cluster.gpu_infer_image):
        where = group.where("container_image")
        yield from image_problems(cluster.container, image, where=where)


def group_warnings(group: PlacedGroup, cluster: ClusterSpec) -> Iterator[str]:
    """Warns of features that no described node has, and of images that may change."""
    features = {f for p in cluster.partitions.values() for f in p.features}
    words = [w for w in _NO_FEATURE.split(group.task.constraint or "") if w]
    unknown = [w for w in words if w not in features]
    if features and unknown:
        yield (
            f"constraint {group.task.constraint}: no partition of the cluster spec has the feature "
            f"{', '.join(unknown)}; known are {', '.join(sorted(features))}"
        )
    if not threads_are_known(group):
        yield (
            f"the number of threads per core in partition {group.task.partition} is unknown: Slurm does "
            "not report it, and the cluster spec has no threads_per_core there. Workers without GPUs will "
            "share the job's CPUs, so that none of them waits for cores held by another"
        )
    yield from image_warnings(
        cluster.container, group.task.container_image, where=group.where("container_image")
    )


def node_limit(groups: Sequence[PlacedGroup], partition: PartitionSpec) -> NodeLimit:
    """Finds the lowest limit on the component's nodes; malformed node lists do not limit it."""
    task, name = groups[0].task, groups[0].task.partition
    excluded, known = set(_names(task.exclude) or ()), _names(partition.nodelist)
    limits = []
    if names := _names(task.nodelist):
        count = len([n for n in names if n not in excluded])
        without = f" without {task.exclude}" if count < len(names) else ""
        words = f"nodelist {task.nodelist}{without}"
        limits.append(NodeLimit(nodes=count, where=groups[0].where("nodelist"), words=words))
    where = f"partitions.{name} in the cluster spec"
    if partition.nodes is not None:
        gone = len(excluded & set(known or ()))
        words = f"partition {name}" + (f" without {task.exclude}" if gone else "")
        nodes = max(0, partition.nodes - gone)
        limits.append(NodeLimit(nodes=nodes, where=where, words=words))
    if partition.max_nodes is not None:
        words = f"most nodes of one job in partition {name}"
        limits.append(NodeLimit(nodes=partition.max_nodes, where=where, words=words))
    return min(limits, key=lambda limit: limit.nodes or 0, default=NodeLimit())


def overcommitted_partitions(
    components: Sequence[JobComponent], layout: JobLayout, cluster: ClusterSpec
) -> Iterator[ConfigError]:
    """Yields partitions whose components fit one by one, but not at the same time.

    Components of a heterogeneous job never share a node (Slurm 22.05 leaves such a job in the queue);
    separate jobs do if both fit.
    """
    for name, partition in cluster.partitions.items():
        here = [c for c in components if c.partition == name]
        nodes = sum(c.nodes for c in here)
        if len(here) < 2 or partition.nodes is None or nodes <= partition.nodes:
            continue
        each = " and ".join(f"{c.nodes} for {c.name}" for c in here)
        what = f"{each} make {nodes} nodes of partition {name!r}, which has {partition.nodes}"
        if layout is JobLayout.SPLIT:
            misfit = _concurrent_jobs_misfit(here, partition)
            if misfit is None:
                continue
            what = f"the jobs don't fit into partition {name!r} at the same time: {misfit.why}"
        yield ConfigError(
            what,
            where=f"partitions.{name} in the cluster spec",
            fix="use layout single, which lets groups share nodes, or request less",
        )


def _concurrent_jobs_misfit(
    jobs: Sequence[JobComponent], partition: PartitionSpec
) -> Misfit | None:
    """Explains why the partition can't hold all jobs at once; None if it can.

    Ignores that two nodes of one job must differ: a job that needs more nodes than there are is refused
    on its own.
    """
    shares = [
        TaskDemand(
            name=job.name,
            count=job.nodes,
            cpus=job.cpus_per_node,
            memory_mib=job.memory_mib_per_node,
            gpus=float(job.gpus_per_node),
        )
        for job in jobs
    ]
    found = place(shares, node_shape(partition, jobs[0].extra), max_nodes=partition.nodes)
    return found if isinstance(found, Misfit) else None


def _names(text: str | None) -> tuple[str, ...] | None:
    """Expands a node list; None if there is none, or a malformed one (reported elsewhere)."""
    if text is None:
        return None
    with collected([]):
        return expand(text)
    return None
