"""Keeps the current folder out of what Python processes that are started from here import from.

`python -m` and `python -c` put it first on the path: our own are started with ``-P``
(tests/unit/house/test_started_pythons.py). What is left is an empty entry of PYTHONPATH, which Python reads
as the current folder: ``export PYTHONPATH=$PYTHONPATH:/x`` makes one where the variable was not set. Our
own command line leaves it first of all: launcher/cli/current_folder.py.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

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
