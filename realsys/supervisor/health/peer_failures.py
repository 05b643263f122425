"""Tells failures that only report that somebody else was missing, and who that was (pure).

A node that dies takes its workers silently. What is seen of it are *secondary* failures elsewhere: reset
connections, timeouts of collectives and replies, a store that one node can't reach. They come seconds
before the dead node's leases end, so nothing is known yet about the cause while all failures are of this
kind. For first_failure.py, which orders failures, and late_evidence.py, which waits for the cause.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from realsys.slurm.hostlist import short_name
from realsys.slurm.lost_nodes import is_silence
from realsys.trial.records import Failure, WorkerRecord

SECONDARY_KINDS = frozenset({"RemoteError", "WorkerLost", "WaitTimeout", "CancelledError"})
# Classes of errors of a connection, whose other end may be a worker or a service of somebody's
_OF_A_CONNECTION = frozenset(
    "ConnectionResetError ConnectionRefusedError ConnectionAbortedError ConnectionError BrokenPipeError "
    "IncompleteReadError RemoteDisconnected ServerDisconnectedError ClientConnectorError ClientOSError "
    "ConnectError ReadError WriteError RemoteProtocolError ConnectTimeout ReadTimeout "
    "ConnectionTimeoutError DistNetworkError DistStoreError StoreUnavailable".split()
)
_STORE_AWAY = "StoreUnavailable"
# Messages of gloo and NCCL: a process of the same collective ended, or did not join.
LOST_PEER = (
    "gloo/transport/",
    "ncclRemoteError",
    "remote process exited",
    "Watchdog caught collective operation timeout",
)
NCCL_ENDED_IT = "NCCL's watchdog ended it because another worker was missing"
STEP_CANCELLED = "Slurm cancelled its step"
UNOBSERVED = "srun ended with"  # a task whose end nobody saw, not even its parent
# As a node goes down, what dies on it first is told by what dies next
HEARTBEAT_ENDED = "its heartbeat process ended"
_NO_LINK = (STEP_CANCELLED, UNOBSERVED, HEARTBEAT_ENDED)
# Nothing but the end of another process of a group causes these
_IN_A_GROUP = re.compile(
    r"|".join(map(re.escape, (*LOST_PEER, NCCL_ENDED_IT, STEP_CANCELLED, HEARTBEAT_ENDED)))
    + rf"|(?<!not started: ){UNOBSERVED}|workers it depends on were gone"
    + r"|socketProgress|socketStartConnect|dump signal from another rank"
    r"|(?:collective|NCCL) operations? (?:have |has )?(?:failed or )?timed out"
    r"|(?:Timed out|timed out) .*(?:monitoredBarrier|for (?:recv|send) operation)"
    r"|failed to pass monitoredBarrier|store.based barrier|Connect timeout \[|Wait timeout"
    r"|NCCL communicator was aborted|Got completion from peer|transport retry counter exceeded"
    r"|recvValue failed|sendBytes failed|failed to recv, got 0 bytes|remote server shutdown or crash"
    r"|wait timeout after \d+ ?ms|client socket has (?:timed out|failed)|Socket Timeout"
    r"|link: (?:disconnected|broken)|could not connect IO|communication connection failure",
    re.IGNORECASE,
)
# Words of the C library and of HTTP clients about any connection
_CONNECTION_LOST = re.compile(
    r"connection (?:was |has been |is )?(?:unexpectedly )?"
    r"(?:reset|refused|aborted|closed|lost|broken|timed out)"
    r"|connection (?:attempts failed|error)|closed (?:the )?connection|broken pipe|no route to host"
    r"|network is (?:unreachable|down)|host is (?:down|unreachable)|not connected"
    r"|server disconnected|cannot connect to host|socket hang up|(?:unexpected|premature) (?:eof|end of)",
    re.IGNORECASE,
)
_WORKER = re.compile(
    r"\b((?:master|model|rollout|reward)_worker|generation_server|gserver_manager|evaluator)/(\d+)"
)
_IN_URL = re.compile(r"\w+://(?:[^/\s@]*@)?(\[[\da-fA-F:.]+\]|[\w.-]+)")
_WITH_PORT = re.compile(r"(\[[\w:.-]+\]|(?:\d{1,3}\.){3}\d{1,3}|[A-Za-z][\w.-]*)[:<](\d{2,5})\b")
_ADDRESS = re.compile(r"\b(?:\d{1,3}\.){3}\d{1,3}\b")
_HERE = frozenset({"localhost", "127.0.0.1", "0.0.0.0", "::1", "::"})


def is_secondary(failure: Failure, peers: Collection[str] = ()) -> bool:
    """Returns whether a failure only reports that another worker, or the way to it, was missing.

    A lost connection to a service that is no worker's (a reward service, a user's database) is the
    failure's own.

    Args:
        peers: names and addresses of the hosts of the attempt's workers; empty: not known.
    """
    if failure.kind in SECONDARY_KINDS or _IN_A_GROUP.search(failure.why):
        return True
    if failure.kind not in _OF_A_CONNECTION and not _CONNECTION_LOST.search(failure.why):
        return False
    named = named_hosts(failure.why)
    known = {short_name(peer) for peer in peers} | _HERE
    return not peers or not named or any(short_name(host) in known for host in named)


def named_hosts(text: str) -> list[str]:
    """Returns host names and addresses in an error's text, in their order: of URLs, before a port, and
    bare IPv4 addresses."""
    found = [match[1] for match in _IN_URL.finditer(text)]
    found += [m[1] for m in _WITH_PORT.finditer(text) if not _is_a_place_in_code(m[1])]
    found += _ADDRESS.findall(text)
    return list(dict.fromkeys(host.strip("[]").lower() for host in found))


def _is_a_place_in_code(word: str) -> bool:
    return word.endswith((".py", ".cc", ".cpp", ".h", ".hpp", ".cu", ".cuh", ".c", ".so", ".rs"))


def addresses_of(record: WorkerRecord) -> set[str]:
    """Returns the names and addresses under which a worker's peers know its host."""
    ends = (record.control, record.data, f"x://{record.rendezvous}" if record.rendezvous else "")
    return {host for host in (record.host, record.node) if host} | {
        match[1].strip("[]").lower() for end in ends for match in _IN_URL.finditer(end)
    }


