"""Where a worker listens, and on which port."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace

import golden
import pytest
import zmq

from realsys.api.cluster import ClusterSpec
from realsys.api.errors import ClusterError
from realsys.transport.binding import bind, connect
from realsys.trial.records import AttemptFiles, AttemptRecord, write_record
from realsys.worker import network
from realsys.worker.network import (
    external_address,
    interface_variables,
    listening_address,
    ports,
)

ROUTES = {"10.1.0.7": "10.1.0.1", "192.168.5.8": "192.168.5.1"}  # target → our address
NAMES = {"n7": "10.1.0.7", "n8": "192.168.5.8", "n9": "172.16.0.9"}  # n9 can't be reached


def cluster(**more: object) -> ClusterSpec:
    return ClusterSpec(scheduler="slurm", **more)  # type: ignore[arg-type]


class Probe:
    """A UDP socket of a host with two networks."""

    def __init__(self, *kind: object) -> None:
        self.here = ""

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass

    def connect(self, target: tuple[str, int]) -> None:
        if target[0] not in ROUTES:
            raise OSError("Network is unreachable")
        self.here = ROUTES[target[0]]

    def getsockname(self) -> tuple[str, int]:
        return self.here, 40000


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names that were looked up, on host n1 of a site with two networks."""
    names: list[str] = []

    def lookup(name: str, port: int, *kind: object) -> list[tuple[object, ...]]:
        names.append(name)
        if name not in NAMES:
            raise socket.gaierror("Name or service not known")
        return [(None, None, None, "", (NAMES[name], port))]

    stand_in = SimpleNamespace(
        socket=Probe,
        getaddrinfo=lookup,
        gethostname=lambda: "n1.site.org",
        AF_INET=socket.AF_INET,
        AF_INET6=socket.AF_INET6,
        SOCK_DGRAM=socket.SOCK_DGRAM,
    )
    monkeypatch.setattr(network, "socket", stand_in)
    return names


# ---- address ---------------------------------------------------------------------------------------


def test_one_machine_listens_on_loopback_whatever_the_spec_names():
    assert listening_address(ClusterSpec(interface="ib9"), "n[1-2]") == "127.0.0.1"


@pytest.mark.parametrize("interface", ["lo", "127.0.0.0/8", "127.0.0.1/8", "127.0.0.1/32"])
def test_an_interface_is_named_or_meant_by_its_subnet(interface):
    assert listening_address(cluster(interface=interface), "") == "127.0.0.1"


@pytest.mark.parametrize("interface", ["ib9", "203.0.113.0/24"])
def test_an_interface_that_is_not_there_is_told_with_those_there_are(interface):
    with pytest.raises(ClusterError) as caught:
        listening_address(cluster(interface=interface), "n[1-2]")
    assert caught.value.what == f"no network interface {interface!r} on {socket.gethostname()}"
    there = caught.value.fix.removeprefix("use one of ").split(", ")
    assert "lo (127.0.0.1)" in there
    assert {entry.partition(" ")[0] for entry in there} <= {n for _, n in socket.if_nameindex()}


@pytest.mark.parametrize(
    ("nodes", "address", "looked_up"),
    [
        ("n[1,7]", "10.1.0.1", ["n7"]),  # our own name is not asked
        ("n[7-8]", "10.1.0.1", ["n7"]),
        ("n[1,8]", "192.168.5.1", ["n8"]),
        ("n[6,9,8]", "192.168.5.1", ["n6", "n9", "n8"]),  # no such name; no route
        ("n6", "127.0.0.1", ["n6"]),
        ("n1", "127.0.0.1", []),
        ("", "127.0.0.1", []),
    ],
)
def test_without_one_it_is_the_address_towards_another_node(asked, nodes, address, looked_up):
    assert listening_address(cluster(), nodes) == address
    assert asked == looked_up


def test_our_own_node_is_not_asked_by_slurms_name_of_it_either(asked, monkeypatch):
    monkeypatch.setenv("SLURMD_NODENAME", "n8")
    assert listening_address(cluster(), "n[7-8]") == "10.1.0.1"
    assert asked == ["n7"]
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    assert listening_address(cluster(), "n[7-8]") == "192.168.5.1"


def test_the_kernels_routes_are_asked_without_sending_anything():
    assert listening_address(cluster(), "127.0.0.1") == "127.0.0.1"


@pytest.mark.parametrize(
    ("submitted_from", "routes", "address"),
    [
        ("n7", {}, "10.1.0.1"),  # the login node
        ("n6", {"192.0.2.1": "192.168.5.1"}, "192.168.5.1"),  # no such name: the default route
        ("n5", {"192.0.2.1": "192.168.5.1"}, "192.168.5.1"),  # /etc/hosts calls it 127.0.1.1
        ("", {"192.0.2.1": "10.1.0.1"}, "10.1.0.1"),
        ("n7", {"10.1.0.7": "127.0.0.1"}, "127.0.0.1"),  # no network at all
    ],
)
def test_the_etcd_of_a_job_of_one_node_can_be_reached_from_outside(
    asked, monkeypatch, submitted_from, routes, address
):
    monkeypatch.setenv("SLURM_SUBMIT_HOST", submitted_from)
    monkeypatch.setitem(NAMES, "n5", "127.0.1.1")
    monkeypatch.setitem(NAMES, network.ANYWHERE, network.ANYWHERE)
    monkeypatch.setitem(ROUTES, "127.0.1.1", "127.0.0.1")
    for target, ours in routes.items():
        monkeypatch.setitem(ROUTES, target, ours)
    assert listening_address(cluster(), "n1") == "127.0.0.1", "workers talk to nobody else"
    assert external_address(cluster(), "n1") == address
    assert external_address(cluster(), "n[1,8]") == "192.168.5.1", "as its workers"
    assert external_address(ClusterSpec(), "") == "127.0.0.1", "one machine"


