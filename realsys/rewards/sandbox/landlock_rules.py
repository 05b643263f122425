"""Landlock on top of the box's mounts: the same folders again, decided by another part of the kernel.

A second wall: if a hole in mounts or namespaces showed the program more files, Landlock would still
refuse them. With ABI 4 also TCP, with ABI 6 abstract Unix sockets and signals beyond the box.
"""

from __future__ import annotations

import ctypes
import os
import struct

from realsys.rewards.sandbox.kernel_calls import syscall

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on every processor
_VERSION_FLAG, _PATH_BENEATH = 1, 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_MAKE_CHAR, _MAKE_BLOCK = 1 << 6, 1 << 11
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # ABI: number of rights, from bit 0
_TCP, _SCOPES = 0b11, 0b11  # bind and connect; abstract Unix sockets and signals
READ = _EXECUTE | _READ_FILE | _READ_DIR


def abi_version() -> int:
    """Returns the Landlock ABI of this kernel; 0 if it has none or it is switched off."""
    try:
        return syscall(_CREATE_RULESET, None, 0, _VERSION_FLAG)
    except OSError:
        return 0


def handled_rights(abi: int) -> bytes:
    """Returns struct landlock_ruleset_attr with all that ``abi`` can refuse."""
    rights = (1 << _FILE_RIGHTS[min(abi, max(_FILE_RIGHTS))]) - 1
    words = [rights, *[_TCP] * (abi >= 4), *[_SCOPES] * (abi >= 6)]
    return struct.pack(f"={len(words)}Q", *words)


def restrict(abi: int, writable: list[str]) -> None:
    """Lets this process, and all it starts, read everything in sight and write only ``writable``."""
    attributes = handled_rights(abi)
    every_right = struct.unpack("=Q", attributes[:8])[0]
    rules = syscall(_CREATE_RULESET, ctypes.c_char_p(attributes), len(attributes), 0)
    try:
        _allow(rules, "/", READ)
        for path in writable:
            _allow(rules, path, every_right & ~(_MAKE_CHAR | _MAKE_BLOCK))
        _allow(rules, "/dev", READ | _WRITE_FILE)
        syscall(_RESTRICT_SELF, rules, 0)
    finally:
        os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = struct.pack("=Qi", rights, folder)
        syscall(_ADD_RULE, rules, _PATH_BENEATH, ctypes.c_char_p(rule), 0)
    finally:
        os.close(folder)
