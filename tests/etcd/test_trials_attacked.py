"""A trial on an etcd of its own, and strangers who try its ports while it trains: its numbers are the same.

What each wrong way in is told stands in test_private_etcd.py; here somebody on the same machine tries to
read, write, watch, stop and weigh down a run.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from history_check import check_history, read_history
from paced import Pace
from real_trials import (
    Trials,
    explain,
    files_under,
    metrics_of,
    name_of,
    small_ppo,
    trained_ids,
    weights_of,
)

from launcher.trials.status import trial_view
from realsys.name_resolve.etcd.access import EtcdAccess
from realsys.runtime.certificates import Authority
from realsys.trial.records import TrialFiles
from realsys.trial.trial_state import State

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(400)]

ATTACKED = small_ppo("exp_ctrl.total_train_epochs=1", "task.train_size=96")
FIRST_STEP_S, STEP_S = 1.0, 8.0  # until the attacks are over
LISTENING = "0A"  # state of a line in /proc/net/tcp
WORDS = (
    ("get", "/", "--prefix"),
    ("watch", "/", "--prefix"),
    ("put", "TRIAL/stop", '{"grace_seconds":0,"by":"x","at":0,"attempt":1}'),
    ("del", "/", "--prefix"),
    ("member", "list"),
    ("lease", "list"),
    ("auth", "disable"),
    ("snapshot", "save", "FOLDER/snapshot"),
    ("defrag",),
)


def descendants(pid: int) -> set[int]:
    """The process and all that it started."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                parents[int(entry.name)] = int(fields[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def listening_ports(pids: set[int]) -> set[int]:
    """Ports that these processes listen on."""
    ports: dict[str, int] = {}
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING:
                ports[f"socket:[{fields[9]}]"] = int(fields[1].rpartition(":")[2], 16)
    found = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            with suppress(OSError):
                found |= {ports[name] for name in (os.readlink(link),) if name in ports}
    return found


def cards(access: EtcdAccess) -> dict[str, EtcdAccess]:
    """What strangers may show at the door; the endpoint is known to everybody on the machine."""
    other = Authority("realsys run, clients")
    pair = other.client("realsys client, no user")
    theirs = {"ca_pem": access.ca_pem, "cert_pem": pair.cert_pem, "key_pem": pair.key_pem}
    return {
        "nothing": EtcdAccess(endpoints=access.endpoints),
        "no certificate": EtcdAccess(endpoints=access.endpoints, ca_pem=access.ca_pem),
        "another run's": EtcdAccess(endpoints=access.endpoints, **theirs),
    }


