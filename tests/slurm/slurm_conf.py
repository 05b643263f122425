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
GPU_TYPE = "h200"
QOS = (
    "add qos spot set Priority=1 PreemptMode=requeue",
    "add qos urgent set Priority=100 Preempt=spot",
)
ACCOUNT = "lab"


@dataclass(frozen=True, kw_only=True)
class ClusterShape:
    """All that the configuration depends on.

    Attributes:
        folder: of configuration, sockets, state and logs.
        host: name of the machine that runs slurmctld, without domain.
        first_port: the first of ``num_ports`` free ports in a row.
        tracking: ``cgroup`` (ends every process of a job) or ``linuxproc`` (where there is no cgroup v1).
        spank: a plug-in and its arguments, as in plugstack.conf; none if empty.
        settings: further slurm.conf lines, or others in place of those here.
    """

    folder: Path
    host: str
    first_port: int
    nodes: tuple[str, ...]
    gpus: int
    cpus: int
    memory_mib: int
    accounting: bool
    tracking: str
    spank: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)

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
    gpus = f"AutoDetect=off\nName=gpu Type={GPU_TYPE} File={shape.folder}/dev/nvidia[0-{shape.gpus - 1}]\n"
    names = [("localhost", ADDRESS), (shape.host, ADDRESS), *((n, ADDRESS) for n in shape.nodes)]
    return {
        "slurm.conf": slurm_conf(shape),
        "slurmdbd.conf": _lines(_slurmdbd(shape)),
        "gres.conf": gpus if shape.gpus else "",
        "cgroup.conf": "CgroupPlugin=cgroup/v1\n",
        "plugstack.conf": f"required {shape.spank}\n" if shape.spank else "",
        "hosts": "".join(f"{address} {name}\n" for name, address in names),
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
        "TaskPlugin": "task/none",
        "MpiDefault": "none",
        "MailProg": "/bin/true",
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
_PATIENCE = {"KillWait": "5", "SlurmdTimeout": "6", "MessageTimeout": "3", "TCPTimeout": "2"}
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
    sockets = 2 if shape.cpus % 2 == 0 else 1
    gres = f" Gres=gpu:{GPU_TYPE}:{shape.gpus}" if shape.gpus else ""
    return [
        f"NodeName={name} NodeHostname={name} NodeAddr={ADDRESS} Port={shape.first_port + 2 + i} "
        f"Sockets={sockets} CoresPerSocket={shape.cpus // sockets} ThreadsPerCore=1 "
        f"RealMemory={shape.memory_mib} Feature={name},rack{i % 2 + 1}{gres}\n"
        for i, name in enumerate(shape.nodes)
    ]


def _partitions(shape: ClusterShape) -> list[str]:
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
