"""Writes a discovered site as a commented YAML file for the user to complete (pure)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from launcher.slurm.discovery.discover import Discovered, NodeKind, described_kinds
from launcher.slurm.discovery.site_facts import PartitionFacts, SiteFacts, hosts_of
from launcher.terminal.text import listed
from realsys.api.cluster import PartitionSpec

_PLAIN = re.compile(r"[A-Za-z/][\w./+-]*( [\w./+-]+)*")
_WORDS = (
    "true",
    "false",
    "yes",
    "no",
    "on",
    "off",
    "none",
    "null",
)  # YAML would not read these as text
_MOST_NODES = 5  # down or drained nodes listed by name
_MOST_NAMES = 12  # accounts or QOS listed by name
_MAX_FEATURES = 30  # some sites define a feature per node


def site_yaml(found: Discovered) -> str:
    """Renders the whole file.

    Reading it back gives ``found.spec``, except features beyond _MAX_FEATURES.
    """
    return "\n".join(_lines(found)) + "\n"


def _lines(found: Discovered) -> Iterator[str]:
    spec = found.spec
    yield f"# {spec.name}: written by `realsys clusters init` from Slurm {found.version}'s configuration."
    yield f"# Check the lines marked EDIT, then: realsys doctor --cluster {spec.name}"
    yield f"name: {scalar(spec.name)}"
    yield "scheduler: slurm"
    yield ""
    yield "# EDIT: a folder shared by login and compute nodes; all trials are stored there."
    yield f"file_root: {scalar(spec.file_root)}"
    yield ""
    yield from _software(spec.container.runtime)
    yield ""
    yield "slurm:"
    yield f"  partition: {scalar(spec.slurm.partition)}"
    yield from _mine(found.facts)
    yield "  # time_limit: 1-00:00:00     # some sites refuse jobs without one; realsys doctor checks"
    if spec.slurm.accounting is not None:
        yield f"  accounting: {scalar(spec.slurm.accounting)}"
    yield ""
    yield "# Resources of one node of each partition. Plans are checked against them."
    if not spec.partitions:
        yield "partitions: {}"
    else:
        yield "partitions:"
        for name, partition in spec.partitions.items():
            yield from _partition(name, partition, found.kinds[name], found.facts)
    yield ""
    yield "# interface: ib0             # or a subnet, 10.1.0.0/16; default: the host's address"
    yield "# port_range: 20000-29999    # if a firewall blocks other ports"
    yield "# secrets: [WANDB_API_KEY]   # names; values are taken from the launching shell"


def _software(runtime: str) -> Iterator[str]:
    if runtime == "none":
        yield "# EDIT: where realsys is installed on all nodes; or a container runtime and images."
        yield "# modules: [python/3.11]"
        yield "# venv: /shared/venv"
        return
    ending = ".sqsh" if runtime == "pyxis" else ".sif"
    yield f"# EDIT: images that contain realsys; realsys image pull SOURCE stores one as {ending}."
    yield f"# cpu_image: /shared/images/realsys{ending}"
    yield f"# gpu_image: /shared/images/realsys{ending}"
    yield "container:"
    yield f"  runtime: {runtime}"
    yield "  # mounts: [/shared/models:/shared/models:ro]   # besides file_root"


def _mine(facts: SiteFacts) -> Iterator[str]:
    """Yields the comment lines that list the user's accounts and QOS."""
    if not facts.accounts:
        yield "  # account: EDIT if the site requires one: sacctmgr show assoc user=$USER"
        yield "  # qos:"
        return
    names = [a.name + " (default)" * a.is_default for a in facts.accounts]
    qos = dict.fromkeys(q for a in facts.accounts for q in a.qos)
    yield f"  # account:                  # yours: {listed(dict.fromkeys(names), _MOST_NAMES)}"
    yield f"  # qos:                      # yours: {listed(qos, _MOST_NAMES)}"


def _about(
    facts: PartitionFacts, kinds: tuple[NodeKind, ...], out: dict[str, str]
) -> Iterator[str]:
    """Yields what a job in this partition must know besides node shapes."""
    if facts.state != "UP":
        yield f"its state is {facts.state}: it starts no jobs at present"
    for word, names in (
        ("only accounts", facts.allow_accounts),
        ("not accounts", facts.deny_accounts),
        ("only QOS", facts.allow_qos),
        ("not QOS", facts.deny_qos),
    ):
        if names:
            yield f"{word} {listed(names, _MOST_NAMES)}"
    if facts.max_mib_per_node is not None:
        yield f"MaxMemPerNode: a job can use at most {facts.max_mib_per_node} MiB per node"
    if facts.max_mib_per_cpu is not None:
        yield f"MaxMemPerCPU: a job with more than {facts.max_mib_per_cpu} MiB per CPU gets more CPUs"
    if system := max(kind.system_mib for kind in kinds):
        yield f"MemSpecLimit: {system} MiB per node are reserved for the system and not counted below"
    if (threads := max(kind.threads_per_core for kind in kinds)) > 1:
        yield f"{threads} threads per core; Slurm allocates whole cores"
    for node, why in list(out.items())[:_MOST_NODES]:
        yield f"{node} is {why}"
    if len(out) > _MOST_NODES:
        yield f"and {len(out) - _MOST_NODES} more are down or drained"


def _partition(
    name: str, spec: PartitionSpec, kinds: tuple[NodeKind, ...], facts: SiteFacts
) -> Iterator[str]:
    yield f"  {scalar(name)}:"
    out = facts.unavailable(host for kind in kinds for host in hosts_of(kind.nodelist))
    for line in _about(facts.partitions.get(name, PartitionFacts()), kinds, out):
        yield "    # " + re.sub(r"\s+", " ", line)
    shapes = {kind.shape for kind in kinds}
    if len(shapes) > 1:
        used = described_kinds(kinds)
        yield "    # Its nodes differ. The values below hold for every node marked *:"
        for kind in kinds:
            yield f"    # {'*' if kind in used else ' '} {_words(kind)}"
    for option in ("nodes", "cpus", "threads_per_core", "memory_mib"):
        yield f"    {option}: {scalar(getattr(spec, option))}"
    if spec.gpus:
        yield f"    gpus: {spec.gpus}"
        if spec.gpu_type:
            yield f"    gpu_type: {scalar(spec.gpu_type)}"
    if spec.nodelist:
        yield f"    nodelist: {scalar(spec.nodelist)}"
    if spec.features:
        shown = ", ".join(scalar(f) for f in spec.features[:_MAX_FEATURES])
        yield f"    features: [{shown}]"
    for option in ("default_time", "max_time", "max_nodes"):
        if getattr(spec, option) is not None:
            yield f"    {option}: {scalar(getattr(spec, option))}"


def _words(kind: NodeKind) -> str:
    gpus = f", {kind.gpus} × {kind.gpu_type or 'gpu'}" if kind.gpus else ""
    return f"{kind.nodes} × {kind.cpus} CPUs, {kind.memory_mib} MiB{gpus}: {kind.nodelist}"


def scalar(value: Any) -> str:
    """Renders a value as YAML that realsys/config/settings.py reads back."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) and (not _PLAIN.fullmatch(value) or value.lower() in _WORDS):
        return json.dumps(value, ensure_ascii=False)
    return str(value)