def etcdctl(access: EtcdAccess, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A client that is not ours. Some of its commands try again for ever: they are ended."""
    scheme = "https" if access.is_encrypted else "http"
    argv = ["etcdctl", "--command-timeout=1s", "--dial-timeout=1s"]
    argv.append(f"--endpoints={scheme}://{access.endpoints[0]}")
    pems = {"cacert": access.ca_pem, "cert": access.cert_pem, "key": access.key_pem}
    with tempfile.TemporaryDirectory(dir=folder) as own:
        for option, pem in pems.items():
            if pem is not None:
                Path(own, option).write_text(pem)
                argv.append(f"--{option}={own}/{option}")
        environment = {**os.environ, "ETCDCTL_API": "3"}
        child = subprocess.Popen(
            [*argv, *words],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        with child:
            try:
                child.wait(timeout=8)
            except subprocess.TimeoutExpired:
                child.kill()
            stdout = child.communicate()[0]
        return subprocess.CompletedProcess(child.args, child.returncode, stdout)


def weigh_down(port: int, stack: ExitStack) -> None:
    """Half-open connections, noise, and a flood of it."""
    for _ in range(100):
        stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=240))
    for noise in (os.urandom(1 << 20), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + os.urandom(1 << 20)):
        end = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=240))
        with suppress(OSError):
            end.sendall(noise)


def test_strangers_neither_read_nor_write_nor_stop_a_run_on_its_own_etcd(
    trials: Trials, tiny_policy: Path, tmp_path: Path
) -> None:
    pace = Pace(tmp_path, FIRST_STEP_S)
    words = (f"actor.path={tiny_policy}", *ATTACKED, *pace.words)
    peaceful = trials.launch("ppo-math", "peaceful", *words)
    site = tmp_path / "site.yaml"
    site.write_text(
        f"name: lab\nscheduler: local\nfile_root: {trials.file_root}\nname_resolve: etcd+job://\n"
    )
    files = trials.launch("ppo-math", "attacked", "--cluster", str(site), *words)
    view = trials.wait_for_step(files, 1)
    pace.set(STEP_S)
    access = EtcdAccess.from_file(files.attempt(1).etcd_access)
    assert access.password
    assert access.key_pem
    file = files.attempt(1).etcd_access
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    key = f"/realsys/v1/lab/{files.root.parents[1].name}/{name_of(files)}"

    def filled(command: tuple[str, ...]) -> list[str]:
        return [w.replace("TRIAL", key).replace("FOLDER", str(tmp_path)) for w in command]

    # Nobody listens but the worker behind its two doors and etcd behind its own two.
    assert view.supervisor_pid is not None
    workers = {worker.pid for worker in view.workers if worker.pid}  # forked by another (forked.py)
    ports = listening_ports(descendants(view.supervisor_pid) | workers)
    log = files.attempt(1).log("model_worker/0").read_text()
    doors = {int(p) for p in re.findall(r"(?:control|data)=tcp://[^ ]*:(\d+)", log)}
    clients = int(access.endpoints[0].rpartition(":")[2])
    assert len(doors) == 2
    assert doors | {clients} < ports
    assert len(ports) == 4

    with ExitStack() as stack:
        for port in ports - doors:
            weigh_down(port, stack)
        attacks = [(card, command) for card in cards(access).items() for command in WORDS]
        with ThreadPoolExecutor(len(attacks)) as pool:
            heard = pool.map(lambda x: etcdctl(x[0][1], tmp_path, *filled(x[1])), attacks)
            for attack, done in zip(attacks, heard, strict=True):
                assert done.returncode != 0, attack
                assert done.stdout == "", attack
        view = trial_view(files)
        assert view.state in State.live(), explain(files, view)
    assert_no_secret_is_shown(files, access, trials)

    pace.set(0.0)
    for run in (files, peaceful):
        view = trials.wait(run, timeout_s=200)
        assert view.state is State.COMPLETED, explain(run, view)
    assert metrics_of(files) == metrics_of(peaceful)
    assert trained_ids(files) == trained_ids(peaceful)
    for role in ("actor", "critic"):
        assert weights_of(files, role) == weights_of(peaceful, role)
    assert check_history(read_history(files.root)) == []
    told = trials.run("status", name_of(files))
    assert (told.returncode, told.stderr) == (0, "")
    assert "model_worker/0   done" in told.stdout


def assert_no_secret_is_shown(files: TrialFiles, access: EtcdAccess, trials: Trials) -> None:
    """The password and the key are in one file of their owner's, and in no command line."""
    assert access.password
    assert access.key_pem
    secrets = (access.password, access.key_pem.splitlines()[1])
    view = trial_view(files)
    assert view.supervisor_pid is not None
    for pid in descendants(view.supervisor_pid):
        for name in ("cmdline", "environ"):
            with suppress(OSError):
                shown = Path(f"/proc/{pid}/{name}").read_bytes()
                assert not any(s.encode() in shown for s in secrets), (pid, name)
    holders = set()
    for path in files_under(trials.file_root):
        with suppress(FileNotFoundError):
            data = path.read_bytes()
            if any(s.encode() in data for s in secrets):
                holders.add(path)
    assert {p.resolve() for p in holders} == {files.attempt(1).etcd_access.resolve()}
