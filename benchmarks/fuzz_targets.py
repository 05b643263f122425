"""Targets of fuzz_codec.py: the real readers, and valid messages for each.

The server's admission and the client's reception of replies, the tensor server and client, both ends of
the heartbeat's socket pair, the JSON records of the store and of a trial's folder.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass
from random import Random
from typing import Any

import msgspec
import zmq
from fuzz_mutations import mutate, mutate_json

from realsys.api import errors
from realsys.api.data import SequenceMeta
from realsys.api.errors import DataError, RealsysError
from realsys.api.model import FinetuneSpec
from realsys.heartbeat import heartbeat_messages as h
from realsys.name_resolve.key_table import TrialKeys
from realsys.runtime.worker_commands import Command, Verb
from realsys.transport import worker_requests as r
from realsys.transport.client import RequestClient
from realsys.transport.codec import ProtocolError, decode, encode
from realsys.transport.curve_keys import TrialKeypairs
from realsys.transport.messages import PROTOCOL_VERSION, ReplyFrame, RequestFrame, error_to_info
from realsys.transport.server import RequestServer
from realsys.trial import records

TRIAL, ATTEMPT, TOKEN, REQUEST_ID = "ppo-math/run1", 2, "5f" * 16, "0123456789abcdef"
WHO: dict[str, Any] = {"trial": TRIAL, "attempt": ATTEMPT, "token": TOKEN}
KEYS = TrialKeypairs.generate()

META = SequenceMeta(
    ids=("a", "b"),
    seqlens={"x": ((3,), (1, 2)), "r": ((1,), (1, 1))},
    dtypes={"x": "int64", "r": "float32"},
    trailing_shapes={"x": (), "r": (2,)},
    metadata={"source": ("s", None)},
)
REQUESTS = (
    r.Ping(),
    r.ClearData(ids=("a", "b")),
    r.Exit(),
    r.Setup(order=0, data_endpoints=("tcp://127.0.0.1:1", "tcp://127.0.0.1:2")),
    r.Initialize(
        order=1, spec=FinetuneSpec(total_train_epochs=2, dataset_size=96, train_batch_size=8)
    ),
    r.Fetch(order=2, indices=(0, 5), ids=("a", "b")),
    r.RunCall(order=3, call="actor_gen", step=1, meta=META, sources=((1, "x", ("a",)),)),
    r.Evaluate(order=4, step=1),
    r.Reallocate(order=3, call="actor_gen", step=1, source="actor@0", target="actor@1", eta=0.5),
    r.Offload(order=3, call="ref_inf", step=1, model="ref@0"),
    r.SaveModel(order=5, model="actor@0", folder="/tmp/x"),
    r.SaveRecover(order=6, folder="/tmp/x"),
    r.HashRecover(order=7, file="/tmp/x"),
    r.LoadRecover(order=7, file="/tmp/x"),
)
REPLIES = (
    r.Done(),
    r.SetupDone(dataset_size=3, dataset_keys=("x",)),
    r.Fetched(meta=META),
    r.CallDone(meta=META, stats={"loss": 0.5}, started=1.0, ended=2.0, compute_s=0.5, tokens=9),
    r.Moved(started=1.0, ended=2.0, bytes_sent=3, bytes_received=4),
    r.Evaluated(stats={"actor": {"accuracy": 0.5}}, samples=({"prompt": "1+1", "ok": True},)),
    r.RecoverSaved(file="f", sha256="00", num_bytes=7),
    r.RecoverHashed(sha256="", why="no file"),
)
STATUS = records.WorkerStatus(state="running", step=3, **{k: WHO[k] for k in ("attempt", "token")})
RECORD = records.WorkerRecord(
    worker="model_worker/0", host="n1", pid=7, start=9, attempt=ATTEMPT, token=TOKEN
)
STOP = records.StopRequest(grace_seconds=30.0, by="somebody", at=1.0, attempt=ATTEMPT)
COMMAND = Command(
    id="1", verb=Verb.PAUSE, by="somebody", at=1.0, attempt=ATTEMPT, token=TOKEN, args={"a": "b"}
)
BEGIN = h.Init(
    worker_type="model_worker",
    index=0,
    pid=7,
    attempt=ATTEMPT,
    token=TOKEN,
    store_url="file:///x",
    keys=TrialKeys(cluster="local", user="u", experiment="e", trial="t"),
    attempt_dir="/x",
    etcd={"user": None},
)


@dataclass(frozen=True)
class Target:
    """One reader: valid messages for it, and what reads bytes; raises ``allowed`` or nothing."""

    samples: list[bytes]
    read: Callable[[bytes], object]
    allowed: tuple[type[BaseException], ...] = (ProtocolError,)
    mutate: Callable[[Random, bytes, list[bytes], tuple[str, ...]], bytes] = mutate


def frames(bodies: tuple[Any, ...]) -> list[bytes]:
    """Requests as they travel."""
    common = {"version": PROTOCOL_VERSION, "sender": "master_worker/0", "deadline_s": 5.0, **WHO}
    return [encode(RequestFrame(request_id=REQUEST_ID, body=encode(b), **common)) for b in bodies]


def server_target() -> Target:
    """The server's admission of a frame, then the reading of its body."""
    server = RequestServer(name="model_worker/0", keypairs=KEYS, request_type=r.Request, **WHO)
    sent: list[list[bytes]] = []

    class Socket:
        async def send_multipart(self, parts: list[bytes]) -> None:
            sent.append(parts)

    server._socket = Socket()  # type: ignore[assignment]

    async def handler(request: r.Request) -> r.Done:
        return r.Done()

    def read(data: bytes) -> None:
        sent.clear()
        frame = finished(server._admit(b"peer", [data]))
        if frame is not None:
            decode(finished(server._run(frame, handler)), ReplyFrame)
            decode(frame.body, r.Request)
        for _, reply in sent:
            assert not decode(reply, ReplyFrame).ok, "a refused request was answered"

    return Target(frames(REQUESTS), read)


