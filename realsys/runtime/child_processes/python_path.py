"""Keeps the current folder out of what Python processes that are started from here import from.

`python -m` and `python -c` put it first on the path: our own are started with ``-P``
(tests/unit/house/test_started_pythons.py). What is left is an empty entry of PYTHONPATH, which Python reads
as the current folder: ``export PYTHONPATH=$PYTHONPATH:/x`` makes one where the variable was not set.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, MutableMapping

_NAME = "PYTHONPATH"


def named_folders(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables with the empty entries of PYTHONPATH removed (pure).

    >>> named_folders({"PYTHONPATH": ":/x::/y", "LANG": "C"})
    {'PYTHONPATH': '/x:/y', 'LANG': 'C'}
    >>> named_folders({"PYTHONPATH": ":"})
    {}
    """
    kept = os.pathsep.join(filter(None, environ.get(_NAME, "").split(os.pathsep)))
    return {n: kept if n == _NAME else value for n, value in environ.items() if n != _NAME or kept}


def leave_current_folder(environ: MutableMapping[str, str], path: list[str]) -> None:
    """Removes the current folder from PYTHONPATH and from ``path`` where an empty entry put it there.

    For the first statements of a program, with ``os.environ`` and ``sys.path``: its children inherit both.
    A folder that PYTHONPATH names stays, the current one too.
    """
    given = environ.get(_NAME, "").split(os.pathsep)
    if _NAME not in environ or all(given):
        return
    named = [os.path.abspath(entry) for entry in given if entry]
    here = {"", os.getcwd()} - set(named)
    first = os.path.dirname(os.path.abspath(sys.argv[0])) if sys.argv and sys.argv[0] else None
    path[:] = [entry for entry in path if entry not in here or entry == first]
    kept = named_folders(environ)
    if _NAME in kept:
        environ[_NAME] = kept[_NAME]
    else:
        del environ[_NAME]
