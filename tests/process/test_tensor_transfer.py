"""Tensors from worker to worker over loopback: exact, authenticated, and every failure told."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import golden
import pytest
import torch
import zmq

from realsys.api.data import SequenceMeta
from realsys.api.errors import ClusterError, DataError, RemoteError, WaitTimeout
from realsys.data.sequence_sample import SequenceSample
from realsys.data.transfer import tensor_server
from realsys.data.transfer.tensor_client import TensorClient
from realsys.data.transfer.tensor_server import TensorServer
from realsys.data.transfer.tensor_store import TensorStore
from realsys.data.transfer.transfer_messages import FRAME_BYTES, TensorPut, TensorReply, sample_of
from realsys.transport.codec import MAX_MESSAGE_BYTES, ProtocolError, encode
from realsys.transport.curve_keys import TrialKeypairs

pytestmark = pytest.mark.process

TRIAL, ATTEMPT = "ppo-math/run1", 3
KEYS = TrialKeypairs.generate()
WHO = {"trial": TRIAL, "attempt": ATTEMPT, "keypairs": KEYS}
# A server's thread that dies is a bug each of these tests shows in its own words.
dead_thread = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


@contextmanager
def serving(store: TensorStore, **changes) -> Iterator[TensorServer]:
    server = TensorServer(store, name="model_worker/0", **{**WHO, **changes}).start()
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def fetching(*endpoints: str, **changes) -> Iterator[TensorClient]:
    client = TensorClient(endpoints, **{**WHO, "store": TensorStore(), **changes})
    try:
        yield client
    finally:
        client.close()


def stored(**rows: torch.Tensor) -> TensorStore:
    """A store with key ``x`` of datapoints ``rows``."""
    store = TensorStore()
    store.put_rows("x", rows.items())
    return store


@pytest.fixture(params=["memory", "socket"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Through memory, however small; and through sockets."""
    monkeypatch.setattr(tensor_server, "MIN_SHARED_BYTES", 1)
    return request.param


