"""Rows in memory that two processes share: used where they are, free afterwards, nobody else's."""

import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import golden
import msgspec
import pytest
import torch

from realsys.api.errors import RemoteError, WaitTimeout
from realsys.data.transfer import shared_memory, tensor_client
from realsys.data.transfer.shared_memory import SegmentMaps, SegmentPool
from realsys.data.transfer.tensor_client import TensorClient
from realsys.data.transfer.tensor_server import TensorServer
from realsys.data.transfer.tensor_store import TensorStore
from realsys.transport.codec import ProtocolError
from realsys.transport.curve_keys import TrialKeypairs

pytestmark = pytest.mark.process

KEYS = TrialKeypairs.generate()
WHO = {"trial": "ppo-math/run1", "attempt": 1, "keypairs": KEYS}
BIG = 100_000  # numbers: enough to go through memory
MIB = 1 << 20


def numbers(seed: int) -> torch.Tensor:
    return torch.arange(BIG) + seed


@dataclass
class Pair:
    """A server and a client, here in one process."""

    server: TensorServer
    client: TensorClient

    def get(self, *names: str, timeout_s: float = 240) -> list[torch.Tensor]:
        return self.client.fetch(0, "x", names, timeout_s=timeout_s)

    @property
    def num_in_use(self) -> int:
        """Slots that the server may not use again."""
        for segment in self.server._pool._segments.values():
            segment.collect()
        return sum(len(s._allocated) for s in self.server._pool._segments.values())


@contextmanager
def paired(store: TensorStore | None = None) -> Iterator[Pair]:
    if store is None:
        store = TensorStore()
        store.put_rows("x", [(name, numbers(i)) for i, name in enumerate("abc")])
    server = TensorServer(store, name="model_worker/0", **WHO).start()
    client = TensorClient([server.endpoint], store=TensorStore(), **WHO)
    try:
        yield Pair(server, client)
    finally:
        client.close()
        server.stop()


def assert_is(found: torch.Tensor, seed: int) -> None:
    assert torch.equal(found, numbers(seed))


# ---- whose a slot is -------------------------------------------------------------------------------


def test_rows_in_use_are_left_alone_and_their_place_is_used_again_later():
    with paired() as pair:
        (kept,) = pair.get("a")
        for _ in range(50):
            (b,), (c,) = pair.get("b"), pair.get("c")
            assert_is(b, 1)
            assert_is(c, 2)
            assert pair.num_in_use == 3
            del b, c
        assert_is(kept, 0)
        assert pair.num_in_use == 1
        del kept
        assert pair.num_in_use == 0
        assert pair.server._pool.numbers == (1,)
        assert pair.client.num_bytes == Counter(memory=101 * BIG * 8)


def test_a_row_of_many_holds_the_place_of_all():
    with paired() as pair:
        rows = pair.get("a", "b")
        part = rows[1][10:20]
        del rows
        assert pair.num_in_use == 1
        assert part.tolist() == list(range(11, 21))
        del part
        assert pair.num_in_use == 0


def test_a_cleared_store_gives_the_place_back():
    with paired() as pair:
        pair.client.fetch_all([(0, "x", ("a", "b"))], timeout_s=240)
        assert pair.num_in_use == 1
        pair.client._store.clear(["a"])
        assert pair.num_in_use == 1
        pair.client._store.clear(["b"])
        assert pair.num_in_use == 0


class SlowOnce(TensorStore):
    """Answers its first reader when told."""

    def __init__(self):
        super().__init__()
        self.num_asked, self.may_answer = 0, threading.Event()

    def rows(self, key, ids):
        self.num_asked += 1
        if self.num_asked == 1:
            self.may_answer.wait(60)
        return super().rows(key, ids)


def test_the_slot_of_a_late_answer_is_given_back():
    store = SlowOnce()
    store.put_rows("x", [("a", numbers(0)), ("b", numbers(1))])
    with paired(store) as pair:
        with pytest.raises(WaitTimeout):
            pair.get("a", timeout_s=0.05)
        store.may_answer.set()
        (found,) = pair.get("b")
        assert_is(found, 1)
        assert pair.num_in_use == 1


