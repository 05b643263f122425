"""Description of a site: where files live, what starts tasks, its nodes and its container images.

Data, not code: read from ``cluster_specs/*.yaml`` and the user's own folder by launcher/sites/clusters.py.
Words are Slurm's own where Slurm has one (man sbatch, man srun, man slurm.conf).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from realsys.api.options import option


@dataclass(frozen=True, kw_only=True)
class PartitionSpec:
    """Nodes of one partition. Values are equal on all of them, or minimums."""

    nodes: int | None = option(None, "how many nodes; none: not checked", ge=1)
    cpus: int = option(1, "CPUs of a node, as Slurm counts them", ge=1)
    threads_per_core: int | None = option(
        None, "how many of these CPUs are threads of one core; none: Slurm is asked", ge=1
    )
    memory_mib: int = option(1024, "memory of a node that jobs can have", unit="MiB", ge=1)
    gpus: int = option(0, "GPUs of a node", ge=0)
    gpu_type: str | None = option(None, "their type in GRES, e.g. h200; none: not named")
    gpu_memory_gib: float | None = option(
        None, "memory of one GPU; none: by gpu_type where that is known", unit="GiB", gt=0
    )
    nodelist: str | None = option(
        None, "hostlist of its nodes, to check nodelist and exclude; none: not checked"
    )
    features: tuple[str, ...] = option((), "features that a constraint can name")
    default_time: str | None = option(
        None, "time limit of a job that names none (DefaultTime), as --time; none: max_time"
    )
    max_time: str | None = option(None, "longest time limit, as --time")
    max_nodes: int | None = option(None, "most nodes of one job", ge=1)


@dataclass(frozen=True, kw_only=True)
class SlurmSpec:
    """Defaults for jobs submitted at this site."""

    partition: str | None = option(None, "default partition; none: Slurm's own default")
    account: str | None = option(None, "default account")
    qos: str | None = option(None, "default quality of service")
    reservation: str | None = option(None, "default reservation")
    constraint: str | None = option(None, "default constraint on node features")
    time_limit: str | None = option(None, "default time limit; none: the partition's own")
    layout: str = option(
        "auto",
        "one job (single), a heterogeneous job (het), or a job a group (split); auto: single when all "
        "groups can share nodes, else het",
        choices=("auto", "single", "het", "split"),
    )
    exclusive: bool = option(False, "take whole nodes")
    requeue: bool = option(
        False, "go on by itself after preemption, a lost node and the time limit"
    )
    grace_seconds: int = option(
        120,
        "how long before the time limit, or preemption, the run is told to save",
        ge=10,
        unit="s",
    )
    rendezvous_seconds: int = option(
        900, "layout split: how long the first job waits for the others", ge=1, unit="s"
    )
    preflight: str = option(
        "off",
        "check nodes, GPUs and the network between them before a job's workers start; warn: tell what is "
        "wrong; stop: end the run, or with requeue go on without the nodes that are ill",
        choices=("off", "warn", "stop"),
    )
    gpu_binding: str = option(
        "visible",
        "visible: tasks of a node can reach each other's GPUs (CUDA IPC, NVLink), each is told its own; "
        "per_task: Slurm hides the others (--gpus-per-task)",
        choices=("visible", "per_task"),
    )
    cpu_bind: str | None = option("none", "srun's --cpu-bind; none of it if empty")
    accounting: bool | None = option(None, "whether sacct works; none: try")
    extra_sbatch: Mapping[str, str] = field(
        default_factory=dict, metadata={"meaning": "further sbatch options, name: value"}
    )
    extra_srun: Mapping[str, str] = field(
        default_factory=dict, metadata={"meaning": "further srun options, name: value"}
    )


@dataclass(frozen=True, kw_only=True)
class ContainerSpec:
    """Container runtime of the site and the options that every container gets."""

    runtime: str = option("none", "what runs images", choices=("none", "pyxis", "apptainer"))
    mounts: tuple[str, ...] = option((), "src:dst[:ro], besides file_root")
    workdir: str | None = option(None, "working directory inside")
    name: str | None = option(None, "pyxis: keep the container on the node under this name")
    writable: bool | None = option(
        None, "whether the image's own files can be written; none: as the runtime is set up"
    )
    remap_root: bool = option(False, "be root inside")
    mount_home: bool = option(False, "the home folder is there inside")
    python: str = option("python3", "Python inside the image; realsys must be installed there")


@dataclass(frozen=True, kw_only=True)
class EtcdSpec:
    """Credentials for the site's etcd. Holds no secret itself, only paths of files that their owner
    can read.
    """

    user: str | None = option(None, "user name; none: etcd asks for none")
    password_file: str | None = option(None, "file of mode 0600 with the user's password")
    ca_file: str | None = option(
        None, "certificate authority (PEM) of the servers; none: no TLS, for a trusted network only"
    )
    cert_file: str | None = option(None, "our certificate (PEM), where etcd asks for one")
    key_file: str | None = option(None, "its private key (PEM), mode 0600")


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """Everything realsys must know about a site before it can place and start tasks."""

    name: str = option("local", "name of the site; part of every name-resolution key")
    scheduler: str = option("local", "what starts tasks", choices=("local", "slurm"))
    file_root: str = option(
        "~/.local/share/realsys", "folder that every task can read and write; holds all trials"
    )
    name_resolve: str | None = option(
        None,
        "URL of the store: etcd://host:2379,host2:2379 (the site's), etcd+job:// (the job's own, on its "
        "first node), file:///folder; none: file://<file_root>/name_resolve",
    )
    etcd: EtcdSpec = option(EtcdSpec(), "how the site's etcd is entered")
    store_patience_seconds: int = option(
        1800,
        "how long a run goes on while its store (name_resolve) does not answer, before it ends itself",
        ge=30,
        unit="s",
    )
    rendezvous: str = option(
        "file",
        "where model workers meet to form process groups. file: in the trial's folder, whose file system "
        "must keep locks (flock) between nodes; tcp: at a port of the first one, which does not ask who "
        "connects",
        choices=("file", "tcp"),
    )
    cpu_image: str | None = option(None, "container image of workers without a GPU")
    gpu_image: str | None = option(None, "container image of workers with a GPU")
    gpu_infer_image: str | None = option(None, "container image of generation servers")
    container: ContainerSpec = option(ContainerSpec(), "how images are run")
    partitions: Mapping[str, PartitionSpec] = field(
        default_factory=dict, metadata={"meaning": "partition: what its nodes have"}
    )
    slurm: SlurmSpec = option(SlurmSpec(), "how jobs are submitted")
    modules: tuple[str, ...] = option((), "environment modules that every task loads")
    venv: str | None = option(None, "virtual environment of every task outside a container")
    setup: tuple[str, ...] = option((), "shell lines at the beginning of the batch script")
    env_vars: Mapping[str, str] = field(
        default_factory=dict, metadata={"meaning": "environment of every task; no secrets"}
    )
    secrets: tuple[str, ...] = option(
        (), "names of environment variables taken over from the launching shell, by a 0600 file"
    )
    interface: str | None = option(
        None,
        "network interface (ib0) or subnet (10.1.0.0/16) that workers listen on; none: the host's",
    )
    port_range: str | None = option(
        None, "ports that workers may listen on, 20000-29999; none: any"
    )
