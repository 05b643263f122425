"""What a group asks of its nodes and its job, held against the site (pure): problems and warnings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from launcher.job.component_nodes import NodeLimit
from launcher.job.groups import Group
from launcher.job.sbatch_options import extra_problems
from launcher.problems import collected
from realsys.api.cluster import ClusterSpec, PartitionSpec
from realsys.api.errors import ConfigError
from realsys.api.job import JobComponent
from realsys.slurm.containers import image_problems, image_warnings
from realsys.slurm.hostlist import check_nodelist, expand

_NO_FEATURE = re.compile(r"[&|,()\[\]!\s]+|\*\d+")  # operators and counts of a constraint


def group_problems(
    group: Group, cluster: ClusterSpec, *, dependency: bool
) -> Iterator[ConfigError]:
    """Node lists, further sbatch options, and the group's own image."""
    known = _names(group.partition.nodelist) if group.partition else None
    for name in ("nodelist", "exclude"):
        if (text := getattr(group.task, name)) is not None:
            yield from check_nodelist(text, known=known, where=group.where(name))
    yield from extra_problems(group.task.extra, where=group.where("extra"), dependency=dependency)
    image = group.task.container_image
    if image not in (cluster.cpu_image, cluster.gpu_image, cluster.gpu_infer_image):
        where = group.where("container_image")
        yield from image_problems(cluster.container, image, where=where)


def group_warnings(group: Group, cluster: ClusterSpec) -> Iterator[str]:
    """Features that no node has, as far as they are described; images that may change."""
    features = {f for p in cluster.partitions.values() for f in p.features}
    words = [w for w in _NO_FEATURE.split(group.task.constraint or "") if w]
    unknown = [w for w in words if w not in features]
    if features and unknown:
        yield (
            f"constraint {group.task.constraint}: no partition of the cluster spec has the feature "
            f"{', '.join(unknown)}; known are {', '.join(sorted(features))}"
        )
    yield from image_warnings(
        cluster.container, group.task.container_image, where=group.where("container_image")
    )


def node_limit(groups: Sequence[Group], partition: PartitionSpec) -> NodeLimit:
    """The fewest nodes that anybody grants the component; wrong node lists grant any number."""
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


def crowded_partitions(
    components: Sequence[JobComponent], cluster: ClusterSpec
) -> Iterator[ConfigError]:
    """Components that fit one by one, but not all at the same time."""
    for name, partition in cluster.partitions.items():
        here = [c for c in components if c.partition == name]
        nodes = sum(c.nodes for c in here)
        if len(here) > 1 and partition.nodes is not None and nodes > partition.nodes:
            each = " and ".join(f"{c.nodes} for {c.name}" for c in here)
            yield ConfigError(
                f"{each} make {nodes} nodes of partition {name!r}, it has {partition.nodes}",
                where=f"partitions.{name} in the cluster spec",
                fix="layout single lets groups share nodes, or ask for less",
            )


def _names(text: str | None) -> tuple[str, ...] | None:
    """None where there is no list, or a wrong one (reported elsewhere)."""
    if text is None:
        return None
    with collected([]):
        return expand(text)
    return None
