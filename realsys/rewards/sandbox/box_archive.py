"""Files from one box to the next: folders as a tar archive, packed and unpacked by programs in the boxes.

This process only carries the bytes. What a program left may be packed wrongly, or not at all, as links or
depths have it; it is a matter of that program, never a failure of the box.
"""

from __future__ import annotations

from realsys.rewards.sandbox.box_limits import BoxLimits

# Reads archives, one behind another, from standard input.
UNPACK = [
    *("tar", "--extract", "--file=-", "--directory=/", "--ignore-zeros"),
    *("--preserve-permissions", "--delay-directory-restore"),
]
PACK_S = 30.0
_HEADERS_BYTES = 1024  # of a file, with what fills its last block


def pack_argv(folders: list[str], read_only: list[str]) -> list[str]:
    """Returns argv that writes an archive of ``folders``, without what is shown ``read_only`` in them.

    Of a file with holes only the rest is written. Files that can't be read, and sockets, are left out.
    """
    words = ["tar", "--create", "--file=-", "--directory=/", "--sparse", "--ignore-failed-read"]
    words += ["--anchored", "--no-wildcards", *(f"--exclude={path[1:]}" for path in read_only)]
    return [*words, "--", *(folder[1:] for folder in folders)]


def most_archive_bytes(limits: BoxLimits) -> int:
    """Returns the size beyond which an archive is given up: that of a box full of files."""
    return limits.file_bytes + limits.files * _HEADERS_BYTES
