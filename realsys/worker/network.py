"""Where a worker listens: loopback on one machine, an address that the other nodes reach on a cluster.

The cluster spec may name an interface (``ib0``) or a subnet (``10.1.0.0/16``). Without one it is the
address from which this host reaches another node of the job, which the kernel's routes tell; a name
of this host in /etc/hosts often stands for 127.0.1.1 and is not asked.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Iterable

from realsys.api.cluster import ClusterSpec
from realsys.api.errors import ClusterError
from realsys.api.trial import AttemptFiles, AttemptRecord, read_record
from realsys.slurm.hostlist import expand

LOOPBACK = "127.0.0.1"
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
    host = socket.gethostname()
    here = {host, host.partition(".")[0], os.environ.get("SLURMD_NODENAME", "")}
    others = [node for node in expand(nodes) if node not in here] if nodes else []
    return _address_towards(others)


def ports(cluster: ClusterSpec) -> range | None:
    """Ports that workers may listen on; None: any free one."""
    if not cluster.port_range:
        return None
    low, _, high = cluster.port_range.partition("-")
    return range(int(low), int(high) + 1)


def interface_variables(cluster: ClusterSpec, attempt: AttemptFiles) -> dict[str, str]:
    """What tells gloo and NCCL to use the same interface as our own sockets."""
    record = read_record(AttemptRecord, attempt.record)
    address = listening_address(cluster, record.nodes if record else "")
    names = [name for name, found in _interfaces() if found == address]
    if not names:
        return {}
    return {"GLOO_SOCKET_IFNAME": names[0], "NCCL_SOCKET_IFNAME": names[0]}


def _address_towards(others: Iterable[str]) -> str:
    """Our address on the route to the first of ``others`` that has one; loopback without any."""
    for node in others:
        try:
            target = socket.getaddrinfo(node, 9, socket.AF_INET, socket.SOCK_DGRAM)[0][4]
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect(target)  # sends nothing: it only asks the routing table
                return str(probe.getsockname()[0])
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
