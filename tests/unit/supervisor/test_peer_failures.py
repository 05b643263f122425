"""Which failures only report that somebody else was missing, and between which hosts a connection broke."""

from __future__ import annotations

from dataclasses import replace

import pytest

from realsys.supervisor.health.peer_failures import (
    UNOBSERVED,
    addresses_of,
    ends_of_link,
    is_secondary,
    named_hosts,
    with_both_ends,
)
from realsys.trial.records import Failure, WorkerRecord


def failure(
    why: str, *, kind: str = "RuntimeError", worker: str = "model_worker/0", **more
) -> Failure:
    host = more.pop("host", "gpu01")
    return Failure(
        worker=worker, host=host, pid=1, why=why, at=more.pop("at", 1.0), kind=kind, **more
    )


def record(worker: str, host: str, address: str) -> WorkerRecord:
    return WorkerRecord(
        worker=worker, host=host, pid=1, start=1, attempt=1, token="t", node=host.partition(".")[0],
        control=f"tcp://{address}:4000", data=f"tcp://{address}:4001", rendezvous=f"{address}:29500",
    )  # fmt: skip


REGISTERED = {
    r.worker: r
    for r in (
        record("model_worker/0", "gpu01.site.edu", "10.78.0.1"),
        record("model_worker/1", "gpu02.site.edu", "10.78.0.2"),
        record("generation_server/0", "gpu03.site.edu", "10.78.0.3"),
    )
}
HOSTS = ("gpu01", "gpu02", "gpu03")
PEERS = set().union(*map(addresses_of, REGISTERED.values()))

OF_A_PEER = (
    "[/pytorch/gloo/transport/tcp/pair.cc:537] Read error [10.78.0.2]:48293: Connection reset",
    "[…/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1800000ms for recv operation",
    "Connection closed by peer [10.78.0.2]:43571",
    "NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled system error: "
    "socketProgress: Connection closed by remote peer gpu02.site.edu<33841>",
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting",
    "NET/IB : Got completion from peer 10.78.0.2<41712> with status=12 opcode=129 len=0 vendor err 129",
    "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE)",
    "Some NCCL operations have failed or timed out. Due to the asynchronous nature of CUDA kernels, …",
    "NCCL communicator was aborted on rank 0.",
    "Rank 0 failed to pass monitoredBarrier in 60000 ms",
    "recvValue failed on SocketImpl(fd=59, addr=[gpu01]:40372, remote=[gpu02]:29500): got 0 bytes",
    "Connection was likely closed. Did the remote server shutdown or crash?",
    "The client socket has timed out after 60000ms while trying to connect to (gpu02, 29500).",
    "wait timeout after 300000ms, keys: /default_pg/0//1//cuda//0",
    "[Errno 104] Connection reset by peer",
    "[Errno 113] No route to host: 'gpu02'",
    "[Errno 32] Broken pipe",
    "Cannot connect to host gpu02:8123 ssl:default [Connect call failed ('10.78.0.2', 8123)]",
    "HTTPConnectionPool(host='10.78.0.3', port=8000): http://10.78.0.3:8000/generate: Connection refused",
    "Slurm cancelled its step: STEP 7.2 ON gpu01 CANCELLED AT 2026-11-27T22:03:46 DUE TO NODE FAILURE",
    "exited with code 137 (srun ended with 137: Timed out waiting for job step to complete)",
    "exited with code 78: the workers it depends on were gone",
)  # fmt: skip
OF_ITS_OWN = (
    "ValueError: a bad record",
    "CUDA error: an illegal memory access was encountered",
    "CUDA error: uncorrectable ECC error encountered",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
    "killed by SIGKILL (signal 9): by hand, or by the kernel (srun: Killed on gpu01)",
    "exited with code 77: its lease could not be renewed in time, so it stopped itself",
    "was not started: srun ended with 255: unrecognized option '--nonsense'",
    "[Errno 28] No space left on device: '/tmp/x'",
    "shape mismatch: [12:34] and [56:78]",
    "its lease has ended: its node is lost or cut off, or it hangs",
)
OF_A_SERVICE = (
    "HTTPConnectionPool(host='judge.example.edu'): http://judge.example.edu/: Connection refused",
    'connection to server at "db.example.edu", port 5432 (db.example.edu:5432) failed: Connection refused',
    "Cannot connect to host 172.16.9.9:443 ssl:default [Connect call failed ('172.16.9.9', 443)]",
)


@pytest.mark.parametrize("why", OF_A_PEER)
def test_what_only_reports_a_missing_peer_is_secondary(why: str) -> None:
    assert is_secondary(failure(why), PEERS)
    assert is_secondary(failure(why))


