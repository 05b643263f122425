"""The configuration of a small Slurm that runs on one machine (pure; slurm_cluster.py starts it).

Several slurmds run side by side (a build with MULTIPLE_SLURMD, as Debian's), each with a port and a
host name of its own. CPUs and memory are declared, not found (``config_overrides``); GPUs are device
nodes that nothing opens. Written for Slurm 22.05 and later, see man slurm.conf.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

ADDRESS = "127.0.0.1"
DOMAIN = "lab.example"
GPU_TYPE = "h200"
QOS = (
    "add qos spot set Priority=1 PreemptMode=requeue",
    "add qos urgent set Priority=100 Preempt=spot",
)
ACCOUNT = "lab"


@dataclass(frozen=True, kw_only=True)
class NodeKind:
    """Equal nodes.

    Attributes:
        names: what Slurm calls them.
        sockets, cores, threads: sockets of a node, cores of a socket, threads of a core.
        gpu_type: of all their GPUs.
        reserved_mib: memory that Slurm gives to no job (MemSpecLimit).
        has_domain: their host names are others than Slurm's, with a domain.
    """

    names: tuple[str, ...]
    sockets: int
    cores: int
    threads: int = 1
    memory_mib: int
    gpus: int = 0
    gpu_type: str = GPU_TYPE
    reserved_mib: int = 0
    features: Mapping[str, str] = field(default_factory=dict)
    has_domain: bool = False

    @property
    def cpus(self) -> int:
        """As Slurm counts them: threads."""
        return self.sockets * self.cores * self.threads

    def host(self, name: str) -> str:
        """What a node calls itself."""
        return f"host-{name}.{DOMAIN}" if self.has_domain else name


def equal_nodes(num: int, *, cpus: int, memory_mib: int, gpus: int) -> NodeKind:
    """n1, n2, … without threads, each with its name and rack1 or rack2 as features."""
    names = tuple(f"n{i + 1}" for i in range(num))
    sockets = 2 if cpus % 2 == 0 else 1
    features = {name: f"{name},rack{i % 2 + 1}" for i, name in enumerate(names)}
    return NodeKind(
        names=names,
        sockets=sockets,
        cores=cpus // sockets,
        memory_mib=memory_mib,
        gpus=gpus,
        features=features,
    )


@dataclass(frozen=True, kw_only=True)
class ClusterShape:
    """All that the configuration depends on.

    Attributes:
        folder: of configuration, sockets, state and logs.
        host: name of the machine that runs slurmctld, without domain.
        first_port: the first of ``num_ports`` free ports in a row.
        kinds: of nodes.
        partitions: lines of slurm.conf without ``PartitionName=``; none: ``main`` and ``small``.
        users: others than root who have the account.
        tracking: ``cgroup`` (ends every process of a job) or ``linuxproc`` (where there is no cgroup v1).
        constrains_memory: a job that takes more memory than it asked for is killed; needs cgroup v1.
        prolog: shell lines that run on a node before a job's first step there; none if empty.
        qos: further lines of sacctmgr.
        spank: a plug-in and its arguments, as in plugstack.conf; none if empty.
        settings: further slurm.conf lines, or others in place of those here.
    """

    folder: Path
    host: str
    first_port: int
    kinds: tuple[NodeKind, ...]
    accounting: bool
    tracking: str
    partitions: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    constrains_memory: bool = False
    prolog: str = ""
    qos: tuple[str, ...] = ()
    spank: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def nodes(self) -> tuple[str, ...]:
        """All of them, as Slurm calls them."""
        return tuple(name for kind in self.kinds for name in kind.names)

    @property
    def hosts(self) -> dict[str, str]:
        """Node: what it calls itself."""
        return {name: kind.host(name) for kind in self.kinds for name in kind.names}

    @property
    def most_gpus(self) -> int:
        """Of a node."""
        return max(kind.gpus for kind in self.kinds)

    @property
    def slurmctld_port(self) -> int:
        """Where slurmctld listens."""
        return self.first_port

    @property
    def slurmdbd_port(self) -> int:
        """Where slurmdbd listens."""
        return self.first_port + 1

    @property
    def first_job_id(self) -> int:
        """Job ids differ between clusters: cgroups of equally named nodes are told apart by them."""
        return self.first_port * 1000

    def runs(self, job_id: int) -> bool:
        """Whether a job id is of this cluster: there are 1000 for each of its ports."""
        return 0 <= job_id - self.first_job_id < num_ports(len(self.nodes)) * 1000

    @property
    def munge_socket(self) -> Path:
        """Where this cluster's own munged listens."""
        return self.folder / "run/munge.sock"

    @property
    def slurm_conf(self) -> Path:
        """What SLURM_CONF names; the other files lie beside it."""
        return self.folder / "etc/slurm.conf"


