"""What strangers do to a port: raw connections, ZMTP by hand, ZeroMQ peers with all kinds of keys.

For test_attackers.py. An attack returns what it got out of the server; judging it is the test's matter.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import zmq

from realsys.transport.curve_keys import TrialKeypairs
from realsys.trial.liveness import processes_of

LISTENING = "0A"  # state of a line in /proc/net/tcp
MIB = 1 << 20


@dataclass(frozen=True)
class Door:
    """A port of a trial, and which of its servers listens there."""

    host: str
    port: int
    server: str  # "control" or "data"

    @property
    def endpoint(self) -> str:
        """For ZeroMQ."""
        return f"tcp://{self.host}:{self.port}"


def known_doors(log: Path) -> list[Door]:
    """The doors that a model worker has told about, in its log."""
    found = re.findall(
        r"registered control=tcp://(.*?):(\d+) data=tcp://(.*?):(\d+)", log.read_text()
    )
    control_host, control, data_host, data = found[-1]
    return [Door(control_host, int(control), "control"), Door(data_host, int(data), "data")]


def listening_ports(trial_dir: Path) -> dict[int, set[int]]:
    """Every TCP port that a process of the trial listens on, with the pids that hold it."""
    inodes: dict[str, int] = {}
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == LISTENING:
                inodes[rest[5]] = int(local.rpartition(":")[2], 16)
    held: dict[int, set[int]] = {}
    for process in processes_of(trial_dir):
        for link in Path(f"/proc/{process.pid}/fd").glob("*"):
            with suppress(OSError):  # closed meanwhile
                inode = os.readlink(link).removeprefix("socket:[").removesuffix("]")
                if inode in inodes:
                    held.setdefault(inodes[inode], set()).add(process.pid)
    return held


# ---- bytes by hand -------------------------------------------------------------------------------


def greeting(mechanism: bytes, *, minor: int = 0) -> bytes:
    """ZMTP 3 begins so (rfc.zeromq.org/spec/23)."""
    signature = b"\xff" + bytes(8) + b"\x7f"
    return signature + bytes([3, minor]) + mechanism.ljust(20, b"\0") + bytes(32)


def command(name: bytes, data: bytes) -> bytes:
    """A ZMTP command of up to 255 bytes."""
    body = bytes([len(name)]) + name + data
    return b"\x04" + bytes([len(body)]) + body


def zmtp_1(message: bytes) -> bytes:
    """Version 1 knows no handshake: an empty identity, then a message."""
    return b"\x01\x00" + b"\xff" + (len(message) + 1).to_bytes(8, "big") + b"\x00" + message


def zmtp_2(message: bytes) -> bytes:
    """Version 2: a signature, revision 1, a DEALER, an empty identity, then a message."""
    begin = b"\xff" + bytes(7) + b"\x01\x7f" + b"\x01\x05" + b"\x00\x00"
    return begin + b"\x02" + len(message).to_bytes(8, "big") + message


@contextmanager
def connected(door: Door) -> Iterator[socket.socket]:
    """A plain connection."""
    with socket.create_connection((door.host, door.port), timeout=240) as end:
        yield end


def say(door: Door, *parts: bytes, pause_s: float = 0.0, listen_s: float = 0.5) -> bytes:
    """Sends the parts, however much of it is taken; returns what comes back until the end."""
    with connected(door) as end:
        with suppress(OSError):
            for part in parts:
                end.sendall(part)
                time.sleep(pause_s)
        return listen(end, listen_s)


def listen(end: socket.socket, listen_s: float) -> bytes:
    """All that comes in this time, or until the connection is cut."""
    answer, until_s = b"", time.monotonic() + listen_s
    with suppress(OSError):
        while (left_s := until_s - time.monotonic()) > 0:
            end.settimeout(left_s)
            if not (data := end.recv(65536)):
                break
            answer += data
    return answer


def flood(door: Door, *, claimed: int, limit: int) -> int:
    """Begins a handshake with a command of ``claimed`` bytes; returns how many of ``limit`` it took."""
    taken, chunk = 0, bytes(MIB)
    with connected(door) as end, suppress(OSError):
        end.sendall(greeting(b"CURVE"))
        end.sendall(b"\x06" + claimed.to_bytes(8, "big"))
        while taken < limit:
            end.sendall(chunk)
            taken += len(chunk)
    return taken


def resident_mib(pid: int) -> float:
    """Memory of a process now."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MIB


# ---- peers ---------------------------------------------------------------------------------------


def with_keys(server: TrialKeypairs, client: TrialKeypairs) -> dict[int, bytes]:
    """Socket options of a peer that believes in ``server`` and is ``client``."""
    return {
        zmq.CURVE_SERVERKEY: server.server_public,
        zmq.CURVE_PUBLICKEY: client.client_public,
        zmq.CURVE_SECRETKEY: client.client_secret,
    }


@contextmanager
def peer(door: Door, options: dict[int, bytes]) -> Iterator[zmq.Socket[bytes]]:
    """A ZeroMQ peer with these options."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as end:
        end.linger = 0
        for option, value in options.items():
            end.setsockopt(option, value)
        end.connect(door.endpoint)
        yield end


def ask(
    door: Door, options: dict[int, bytes], *messages: list[bytes], wait_s: float = 60.0
) -> list[list[bytes]]:
    """The answers to these messages, as far as they come in time; the last one waits longest."""
    with peer(door, options) as end:
        for message in messages:
            end.send_multipart(message)
        answers: list[list[bytes]] = []
        while len(answers) < len(messages) and end.poll(int(wait_s * 1000)):
            answers.append(end.recv_multipart())
        return answers
