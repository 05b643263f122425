"""The second site of the slurm tier: what differs between clusters, as far as one machine can show it.

Nodes with two threads a core, two other kinds of nodes, host names that Slurm does not know, memory
limits that kill, a slow prolog, and partitions, QOS and users with limits of their own. Names say what
they are for. ``SITE`` is its site file's part that a user would write.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from slurm_conf import ACCOUNT, NodeKind

USER = "nobody"  # an ordinary one, who is on every machine
THREADED = NodeKind(
    names=("t1", "t2"),
    sockets=2,
    cores=4,
    threads=2,
    memory_mib=64_000,
    reserved_mib=1_000,
    features={"t1": "threaded,rack1", "t2": "threaded,rack2"},
    has_domain=True,
)
BIG = NodeKind(names=("b1",), sockets=1, cores=24, memory_mib=128_000, has_domain=True)
GPU = NodeKind(
    names=("g1",),
    sockets=2,
    cores=8,
    threads=2,
    memory_mib=96_000,
    gpus=2,
    gpu_type="a100",
    has_domain=True,
)
KINDS = (THREADED, BIG, GPU)
MAX_MIB = 48_000  # of a job on a node of `main`
PARTITIONS = (
    f"main Nodes=t[1-2] Default=YES State=UP DefaultTime=20 MaxTime=60 MaxMemPerNode={MAX_MIB}",
    "big Nodes=b1 State=UP MaxTime=UNLIMITED",
    "gpu Nodes=g1 State=UP DefaultTime=10 MaxTime=60",
    "all Nodes=t[1-2],b1,g1 State=UP DefaultTime=10 MaxTime=60",
    "broken Nodes=b1 State=DOWN MaxTime=60",
    "theirs Nodes=b1 State=UP MaxTime=60 AllowAccounts=theirs",
)
QOS = (
    "add qos tiny MaxTRESPerJob=cpu=2 Flags=DenyOnLimit",
    "add qos short MaxWallDurationPerJob=00:05:00",
)
PROLOG = "sleep 0.5"
SETTINGS = {
    "AccountingStorageEnforce": "associations,limits,qos",
    "PrivateData": "accounts,jobs,usage,users",
    "PrologFlags": "Alloc",
    "EnforcePartLimits": "ALL",
}


def options() -> dict[str, Any]:
    """Of SlurmCluster."""
    memory = Path("/sys/fs/cgroup/memory")  # cgroup v1's controller
    return {
        "kinds": KINDS,
        "partitions": PARTITIONS,
        "users": (USER,),
        "qos": QOS,
        "prolog": PROLOG,
        "constrains_memory": memory.is_dir() and os.access(memory, os.W_OK),
        "settings": SETTINGS,
    }


def spec(name: str, file_root: Path) -> dict[str, Any]:
    """Its site file, as someone would write it who has read `scontrol show node`."""
    return {
        "name": name,
        "scheduler": "slurm",
        "file_root": str(file_root),
        "partitions": {
            "main": {
                "nodes": 2,
                "cpus": THREADED.cpus,
                "memory_mib": MAX_MIB,
                "nodelist": "t[1-2]",
                "features": ["threaded", "rack1", "rack2"],
                "max_time": "60",
            },
            "big": {"nodes": 1, "cpus": BIG.cpus, "memory_mib": BIG.memory_mib, "nodelist": "b1"},
            "gpu": {
                "nodes": 1,
                "cpus": GPU.cpus,
                "memory_mib": GPU.memory_mib,
                "gpus": GPU.gpus,
                "gpu_type": GPU.gpu_type,
                "nodelist": "g1",
                "max_time": "60",
            },
        },
        "slurm": {"partition": "main", "account": ACCOUNT, "time_limit": "10", "accounting": True},
    }