def num_ports(num_nodes: int) -> int:
    """Of slurmctld, slurmdbd and a slurmd a node."""
    return 2 + num_nodes


def configuration(shape: ClusterShape) -> dict[str, str]:
    """File name: text, for the folder ``etc``."""
    gpus = "".join(
        f"NodeName={','.join(kind.names)} AutoDetect=off Name=gpu Type={kind.gpu_type} "
        f"File={shape.folder}/dev/nvidia[0-{kind.gpus - 1}]\n"
        for kind in shape.kinds
        if kind.gpus
    )
    names = dict.fromkeys(["localhost", shape.host, *shape.nodes, *shape.hosts.values()])
    return {
        "slurm.conf": slurm_conf(shape),
        "slurmdbd.conf": _lines(_slurmdbd(shape)),
        "gres.conf": gpus,
        "cgroup.conf": "CgroupPlugin=cgroup/v1\n"
        + "ConstrainRAMSpace=yes\n" * shape.constrains_memory,
        "plugstack.conf": f"required {shape.spank}\n" if shape.spank else "",
        **({"prolog": f"#!/bin/sh\n{shape.prolog}\n"} if shape.prolog else {}),
        "hosts": "".join(f"{ADDRESS} {name}\n" for name in names),
    }


def slurm_conf(shape: ClusterShape) -> str:
    """The text of slurm.conf: settings, then nodes, then partitions."""
    accounting = _accounting(shape) if shape.accounting else _PREEMPTION_BY_PARTITION
    settings = {**_daemons(shape), **_SCHEDULING, **_PATIENCE, **accounting, **shape.settings}
    return _lines(settings) + "".join(_nodes(shape)) + "".join(_partitions(shape))


def _daemons(shape: ClusterShape) -> dict[str, str]:
    folder = shape.folder
    return {
        "ClusterName": "lab",
        "SlurmctldHost": f"{shape.host}({ADDRESS})",
        "SlurmctldPort": str(shape.slurmctld_port),
        "SlurmUser": "root",
        "SlurmdUser": "root",
        "AuthType": "auth/munge",
        # A requeued job waits until its credential has expired, 120 s by default.
        "AuthInfo": f"socket={shape.munge_socket},cred_expire=5",
        "StateSaveLocation": f"{folder}/state",
        "SlurmdSpoolDir": f"{folder}/spool-%n",
        "SlurmctldPidFile": f"{folder}/run/slurmctld.pid",
        "SlurmdPidFile": f"{folder}/run/slurmd.%n.pid",
        "SlurmctldLogFile": f"{folder}/log/slurmctld.log",
        "SlurmdLogFile": f"{folder}/log/slurmd.%n.log",
        "PlugStackConfig": f"{folder}/etc/plugstack.conf",
        "ProctrackType": f"proctrack/{shape.tracking}",
        "FirstJobId": str(shape.first_job_id),
        "TaskPlugin": "task/cgroup" if shape.constrains_memory else "task/none",
        "MpiDefault": "none",
        "MailProg": "/bin/true",
        **({"Prolog": f"{folder}/etc/prolog"} if shape.prolog else {}),
    }


