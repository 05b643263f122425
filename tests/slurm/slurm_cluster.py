"""A real Slurm of several nodes on this machine, for a test: up in two seconds, gone without a trace.

Everything lies in one folder: munge key, database, state, logs, configuration. Each node is a slurmd with
a host name of its own. Needs root (host names, device nodes) and the packages of `make slurm-packages`; no
systemd, and nothing in /etc. Its configuration is in slurm_conf.py, what it leaves to be ended in
slurm_processes.py.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import slurm_processes as processes
from claimed_ports import free_ports
from slurm_conf import ACCOUNT, QOS, ClusterShape, NodeKind, configuration, equal_nodes, num_ports
from slurm_daemons import Daemons, wait_until

# As `scontrol show job` writes them.
OVER = (
    *("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "DEADLINE", "PREEMPTED"),
    *("OUT_OF_MEMORY", "BOOT_FAIL"),
)
UP = ("idle", "mixed", "allocated", "completing")
_OF_ALL_USERS = ("etc", "run", "etc/slurm.conf", "etc/plugstack.conf", "etc/hosts")


class SlurmCluster:
    """A context manager: the cluster is up inside, and nothing of it is left outside.

    Args:
        folder: is made; a short path on a tmpfs starts fastest.
        nodes: how many: n1, n2, … with their name and rack1 or rack2 as features.
        gpus, cpus, memory_mib: of each node, whatever this machine has.
        kinds: of nodes, in place of all these.
        accounting: with slurmdbd, and the QOS ``spot``, which ``urgent`` preempts. Without it (up in a
            tenth of a second) the partition ``high`` preempts ``low``.
        spank: a plug-in and its arguments.
        settings: further lines of slurm.conf, or others in place of its own. With AccountingStorageEnforce,
            root has the account ``lab`` and no other.
        others: fields of ClusterShape.
    """

    def __init__(
        self,
        folder: Path,
        *,
        nodes: int = 4,
        gpus: int = 8,
        cpus: int = 64,
        memory_mib: int = 1_000_000,
        kinds: tuple[NodeKind, ...] = (),
        accounting: bool = True,
        spank: str = "",
        settings: Mapping[str, str] | None = None,
        **others: Any,
    ) -> None:
        kinds = kinds or (equal_nodes(nodes, cpus=cpus, memory_mib=memory_mib, gpus=gpus),)
        self.nodes = tuple(name for kind in kinds for name in kind.names)
        self.shape = ClusterShape(
            folder=folder,
            host=socket.gethostname().partition(".")[0],
            first_port=free_ports(num_ports(len(self.nodes))),
            kinds=kinds,
            accounting=accounting,
            tracking="cgroup" if processes.FREEZER.is_dir() else "linuxproc",
            spank=spank,
            settings=settings or {},
            **others,
        )
        self.daemons = Daemons(folder, self.environment)

    @property
    def environment(self) -> dict[str, str]:
        """Of every command that is to speak with this cluster."""
        foreign = ("SLURM_", "SBATCH_", "SRUN_", "SQUEUE_", "SACCT_", "SINFO_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        return {**kept, "SLURM_CONF": str(self.shape.slurm_conf)}

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    # What a test does with it

    def run(
        self, *argv: str, check: bool = True, timeout_s: float = 240
    ) -> subprocess.CompletedProcess[str]:
        """A command with this cluster's environment; fails with what it said."""
        done = subprocess.run(
            argv,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert not check or done.returncode == 0, f"{' '.join(argv)}: {done.stdout}{done.stderr}"
        return done

    def submit(self, *options: str, command: str) -> int:
        """The id of a batch job that runs a shell command and keeps no output."""
        said = self.run("sbatch", "--parsable", "--output=/dev/null", *options, f"--wrap={command}")
        return int(said.stdout.partition(";")[0])

    def show_job(self, job_id: int | str) -> dict[str, str]:
        """What ``scontrol show job`` says of it, or of the first of several; empty if unknown."""
        done = self.run("scontrol", "show", "job", "--oneliner", str(job_id), check=False)
        line = done.stdout.partition("\n")[0] if done.returncode == 0 else ""
        pairs = re.split(r" (?=[A-Za-z/:]+=)", line.strip())
        return dict(pair.split("=", 1) for pair in pairs if pair)

    def wait_for_job(self, job_id: int, *states: str, timeout_s: float = 240) -> dict[str, str]:
        """``show_job`` as soon as the job is in one of the states, Slurm's names."""
        job: dict[str, str] = {}

        def there() -> bool:
            nonlocal job
            job = self.show_job(job_id)
            return job.get("JobState") in states

        wait_until(
            there, lambda: f"job {job_id} is not {' or '.join(states)}: {job}", timeout_s=timeout_s
        )
        return job

    def wait_for_nodes(self, *names: str, timeout_s: float = 240) -> None:
        """Until they (or all) can run jobs."""
        wanted = set(names or self.nodes)
        wait_until(
            lambda: all(self.node_states().get(name) in UP for name in wanted),
            lambda: f"nodes are {self.node_states()}\n{self.daemons.log_tails()}",
            timeout_s=timeout_s,
        )

    def node_states(self) -> dict[str, str]:
        """Node: state as sinfo writes it; ``*`` at its end when the node does not answer."""
        said = self.run("sinfo", "--noheader", "--Node", "--format=%N %T", check=False).stdout
        return dict(line.split() for line in said.splitlines())

    def set_node(self, name: str, state: str) -> None:
        """down (its jobs fail; a live slurmd brings it back in seconds), drain, resume."""
        self.run("scontrol", "update", f"nodename={name}", f"state={state}", "reason=test")

    def processes_of(self, job_id: int, *, node: str | None = None) -> set[int]:
        """Pids of what a job runs, on all nodes or on one."""
        pids = processes.pids_of_job(self.shape.slurm_conf, job_id)
        return {pid for pid in pids if node is None or processes.node_of(pid) == node}

    def kill_slurmd(self, name: str) -> None:
        """The node stops answering; what runs there runs on. DOWN after SlurmdTimeout and a little."""
        self.daemons.end(f"slurmd.{name}", signal.SIGKILL)

    def kill_node(self, name: str) -> None:
        """As a power cut: slurmd and all that runs on the node."""
        self.kill_slurmd(name)
        processes.kill_all(lambda: {p for p in self._pids() if processes.node_of(p) == name})

    def start_slurmd(self, name: str, *, wait: bool = True) -> None:
        """Starts a node, or starts it again."""
        script = (
            f"hostname {self.shape.hosts[name]} && mount --bind {self.shape.folder}/etc/hosts /etc/hosts "
            f"&& exec slurmd -D -N {name}"
        )
        self.daemons.start(f"slurmd.{name}", "unshare", "--uts", "--mount", "sh", "-c", script)
        if wait:
            self.wait_for_nodes(name)

    def stop_slurmctld(self) -> None:
        """It writes its state and ends; jobs run on."""
        self.daemons.end("slurmctld", signal.SIGTERM)

    def start_slurmctld(self, *, clean: bool = False) -> None:
        """Starts it with the state that it left, or none. Nodes answer it some seconds later."""
        self.daemons.start("slurmctld", "slurmctld", "-D", *(["-c"] if clean else []))
        self.daemons.wait_for_port("slurmctld", self.shape.slurmctld_port)

    def restart_slurmctld(self) -> None:
        """Stops and starts it, keeping its state."""
        self.stop_slurmctld()
        self.start_slurmctld()

    def clear(self) -> None:
        """Ends all jobs and brings back what a test took away, for the next test."""
        if "slurmctld" not in self.daemons:
            self.start_slurmctld()
        for name in self.nodes:
            if f"slurmd.{name}" not in self.daemons:
                self.start_slurmd(name, wait=False)
        wait_until(
            self._cancel_all, lambda: f"jobs stay:\n{self.run('squeue').stdout}", timeout_s=120
        )
        for name, state in self.node_states().items():
            if "drain" in state:
                self.set_node(name, "resume")
        self.wait_for_nodes()

    # How it starts and stops

    def _start(self) -> None:
        shape, daemons = self.shape, self.daemons
        for name in ("etc", "run", "log", "state", "db", "dev"):
            (shape.folder / name).mkdir(parents=True)
        for i in range(shape.most_gpus):  # a major number that no driver has
            os.mknod(shape.folder / f"dev/nvidia{i}", 0o020666, os.makedev(240, i))
        for name, text in configuration(shape).items():
            _write_private(shape.folder / "etc" / name, text.encode())
        _write_private(shape.folder / "etc/munge.key", os.urandom(128))
        if shape.prolog:
            (shape.folder / "etc/prolog").chmod(0o700)
        if shape.users:  # they come to what Slurm's commands read, and to munged
            for path in (shape.folder, *(shape.folder / name for name in _OF_ALL_USERS)):
                path.chmod(0o755)
        daemons.start_munged(shape.munge_socket)
        if shape.accounting:
            daemons.start_mariadbd()
        daemons.wait_for("munged", shape.munge_socket.exists)
        if shape.accounting:
            self._start_slurmdbd()
        self.start_slurmctld(clean=True)
        for name in self.nodes:  # a slurmd that comes before slurmctld waits a second
            self.start_slurmd(name, wait=False)
        if shape.accounting:  # slurmctld does not hear of what is added while it starts
            self._add_qos_and_account()
        self.wait_for_nodes()

    def _start_slurmdbd(self) -> None:
        """On a busy machine its first question to the database may get an empty answer, and it ends."""
        for is_last in (False, False, True):
            self.daemons.start("slurmdbd", "slurmdbd", "-D")
            try:
                self.daemons.wait_for_port("slurmdbd", self.shape.slurmdbd_port)
                return
            except AssertionError:
                if is_last:
                    raise
                self.daemons.end("slurmdbd", signal.SIGKILL)

    def _add_qos_and_account(self) -> None:
        lines = (*QOS, *self.shape.qos)
        self._administer(*lines)
        if "AccountingStorageEnforce" in self.shape.settings:
            names = ["normal", *(line.split()[2] for line in lines)]
            qos = f"QosLevel={','.join(names)}"
            users = ("root", *self.shape.users)
            self._administer(
                f"add account {ACCOUNT} {qos}",
                *(f"add user {user} Account={ACCOUNT} {qos}" for user in users),
            )

    def _administer(self, *lines: str) -> None:
        """One sacctmgr for all lines; it does not see what it has itself added."""
        script = self.shape.folder / "etc/sacctmgr"
        script.write_text("".join(f"{line}\n" for line in lines))
        self.run("sh", "-c", f"sacctmgr --immediate < {script}")

    def _cancel_all(self) -> bool:
        """Cancels what is left; True when nothing is."""
        said = self.run(
            "squeue", "--noheader", "--states=all", "--format=%A %T", check=False
        ).stdout
        jobs = dict(line.split() for line in said.splitlines())
        left = [job for job, state in jobs.items() if state not in OVER]
        if left:
            self.run("scancel", "--signal=KILL", "--full", *left, check=False)
            self.run("scancel", *left, check=False)
        return not left

    def stop(self) -> None:
        """Ends every process of this cluster, by pid, and removes its folder."""
        processes.kill_all(self._pids)
        self.daemons.kill()
        processes.remove_cgroups(self.shape.runs)
        shutil.rmtree(self.shape.folder, ignore_errors=True)

    def _pids(self) -> set[int]:
        return processes.pids_of_cluster(self.shape.slurm_conf, self.shape.runs)


def _write_private(path: Path, content: bytes) -> None:
    path.touch(mode=0o600)
    path.write_bytes(content)
