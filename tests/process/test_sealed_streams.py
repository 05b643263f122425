"""Tensors between hosts by sealed streams: nobody reads, changes, repeats or holds them up for ever."""

import socket as tcp
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
import torch

from realsys.api.errors import ClusterError, RemoteError, WaitTimeout
from realsys.data.transfer import sealed_receiver
from realsys.data.transfer.sealed_frames import FRAME_BYTES, HELLO_BYTES, TAG_BYTES, hello
from realsys.data.transfer.sealed_sender import SealedStream
from realsys.data.transfer.tensor_client import MAX_STREAMS, TensorClient
from realsys.data.transfer.tensor_server import MIN_SEALED_BYTES, TensorServer
from realsys.data.transfer.tensor_store import TensorStore
from realsys.transport.codec import ProtocolError
from realsys.transport.curve_keys import TrialKeypairs

pytestmark = pytest.mark.process

KEYS = TrialKeypairs.generate()
WHO = {"trial": "ppo-math/run1", "attempt": 1, "keypairs": KEYS}
WAIT_S = 240.0
NUM_FRAMES = 3
CONNECT = tcp.create_connection  # tests put another one in its place
SEALED_BYTES = FRAME_BYTES + TAG_BYTES  # of a frame on the wire


def row(seed: int) -> torch.Tensor:
    """Three frames of bytes that no other seed has."""
    return torch.randint(
        0, 256, (NUM_FRAMES * FRAME_BYTES,), dtype=torch.uint8, generator=torch.manual_seed(seed)
    )


ROWS = {"a": row(0), "b": row(1)}


def threads() -> list[str]:
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("sealed"))


def eventually(is_so: Callable[[], bool]) -> None:
    until_s = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < until_s
        time.sleep(0.01)


@contextmanager
def served() -> Iterator[TensorServer]:
    store = TensorStore()
    store.put_rows("x", ROWS.items())
    server = TensorServer(store, name="model_worker/0", **WHO).start()
    try:
        yield server
    finally:
        server.stop()
        assert threads() == []


@contextmanager
def client_of(server: TensorServer) -> Iterator[TensorClient]:
    client = TensorClient([server.endpoint], may_share=False, **WHO)
    try:
        yield client
    finally:
        client.close()


def get(client: TensorClient, *names: str, timeout_s: float = WAIT_S) -> list[torch.Tensor]:
    found = {}
    sources = [(0, "x", (name,)) for name in names]
    for (_, _, (name,)), (x,) in client.stream(sources, timeout_s=timeout_s, in_flight=2):
        found[name] = x
    return [found[name] for name in names]


def assert_right(client: TensorClient) -> None:
    for x, name in zip(get(client, "a", "b", "a"), "aba", strict=True):
        assert torch.equal(x, ROWS[name])


# ---- somebody in between ---------------------------------------------------------------------------


class Between:
    """Reads what a server sends, message by message, and passes on what ``change`` makes of it.

    Args:
        change: (number of the connection, frames of a message) → what goes on; None: cut it here.
    """

    def __init__(self, change: Callable[[int, list[bytes]], list[bytes] | None]) -> None:
        self._change = change
        self._sockets: list[tcp.socket] = []
        self._threads: list[threading.Thread] = []
        self.hellos: list[bytes] = []
        self.addresses: list[tuple[str, int]] = []
        self.seen = b""

    def connect(self, address: tuple[str, int], timeout: float | None = None) -> tcp.socket:
        """Instead of ``socket.create_connection``."""
        server = CONNECT(address)
        ours, theirs = tcp.socketpair(tcp.AF_UNIX)
        self._sockets += [server, ours]
        self.addresses.append(address)
        number = len(self._threads)
        thread = threading.Thread(target=self._pass_on, args=(number, server, ours))
        self._threads.append(thread)
        thread.start()
        return _Socket(fileno=theirs.detach())

    def _pass_on(self, number: int, server: tcp.socket, ours: tcp.socket) -> None:
        with suppress(OSError), server, ours:
            said = ours.recv(HELLO_BYTES, tcp.MSG_WAITALL)
            self.hellos.append(said)
            server.sendall(said)
            while True:
                frames = [server.recv(SEALED_BYTES, tcp.MSG_WAITALL) for _ in range(NUM_FRAMES)]
                if not all(frames):
                    return
                self.seen += b"".join(frames)
                passed = self._change(number, frames)
                if passed is None:
                    return
                for frame in passed:
                    ours.sendall(frame)

    def close(self) -> None:
        for socket in self._sockets:
            with suppress(OSError):
                socket.shutdown(tcp.SHUT_RDWR)
        for thread in self._threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()


class _Socket(tcp.socket):
    """One of a pair that takes TCP's options for granted."""

    def setsockopt(self, *option: object) -> None:
        pass


@pytest.fixture
def between(monkeypatch):
    """Puts somebody between client and server."""
    made = []

    def put(change):
        made.append(Between(change))
        monkeypatch.setattr(sealed_receiver.tcp, "create_connection", made[-1].connect)
        return made[-1]

    yield put
    for one in made:
        one.close()