_SCHEDULING = {
    "SelectType": "select/cons_tres",
    "SelectTypeParameters": "CR_Core_Memory",
    "DefMemPerCPU": "500",  # without it a job takes all memory of its nodes
    "GresTypes": "gpu",
    "SchedulerParameters": "sched_interval=1,bf_interval=1",
    "SlurmdParameters": "config_overrides",
    "SlurmctldParameters": "preempt_send_user_signal",
    "EnforcePartLimits": "NO",
    "JobRequeue": "1",
    "ReturnToService": "2",
}
# Seconds that a test would wait for.
_PATIENCE = {"KillWait": "12", "SlurmdTimeout": "6", "MessageTimeout": "3", "TCPTimeout": "2"}
_PREEMPTION_BY_PARTITION = {"PreemptType": "preempt/partition_prio", "PreemptMode": "REQUEUE"}


def _accounting(shape: ClusterShape) -> dict[str, str]:
    return {
        "AccountingStorageType": "accounting_storage/slurmdbd",
        "AccountingStorageHost": ADDRESS,
        "AccountingStoragePort": str(shape.slurmdbd_port),
        # Not a password: where munge listens, for what asks slurmdbd.
        "AccountingStoragePass": str(shape.munge_socket),
        "AccountingStorageTRES": "gres/gpu",
        "PreemptType": "preempt/qos",
        "PreemptMode": "REQUEUE",
    }


def _slurmdbd(shape: ClusterShape) -> dict[str, str]:
    return {
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={shape.munge_socket}",
        "DbdHost": "localhost",
        "DbdPort": str(shape.slurmdbd_port),
        "SlurmUser": "root",
        "LogFile": f"{shape.folder}/log/slurmdbd.log",
        "PidFile": f"{shape.folder}/run/slurmdbd.pid",
        "StorageType": "accounting_storage/mysql",
        "StorageHost": "localhost",
        "StorageUser": "root",
        "StorageLoc": "slurm_acct_db",
    }


def _nodes(shape: ClusterShape) -> list[str]:
    ports = dict(zip(shape.nodes, range(shape.first_port + 2, 1 << 16), strict=False))
    return [
        f"NodeName={name} NodeHostname={kind.host(name)} NodeAddr={ADDRESS} Port={ports[name]} "
        f"Sockets={kind.sockets} CoresPerSocket={kind.cores} ThreadsPerCore={kind.threads} "
        f"RealMemory={kind.memory_mib}{_node_options(kind, name)}\n"
        for kind in shape.kinds
        for name in kind.names
    ]


def _node_options(kind: NodeKind, name: str) -> str:
    options = {
        "Feature": kind.features.get(name, ""),
        "Gres": f"gpu:{kind.gpu_type}:{kind.gpus}" if kind.gpus else "",
        "MemSpecLimit": str(kind.reserved_mib) if kind.reserved_mib else "",
    }
    return "".join(f" {option}={value}" for option, value in options.items() if value)


def _partitions(shape: ClusterShape) -> list[str]:
    if shape.partitions:
        return [f"PartitionName={line}\n" for line in shape.partitions]
    everywhere = f"Nodes={','.join(shape.nodes)} State=UP"
    made = [
        f"PartitionName=main {everywhere} Default=YES MaxTime=INFINITE\n",
        f"PartitionName=small Nodes={shape.nodes[0]} State=UP MaxTime=5\n",
    ]
    if not shape.accounting:  # with it, the QOS spot and urgent do the same
        made += [
            f"PartitionName=low {everywhere} PriorityTier=1\n",
            f"PartitionName=high {everywhere} PriorityTier=10\n",
        ]
    return made


def _lines(settings: Mapping[str, str]) -> str:
    return "".join(f"{name}={value}\n" for name, value in settings.items())