def test_a_node_is_not_taken_for_another_one_by_its_second_name(asked, monkeypatch):
    monkeypatch.setenv("SLURMD_NODENAME", "n8")
    assert listening_address(cluster(), "n[7-8]") == "10.1.0.1"
    assert listening_address(cluster(), "n8") == "127.0.0.1"
    assert asked == ["n7"]


def test_gloo_and_nccl_are_told_the_interface_of_that_address(tmp_path: Path):
    attempt = AttemptFiles(tmp_path / "0001")
    told = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
    assert interface_variables(cluster(interface="lo"), attempt) == told
    record = AttemptRecord(
        number=1,
        token="t",
        host="n1",
        supervisor_pid=1,
        supervisor_start=1,
        started_at=1.0,
        nodes=socket.gethostname(),
    )
    write_record(attempt.record, record)
    assert interface_variables(cluster(), attempt) == told


def test_an_address_of_no_interface_tells_them_nothing(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(network, "listening_address", lambda *asked: "203.0.113.7")
    assert interface_variables(cluster(), AttemptFiles(tmp_path / "0001")) == {}


# ---- port ------------------------------------------------------------------------------------------


def test_a_port_range_holds_both_its_ends():
    assert ports(cluster()) is None
    assert ports(cluster(port_range="20000-20002")) == range(20000, 20003)


@pytest.fixture
def make_socket():
    context, made = zmq.Context(), []

    def make():
        made.append(context.socket(zmq.ROUTER))
        return made[-1]

    yield make
    for one in made:
        one.close(linger=0)
    context.term()


def test_without_a_range_any_free_port_will_do(make_socket):
    first, second = (bind(make_socket(), "127.0.0.1") for _ in range(2))
    assert first.rpartition(":")[0] == second.rpartition(":")[0] == "tcp://127.0.0.1"
    assert first != second


def test_a_taken_port_is_passed_over(make_socket):
    taken = int(bind(make_socket(), "127.0.0.1").rpartition(":")[2])
    found = bind(make_socket(), "127.0.0.1", (taken, 0))
    assert int(found.rpartition(":")[2]) not in (0, taken)


def test_a_range_that_is_all_taken_is_a_cluster_error(make_socket):
    taken = [int(bind(make_socket(), "127.0.0.1").rpartition(":")[2]) for _ in range(2)]
    with golden.raises(ClusterError):
        bind(make_socket(), "127.0.0.1", taken)


def test_a_name_of_this_host_is_kept_in_the_endpoint(make_socket):
    assert bind(make_socket(), "localhost").startswith("tcp://localhost:")


def test_an_address_of_another_host_is_no_matter_of_ports(make_socket):
    with pytest.raises(zmq.ZMQError) as caught:
        bind(make_socket(), "203.0.113.7", range(20000, 20010))
    assert caught.value.errno == zmq.EADDRNOTAVAIL


# ---- hosts that have no IPv4 -----------------------------------------------------------------------


def test_a_host_without_ipv4_listens_on_the_ipv6_address_towards_another_node(asked, monkeypatch):
    monkeypatch.setitem(NAMES, "v6", "fd00::7")
    monkeypatch.setitem(ROUTES, "fd00::7", "fd00::1")
    assert listening_address(cluster(), "n1,v6") == "fd00::1"
    assert listening_address(cluster(), "v6,n7") == "10.1.0.1", "IPv4 where there is one"


@pytest.mark.parametrize("own", ["fe80::1", "::1", "127.0.1.1"])
def test_addresses_of_one_cable_or_one_host_are_not_told_to_others(asked, monkeypatch, own):
    target = "fd00::7" if ":" in own else "10.9.9.9"
    monkeypatch.setitem(NAMES, "v6", target)
    monkeypatch.setitem(ROUTES, target, own)
    assert listening_address(cluster(), "v6") == "127.0.0.1"


def test_ipv6_addresses_of_interfaces_are_those_that_others_can_reach():
    lines = [
        "fe8000000000000000fc00fffe000001 04 40 20 80     eth0",
        "00000000000000000000000000000001 01 80 10 80       lo",
        "fd000000000000000000000000000002 04 40 00 82     eth0",
    ]
    assert network.ipv6_interfaces(lines) == [("eth0", "fd00::2")]


def test_an_ipv6_subnet_names_an_interface(monkeypatch):
    monkeypatch.setattr(network, "_interfaces", lambda: [("eth0", "10.0.0.1"), ("ib0", "fd00::2")])
    assert listening_address(cluster(interface="fd00::/64"), "") == "fd00::2"
    assert listening_address(cluster(interface="ib0"), "") == "fd00::2"


def test_sockets_listen_and_connect_over_ipv6():
    context = zmq.Context.instance()
    with context.socket(zmq.ROUTER) as server, context.socket(zmq.DEALER) as client:
        endpoint = bind(server, "::1")
        assert endpoint.startswith("tcp://[::1]:")
        connect(client, endpoint)
        client.send(b"here")
        assert server.poll(10_000)
        assert server.recv_multipart()[1] == b"here"
