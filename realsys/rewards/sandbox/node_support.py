"""What of a sandbox this node can enforce: `python -m realsys.rewards.sandbox.node_support`.

Each feature is tried in a process of its own. Which of them a sandbox needs stands in NEEDED.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec

from realsys.rewards.sandbox import kernel_calls as kernel
from realsys.rewards.sandbox import landlock_rules, seccomp_filter
from realsys.rewards.sandbox.fork_server import NAMESPACES

_PROBE_WITHIN_S = 120.0
# Without these nothing can be contained; without those, a sandbox runs if it is told to.
INDISPENSABLE = ("user", "mount", "pid")
NEEDED = (*INDISPENSABLE, "net", "ipc", "uts", "seccomp")
_SYSCTLS = (
    "user.max_user_namespaces above 0; on Debian kernel.unprivileged_userns_clone=1; on Ubuntu "
)
_SYSCTLS += "kernel.apparmor_restrict_unprivileged_userns=0"
FIXES = {
    "user": f"ask the administrator to allow user namespaces: {_SYSCTLS}",
    "mount": "inside of a container that forbids mounts, run outside of it",
    "pid": "inside of a container that hides parts of /proc, run outside of it, or bind the host's /proc",
    "net": "use a kernel with CONFIG_NET_NS, and user.max_net_namespaces above 0",
    "ipc": "use a kernel with CONFIG_IPC_NS",
    "uts": "use a kernel with CONFIG_UTS_NS",
    "seccomp": "use a kernel with CONFIG_SECCOMP_FILTER, on x86_64 or aarch64",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeSupport:
    """What this node has of the features that a sandbox uses."""

    missing: dict[str, str]  # feature: what failed; of NEEDED
    landlock_abi: int  # 0: none. Then mounts and namespaces are the only wall between files
    kernel: str

    def words(self) -> str:
        """Describes the node in a line for each feature."""
        lines = [f"{name}: {self.missing.get(name, 'yes')}" for name in NEEDED]
        landlock = f"ABI {self.landlock_abi}" if self.landlock_abi else "no (not needed)"
        limits = "rlimits of each process; sums over a box are read 20 to 50 times a second"
        return "\n".join([f"Linux {self.kernel}", *lines, f"landlock: {landlock}", limits])


def node_support() -> NodeSupport:
    """Returns what this node supports. Takes a tenth of a second; starts a process."""
    command = [sys.executable, "-P", "-m", "realsys.rewards.sandbox.node_support"]
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PATH": "/usr/bin:/bin"}
    found = subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=True,
        timeout=_PROBE_WITHIN_S,
    )
    return msgspec.json.decode(found.stdout, type=NodeSupport)


def probe() -> NodeSupport:
    """Tries each feature in a fork. Only in a process without threads."""
    if not kernel.supported_machine():
        reason = f"no table of system calls for {platform.machine()}"
        return NodeSupport(
            missing=dict.fromkeys(NEEDED, reason), landlock_abi=0, kernel=platform.release()
        )
    trials: dict[str, Callable[[], None]] = {"user": _user, "mount": _mount, "pid": _pid}
    trials |= {name: partial(_namespace, flag) for name, flag in NAMESPACES.items()}
    trials["seccomp"] = _seccomp
    failures = {name: _failure(trial) for name, trial in trials.items()}
    return NodeSupport(
        missing={name: text for name, text in failures.items() if text},
        landlock_abi=landlock_rules.abi_version(),
        kernel=platform.release(),
    )


def _failure(trial: Callable[[], None]) -> str:
    """Runs a trial in a fork and returns what it raised; empty if nothing."""
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            trial()
        except BaseException as error:  # the answer
            os.write(write, str(error).encode()[:500] or b"failed")
        os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:
        text = pipe.read().decode(errors="replace")
    status = os.waitpid(pid, 0)[1]
    return text or (f"ended with status {status}" if status else "")


def _user() -> None:
    uid, gid = os.getuid(), os.getgid()
    kernel.unshare(kernel.CLONE_NEWUSER)
    kernel.map_own_ids(uid, gid, uid, gid)


def _mount() -> None:
    _user()
    kernel.unshare(kernel.CLONE_NEWNS)
    kernel.mount("", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", "/tmp", "tmpfs", data="size=1m")


def _pid() -> None:
    _user()
    kernel.unshare(kernel.CLONE_NEWNS | kernel.CLONE_NEWPID)
    kernel.mount("", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    if text := _failure(lambda: kernel.mount("proc", "/proc", "proc")):
        raise OSError(text)


def _namespace(flag: int) -> None:
    _user()
    kernel.unshare(flag)


def _seccomp() -> None:
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    seccomp_filter.install()


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(probe()))
