"""Where a worker listens: loopback on one machine, an address that the other nodes reach on a cluster.

The cluster spec may name an interface (``ib0``) or a subnet (``10.1.0.0/16``). Without one it is the
address from which this host reaches another node of the job, which the kernel's routes tell; a name
of this host in /etc/hosts often stands for 127.0.1.1 and is not asked. Who serves hosts outside the job
as well (a job's own etcd) has an address of its own, ``entrance_address``.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import resource
import socket
import struct
from collections.abc import Iterable

from realsys.api.cluster import ClusterSpec
from realsys.api.errors import ClusterError
from realsys.api.trial import AttemptFiles, AttemptRecord, read_record
from realsys.slurm.hostlist import expand

LOOPBACK = "127.0.0.1"
ANYWHERE = "192.0.2.1"  # nobody's (RFC 5737): its route is the default route
_SIOCGIFADDR = 0x8915  # netdevice(7)


def listening_address(cluster: ClusterSpec, nodes: str) -> str:
    """IPv4 address for this worker's sockets.

    Args:
        nodes: hostlist of the attempt's nodes; empty on one machine.
    Raises:
        ClusterError: no such interface or subnet here; lists those that there are.
    """
    if cluster.scheduler == "local":
        return LOOPBACK
    if cluster.interface:
        return _named_address(cluster.interface)
    return _address_towards(_other_nodes(nodes))


def entrance_address(cluster: ClusterSpec, nodes: str) -> str:
    """IPv4 address for what hosts outside this job must reach: login nodes, and the trial's other jobs.

    As ``listening_address``; where that is loopback, since the job has one node, the address towards the
    host that submitted the job, else that of the default route.

    Args:
        nodes: hostlist of this job's nodes; empty on one machine.
    Raises:
        ClusterError: as there.
    """
    address = listening_address(cluster, nodes)
    if cluster.scheduler == "local" or cluster.interface or address != LOOPBACK:
        return address
    submitted_from = os.environ.get("SLURM_SUBMIT_HOST", "")
    return _address_towards([*filter(None, [submitted_from]), ANYWHERE])


def ports(cluster: ClusterSpec) -> range | None:
    """Ports that workers may listen on; None: any free one."""
    if not cluster.port_range:
        return None
    low, _, high = cluster.port_range.partition("-")
    return range(int(low), int(high) + 1)


def allow_many_files() -> None:
    """As many open files as we, and those whom we start, may have: a socket a peer, and strangers who
    connect and say nothing must not keep a checkpoint from being opened."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def interface_variables(cluster: ClusterSpec, attempt: AttemptFiles) -> dict[str, str]:
    """What tells gloo and NCCL to use the same interface as our own sockets."""
    record = read_record(AttemptRecord, attempt.record)
    address = listening_address(cluster, record.nodes if record else "")
    names = [name for name, found in _interfaces() if found == address]
    if not names:
        return {}
    return {"GLOO_SOCKET_IFNAME": names[0], "NCCL_SOCKET_IFNAME": names[0]}


def _other_nodes(nodes: str) -> list[str]:
    """A hostlist without this node, under any of its names."""
    name = socket.gethostname()
    here = {name, name.partition(".")[0], os.environ.get("SLURMD_NODENAME")}
    return [node for node in expand(nodes) if node not in here] if nodes else []


def _address_towards(others: Iterable[str]) -> str:
    """Our address on the route to the first of ``others`` that has one; loopback without any. A name
    that stands for a loopback address tells nothing of a route."""
    for node in others:
        try:
            target = socket.getaddrinfo(node, 9, socket.AF_INET, socket.SOCK_DGRAM)[0][4]
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect(target)  # sends nothing: it only asks the routing table
                found = str(probe.getsockname()[0])
            if not found.startswith("127."):
                return found
        except OSError:
            continue
    return LOOPBACK


def _named_address(wanted: str) -> str:
    found = _interfaces()
    for name, address in found:
        if name == wanted:
            return address
    if "/" in wanted:
        subnet = ipaddress.ip_network(wanted, strict=False)
        for _, address in found:
            if ipaddress.ip_address(address) in subnet:
                return address
    raise ClusterError(
        f"no network interface {wanted!r} on {socket.gethostname()}",
        where="interface in the cluster spec",
        fix="use one of " + ", ".join(f"{name} ({address})" for name, address in found),
    )


def _interfaces() -> list[tuple[str, str]]:
    """(name, IPv4 address) of every interface that has one."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                reply = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue
            found.append((name, socket.inet_ntoa(reply[20:24])))
    return found
