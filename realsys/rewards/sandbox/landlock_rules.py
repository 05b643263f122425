"""Landlock on top of the box's mounts: the same folders again, decided by another part of the kernel.

A second wall: if a hole in mounts or namespaces showed the program more files, Landlock would still
refuse them. With ABI 4 also TCP, with ABI 6 abstract Unix sockets and signals beyond the box.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence

from realsys.rewards.sandbox.kernel_calls import syscall

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on every processor
_VERSION_FLAG, _PATH_BENEATH, _NET_PORT, _CONNECT_TCP = 1, 1, 2, 2
_EXECUTE, WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_MAKE_CHAR, _MAKE_BLOCK, _TRUNCATE = 1 << 6, 1 << 11, 1 << 14
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # ABI: number of rights, from bit 0
_TCP, _SCOPES = 0b11, 0b11  # bind and connect; abstract Unix sockets and signals
READ = _EXECUTE | _READ_FILE | _READ_DIR
OF_FILES = _EXECUTE | _READ_FILE | WRITE_FILE | _TRUNCATE  # what is a right on a file, too
MAKE_DEVICES = _MAKE_CHAR | _MAKE_BLOCK


def abi_version() -> int:
    """Returns the Landlock ABI of this kernel; 0 if it has none or it is switched off."""
    try:
        return syscall(_CREATE_RULESET, None, 0, _VERSION_FLAG)
    except OSError:
        return 0


def handled_rights(abi: int, *, refuse_tcp: bool = True) -> list[int]:
    """Returns the fields of struct landlock_ruleset_attr with all that ``abi`` can refuse: the rights on
    files first."""
    rights = (1 << _FILE_RIGHTS[min(abi, max(_FILE_RIGHTS))]) - 1
    return [rights, *[_TCP if refuse_tcp else 0] * (abi >= 4), *[_SCOPES] * (abi >= 6)]


def create(handled: Sequence[int]) -> int:
    """Returns the descriptor of new rules, which allow nothing of what they handle."""
    attributes = struct.pack(f"={len(handled)}Q", *handled)
    return syscall(_CREATE_RULESET, ctypes.c_char_p(attributes), len(attributes), 0)


def allow_beneath(rules: int, place: int, rights: int) -> None:
    """Allows ``rights`` at a file, or in a folder and all that is in it, which is open as ``place``."""
    rule = struct.pack("=Qi", rights, place)
    syscall(_ADD_RULE, rules, _PATH_BENEATH, ctypes.c_char_p(rule), 0)


def allow_connect(rules: int, port: int) -> None:
    """Allows to connect to a TCP port, at any address."""
    rule = struct.pack("=2Q", _CONNECT_TCP, port)
    syscall(_ADD_RULE, rules, _NET_PORT, ctypes.c_char_p(rule), 0)


def restrict_self(rules: int) -> None:
    """Holds this process, and all it starts, to the rules for good."""
    syscall(_RESTRICT_SELF, rules, 0)


def restrict(abi: int, writable: list[str], *, connect_to: int | None = None) -> None:
    """Lets this process, and all it starts, read everything in sight and write only ``writable``.

    By TCP they reach the port ``connect_to`` at most, where ``abi`` knows TCP; they can bind none.
    """
    handled = handled_rights(abi)
    rules = create(handled)
    try:
        _allow(rules, "/", READ)
        for path in writable:
            _allow(rules, path, handled[0] & ~MAKE_DEVICES)
        _allow(rules, "/dev", READ | WRITE_FILE)
        if connect_to is not None and abi >= 4:
            allow_connect(rules, connect_to)
        restrict_self(rules)
    finally:
        os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        allow_beneath(rules, folder, rights)
    finally:
        os.close(folder)