def test_rows_that_cannot_be_packed_leave_no_slot_behind(monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object, **__: object) -> None:
        raise MemoryError("no memory left")

    with paired() as pair:
        with monkeypatch.context() as patch:
            patch.setattr("realsys.data.transfer.tensor_server.packed_bytes", fail)
            with golden.raises(RemoteError):
                pair.get("a")
        assert pair.num_in_use == 0
        assert_is(pair.get("a")[0], 0)


def test_unused_memory_beyond_what_is_kept_is_let_go_and_forgotten_by_the_client():
    pool, maps = SegmentPool(segment_bytes=MIB, keep_bytes=2 * MIB), SegmentMaps()
    for num_mib in (1, 2, 3):  # each too large for the ones before it
        slot, memory = pool.allocate(num_mib * MIB)
        memory.fill_(num_mib)
        rows = maps.rows(0, slot)
        assert rows[-1] == num_mib
        del rows, memory
    assert pool.numbers == (2, 3)  # 1 + 2 + 3 MiB; the oldest goes, when the third was made
    maps.keep_only(0, pool.numbers)
    assert sorted(segment for _, segment, _ in maps._maps) == [2, 3]
    maps.keep_only(1, ())  # another worker's
    assert len(maps._maps) == 2


# ---- who may open it -----------------------------------------------------------------------------


def test_a_segment_has_no_name_is_ours_alone_and_cannot_shrink():
    pool = SegmentPool()
    slot, _ = pool.allocate(1000)
    there = f"/proc/{slot.pid}/fd/{slot.fd}"
    assert stat.S_IMODE(os.stat(there).st_mode) == 0o600
    assert os.readlink(there).startswith("/memfd:")
    fd = os.open(there, os.O_RDWR)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    os.close(fd)
    pool.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_another_user_cannot_open_it():
    pool = SegmentPool()
    slot, _ = pool.allocate(1000)
    code = f"import os; os.setuid(65534); os.open('/proc/{slot.pid}/fd/{slot.fd}', os.O_RDONLY)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "PermissionError" in done.stderr
    pool.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"offset": 0},  # the flags
        {"offset": 1 << 40},
        {"num_bytes": 1 << 40},
        {"num_bytes": 0},
        {"num_bytes": -1},
        {"index": -1},
        {"index": 4096},
        {"index": 7},  # not given to anybody
        {"size": 4096 * 2},
        {"inode": 1},
        {"fd": 0},
        {"fd": -1},
    ],
    ids=str,
)
def test_a_slot_that_is_none_is_refused(changes):
    pool = SegmentPool()
    slot, _ = pool.allocate(1000)
    if "fd" in changes:
        with tempfile.TemporaryFile() as other:  # 0 is whatever the tests were started with
            changes = {"fd": other.fileno() if changes["fd"] == 0 else changes["fd"]}
            with golden.raises(ProtocolError):
                SegmentMaps().rows(0, msgspec.structs.replace(slot, **changes))
    else:
        with golden.raises(ProtocolError):
            SegmentMaps().rows(0, msgspec.structs.replace(slot, **changes))
    pool.close()


def test_a_file_that_could_shrink_under_us_is_refused(tmp_path: Path):
    pool = SegmentPool()
    slot, _ = pool.allocate(1000)
    with (tmp_path / "f").open("w+b") as file:
        file.write(bytes([1]) * slot.size)
        file.flush()
        inode = os.fstat(file.fileno()).st_ino
        false = msgspec.structs.replace(slot, fd=file.fileno(), inode=inode)
        with golden.raises(ProtocolError):
            SegmentMaps().rows(0, false)
    pool.close()


# ---- where it does not work ------------------------------------------------------------------------


