"""Which of the packages that tasks' Dockerfiles install are missing on this node."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
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
    users: dict[tuple[str, str], list[str]] = {}
    for task in tasks:
        for need in task.build.packages:
            if need.name not in assume:
                users.setdefault((need.manager, need.name), []).append(f"{task.name}:{need.line}")
    missing = _missing_system({name for manager, name in users if manager == "system"})
    lacking = [
        (name, found)
        for (manager, name), found in sorted(users.items())
        if (name in missing if manager == "system" else not _has_distribution(name))
    ]
    return "; ".join(
        f"{name} ({', '.join(found[:_SHOWN])}{', …' * (len(found) > _SHOWN)})"
        for name, found in lacking
    )


def _missing_system(names: Collection[str]) -> set[str]:
    path = os.pathsep.join([os.path.join(sys.prefix, "bin"), os.defpath, "/usr/sbin", "/sbin"])
    missing = {name for name in names if not shutil.which(name, path=path)}
    if not missing or not shutil.which("dpkg-query"):
        return missing
    command = ["dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\n", "--", *missing]
    found = subprocess.run(command, capture_output=True, text=True, timeout=_LIST_S, check=False)
    return missing - {
        line.split()[0] for line in found.stdout.splitlines() if line.endswith(" installed")
    }


def _has_distribution(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True
