"""The bearer key of a trial's generation servers, which both ends work out from the trial's CURVE keys."""

from __future__ import annotations

import hashlib

from realsys.transport.curve_keys import TrialKeypairs

_PURPOSE = b"realsys generation servers: bearer key"


def bearer_key(keypairs: TrialKeypairs) -> str:
    """64 hex digits. Nobody can find the CURVE secret from it, and it is written down nowhere."""
    return hashlib.blake2b(_PURPOSE, key=keypairs.server_secret, digest_size=32).hexdigest()
