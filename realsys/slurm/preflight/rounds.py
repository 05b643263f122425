"""Defines the requests to the nodes and their order (pure); drive.py executes them.

1. One node holds a lock, and meanwhile 2. every node checks itself and measures its GPUs and the
all-reduce among them. 3. In rounds, pairs of nodes measure theirs, each in processes of their own, so
that a hanging node spoils only its own pairs. 4. All nodes together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LOOK_S = 240  # the first import of torch from a busy file system alone may take a minute or two
REDUCE_S = 150
HELD_S = 60  # for the node that is to hold the lock
STARTS_S = 60
MOST_ROUNDS = 3  # of pairs
GPU_BYTES, CPU_BYTES = 512 << 20, 4 << 20  # of one all-reduce, as one rank has them


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is measured, and where.

    Attributes:
        nodes: Slurm's names, in its order.
        device: ``cuda`` (NCCL), or ``cpu`` (gloo), which measures the network only.
        processes: per node: its GPUs, or this many processes on its CPUs.
        gpus, gpu_type: of a node, from the site file; 0 and None: not compared.
        lock: a file on the file root; "" if locks are not tested.
        interface, ports: as in the site file.
        environment: variables of the site.
        look_s, reduce_s: time limit of a node's own checks, and of an all-reduce with others.
        starts_s: additional time for srun and an image to start a step and to end it.
    """

    nodes: tuple[str, ...]
    device: str = "cuda"
    processes: int = 8
    gpus: int = 0
    gpu_type: str | None = None
    lock: str = ""
    interface: str = ""
    ports: tuple[int, int] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    look_s: float = LOOK_S
    reduce_s: float = REDUCE_S
    starts_s: float = STARTS_S

    @property
    def num_bytes(self) -> int:
        """Bytes of one all-reduce."""
        return GPU_BYTES if self.device == "cuda" else CPU_BYTES

    @property
    def longest_s(self) -> float:
        """Seconds for all steps if everything hangs."""
        several = len(self.nodes) > 1
        rounds = len(pair_rounds(self.nodes)) + (len(self.nodes) > 2)
        held_s = HELD_S + self.starts_s if several else 0
        return held_s + self.look_s + self.starts_s + rounds * (self.reduce_s + self.starts_s)


def program() -> str:
    """Returns the text that is sent to the nodes; it is never imported here, where no torch is."""
    return Path(__file__).with_name("node_program.py").read_text(encoding="utf-8")


def hold_request(wanted: Wanted) -> dict[str, Any]:
    """Returns the request for the node that holds the lock."""
    return {"stage": "hold", "lock": wanted.lock, "limit_s": wanted.look_s + wanted.starts_s}


def look_request(wanted: Wanted) -> dict[str, Any]:
    """Returns the request for every node by itself."""
    return {
        **_request(wanted, wanted.look_s),
        "stage": "look",
        "lock": wanted.lock if len(wanted.nodes) > 1 else "",
        "matmul": True,
    }


def reduce_request(
    wanted: Wanted,
    groups: Sequence[Sequence[str]],
    facts: Mapping[str, Mapping[str, Any]],
    turn: int,
) -> dict[str, Any]:
    """Returns the request for all-reduces of several groups of nodes side by side.

    Args:
        facts: node → its own record (``node`` of the node program).
        turn: count from 0; each turn uses another port.
    """
    made = [
        {
            "nodes": list(group),
            "address": facts[group[0]]["address"],
            "port": facts[group[0]]["ports"][turn % len(facts[group[0]]["ports"])],
        }
        for group in groups
    ]
    request = {"stage": "reduce", "groups": made, "matmul": False}
    return {**_request(wanted, wanted.reduce_s), **request}


def pair_rounds(nodes: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Returns at most ``MOST_ROUNDS`` rounds of pairs without repeated nodes; each node is in equally many
    pairs, with another partner each time (the circle method of tournaments)."""
    ring: list[str | None] = list(nodes)
    if len(ring) < 2:
        return []
    if len(ring) % 2:
        ring.append(None)
    found = []
    for _ in range(min(MOST_ROUNDS, len(ring) - 1)):
        half = len(ring) // 2
        sides = zip(ring[:half], reversed(ring[half:]), strict=True)
        found.append([(a, b) for a, b in sides if a is not None and b is not None])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return found


def bus_bandwidth(num_bytes: int, seconds: float, ranks: int) -> float:
    """Returns bytes a second that each link of a ring carries in an all-reduce: 2 (n - 1) / n · bytes /
    s.

    nccl-tests, doc/PERFORMANCE.md, "AllReduce": what the hardware does, whatever the number of ranks.
    """
    return 2 * (ranks - 1) / ranks * num_bytes / seconds


def _request(wanted: Wanted, limit_s: float) -> dict[str, Any]:
    cuda = wanted.device == "cuda"
    return {
        "nodes": list(wanted.nodes),
        "device": wanted.device,
        "processes": wanted.processes,
        "interface": wanted.interface,
        "ports": list(wanted.ports) if wanted.ports else None,
        "environment": dict(wanted.environment),
        "limit_s": limit_s,
        "bytes": wanted.num_bytes,
        "matmul_s": 3.0 if cuda else 0.2,
        "reduce_s": 3.0 if cuda else 0.3,
    }
