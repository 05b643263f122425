"""The walls around the fork of an answer: Landlock for files, seccomp for calls, limits for resources.

What a node lacks is left out and named (``lacking``): the fork, its limits and its clean environment hold
everywhere.
"""

from __future__ import annotations

import errno
import os
import platform
import resource
import sys
import sysconfig
from collections.abc import Iterable
from math import ceil
from pathlib import Path

from realsys.api.basics.rule_permissions import CERTIFICATES, RulePermissions
from realsys.rewards.guard import rule_filter
from realsys.rewards.sandbox import kernel_calls as kernel
from realsys.rewards.sandbox import landlock_rules

FILE_BYTES = 1 << 30  # of one file that a call writes
_SYSTEM = (
    "/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/etc/alternatives", "/etc/ld.so.cache",
    "/etc/ssl", "/etc/pki", "/etc/ca-certificates", "/etc/hosts", "/etc/host.conf",
    "/etc/resolv.conf", "/etc/nsswitch.conf", "/etc/gai.conf", "/etc/services", "/etc/protocols",
    "/etc/localtime", "/etc/timezone", "/etc/mime.types", "/etc/passwd", "/etc/group",
    "/run/systemd/resolve", "/sys/devices/system/cpu", "/proc/cpuinfo", "/proc/meminfo",
)  # fmt: skip
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


def lacking() -> dict[str, str]:
    """Returns which walls this node can't raise, and what follows."""
    found = {}
    if not landlock_rules.abi_version():
        found["landlock"] = "a rule can read and write what you can"
    if not rule_filter.supported_here() or not _has_filters():
        found["seccomp"] = "a rule can open connections, start programs and signal processes"
    return found


def _has_filters() -> bool:
    """Asks the kernel with a filter that it can't read: EFAULT where it knows filters."""
    try:
        kernel.prctl(kernel.PR_SET_SECCOMP, kernel.SECCOMP_MODE_FILTER, 0)
    except OSError as error:
        return error.errno == errno.EFAULT
    return False


def readable_paths(permissions: RulePermissions, own_file: str | None) -> list[str]:
    """Returns what a rule may read: Python and its packages, the system's libraries, its own folder, and
    what it declares.

    Args:
        own_file: the file that registers it; None: a built-in one.
    """
    found = [sys.prefix, sys.base_prefix, sys.exec_prefix, *sysconfig.get_paths().values()]
    found += [entry for entry in sys.path if entry and not _holds_all(entry)]
    found += [text for text in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if text]
    found += _SYSTEM
    if permissions.network:
        found += [os.environ[name] for name in CERTIFICATES if name in os.environ]
    if own_file:
        folder = str(Path(own_file).resolve().parent)
        found.append(own_file if _holds_all(folder) else folder)
    found += [os.path.expanduser(path) for path in permissions.reads]
    return list(dict.fromkeys(os.path.realpath(path) for path in found))


def _holds_all(folder: str) -> bool:
    """True for folders in which too much lies that is no rule's: only the rule's file is meant."""
    return os.path.realpath(folder) in ("/", os.path.realpath(os.path.expanduser("~")), "/tmp")


class RuleWalls:
    """The walls of one rule's calls, prepared before they are forked.

    Args:
        own_file: the file that registers the rule.
        used_bytes: address space of the process that is forked.
    """

    def __init__(
        self, permissions: RulePermissions, *, own_file: str | None, used_bytes: int
    ) -> None:
        self._permissions = permissions
        self._abi = landlock_rules.abi_version()
        self._filters = rule_filter.supported_here() and _has_filters()
        self._readable = readable_paths(permissions, own_file)
        self._address_bytes = used_bytes + (permissions.memory_mib << 20)

    def ruleset(self, writable: str) -> int:
        """Returns the descriptor of Landlock's rules with one folder to write in; -1: there is none."""
        if not self._abi:
            return -1
        handled = landlock_rules.handled_rights(self._abi, refuse_tcp=not self._permissions.network)
        rules, rights = landlock_rules.create(handled), handled[0]
        try:
            _allow(rules, self._readable, landlock_rules.READ, rights)
            _allow(rules, _DEVICES, landlock_rules.READ | landlock_rules.WRITE_FILE, rights)
            _allow(rules, [writable], rights & ~landlock_rules.MAKE_DEVICES, rights)
        except BaseException:
            os.close(rules)
            raise
        os.set_inheritable(rules, False)
        return rules

    def limit(self, num_answers: int = 1) -> None:
        """Sets the limits of this process, for a call with so many answers."""
        cpu_s = ceil(self._permissions.computing_of(num_answers))
        _set_limit(resource.RLIMIT_CORE, 0)
        _set_limit(resource.RLIMIT_CPU, cpu_s, cpu_s + 1)
        _set_limit(resource.RLIMIT_AS, self._address_bytes)
        _set_limit(resource.RLIMIT_FSIZE, FILE_BYTES)

    def raise_common(self) -> None:
        """Raises what stands around the host and all its forks. It has given up all privileges before."""
        if self._filters:
            may = self._permissions
            rule_filter.install(
                rule_filter.assemble_common(
                    platform.machine(), network=may.network, programs=may.programs
                )
            )

    def raise_around(self, ruleset: int) -> None:
        """Raises the other walls around this process, for one folder's rules."""
        if ruleset >= 0:
            landlock_rules.restrict_self(ruleset)
            os.close(ruleset)
        if self._filters and not self._permissions.programs:
            rule_filter.install(rule_filter.assemble_own(platform.machine(), pid=os.getpid()))


def _set_limit(kind: int, soft: int, hard: int | None = None) -> None:
    """Lowers a limit; one that is lower already stays."""
    most = resource.getrlimit(kind)[1]
    highest = soft if hard is None else hard
    if most != resource.RLIM_INFINITY:
        soft, highest = min(soft, most), min(highest, most)
    resource.setrlimit(kind, (soft, highest))


def _allow(rules: int, paths: Iterable[str], wanted: int, handled: int) -> None:
    for path in paths:
        try:
            at = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:  # not on this node
            continue
        try:
            mask = handled if os.path.isdir(path) else handled & landlock_rules.OF_FILES
            landlock_rules.allow_beneath(rules, at, wanted & mask)
        finally:
            os.close(at)
