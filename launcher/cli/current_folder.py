"""Leaves the current folder out of the path, where an empty entry of PYTHONPATH put it there.

For the first statements of a program. It imports nothing of realsys, which would be looked for in that
folder. For processes that are started: realsys/runtime/child_processes/python_path.py.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping

_NAME = "PYTHONPATH"


def leave_current_folder(environ: MutableMapping[str, str], path: list[str]) -> None:
    """Removes the current folder from PYTHONPATH and from ``path`` where an empty entry put it there.

    Args:
        environ, path: ``os.environ`` and ``sys.path``: the program's children inherit both. A folder that
            PYTHONPATH names stays, the current one too.
    """
    given = environ.get(_NAME, "").split(os.pathsep)
    if _NAME not in environ or all(given):
        return
    kept = [entry for entry in given if entry]
    here = {"", os.getcwd()} - set(map(os.path.abspath, kept))
    first = os.path.dirname(os.path.abspath(sys.argv[0])) if sys.argv and sys.argv[0] else None
    path[:] = [entry for entry in path if entry not in here or entry == first]
    if kept:
        environ[_NAME] = os.pathsep.join(kept)
    else:
        del environ[_NAME]