@pytest.mark.parametrize("why", OF_ITS_OWN)
def test_what_is_of_its_own_is_primary(why: str) -> None:
    assert not is_secondary(failure(why), PEERS)


@pytest.mark.parametrize("why", OF_A_SERVICE)
def test_a_lost_connection_to_a_service_of_the_users_is_of_its_own(why: str) -> None:
    assert not is_secondary(failure(why, kind="ConnectionError"), PEERS)
    assert is_secondary(failure(why, kind="ConnectionError"))  # while no peer is known


@pytest.mark.parametrize("kind", ["ConnectionResetError", "BrokenPipeError", "DistNetworkError"])
def test_a_class_of_broken_connections_needs_no_words(kind: str) -> None:
    assert is_secondary(failure(kind, kind=kind), PEERS)


def test_hosts_are_read_from_urls_ports_and_addresses_and_not_from_places_in_code() -> None:
    text = "[pair.cc:537] tcp://user@gpu07.site.edu:4000, [fd00::2]:48293, 10.78.0.2, gpu01:29500 at 12:30"
    assert named_hosts(text) == ["gpu07.site.edu", "fd00::2", "gpu01", "10.78.0.2"]


@pytest.mark.parametrize(
    ("why", "ends"),
    [
        ("no reply from model_worker/1 in 60 s (link: disconnected)", ("gpu01", "gpu02")),
        ("gloo/transport/tcp/pair.cc:537] Read error [10.78.0.2]:48293: reset", ("gpu01", "gpu02")),
        ("Cannot connect to host gpu03.site.edu:8123", ("gpu01", "gpu03")),
        ("no reply from model_worker/0", None),  # on its own host, and there are two others
        ("Watchdog caught collective operation timeout", None),
        ("Read error [10.99.0.9]:48293: reset", None),
    ],
)
def test_the_ends_of_a_link(why: str, ends: tuple[str, str] | None) -> None:
    assert ends_of_link(failure(why, host="gpu01.site.edu"), REGISTERED, HOSTS) == ends


def test_of_two_hosts_the_other_one_is_the_other_end() -> None:
    found = ends_of_link(failure("[Errno 104] Connection reset by peer"), {}, ("gpu01", "gpu02"))
    assert found == ("gpu01", "gpu02")


def test_where_nobody_knows_whose_fault_it_is_both_ends_are_named() -> None:
    first = failure("no reply from model_worker/1 (link: disconnected)\nmore", secondary=True)
    told = with_both_ends(first, (), REGISTERED, HOSTS)
    line, _, rest = told.why.partition("\n")
    assert ("gpu01" in line, "gpu02" in line, rest) == (True, True, "more")
    assert ("gpu01" in told.fix, "gpu02" in told.fix) == (True, True)


def test_the_message_on_a_lost_node_has_who_lost_its_connection_to_it() -> None:
    first = failure("its lease has ended: its node is lost or cut off", host="gpu02", kind="")
    reset = failure("Read error [10.78.0.2]:48293: Connection reset by peer", secondary=True)
    assert "model_worker/0 on gpu01" in with_both_ends(first, (reset,), REGISTERED, HOSTS).why
    assert with_both_ends(first, (), REGISTERED, HOSTS) == first
    own = failure("ValueError: no")
    assert with_both_ends(own, (reset,), REGISTERED, HOSTS) == own


def test_a_host_without_a_node_has_no_empty_name() -> None:
    assert "" not in addresses_of(replace(REGISTERED["model_worker/0"], node=""))


@pytest.mark.parametrize(
    ("kind", "why", "others", "is_told"),
    [
        ("RuntimeError", OF_A_PEER[0], [], True),
        ("RuntimeError", "gloo/transport/ and no address", ["gpu02"], True),
        ("RuntimeError", "gloo/transport/ and no address", ["gpu01"], False),  # one end only
        ("StoreUnavailable", OF_A_PEER[0], [], False),
        ("RuntimeError", f"{OF_A_PEER[0]} {UNOBSERVED}", [], False),
    ],
)
def test_both_ends_of_a_link_are_told_if_it_was_one(
    kind: str, why: str, others: list[str], is_told: bool
) -> None:
    first = failure(why, kind=kind, secondary=True)
    also = [failure("x", host=host, secondary=True) for host in others]
    hosts = () if others else HOSTS
    found = with_both_ends(first, also, REGISTERED, hosts)
    assert (found != first) is is_told
    assert ("gpu01" in found.fix and "gpu02" in found.fix) is is_told
    assert with_both_ends(replace(first, fix="mine"), also, REGISTERED, hosts).fix == "mine"
