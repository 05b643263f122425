"""Encodes the difference between two versions of a bucket as positions and new values (no torch).

Works on 16-bit words, since most bfloat16 numbers are unchanged by a small step. Format, little endian:
number of words n (uint32), n gaps between their positions (uint16), n values (uint16). If a gap would not
fit, an unchanged word is listed in between.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from realsys.transport.codec import ProtocolError, mismatch_error

Bytes = np.ndarray[Any, Any]
_STRIDE = 0xFFFF
_SAMPLE = 1031


def make_patch(old: Bytes, new: Bytes, *, max_bytes: int) -> Bytes | None:
    """Makes the patch from ``old`` to ``new`` (uint8 of the same even length), empty if they are equal.

    Returns None if it needs more than ``max_bytes``.
    """
    a, b = _words(old), _words(new)
    share = np.mean(a[::_SAMPLE] != b[::_SAMPLE]) if len(a) > 1000 * _SAMPLE else 0.0
    if 4 * len(a) * share > 2 * max_bytes:  # it would be far too long: skip the comparison
        return None
    mask = a != b
    changed = int(np.count_nonzero(mask))
    if not changed:
        return np.empty(0, np.uint8)
    if 4 + 4 * changed > max_bytes:
        return None
    mask[::_STRIDE] = True
    positions = np.flatnonzero(mask)
    gaps = np.diff(positions, prepend=0).astype("<u2")
    values = b[positions]
    count = np.array([len(positions)], "<u4")
    patch = np.concatenate([x.view(np.uint8) for x in (count, gaps, values)])
    return patch if len(patch) <= max_bytes else None


def apply_patch(patch: Bytes, bucket: Bytes) -> None:
    """Applies a patch to ``bucket`` (uint8) in place.

    Raises:
        ProtocolError: the patch is invalid, or belongs to a longer bucket.
    """
    count = int(patch[:4].view("<u4")[0]) if len(patch) >= 4 else 0
    if not count or len(patch) != 4 + 4 * count:
        raise _refusal(f"{len(patch)} bytes are no patch")
    gaps = np.frombuffer(patch[4 : 4 + 2 * count].tobytes(), "<u2")
    values = np.frombuffer(patch[4 + 2 * count :].tobytes(), "<u2")
    positions = np.cumsum(gaps, dtype=np.int64)
    words = _words(bucket)
    if positions[-1] >= len(words):
        raise _refusal(f"it changes word {positions[-1]} of {len(words)}")
    words[positions] = values


def _words(x: Bytes) -> Bytes:
    return x.view("<u2")


def _refusal(why: str) -> ProtocolError:
    return mismatch_error(f"a change of weights can't be applied: {why}", where="receiving weights")
