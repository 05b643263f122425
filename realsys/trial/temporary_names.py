"""Names of what is written beside its target and renamed into place: never those of another process.

A pid does not make a name unique: the trials of a user share folders over many hosts and containers, where
equal pids are common. Where only a file's name is missing, ``tempfile.mkstemp`` and ``mkdtemp`` do too.
tests/unit/house/test_temporary_names.py refuses names made from a pid.
"""

from __future__ import annotations

import os
from pathlib import Path

_RANDOM_BYTES = 8


def temporary_beside(path: Path, *, prefix: str = ".") -> Path:
    """Returns a name in the folder of ``path`` that no other process of any host chooses.

    It creates nothing. Where another user could plant a file, open it with O_EXCL.

    Args:
        prefix: of the name; the target's own name follows.
    """
    return path.with_name(f"{prefix}{path.name}.{os.urandom(_RANDOM_BYTES).hex()}")


def replace_text(path: Path, text: str) -> None:
    """Writes a file so that a reader sees all of it or what was there before; it is not synced to disk.

    Raises:
        OSError: it can't be written; what was there is kept.
    """
    new = temporary_beside(path)
    try:
        new.write_text(text, encoding="utf-8")
        os.replace(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