def test_nobody_in_between_reads_anything(between):
    someone = between(lambda number, frames: frames)
    with served() as server, client_of(server) as client:
        assert_right(client)
        assert client.num_bytes == Counter(socket=3 * len(ROWS["a"]))
    assert len(someone.seen) == 3 * NUM_FRAMES * SEALED_BYTES
    for x in ROWS.values():
        plain = x.numpy().tobytes()
        assert not any(
            plain[i : i + 8] in someone.seen for i in range(0, len(plain), FRAME_BYTES // 4)
        )
    assert len(someone.hellos) == 1  # one connection for all


def flipped(frames):
    changed = bytearray(frames[1])
    changed[777] ^= 16
    return [frames[0], bytes(changed), frames[2]]


@pytest.mark.parametrize(
    "change",
    [
        flipped,
        lambda f: [f[1], f[0], f[2]],
        lambda f: [f[0], f[0], f[1]],
        lambda f: [f[0], f[2], f[2]],
        lambda f: [f[0], bytes(SEALED_BYTES), f[2]],
        lambda f: [f[0][:-1], f[1], f[2], b"x"],
        lambda f: [b"\0" * TAG_BYTES, *f],
    ],
    ids=["bit", "swapped", "repeated", "left_out", "zeros", "shifted", "inserted"],
)
def test_what_was_changed_on_the_way_is_refused_and_the_next_fetch_is_right(between, change):
    between(lambda number, frames: change(frames) if number == 0 else frames)
    with served() as server, client_of(server) as client:
        with pytest.raises(ProtocolError, match="changed"):
            get(client, "a")
        assert client.num_bytes == Counter()
        assert_right(client)


def test_a_message_that_was_recorded_is_refused_in_its_own_stream_and_in_a_later_one(between):
    """The same row, so the same bytes were sent before."""
    recorded: list[list[bytes]] = []

    def replay(number, frames):
        recorded.append(frames)
        return recorded[0]

    between(replay)
    with served() as server, client_of(server) as client:
        for expected in (1, 2):  # the second one has a stream, and so a key, of its own
            with pytest.raises(ProtocolError, match="changed"):
                get(client, "a", *(["a"] if expected == 1 else []))
        assert len(recorded) >= 3


def test_a_connection_that_is_cut_in_a_message_is_opened_anew(between):
    someone = between(lambda number, frames: None if number == 0 else frames)
    with served() as server, client_of(server) as client:
        assert_right(client)
        assert len(someone.hellos) == 2
        assert len(set(someone.hellos)) == 2  # a key is used once


def test_one_that_is_cut_again_and_again_is_told(between):
    someone = between(lambda number, frames: None)
    with served() as server, client_of(server) as client:
        with pytest.raises(RemoteError, match=rf"sends 'x' was cut {MAX_STREAMS} times") as caught:
            get(client, "a", "b")
        assert server.endpoint in caught.value.where
    assert len(someone.hellos) == MAX_STREAMS


@pytest.mark.parametrize(
    "change",
    [lambda f: [f[0], f[1][:1000]], lambda f: []],
    ids=["half", "nothing"],
)
def test_bytes_that_stay_away_end_with_the_time(between, change):
    """Held back in the middle, or all of them; the connection stays open."""
    someone = between(lambda number, frames: change(frames) if number == 0 else frames)
    with served() as server, client_of(server) as client:
        in_vain(client, someone)
        assert_right(client)


def in_vain(client: TensorClient, someone: Between) -> None:
    """Fetches for a short time, again if there was no time to open the first connection."""
    while not someone.hellos:
        with pytest.raises(WaitTimeout, match=r"0\.5 s"):
            get(client, "a", timeout_s=0.5)


def test_bytes_that_trickle_end_with_the_time(between):
    gate = threading.Event()

    def trickle(number, frames):
        if number:
            return frames
        return iter(lambda: gate.wait(0.02) or frames[0][:1], b"")

    someone = between(trickle)
    with served() as server, client_of(server) as client:
        in_vain(client, someone)
        assert_right(client)


# ---- who may open a stream -------------------------------------------------------------------------


def refused(address: tuple[str, int], said: bytes) -> bool:
    """Whether a connection that says this is closed, without a byte."""
    with CONNECT(address, timeout=WAIT_S) as socket:
        socket.sendall(said)
        with suppress(ConnectionResetError):
            return socket.recv(1) == b""
        return True


def test_who_has_no_key_or_an_old_hello_gets_nothing(between):
    someone = between(lambda number, frames: frames)
    with served() as server, client_of(server) as client:
        assert_right(client)
        (address,), (said,) = someone.addresses, someone.hellos
        assert refused(address, said)  # of the stream that is open
        assert_right(client)
        forged = said[:-1] + bytes([said[-1] ^ 1])
        assert refused(address, forged)
        assert refused(address, b"GET / HTTP/1.1\r\n" + bytes(HELLO_BYTES))
        assert server._refusals.counts == Counter(wrong_key=2, no_handshake=1)
        assert_right(client)
        assert len(someone.hellos) == 1
    with served() as server, client_of(server) as client:
        get(client, "a")
        assert refused(someone.addresses[-1], said)  # of another server, or an older attempt


def offered(server: TensorServer):
    """A stream that the server has offered and nobody has opened."""
    made = []
    done = threading.Event()

    def make():
        made.append(server._streams.offer())
        done.set()

    server._thread._loop.call_soon_threadsafe(make)
    assert done.wait(WAIT_S)
    return made[0]


def test_an_offer_is_for_its_key_once_and_for_a_while():
    with served() as server:
        offer = offered(server)
        address = ("127.0.0.1", offer.port)
        assert refused(address, hello(offer)[:-1] + b"\0")  # it has not used the offer up
        with CONNECT(address, timeout=WAIT_S) as socket:
            socket.sendall(hello(offer))
            eventually(lambda: server._streams.num_open == 1)
            assert refused(address, hello(offer))
        eventually(lambda: server._streams.num_open == 0)
        server._streams.hello_s = 0.2
        late = offered(server)
        eventually(lambda: server._streams.find(late.stream) is None)
        assert refused(address, hello(late))


def test_who_says_nothing_is_cut_off():
    with served() as server:
        server._streams.hello_s = 0.2
        port = offered(server).port
        with CONNECT(("127.0.0.1", port), timeout=WAIT_S) as socket:
            assert socket.recv(1) == b""
        assert server._refusals.counts == Counter(no_handshake=1)


def test_no_port_is_opened_for_few_bytes_or_shared_memory():
    with served() as server:
        server._store.put_rows("x", [("c", torch.zeros(MIN_SEALED_BYTES - 1, dtype=torch.uint8))])
        with client_of(server) as client:
            get(client, "c")
        near = TensorClient([server.endpoint], **WHO)
        get(near, "a")
        near.close()
        assert server._streams._listener is None


def test_a_port_that_is_closed_is_named(monkeypatch):
    with served() as server, client_of(server) as client:

        def nobody(address, timeout):
            raise ConnectionRefusedError(111, "Connection refused")

        monkeypatch.setattr(sealed_receiver.tcp, "create_connection", nobody)
        with pytest.raises(
            ClusterError, match=r"model_worker/0 sends tensors from 127.0.0.1:\d+, which"
        ):
            get(client, "a")


# ---- the other end goes, or sleeps -----------------------------------------------------------------


def test_a_stream_ends_with_its_client():
    with served() as server:
        for _ in range(3):
            with client_of(server) as client:
                assert_right(client)
                assert threads() == ["sealed from model_worker/0", "sealed model_worker/0"]
            eventually(lambda: server._streams.num_open == 0 and threads() == [])


def test_a_server_that_ends_waits_for_the_threads_of_clients_that_left(monkeypatch):
    main, gate = SealedStream._main, threading.Event()

    def slow(stream: SealedStream) -> None:
        main(stream)
        gate.wait(WAIT_S)

    monkeypatch.setattr(SealedStream, "_main", slow)
    with served() as server:
        with client_of(server) as client:
            assert_right(client)
        eventually(lambda: server._streams.num_open == 0)
        assert threads() == ["sealed model_worker/0"]
        threading.Timer(0.3, gate.set).start()


def test_a_client_that_reads_nothing_is_let_go():
    with served() as server:
        server._streams.stalled_s = 0.3
        offer = offered(server)
        with CONNECT(("127.0.0.1", offer.port), timeout=WAIT_S) as socket:
            socket.sendall(hello(offer))
            eventually(lambda: server._streams.num_open == 1)
            stream = server._streams.find(offer.stream)
            for _ in range(20):
                stream.enqueue(ROWS["a"])  # more than sockets hold
            eventually(lambda: server._streams.num_open == 0 and threads() == [])


def test_a_client_that_was_let_go_opens_another_stream():
    with served() as server, client_of(server) as client:
        assert_right(client)
        (stream,) = server._streams._open.values()
        stream.socket.shutdown(tcp.SHUT_RDWR)  # as a network would
        eventually(lambda: server._streams.num_open == 0)
        assert_right(client)


def test_a_fetch_that_was_left_in_the_middle_leaves_nothing_for_the_next():
    with served() as server, client_of(server) as client:
        sources = [(0, "x", (name,)) for name in "abab"]
        for _, (x,) in client.stream(sources, timeout_s=WAIT_S, in_flight=4):
            assert x.numel()
            break
        assert_right(client)


def test_a_server_that_ends_is_waited_for_until_the_time_is_up():
    with served() as server, client_of(server) as client:
        assert_right(client)
        server.stop()
        with pytest.raises(WaitTimeout, match=r"0\.5 s"):
            get(client, "a", timeout_s=0.5)
