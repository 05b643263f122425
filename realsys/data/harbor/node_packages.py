"""Which of the packages that tasks' Dockerfiles install are missing on this node."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable
from importlib.metadata import PackageNotFoundError, distribution

from realsys.data.harbor.task_directory import TaskDirectory

_LIST_S = 60.0
_SHOWN = 3  # tasks that a message names


def lacking_packages(tasks: Iterable[TaskDirectory], assume: Collection[str] = ()) -> str:
    """Names the packages that tasks need and this node does not have; empty if there are none.

    A system package is there if the distribution (dpkg) has it, or a program of its name is on PATH; one
    of pip, if this Python has it. Versions are not compared.

    Args:
        assume: names of packages that are taken to be there.
    """
    users = defaultdict[tuple[bool, str], list[str]](list)
    for task in tasks:
        for need in task.build.packages:
            users[need.by_pip, need.name].append(f"{task.name}:{need.line}")
    there = _system({name for by_pip, name in users if not by_pip})
    there_by_pip = {name for by_pip, name in users if by_pip and _has_distribution(name)}
    return "; ".join(
        f"{name} ({', '.join(found[:_SHOWN])}{', …' * (len(found) > _SHOWN)})"
        for (by_pip, name), found in sorted(users.items())
        if name not in (there_by_pip if by_pip else there) and name not in assume
    )


def _system(names: Collection[str]) -> set[str]:
    """Returns those of the packages that are there."""
    path = os.pathsep.join([os.path.join(sys.prefix, "bin"), os.defpath, "/usr/sbin", "/sbin"])
    there = {name for name in names if shutil.which(name, path=path)}
    if len(there) == len(names) or not shutil.which("dpkg-query"):
        return there
    command = ["dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\n", "--", *names]
    found = subprocess.run(command, capture_output=True, text=True, timeout=_LIST_S, check=False)
    lines = found.stdout.splitlines()
    return there | {line.split()[0] for line in lines if line.endswith(" installed")}


def _has_distribution(name: str) -> bool:
    try:
        return distribution(name) is not None
    except PackageNotFoundError:
        return False
