"""Classification of failed calls: which errors of etcd and gRPC are retried and which are final.

Pure; for channels.py and etcd_client.py. etcd's errors are distinguished by their text, gRPC's by a
code.
"""

from __future__ import annotations

from enum import StrEnum

from realsys.api.errors import ConfigError, StoreDenied, StoreError, StoreUnavailable
from realsys.name_resolve.store_refusals import lease_lost


class FailureVerdict(StrEnum):
    """Whether a failed call may have taken effect, and whether a retry makes sense."""

    NEVER_SENT = "never sent"  # no connection: it can't have happened
    UNSURE = "unsure"  # it may have happened, or may still happen
    LOG_IN = "log in"  # the token is not known (any more): nothing happened
    FINAL = "final"  # etcd has refused, or a retry can't succeed


class Compacted(StoreError):
    """Raised if the requested revision has been compacted."""


class FutureRevision(StoreError):
    """Raised if the requested revision has not been written yet."""


class LeaseExists(StoreError):
    """Raised if a lease of that number has already been granted."""


_NO_LOGIN = ("invalid auth token", "revision of auth store is old", "auth: revision in header")
# The certificate or its key is wrong: a retry would fail the same way.
_TLS = ("andshake", "CERTIFICATE", "SSL", "certificate", "Verification", "TSI_")


def judge(code: str, details: str) -> FailureVerdict:
    """Classifies a failure. ``code`` is the name of a gRPC status, ``details`` the text with it."""
    if any(text in details for text in _NO_LOGIN) or code == "UNAUTHENTICATED":
        return FailureVerdict.LOG_IN
    if code == "UNAVAILABLE":
        if "failed to connect" in details or "no leader" in details or _is_tls(details):
            return FailureVerdict.NEVER_SENT
        return FailureVerdict.UNSURE
    if code in ("DEADLINE_EXCEEDED", "CANCELLED", "ABORTED"):
        return FailureVerdict.UNSURE
    if code == "RESOURCE_EXHAUSTED" and "too many requests" in details:
        return FailureVerdict.NEVER_SENT
    if code in ("UNKNOWN", "INTERNAL") and "etcdserver:" not in details:
        return FailureVerdict.UNSURE  # a stream that was torn, e.g. RST_STREAM
    return FailureVerdict.FINAL


def final_error(
    code: str, details: str, *, where: str, user: str | None
) -> StoreError | ConfigError:
    """Returns the exception for an answer that no retry will change."""
    if "requested lease not found" in details:
        return lease_lost("the lease has ended", where=where)
    if "database space exceeded" in details:
        return StoreUnavailable(
            "etcd is full (alarm NOSPACE): it serves reads and deletes but accepts no writes",
            where=where,
            fix="its administrator must compact, defragment and disarm: etcdctl compact <revision>; "
            "etcdctl defrag; etcdctl alarm disarm. See also --quota-backend-bytes, "
            "--auto-compaction-retention",
        )
    for text, kind in _INTERNAL.items():
        if text in details:
            return kind(details, where=where, fix="none is needed")
    for text, what, fix in _LOGIN_PROBLEMS:
        if text in details:
            return StoreDenied(what.format(user=user), where=where, fix=fix)
    return StoreError(
        f"etcd refused: {details or 'no reason given'} ({code})",
        where=where,
        fix="see etcd's log for the reason",
    )


def unavailable(
    details: str, *, waited_s: float, where: str, is_encrypted: bool
) -> StoreUnavailable:
    """Returns the exception for a call that got no answer in time."""
    last = f"; last error: {details}" if details else ""
    if _is_tls(details):
        fix = (
            "the certificates do not fit: is ca_file the authority of this etcd, does its certificate "
            "name this host, is our certificate of an authority that it trusts?"
        )
    else:
        fix = "is etcd running there (etcdctl endpoint health), and does a firewall let us through?"
        if not is_encrypted:
            fix += " Does it want TLS? Then it needs a certificate authority: ca_file, in the cluster's "
            fix += "etcd section"
    return StoreUnavailable(f"etcd did not answer in {waited_s:.1f} s{last}", where=where, fix=fix)


def is_hopeless(details: str) -> bool:
    """Returns whether waiting for this server is pointless: it is reachable, but TLS fails."""
    return _is_tls(details)


def _is_tls(details: str) -> bool:
    return any(text in details for text in _TLS)


_INTERNAL: dict[str, type[StoreError]] = {
    "required revision has been compacted": Compacted,
    "required revision is a future revision": FutureRevision,
    "lease already exists": LeaseExists,
}
_LOGIN_PROBLEMS = (
    (
        "permission denied",
        "etcd does not let the user {user!r} do that with this key",
        "give the user readwrite on its prefix: `realsys etcd roles` prints the commands",
    ),
    (
        "authentication failed",
        "etcd does not know the user {user!r} with this password",
        "check the user and the password file in the cluster's etcd section",
    ),
    (
        "user name is empty",
        "etcd wants a user and a password, and none was given",
        "set user and password_file in the cluster's etcd section",
    ),
    (
        "authentication is not enabled",
        "etcd asks for no password, yet the user {user!r} is configured",
        "switch authentication on (etcdctl auth enable), or remove the user from the etcd section",
    ),
)
