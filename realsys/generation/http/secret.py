"""Bearer key of a trial's generation servers, derived on both ends from the trial's CURVE keys."""

from __future__ import annotations

import hashlib

from realsys.transport.curve_keys import TrialKeypairs

_PURPOSE = b"realsys generation servers: bearer key"


def bearer_key(keypairs: TrialKeypairs) -> str:
    """Derives 64 hex digits. The CURVE secret can't be computed from it, and it is never stored."""
    return hashlib.blake2b(_PURPOSE, key=keypairs.server_secret, digest_size=32).hexdigest()