def test_memory_that_cannot_be_opened_is_given_back_and_frames_come_instead(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(shared_memory, "_open", refuse)
    with paired() as pair:
        for _ in range(2):
            assert_is(pair.get("a")[0], 0)
        assert pair.num_in_use == 0
        assert pair.client.num_bytes == Counter(socket=2 * BIG * 8)
    assert [r.message for r in caplog.records if r.levelname == "WARNING"] == [
        "memory not shared peer=model_worker/0 error=[Errno 13] Permission denied"
    ]


def test_a_system_that_gives_no_memory_is_served_through_sockets(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "memfd_create", refuse)
    with paired() as pair:
        for _ in range(2):
            assert_is(pair.get("a")[0], 0)
        assert pair.client.num_bytes == Counter(socket=2 * BIG * 8)


@pytest.mark.parametrize("host", ["", "another boot"])
def test_another_host_is_served_through_sockets(monkeypatch: pytest.MonkeyPatch, host: str):
    monkeypatch.setattr(tensor_client, "host_name", lambda: host)
    with paired() as pair:
        assert_is(pair.get("a")[0], 0)
        assert pair.client.num_bytes == Counter(socket=BIG * 8)
        assert pair.server._pool.numbers == ()


# ---- processes that are killed -----------------------------------------------------------------------

START = """
import json, sys
import torch
from realsys.data.transfer.tensor_client import TensorClient
from realsys.data.transfer.tensor_server import TensorServer
from realsys.data.transfer.tensor_store import TensorStore
from realsys.transport.curve_keys import TrialKeypairs
torch.set_num_threads(1)
keys = TrialKeypairs(**{k: bytes.fromhex(v) for k, v in json.loads(sys.stdin.readline()).items()})
who = {"trial": "ppo-math/run1", "attempt": 1, "keypairs": keys}
store = TensorStore()
"""
SERVE = """
store.put_rows("x", [(name, torch.arange(100_000) + i) for i, name in enumerate("abc")])
print(TensorServer(store, name="model_worker/0", **who).start().endpoint, flush=True)
"""
HOLD = """
client = TensorClient([sys.stdin.readline().strip()], store=store, **who)
client.fetch_all([(0, "x", ("a",)), (0, "x", ("b",))], timeout_s=240)
print(dict(client.num_bytes), flush=True)
"""
KEY_FIELDS = ("server_public", "client_public", "server_secret", "client_secret")
UNTIL_THE_PARENT_ENDS = "sys.stdin.read()"


@contextmanager
def started(code: str) -> Iterator[subprocess.Popen[str]]:
    """A process of its own that has our keys; it ends when its standard input does."""
    words = [sys.executable, "-c", START + code + UNTIL_THE_PARENT_ENDS]
    process = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    try:
        keys = {name: getattr(KEYS, name).hex() for name in KEY_FIELDS}
        process.stdin.write(json.dumps(keys) + "\n")
        yield process
    finally:
        process.kill()
        process.wait(60)
        process.stdin.close()
        process.stdout.close()


def kill(process: subprocess.Popen[str]) -> None:
    """As a power cut would; what it shares has no name that could stay behind."""
    maps = Path(f"/proc/{process.pid}/maps").read_text()
    assert "/memfd:realsys-1 (deleted)" in maps
    assert "/dev/shm" not in maps
    process.send_signal(signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL


def test_rows_outlive_the_server_that_is_killed_and_nothing_stays_behind():
    with started(SERVE) as process:
        client = TensorClient([process.stdout.readline().strip()], store=TensorStore(), **WHO)
        client.fetch_all([(0, "x", ("a", "b"))], timeout_s=240)
        assert client.num_bytes == Counter(memory=2 * BIG * 8)
        kill(process)
        a, b = client._store.rows("x", ["a", "b"])
        assert_is(a, 0)
        assert_is(b, 1)
        b += 1  # ours to write
        with golden.raises(WaitTimeout):
            client.fetch(0, "x", ["c"], timeout_s=0.2)
        client.close()
        assert_is(b, 2)


def test_what_a_killed_client_had_is_used_again():
    with paired() as pair, started(HOLD) as process:
        pair.server._pool = SegmentPool(
            segment_bytes=2 * (BIG * 8 + 4096)
        )  # room for its rows alone
        process.stdin.write(pair.server.endpoint + "\n")
        assert process.stdout.readline().strip() == str({"memory": 2 * BIG * 8})
        assert pair.num_in_use == 2
        kill(process)
        for _ in range(3):
            assert_is(pair.get("c")[0], 2)
        assert pair.num_in_use == 0
        assert pair.server._pool.numbers == (1,)
