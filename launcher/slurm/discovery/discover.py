"""Drafts a cluster spec from Slurm's configuration, for `realsys clusters init`.

Pure, except discover_site.

Reads `sinfo` and `scontrol show config` and finds the kinds of nodes of each partition; site_yaml.py
writes the commented YAML. Values that Slurm does not hold (the shared folder, images, secrets) remain
commented lines for the user to fill in.
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from launcher.sites.places import user_name
from launcher.slurm.discovery.core_threads import threads_of
from launcher.slurm.discovery.site_facts import (
    NodeFacts,
    PartitionFacts,
    SiteFacts,
    ask_facts,
    hosts_of,
    slurm_output,
)
from realsys.api.cluster import ClusterSpec, ContainerSpec, PartitionSpec, SlurmSpec
from realsys.slurm.hostlist import compress, expand

# partition (a star marks the default), nodes, CPUs, MiB, GRES, features, time limit, nodes of a job, hosts,
# sockets:cores:threads
SINFO_FORMAT = "%P|%D|%c|%m|%G|%f|%l|%s|%N|%z"


@dataclass(frozen=True, kw_only=True)
class NodeKind:
    """Identical nodes of one partition: one line of `sinfo --exact`."""

    partition: str
    default: bool
    nodes: int
    cpus: int
    memory_mib: int
    gpus: int
    gpu_type: str | None
    features: tuple[str, ...]
    max_time: str | None
    max_nodes: int | None
    nodelist: str
    threads_per_core: int = 1
    system_mib: int = 0  # memory reserved for the system: MemSpecLimit

    @property
    def shape(self) -> tuple[int, int, int, str | None]:
        """The resources a job can request on such a node: (CPUs, MiB, GPUs, GPU type)."""
        return self.cpus, self.memory_mib, self.gpus, self.gpu_type


@dataclass(frozen=True, kw_only=True)
class Discovered:
    """A site as Slurm describes it: the drafted spec, Slurm's version, node kinds and further facts."""

    spec: ClusterSpec
    version: str
    kinds: dict[str, tuple[NodeKind, ...]]
    facts: SiteFacts = field(default_factory=SiteFacts)


def discover_site(name: str | None = None) -> Discovered:
    """Queries the Slurm programs on PATH and drafts the site.

    Raises ClusterError if Slurm does not answer.
    """
    options = slurm_output(["srun", "--help"])
    runtime = "pyxis" if "--container-image" in options else "none"
    if runtime == "none" and shutil.which("apptainer"):
        runtime = "apptainer"
    config = slurm_output(["scontrol", "show", "config"])
    return site_from_output(
        config,
        slurm_output(["sinfo", "--noheader", "--exact", f"--format={SINFO_FORMAT}"]),
        runtime=runtime,
        name=name,
        more=ask_facts(user_name(), accounting=_keeps_accounts(config_facts(config))),
    )


def site_from_output(
    config: str,
    nodes: str,
    *,
    runtime: str,
    name: str | None = None,
    more: SiteFacts | None = None,
) -> Discovered:
    """Builds the site from the programs' output (pure)."""
    facts = config_facts(config)
    enforced = "associations" in facts.get("AccountingStorageEnforce", "")
    more = replace(more or SiteFacts(), enforces_accounts=enforced)
    kinds = by_partition(with_facts(kind, more.nodes) for kind in node_kinds(nodes))
    default = [p for p, of_it in kinds.items() if any(kind.default for kind in of_it)]
    accounting = facts.get("AccountingStorageType", "")
    spec = ClusterSpec(
        name=name or facts.get("ClusterName", "cluster"),
        scheduler="slurm",
        container=ContainerSpec(runtime=runtime),
        partitions={
            p: partition_spec(of_it, more.partitions.get(p, PartitionFacts()))
            for p, of_it in kinds.items()
        },
        slurm=SlurmSpec(
            partition=default[0] if default else None,
            accounting=_keeps_accounts(facts) if accounting else None,
        ),
    )
    version = facts.get("SLURM_VERSION", "?")
    return Discovered(spec=spec, version=version, kinds=kinds, facts=more)


def with_facts(kind: NodeKind, nodes: Mapping[str, NodeFacts]) -> NodeKind:
    """Returns the node kind limited to what jobs can use on every one of its nodes."""
    known = [nodes[host] for host in hosts_of(kind.nodelist) if host in nodes]
    if not known:
        return kind
    return replace(
        kind,
        cpus=min(kind.cpus, *(node.cpus or kind.cpus for node in known)),
        system_mib=max(node.system_mib for node in known),
    )


