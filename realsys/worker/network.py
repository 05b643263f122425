"""The address on which a worker listens: loopback on one machine, one reachable from other nodes on a
cluster.

The cluster spec may name an interface (``ib0``) or a subnet (``10.1.0.0/16``). Otherwise it is the
address from which this host reaches another node of the job, according to the kernel's routes; the host
name is not resolved, because /etc/hosts often maps it to 127.0.1.1. A service for hosts outside the job
(a job's own etcd) uses ``external_address``.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import resource
import socket
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from realsys.api.cluster import ClusterSpec
from realsys.api.errors import ClusterError
from realsys.slurm.hostlist import expand
from realsys.trial.records import AttemptFiles, AttemptRecord, read_record

LOOPBACK = "127.0.0.1"
# Unassigned addresses (RFC 5737, RFC 3849): their route is the default route.
ANYWHERE, ANYWHERE_IPV6 = "192.0.2.1", "2001:db8::1"
_SIOCGIFADDR = 0x8915  # netdevice(7)
_IPV6, _GLOBAL = Path("/proc/net/if_inet6"), "00"


def listening_address(cluster: ClusterSpec, nodes: str) -> str:
    """Returns the address for this worker's sockets: IPv4, or IPv6 on a host without IPv4.

    Args:
        nodes: hostlist of the attempt's nodes; empty on one machine.
    Raises:
        ClusterError: no such interface or subnet here; lists the existing ones.
    """
    if cluster.scheduler == "local":
        return LOOPBACK
    if cluster.interface:
        return _named_address(cluster.interface)
    return _address_towards(_other_nodes(nodes))


def external_address(cluster: ClusterSpec, nodes: str) -> str:
    """Returns the address for services used by hosts outside this job: login nodes, and the trial's other
    jobs.

    As ``listening_address``; if that is loopback, because the job has one node, the address towards the
    host that submitted the job, else that of the default route.

    Args:
        nodes: hostlist of this job's nodes; empty on one machine.
    Raises:
        ClusterError: as ``listening_address``.
    """
    address = listening_address(cluster, nodes)
    if cluster.scheduler == "local" or cluster.interface or address != LOOPBACK:
        return address
    submitted_from = os.environ.get("SLURM_SUBMIT_HOST", "")
    return _address_towards([*filter(None, [submitted_from]), ANYWHERE, ANYWHERE_IPV6])


def ports(cluster: ClusterSpec) -> range | None:
    """Returns the ports that workers may listen on; None: any free one."""
    if not cluster.port_range:
        return None
    low, _, high = cluster.port_range.partition("-")
    return range(int(low), int(high) + 1)


def raise_open_file_limit() -> None:
    """Raises the limit of open files of this process and its children to the maximum: peers, and
    unauthenticated connections, need a socket each and must not prevent a checkpoint from being opened."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def interface_variables(cluster: ClusterSpec, attempt: AttemptFiles) -> dict[str, str]:
    """Returns the variables that make gloo and NCCL use the interface of our own sockets, and only that
    one: without the ``=``, NCCL uses every interface whose name starts with it."""
    record = read_record(AttemptRecord, attempt.record)
    address = listening_address(cluster, record.nodes if record else "")
    names = [name for name, found in _interfaces() if found == address]
    if not names:
        return {}
    return {"GLOO_SOCKET_IFNAME": names[0], "NCCL_SOCKET_IFNAME": f"={names[0]}"}


def _other_nodes(nodes: str) -> list[str]:
    """Returns the nodes of a hostlist without this node, under any of its names."""
    name = socket.gethostname()
    here = {name, name.partition(".")[0], os.environ.get("SLURMD_NODENAME")}
    return [node for node in expand(nodes) if node not in here] if nodes else []


def _address_towards(others: Iterable[str]) -> str:
    """Returns our address on the route to the first of ``others`` that has one: IPv4 if possible, else
    IPv6; loopback if there is none."""
    by_ipv6 = []
    for node in others:
        try:
            targets = [found[4] for found in socket.getaddrinfo(node, 9, 0, socket.SOCK_DGRAM)]
        except OSError:
            continue
        by_ipv6 += [target for target in targets if ":" in str(target[0])][:1]
        for target in [target for target in targets if ":" not in str(target[0])][:1]:
            if own := _own_address(target):
                return own
    return next(filter(None, map(_own_address, by_ipv6)), LOOPBACK)


def _own_address(target: tuple[Any, ...]) -> str:
    """Returns our address on the route to ``target``; empty without a route, or if the address is
    loopback or link-local and thus useless to other hosts."""
    family = socket.AF_INET6 if ":" in str(target[0]) else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing: it only consults the routing table
            found = str(probe.getsockname()[0])
    except OSError:
        return ""
    return "" if found.startswith(("127.", "fe80:")) or found == "::1" else found


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
    """Returns (name, address) of every interface that has one: IPv4, then IPv6."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                reply = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue
            found.append((name, socket.inet_ntoa(reply[20:24])))
    try:
        lines = _IPV6.read_text(encoding="ascii").splitlines()
    except OSError:
        lines = []
    return found + ipv6_interfaces(lines)


def ipv6_interfaces(lines: Iterable[str]) -> list[tuple[str, str]]:
    """Returns (name, address) from lines of /proc/net/if_inet6, for addresses of global scope (pure)."""
    fields = [line.split() for line in lines]
    return [
        (name, str(ipaddress.IPv6Address(int(address, 16))))
        for address, _, _, scope, _, name in fields
        if scope == _GLOBAL
    ]