def moved(*rows: torch.Tensor, way: str) -> list[torch.Tensor]:
    """``rows`` after a journey."""
    names = [f"i{n}" for n in range(len(rows))]
    num_bytes = sum(x.numel() * x.element_size() for x in rows)
    with (
        serving(stored(**dict(zip(names, rows, strict=True)))) as server,
        fetching(server.endpoint, may_share=way == "memory") as client,
    ):
        found = client.fetch(0, "x", names, timeout_s=240)
        assert client.num_bytes == Counter({way: num_bytes} if num_bytes else {})
    return found


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Bit for bit, NaNs included."""
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert torch.equal(
        found.contiguous().flatten().view(torch.uint8),
        expected.contiguous().flatten().view(torch.uint8),
    )


# ---- exact ----------------------------------------------------------------------------------------

VALUES = {
    "bool": torch.tensor([True, False, True]),
    "uint8": torch.tensor([0, 255, 7], dtype=torch.uint8),
    "int8": torch.tensor([-128, 127], dtype=torch.int8),
    "int16": torch.tensor([-32768, 32767], dtype=torch.int16),
    "int32": torch.tensor([-(2**31), 2**31 - 1], dtype=torch.int32),
    "int64": torch.tensor([2**53 + 1, -(2**63), 2**63 - 1]),
    "float16": torch.tensor([65504.0, 6e-8, float("-inf")], dtype=torch.float16),
    "bfloat16": torch.tensor([1.0, 3.14159, float("nan"), 3e38], dtype=torch.bfloat16),
    "float32": torch.tensor([0.1, -0.0, float("nan"), 1e-45]),
    "float64": torch.tensor([0.1, 1e308, 5e-324], dtype=torch.float64),
    "float8_e4m3fn": torch.tensor([1.0, 448.0, float("nan")]).to(torch.float8_e4m3fn),
    "float8_e5m2": torch.tensor([1.0, 57344.0, float("-inf")]).to(torch.float8_e5m2),
    "complex64": torch.tensor([1 + 2j, -3j], dtype=torch.complex64),
}


@pytest.mark.parametrize("x", VALUES.values(), ids=VALUES)
def test_a_dtype_arrives_exact(x, way):
    (found,) = moved(x, way=way)
    assert_same(found, x)


def test_rows_of_many_datapoints_arrive_apart_and_in_order(way):
    rows = [torch.arange(n) + 100 * n for n in (3, 1, 0, 5)]
    for found, expected in zip(moved(*rows, way=way), rows, strict=True):
        assert_same(found, expected)


def test_shapes_behind_the_rows_arrive(way):
    rows = [torch.arange(24.0).view(2, 3, 4), torch.arange(12.0).view(1, 3, 4)]
    for found, expected in zip(moved(*rows, way=way), rows, strict=True):
        assert_same(found, expected)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0)])
def test_empty_tensors_arrive(shape, way):
    x = torch.empty(shape, dtype=torch.bfloat16)
    for found in moved(x, x, way=way):
        assert_same(found, x)


def test_a_tensor_that_is_not_contiguous_arrives(way):
    x = torch.arange(12).view(3, 4).T
    (found,) = moved(x, way=way)
    assert_same(found, x)


@pytest.mark.parametrize("num_bytes", [FRAME_BYTES - 1, FRAME_BYTES, FRAME_BYTES + 1])
def test_the_border_of_a_frame_cuts_nothing(num_bytes, way):
    x = (torch.arange(num_bytes) % 251).to(torch.uint8)
    (found,) = moved(x, way=way)
    assert_same(found, x)


def test_forty_mebibytes_arrive(way):
    x = torch.arange(10 * 2**20, dtype=torch.float32)
    (found,) = moved(x, way=way)
    assert_same(found, x)


def test_what_arrived_can_be_changed_without_changing_the_peers(way):
    store, may_share = stored(a=torch.zeros(3)), way == "memory"
    with serving(store) as server, fetching(server.endpoint, may_share=may_share) as client:
        (found,) = client.fetch(0, "x", ["a"], timeout_s=240)
        found += 1
    assert store.rows("x", ["a"])[0].tolist() == [0.0, 0.0, 0.0]


@dead_thread
def test_a_tensor_that_still_has_its_graph_arrives(way):
    (found,) = moved(torch.ones(2, requires_grad=True) * 3, way=way)
    assert not found.requires_grad
    assert found.tolist() == [3.0, 3.0]


def test_a_client_reaches_several_workers_by_index():
    with (
        serving(stored(a=torch.tensor([1]))) as first,
        serving(stored(a=torch.tensor([2]))) as second,
        fetching(first.endpoint, second.endpoint) as client,
    ):
        assert [client.fetch(w, "x", ["a"], timeout_s=240)[0].item() for w in (1, 0, 1)] == [
            2,
            1,
            2,
        ]


# ---- all at once -----------------------------------------------------------------------------------


class Together(TensorStore):
    """Gives nothing until all that share its barrier were asked."""

    def __init__(self, barrier: threading.Barrier) -> None:
        super().__init__()
        self.barrier = barrier

    def rows(self, key, ids):
        self.barrier.wait(60)
        return super().rows(key, ids)


def test_all_peers_are_asked_before_the_first_answer_is_awaited():
    barrier = threading.Barrier(2)
    stores = [Together(barrier), Together(barrier)]
    for i, store in enumerate(stores):
        store.put_rows("x", [(f"a{i}", torch.tensor([i])), (f"b{i}", torch.tensor([10 + i]))])
    store = TensorStore()
    with (
        serving(stores[0]) as first,
        serving(stores[1]) as second,
        fetching(first.endpoint, second.endpoint, store=store) as client,
    ):
        sources = [(w, "x", (f"{n}{w}",)) for w in (0, 1) for n in "ab"]
        client.fetch_all(sources, timeout_s=240)
    names = [name for _, _, (name,) in sources]
    assert [x.item() for x in store.rows("x", names)] == [0, 10, 1, 11]


def test_a_thousand_requests_fit_on_the_way():
    names = [f"i{n}" for n in range(3000)]
    with (
        serving(stored(**{name: torch.tensor([n]) for n, name in enumerate(names)})) as server,
        fetching(server.endpoint) as client,
    ):
        client.fetch_all([(0, "x", (name,)) for name in names], timeout_s=240)
        found = client._store.rows("x", names)
    assert torch.cat(found).tolist() == list(range(3000))


def test_nothing_to_fetch_asks_nobody():
    with fetching("tcp://127.0.0.1:9") as client:
        client.fetch_all([], timeout_s=0.01)


def test_a_wait_says_for_whom_and_its_end_names_all_who_are_late():
    told = []

    @contextmanager
    def waiting_for(text):
        told.append(text)
        yield

    with (
        serving(stored(a=torch.tensor([7]))) as server,
        fetching("tcp://127.0.0.1:9", server.endpoint, "tcp://127.0.0.1:9") as client,
    ):
        sources = [(0, "x", ("a",)), (1, "x", ("a",)), (2, "y", ("a",))]
        late_ones = "model_worker/0, model_worker/1"
        while late_ones.endswith("1"):  # what it sends may take longer, on a busy machine
            told.clear()
            with golden.raises(WaitTimeout) as late:
                client.fetch_all(sources, timeout_s=0.5, waiting_for=waiting_for)
            late_ones = late.value.what.partition(", model_worker/2")[0]
        assert client._store.rows("x", ["a"])[0].item() == 7  # what came is kept
    assert told[0] == "model_worker/0: tensors x"


def test_a_refusal_ends_the_fetch_and_what_came_of_it_later_disturbs_nothing():
    with (
        serving(stored(a=torch.tensor([1]))) as first,
        serving(stored(b=torch.arange(50_000))) as second,
        fetching(first.endpoint, second.endpoint) as client,
    ):
        with golden.raises(RemoteError):
            client.fetch_all([(0, "y", ("a",)), (1, "x", ("b",))], timeout_s=240)
        for _ in range(2):
            client.fetch_all([(0, "x", ("a",)), (1, "x", ("b",))], timeout_s=240)
        assert client._store.rows("x", ["a"])[0].item() == 1


# ---- refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize("half", ["both", "client only"])
def test_wrong_keys_get_nothing_and_the_wait_names_the_peer(half):
    other = TrialKeypairs.generate()
    if half == "client only":  # knows the server's public key, is not of the trial
        other = TrialKeypairs(
            server_public=KEYS.server_public,
            server_secret=other.server_secret,
            client_public=other.client_public,
            client_secret=other.client_secret,
        )
    with (
        serving(stored(a=torch.ones(1))) as server,
        fetching(server.endpoint, keypairs=other) as client,
    ):
        with golden.raises(WaitTimeout) as late:
            client.fetch(0, "x", ["a"], timeout_s=0.2)
        assert late.value.where == server.endpoint
        with fetching(server.endpoint) as known:  # others are served as before
            assert known.fetch(0, "x", ["a"], timeout_s=240)[0].item() == 1.0


@pytest.mark.parametrize(
    "changes", [{"attempt": 2}, {"attempt": 4}, {"trial": "ppo-math/run2"}, {"token": "5f" * 16}]
)
def test_another_attempt_or_trial_is_refused_with_both_named(changes):
    with (
        serving(stored(a=torch.ones(1))) as server,
        fetching(server.endpoint, **changes) as client,
        golden.raises(RemoteError) as refused,
    ):
        client.fetch(0, "x", ["a"], timeout_s=240)
    assert f"attempt {ATTEMPT} of {TRIAL}" in refused.value.what


def test_a_tensor_that_is_not_there_is_named_with_its_datapoints():
    with (
        serving(stored(a=torch.ones(1))) as server,
        fetching(server.endpoint) as client,
    ):
        with golden.raises(RemoteError):
            client.fetch(0, "x", ["a", "b"], timeout_s=240)
        with golden.raises(RemoteError):
            client.fetch(0, "y", ["a"], timeout_s=240)
        assert client.fetch(0, "x", ["a"], timeout_s=240)[0].item() == 1.0


def test_a_peer_that_is_gone_is_named():
    with serving(stored(a=torch.ones(1))) as server:
        endpoint = server.endpoint
    with fetching(endpoint) as client, golden.raises(WaitTimeout):
        client.fetch(0, "x", ["a"], timeout_s=0.1)


@dead_thread
def test_rows_that_do_not_fit_together_are_told_and_the_server_lives_on():
    store = stored(a=torch.ones(1, 2), b=torch.ones(1, 3))
    with serving(store) as server, fetching(server.endpoint) as client:
        with pytest.raises(RemoteError):
            client.fetch(0, "x", ["a", "b"], timeout_s=240)
        assert client.fetch(0, "x", ["a"], timeout_s=240)[0].shape == (1, 2)


@dead_thread
def test_a_request_for_nothing_does_not_end_the_server():
    with serving(stored(a=torch.ones(1))) as server, fetching(server.endpoint) as client:
        try:
            assert client.fetch(0, "x", [], timeout_s=240) == []
        except RemoteError:
            pass  # told: as good
        assert client.fetch(0, "x", ["a"], timeout_s=240)[0].item() == 1.0


def test_what_is_no_request_does_not_end_the_server():
    with serving(stored(a=torch.ones(1))) as server, zmq.Context() as context:
        with context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.curve_serverkey = KEYS.server_public
            socket.curve_publickey = KEYS.client_public
            socket.curve_secretkey = KEYS.client_secret
            socket.connect(server.endpoint)
            for junk in (b"\xc1junk", b"", b"\x80"):
                socket.send_multipart([b"id", junk])
                assert socket.poll(60_000)
                assert b"error" in b"".join(socket.recv_multipart())
        with fetching(server.endpoint) as client:
            assert client.fetch(0, "x", ["a"], timeout_s=240)[0].item() == 1.0


@dead_thread
@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"dtype": "load"}, "'load'"),  # a name in torch that is no dtype
        ({"dtype": ""}, "''"),
        ({"rows": (2**40,)}, "1099511627776"),
        ({"rows": (-1, 6)}, "shape"),
        ({"trailing_shape": (2**63 - 1,) * 9}, "shape"),
        ({"rows": (4,)}, "20 bytes"),
        ({"rows": (2, 3)}, "of 2 datapoints came for 1"),
    ],
    ids=str,
)
def test_a_reply_whose_header_and_bytes_differ_is_refused(changes, refused):
    header = TensorReply(**{"dtype": "float32", "trailing_shape": (), "rows": (5,), **changes})
    with fetching("tcp://127.0.0.1:9") as client:
        frames = [zmq.Frame(encode(header)), zmq.Frame(bytes(20))]
        client._receive = lambda waiting, *_: (next(iter(waiting)), frames)
        with golden.raises(ProtocolError):
            client.fetch(0, "x", ["a"], timeout_s=1)


def test_an_answer_without_a_header_is_refused():
    with fetching("tcp://127.0.0.1:9") as client:
        client._receive = lambda waiting, *_: (next(iter(waiting)), [])
        with golden.raises(ProtocolError):
            client.fetch(0, "x", ["a"], timeout_s=1)


def test_an_error_that_quotes_a_huge_request_does_not_end_the_server():
    with serving(stored(a=torch.arange(3))) as server, fetching(server.endpoint) as client:
        with golden.raises(RemoteError) as refused:
            client.fetch(0, "x", ["y" * (MAX_MESSAGE_BYTES - 1000)], timeout_s=240)
        assert len(refused.value.what) < 30_000
        assert len(client.fetch(0, "x", ["a"], timeout_s=240)) == 1


def test_half_a_message_does_not_end_the_server():
    with serving(stored(a=torch.ones(1))) as server, zmq.Context() as context:
        with context.socket(zmq.DEALER) as socket:
            socket.linger = 200
            socket.curve_serverkey = KEYS.server_public
            socket.curve_publickey = KEYS.client_public
            socket.curve_secretkey = KEYS.client_secret
            socket.connect(server.endpoint)
            socket.send_multipart([b"alone"])  # an id and no body
        with fetching(server.endpoint) as client:
            assert client.fetch(0, "x", ["a"], timeout_s=240)[0].item() == 1.0


@dead_thread
def test_an_address_that_is_not_ours_is_told_with_the_reason():
    server = TensorServer(TensorStore(), name="model_worker/0", host="203.0.113.1", **WHO)
    with pytest.raises(ClusterError) as refused:  # documentation range, RFC 5737: nobody's
        server.start()
    assert "assign" in refused.value.what
    assert "203.0.113.1" in str(refused.value)


# ---- late answers ---------------------------------------------------------------------------------


class SlowOnce(TensorStore):
    """Answers its first reader when told."""

    def __init__(self) -> None:
        super().__init__()
        self.may_answer = threading.Event()

    def rows(self, key, ids):
        self.may_answer.wait(60)
        return super().rows(key, ids)


def test_the_late_answer_to_an_older_request_is_not_taken_for_the_newer_ones():
    store = SlowOnce()
    store.put_rows("x", [("a", torch.tensor([1]))])
    store.put_rows("y", [("a", torch.tensor([2]))])
    with serving(store) as server, fetching(server.endpoint) as client:
        with pytest.raises(WaitTimeout):
            client.fetch(0, "x", ["a"], timeout_s=0.1)
        store.may_answer.set()
        assert client.fetch(0, "y", ["a"], timeout_s=240)[0].item() == 2


# ---- the store ------------------------------------------------------------------------------------


def sample() -> SequenceSample:
    meta = SequenceMeta(
        ids=("a", "b"),
        seqlens={"x": ((2,), (3,)), "r": ((1,), (1,))},
        dtypes={"x": "int64", "r": "float32"},
        trailing_shapes={"x": (), "r": ()},
    )
    return SequenceSample.from_meta(meta, {"x": torch.arange(5), "r": torch.tensor([0.5, 1.5])})


def test_a_store_gives_back_any_batch_of_what_it_holds():
    store, whole = TensorStore(), sample()
    store.put(whole)
    swapped = whole.meta.take([1, 0]).select(["x"])
    assert store.get(swapped).data["x"].tolist() == [2, 3, 4, 0, 1]
    assert len(store) == 2


def test_a_store_forgets_what_is_used_up_and_ignores_what_it_never_had():
    store = TensorStore()
    store.put(sample())
    store.clear(["a", "never"])
    with golden.raises(DataError):
        store.get(sample().meta)
    assert len(store) == 1


def test_a_server_that_ends_by_itself_tells_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else peers would wait for its tensors until their deadline."""
    ended = threading.Event()
    server = TensorServer(stored(i0=torch.ones(1)), name="m/0", on_failure=ended.set, **WHO)

    def fail(*args: object) -> None:
        raise MemoryError("no memory left")

    monkeypatch.setattr(server, "_answer", fail)
    server.start()
    with fetching(server.endpoint) as client, pytest.raises(WaitTimeout):
        client.fetch(0, "x", ["i0"], timeout_s=0.5)
    assert ended.wait(60)
    with golden.raises(ClusterError):
        server.raise_failure()
    server.stop()


def test_a_sample_is_put_where_it_will_be_used():
    """Bits, dtypes and lengths arrive, and what does not fit together is refused."""
    sample = SequenceSample.from_tensors(
        ["a", "b"],
        {"x": [[2, 1], [3]], "big": [[1], [1]], "none": [[0], [0]]},
        {
            "x": torch.arange(6),
            "big": torch.rand(2, 700_000),
            "none": torch.empty(0, dtype=torch.bool),
        },
    )
    store = TensorStore()
    with serving(store) as server, fetching(server.endpoint) as client:
        client.put(0, sample, timeout_s=240)
        found = store.get(sample.meta)
        for key, x in sample.data.items():
            assert_same(found.data[key], x)
    with (
        serving(store) as server,
        fetching(server.endpoint, attempt=ATTEMPT - 1) as client,
        golden.raises(RemoteError),
    ):
        client.put(0, sample, timeout_s=240)
    put = TensorPut(
        trial=TRIAL,
        attempt=ATTEMPT,
        token="",
        meta=sample.meta,
        keys=("x", "big", "none"),
        frames=(1, 1, 0),
    )
    with golden.raises(ProtocolError):
        sample_of(put, [b""])
    with golden.raises(ProtocolError):
        sample_of(put, [b"1234567", b""])
