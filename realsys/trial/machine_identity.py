"""Identifies the machine on which a process was started, by more than its host name.

A name changes: with DHCP, a new container on the same folder, a renamed laptop. The boot and the PID
namespace say for certain that a pid is one of ours; another boot of the machine that has both our id and
our name, that it is not any more.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_MACHINE = Path("/etc/machine-id")


@dataclass(frozen=True, kw_only=True)
class MachineIdentity:
    """A machine, as one of its processes sees it. Empty: could not be read.

    Attributes:
        boot: id of the kernel's boot.
        pid_namespace: in which pids are counted; a container has its own.
        machine: id that outlives a boot; hosts of one image may share it.
    """

    boot: str = ""
    pid_namespace: str = ""
    machine: str = ""


class Whereabouts(StrEnum):
    """Where a recorded process was started, seen from this one."""

    HERE = "here"  # its pid means something here
    BEFORE_A_REBOOT = "before a reboot"  # here, but it has ended with that boot
    ELSEWHERE = "elsewhere"


@cache
def this_machine() -> MachineIdentity:
    """Returns the identity of the machine of this process."""
    return MachineIdentity(
        boot=_first_line(_BOOT), pid_namespace=_namespace(), machine=_first_line(_MACHINE)
    )


def whereabouts(host: str, machine: MachineIdentity | None) -> Whereabouts:
    """Decides where a process was started.

    Args:
        host: its host's name.
        machine: None or empty: recorded by an older revision, or there is no /proc: the name decides.
    """
    here, has_name = this_machine(), host == socket.gethostname()
    if machine is None or not machine.boot or not here.boot:
        return Whereabouts.HERE if has_name else Whereabouts.ELSEWHERE
    if machine.boot == here.boot:
        is_counted_here = machine.pid_namespace == here.pid_namespace
        return Whereabouts.HERE if is_counted_here else Whereabouts.ELSEWHERE
    # The id alone does not say it: images of containers and cloned nodes carry one id to many hosts.
    is_same = has_name and bool(here.machine) and machine.machine == here.machine
    return Whereabouts.BEFORE_A_REBOOT if is_same else Whereabouts.ELSEWHERE


def _first_line(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").partition("\n")[0].strip()
    except (OSError, ValueError):
        return ""


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