def ends_of_link(
    failure: Failure, registered: Mapping[str, WorkerRecord], hosts: Iterable[str]
) -> tuple[str, str] | None:
    """Returns the two hosts between which a secondary failure's connection broke; None if its text
    doesn't tell the other one.

    Args:
        registered: worker → its registration.
        hosts: of all workers of the attempt. Of two the other one needs no mention in the text.
    """
    own = short_name(failure.host)
    others = {short_name(r.node or r.host): r for r in registered.values()}
    for match in _WORKER.finditer(failure.why):
        record = registered.get(f"{match[1]}/{match[2]}")
        if record is not None and (host := short_name(record.node or record.host)) != own:
            return own, host
    for named in named_hosts(failure.why):
        held_by = {
            host
            for host, record in others.items()
            if short_name(named) in map(short_name, addresses_of(record))
        }
        if len(held_by) == 1 and own not in held_by:
            return own, held_by.pop()
    left = {short_name(host) for host in hosts if host} - {own}
    return (own, left.pop()) if len(left) == 1 else None


def with_both_ends(
    first: Failure,
    others: Sequence[Failure],
    registered: Mapping[str, WorkerRecord],
    hosts: Collection[str],
) -> Failure:
    """Returns the first failure with both ends of the broken connection in its reason, and what to look
    at where nobody knows which of them is at fault.

    Args:
        registered, hosts: as for ``ends_of_link``.
    """
    if first.secondary:
        ends = ends_of_link(first, registered, hosts)
        also = [short_name(f.host) for f in others if f.secondary]
        named = list(dict.fromkeys(ends or (short_name(first.host), *also)))
        if len(named) < 2 or not _is_of_a_link(first):
            return first
        note = (
            f"the connection between {' and '.join(named)} broke; neither Slurm nor the leases tell which "
            "of them is at fault"
        )
        fix = f"look at these nodes and the network between them: {', '.join(named)}; then realsys resume"
        return replace(_with_note(first, note), fix=first.fix or fix)
    if not is_silence(first):
        return first
    ill = short_name(first.host)
    for other in sorted(others, key=lambda failure: failure.at):
        if other.secondary and _is_of_a_link(other):
            ends = ends_of_link(other, registered, hosts)
            to = "" if ends is None else " to it" if ends[1] == ill else f" to {ends[1]}"
            host = short_name(other.host)
            return _with_note(first, f"{other.worker} on {host} lost its connection{to}")
    return first


def _is_of_a_link(failure: Failure) -> bool:
    return failure.kind != _STORE_AWAY and not any(words in failure.why for words in _NO_LINK)


def _with_note(failure: Failure, note: str) -> Failure:
    first_line, newline, rest = failure.why.partition("\n")
    return replace(failure, why=f"{first_line} ({note}){newline}{rest}")