def finished(work: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that has nothing to wait for."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("it waits")


def client_target() -> Target:
    """What the master does with a reply: an answer, an error of ours, or it is dropped."""
    loop = asyncio.new_event_loop()
    client = RequestClient(
        "tcp://127.0.0.1:9",
        **{"peer_name": "model_worker/0", "sender": "master_worker/0", "keypairs": KEYS, **WHO},
        reply_type=r.Reply,
        context=None,  # type: ignore[arg-type]  # never connects
    )

    def read(data: bytes) -> None:
        reply = client._waiting[REQUEST_ID] = loop.create_future()
        client._take(data)
        if reply.done() and (error := reply.exception()) is not None:
            assert isinstance(error, RealsysError), f"{error!r} for the caller"

    told = [error_to_info(kind("w", where="x", fix="f")) for kind in (DataError, ProtocolError)]
    who = {"version": PROTOCOL_VERSION, "request_id": REQUEST_ID, "attempt": ATTEMPT}
    replies = [ReplyFrame(ok=True, body=encode(body), **who) for body in REPLIES]
    replies += [ReplyFrame(ok=False, error=info, **who) for info in told]
    return Target([encode(x) for x in replies], read, ())


def tensor_targets() -> dict[str, Target]:
    """The tensor server's answer to a request, and what a client makes of one."""
    import torch

    from realsys.data.transfer import transfer_messages as m
    from realsys.data.transfer.sealed_frames import new_offer
    from realsys.data.transfer.tensor_client import TensorClient
    from realsys.data.transfer.tensor_server import TensorServer
    from realsys.data.transfer.tensor_store import TensorStore

    torch.set_num_threads(1)
    store = TensorStore()
    store.put_rows("x", [("a", torch.arange(3)), ("b", torch.arange(2))])
    big = ("c", "d")  # these go through shared memory
    store.put_rows("x", [(name, torch.zeros(3000, dtype=torch.int64)) for name in big])
    server = TensorServer(store, name="model_worker/0", keypairs=KEYS, **WHO)
    server._streams.offer = lambda: new_offer(1)  # type: ignore[method-assign]  # there is no loop

    def ask(data: bytes) -> None:
        header, _ = server._answer([data])
        encode(header)
        assert "Error: " not in header.error, header.error  # any but a RealsysError was caught
        if header.slot is not None:  # nobody will use it
            server._pool.free(header.slot.segment, header.slot.index)  # type: ignore[union-attr]

    client = TensorClient(["tcp://127.0.0.1:9"], keypairs=KEYS, **WHO)
    client._socket = lambda worker: _Sink()  # type: ignore[assignment,method-assign,return-value]
    answer: list[zmq.Frame] = []
    # The same again, should the client ask again.
    client._receive = lambda waiting, *_: (next(iter(waiting)), answer)  # type: ignore[method-assign]

    def receive(data: bytes) -> None:
        client._no_sharing.clear()
        answer[:] = [zmq.Frame(data), zmq.Frame(bytes(40))]
        client.fetch(0, "x", ["a", "b"], timeout_s=1.0)

    requests = [
        m.TensorRequest(key="x", ids=("a", "b"), **WHO),
        m.TensorRequest(key="x", ids=big, host=server._host_name, give_back=((1, 0),), **WHO),
    ]
    shared, _ = server._answer([encode(requests[1])])
    replies = [
        m.TensorReply(dtype="int64", trailing_shape=(), rows=(3, 2)),
        m.TensorReply(error="no such key (x)"),
        m.TensorReply(
            dtype="int64", rows=(3, 2), sealed=m.SealedBytes(stream=b"s", number=0, num_bytes=40)
        ),
        shared,
    ]
    return {
        "tensor_request": Target([encode(x) for x in requests], ask, ()),
        "tensor_reply": Target([encode(x) for x in replies], receive, (RealsysError,)),
    }


class _Sink:
    def send_multipart(self, parts: list[bytes]) -> None:
        """Takes everything."""


def heartbeat_targets() -> dict[str, Target]:
    """Both directions between a worker and its heartbeat process, through a real socket pair.

    Parent and child of one program: what does not fit may end the reader, but as msgspec's error.
    """
    here, there = h.PacketSocket.pair()

    def through(receive: Callable[[], object]) -> Callable[[bytes], object]:
        def read(data: bytes) -> object:
            if not data or len(data) > h.MAX_PACKET:
                return None  # an empty packet is the end of the stream
            there.end.send(data)
            return receive()

        return read

    register = h.Register(
        record=RECORD, status=STATUS, ttl_s=15.0, timeout_s=5.0, watch_keys=("k",)
    )
    up = (
        BEGIN,
        register,
        h.StatusUpdate(status=STATUS),
        h.Deregister(status=STATUS, timeout_s=3.0),
    )
    down = (
        h.Registered(),
        h.RegistrationRefused(kind="StoreError", what="w", where="x", fix="f"),
        h.StopRequested(request=STOP),
        h.CommandReceived(value=records.dumps(COMMAND)),
        h.Terminate(code=70, kind="Fenced", why="w"),
        h.Deregistered(trouble="t"),
    )
    allowed = (ProtocolError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
    return {
        "heartbeat_up": Target([encode(x) for x in up], through(here.receive_from_worker), allowed),
        "heartbeat_down": Target(
            [encode(x) for x in down], through(here.receive_to_worker), allowed
        ),
    }


def record_targets() -> dict[str, Target]:
    """JSON records of the store and of the trial's folder."""
    attempt = records.AttemptRecord(
        number=2, token=TOKEN, host="n1", supervisor_pid=7, supervisor_start=9, started_at=1.0
    )

    def target(record: Any) -> Target:
        def read(data: bytes) -> object:
            return records.loads(type(record), data, where="a key")

        return Target([records.dumps(record)], read, (errors.TrialError,), mutate_json)

    read_from_store = (COMMAND, STOP, RECORD, STATUS, attempt)
    return {f"record_{type(record).__name__}": target(record) for record in read_from_store}


def targets(only: Collection[str] = ()) -> dict[str, Target]:
    """Those named, or all of them."""
    found = {"request": server_target(), "reply": client_target()}
    found |= heartbeat_targets() | record_targets()
    if not set(only) <= set(found) or not only:  # they need torch, which takes long to import
        found |= tensor_targets()
    return {name: target for name, target in found.items() if not only or name in only}


def known_names() -> tuple[str, ...]:
    """Tags, names of fields and of errors: what a text is worth being replaced by."""
    structs = [type(x) for x in (*REQUESTS, *REPLIES)] + [RequestFrame, ReplyFrame]
    names = {n for s in structs for n in (s.__name__, *s.__struct_fields__)}
    return tuple(sorted(names | {n for n in dir(errors) if n[0].isupper()} | {TOKEN, TRIAL}))
