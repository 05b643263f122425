"""Rules for tests/unit/rewards/test_rule_guard.py, in a file as a user gives one by --import."""

from __future__ import annotations

import asyncio
import builtins
import ctypes
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from realsys.api.basics.rule_permissions import RulePermissions
from realsys.api.errors import ClusterError
from realsys.api.registry import register_reward

SEEN: list[str] = []


def length(response: str) -> float:
    """Number of letters; what earlier answers left is visible to it."""
    assert SEEN == []
    assert not hasattr(json, "poisoned")
    assert threading.active_count() == 1
    assert os.listdir(".") == []
    assert "POISON" not in os.environ
    return float(len(response))


def poisons(response: str) -> float:
    """Does to its process what the answer says, and scores 1."""
    if response == "clean":
        return length(response)
    SEEN.append(response)
    if response == "float":
        builtins.float = lambda value: 1.0  # type: ignore[assignment,misc]
    elif response == "module":
        json.poisoned = True  # type: ignore[attr-defined]
        sys.modules["realsys.rewards.scores"] = None  # type: ignore[assignment]
    elif response == "file":
        Path("left").write_text("x")
        Path(os.environ["TMPDIR"], "deep/er").mkdir(parents=True)
    elif response == "thread":
        threading.Thread(target=time.sleep, args=(3600,), daemon=False).start()
    elif response == "environment":
        os.environ["POISON"] = "1"
    return 1.0


def noise(response: str) -> float:
    """A number that depends on the answer alone."""
    return random.random()


def sees(response: str) -> dict[str, float]:
    """What of the process that started it is visible."""
    names = [os.readlink(f"/proc/self/fd/{fd}") for fd in range(256) if is_open(fd)]
    return {
        "reward": 1.0,
        "variables": float(len(os.environ)),
        "has_key": float("TRIAL_KEY" in os.environ),
        "pipes": float(sum(name.startswith("pipe:") for name in names)),
        "sockets": float(sum(name.startswith("socket:") for name in names)),
        "files": float(sum(name.startswith("/") and name != "/dev/null" for name in names)),
        "host": float(os.getppid()),
    }


def is_open(fd: int) -> bool:
    """Whether this process has the descriptor; /proc is not for rules to list."""
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def forges(response: str) -> float:
    """Writes into every descriptor that it finds, then ends."""
    for fd in range(3, 64):
        try:
            os.write(fd, response.encode("latin-1"))
        except OSError:
            continue
    os._exit(0)


def uses(response: str) -> float:
    """Does what the answer names, which only some registrations declare."""
    kind, _, value = response.partition(" ")
    if kind == "connect":
        socket.create_connection(("127.0.0.1", int(value)), timeout=60).close()
    elif kind == "read":
        assert Path(value).read_text()
    elif kind == "write":
        Path(value).write_text("x")
    elif kind == "run":
        assert subprocess.run(["true"], check=True).returncode == 0
    elif kind == "variable":
        assert os.environ[value]
    elif kind == "kill":
        os.kill(int(value), signal.SIGTERM)
    elif kind == "bare":  # past everything that Python would notice
        libc = ctypes.CDLL(None, use_errno=True)
        calls = {"socket": (41, 2, 1, 0), "fork": (57, 0, 0, 0), "execve": (59, 0, 0, 0)}
        found = libc.syscall(*map(ctypes.c_long, calls[value]))
        assert (found, ctypes.get_errno()) == (-1, 1), (found, ctypes.get_errno())
    elif kind == "leave":
        subprocess.Popen(["sleep", value], start_new_session=True)
        Path("left").write_text("")
    elif kind == "spin":
        while True:
            pass
    elif kind == "sleep":
        time.sleep(3600)
    elif kind == "hoard":
        assert len(bytearray(1 << 40))
    elif kind == "tower":
        assert 9**9**9**9
    elif kind == "evaluate":
        assert eval(value)
    return 1.0


def ranks(response: list[str]) -> list[float]:
    """All answers in one process."""
    SEEN.extend(response)
    return [float(sorted(SEEN).index(text)) for text in response]


@dataclass(kw_only=True)
class Prepared:
    """Counts how often it is prepared."""

    base: float = 1.0
    times: int = 0

    @property
    def permissions(self) -> RulePermissions:
        """By its arguments."""
        return RulePermissions(cpu_s=5.0 + self.base)

    def prepare(self) -> None:
        """Loads what is expensive."""
        self.times += 1

    def __call__(self, response: str, record: Any, token_ids: tuple[int, ...]) -> dict[str, float]:
        self.times += 10
        assert type(token_ids) is tuple
        return {"reward": self.base + self.times, "record": float(record["number"])}


async def service(response: str) -> float:
    """One process for all answers."""
    SEEN.append(response)
    await asyncio.sleep(0.001 * (int(response) % 3))
    return os.getpid() if response == "0" else float(len(SEEN) > 0)


async def broken(response: str) -> float:
    """What no answer would fare better with."""
    raise ClusterError("no user namespaces", where="n1", fix="enable them")


async def asks(response: str) -> float:
    """Connects without blocking."""
    _, writer = await asyncio.open_connection("127.0.0.1", int(response))
    writer.close()
    return 1.0


for rule in (length, poisons, noise, sees, forges, service, asks, broken):
    register_reward(rule.__name__, rule)
register_reward("uses", uses, cpu_s=0.3, memory_mib=64)
register_reward("uses_quickly", uses, deadline_s=1.0)
register_reward("connects", uses, network=True)
register_reward("runs", uses, programs=True)
register_reward("reads", uses, reads=["/etc/shadow", "/etc/hostname"])
register_reward("named", uses, env=["TRIAL_KEY"])
register_reward("asks_network", asks, network=True)
register_reward("ranks", ranks, batched=True)
register_reward("prepared", Prepared)