def _keeps_accounts(facts: Mapping[str, str]) -> bool:
    return facts.get("AccountingStorageType", "").endswith("slurmdbd")


def config_facts(text: str) -> dict[str, str]:
    """Parses ``Name = value`` lines of `scontrol show config`; unset values are left out."""
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line)
    facts = {name.strip(): value.strip() for name, _, value in pairs}
    return {name: value for name, value in facts.items() if value not in ("", "(null)", "N/A")}


def node_kinds(text: str) -> Iterator[NodeKind]:
    """Parses sinfo's lines in SINFO_FORMAT; other lines are skipped."""
    for line in text.splitlines():
        fields = line.strip().split("|")
        if len(fields) != SINFO_FORMAT.count("|") + 1:
            continue
        partition, nodes, cpus, memory, gres, features, limit, size, hosts, cores = fields
        gpu_type, gpus = gpus_of(gres)
        if int(nodes) == 0:
            continue
        yield NodeKind(
            partition=partition.removesuffix("*"),
            default=partition.endswith("*"),
            nodes=int(nodes),
            cpus=_number(cpus),
            memory_mib=_number(memory),
            gpus=gpus,
            gpu_type=gpu_type,
            features=tuple(f for f in features.split(",") if f not in ("", "(null)")),
            max_time=None if limit in ("infinite", "n/a", "") else limit,
            max_nodes=_most_nodes(size),
            nodelist=hosts,
            threads_per_core=threads_of(cpus, cores) or 1,
        )


def gpus_of(gres: str) -> tuple[str | None, int]:
    """Parses (type, count) of GPUs from sinfo's %G; the type is None if a node has several.

    ``gpu:h100:8(S:0-3),nvme:1`` has 8 of h100; ``gpu:a100:2,gpu:v100:2`` has 4 of mixed types.
    """
    types: set[str | None] = set()
    count = 0
    for entry in re.sub(r"\([^)]*\)", "", gres).split(","):
        name, *rest = entry.split(":")
        if name == "gpu" and rest and rest[-1].isdigit() and int(rest[-1]):
            types.add(":".join(rest[:-1]) or None)
            count += int(rest[-1])
    return (types.pop() if len(types) == 1 else None), count


def by_partition(kinds: Iterable[NodeKind]) -> dict[str, tuple[NodeKind, ...]]:
    """Groups node kinds by partition, in sinfo's order."""
    found: dict[str, tuple[NodeKind, ...]] = {}
    for kind in kinds:
        found[kind.partition] = (*found.get(kind.partition, ()), kind)
    return found


def partition_spec(kinds: tuple[NodeKind, ...], facts: PartitionFacts) -> PartitionSpec:
    """Describes a partition by the minimum over its described nodes (described_kinds)."""
    described = described_kinds(kinds)
    features = dict.fromkeys(f for kind in described for f in kind.features)
    memory = max(1, min(kind.memory_mib - kind.system_mib for kind in described))
    most = facts.max_mib_per_node
    return PartitionSpec(
        nodes=sum(kind.nodes for kind in described),
        cpus=min(kind.cpus for kind in described),
        # Over all kinds, not only the described ones: a value too high is harmless, one too low makes
        # steps wait for cores.
        threads_per_core=max(kind.threads_per_core for kind in kinds),
        memory_mib=memory if most is None else min(memory, most),
        gpus=described[0].gpus,
        gpu_type=described[0].gpu_type,
        nodelist=compress(host for kind in described for host in expand(kind.nodelist)),
        features=tuple(features),
        default_time=facts.default_time,
        max_time=described[0].max_time,
        max_nodes=described[0].max_nodes,
    )


def described_kinds(kinds: tuple[NodeKind, ...]) -> tuple[NodeKind, ...]:
    """Selects the node kinds that describe a partition: those with the most common GPUs.

    Slurm finds them by the GPUs a job requests.
    """
    totals: Counter[tuple[int, str | None]] = Counter()
    for kind in kinds:
        totals[kind.gpus, kind.gpu_type] += kind.gpus * kind.nodes
    commonest, _ = totals.most_common(1)[0]
    return tuple(kind for kind in kinds if (kind.gpus, kind.gpu_type) == commonest)


def _number(text: str) -> int:
    """Parses ``64`` or ``64+`` (at least that many); 1 if unreadable."""
    found = re.match(r"\d+", text)
    return max(1, int(found[0])) if found else 1


def _most_nodes(size: str) -> int | None:
    """Parses the upper bound of sinfo's %s, ``1-32``; None for ``1-infinite``."""
    last = size.rpartition("-")[2]
    return int(last) if last.isdigit() and int(last) else None
