"""The channel over real sockets on the loopback interface: calls, repeats, refusals, ends."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from claimed_ports import free_ports

from realsys.api.errors import (
    ClusterError,
    DataError,
    RemoteError,
    StaleAttempt,
    WaitTimeout,
    WorkerLost,
)
from realsys.transport.channel import Handler, RequestClient, RequestServer, client_context
from realsys.transport.codec import ProtocolError, decode, encode
from realsys.transport.curve_keys import TrialKeypairs
from realsys.transport.messages import PROTOCOL_VERSION, ReplyFrame, RequestFrame

pytestmark = pytest.mark.process

TRIAL, ATTEMPT, TOKEN = "ppo-math/run1", 3, "5f" * 16
WHO = {"trial": TRIAL, "attempt": ATTEMPT, "token": TOKEN}
KEYS = TrialKeypairs.generate()


class Ask(msgspec.Struct, frozen=True, tag=True):
    text: str
    pause_s: float = 0.0


class Answer(msgspec.Struct, frozen=True, tag=True):
    text: str


async def echo(request: Ask) -> Answer:
    await asyncio.sleep(request.pause_s)
    return Answer(request.text)


class Counting:
    """A handler that counts, and answers when told to."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.may_answer = asyncio.Event()

    async def __call__(self, request: Ask) -> Answer:
        self.num_calls += 1
        await self.may_answer.wait()
        return Answer(f"{request.text} {self.num_calls}")


@asynccontextmanager
async def serving(handler: Handler = echo, **overrides: Any) -> AsyncIterator[RequestServer]:
    options = {**WHO, "keypairs": KEYS, "request_type": Ask}
    async with RequestServer(name="model_worker/0", **{**options, **overrides}) as server:
        task = asyncio.create_task(server.serve(handler))
        try:
            yield server
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


@asynccontextmanager
async def calling(endpoint: str, **overrides: Any) -> AsyncIterator[RequestClient]:
    context = client_context()
    options = {**WHO, "keypairs": KEYS, "reply_type": Answer}
    names = {"peer_name": "model_worker/0", "sender": "master_worker/0", "context": context}
    try:
        async with RequestClient(endpoint, **{**names, **options, **overrides}) as client:
            yield client
    finally:
        context.term()


@asynccontextmanager
async def raw_dealer(endpoint: str, keys: TrialKeypairs = KEYS) -> AsyncIterator[Any]:
    """A peer that holds the keys and sends what it likes."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.curve_serverkey = keys.server_public
    socket.curve_publickey, socket.curve_secretkey = keys.client_public, keys.client_secret
    socket.connect(endpoint)
    try:
        yield socket
    finally:
        socket.close()
        context.term()


def frame(request_id: str = "r1", **overrides: Any) -> RequestFrame:
    fields: dict[str, Any] = {
        "version": PROTOCOL_VERSION,
        **WHO,
        "request_id": request_id,
        "sender": "master_worker/0",
        "deadline_s": 5.0,
        "body": encode(Ask("hi")),
    }
    return RequestFrame(**{**fields, **overrides})


async def reply_to(socket: Any) -> ReplyFrame:
    async with asyncio.timeout(60):
        reply: ReplyFrame = decode(await socket.recv(), ReplyFrame)
        return reply


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


def in_a_loop(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    def run() -> None:
        asyncio.run(test())  # type: ignore[arg-type]

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


# --- calls --------------------------------------------------------------------------------------


@in_a_loop
async def test_a_call_returns_the_reply():
    async with serving() as server, calling(server.endpoint) as client:
        assert await client.call(Ask("hello"), timeout_s=60, what="echo") == Answer("hello")
        assert server.refused == {}


@in_a_loop
async def test_100_calls_at_once_return_in_any_order():
    order: list[str] = []
    is_ready = [asyncio.Event() for _ in range(101)]

    async def last_first(request: Ask) -> Answer:
        await is_ready[int(request.text) + 1].wait()
        is_ready[int(request.text)].set()
        return Answer(request.text)

    async def call(client: RequestClient, i: int) -> None:
        answer = await client.call(Ask(str(i)), timeout_s=60, what=f"echo {i}")
        assert answer.text == str(i)
        order.append(answer.text)

    async with (
        serving(last_first) as server,
        calling(server.endpoint) as client,
        asyncio.TaskGroup() as calls,
    ):
        is_ready[100].set()
        for i in range(100):
            calls.create_task(call(client, i))
    assert len(order) == 100
    assert order.index("99") < order.index("0")  # the last one asked was ready first


@in_a_loop
async def test_an_error_arrives_with_its_class_and_traceback():
    async def fail(request: Ask) -> Answer:
        if request.text == "data":
            raise DataError("no such sample", where="train.jsonl:7", fix="remove the line")
        raise ZeroDivisionError("bad batch")

    async with serving(fail) as server, calling(server.endpoint) as client:
        with pytest.raises(DataError, match="sample") as ours:
            await client.call(Ask("data"), timeout_s=60, what="load")
        assert ours.value.where == "train.jsonl:7 (on model_worker/0)"
        with pytest.raises(RemoteError, match="ZeroDivisionError: bad batch") as other:
            await client.call(Ask("x"), timeout_s=60, what="load")
        assert "in fail" in other.value.what
        with pytest.raises(DataError):  # and the server goes on
            await client.call(Ask("data"), timeout_s=60, what="load")


@in_a_loop
async def test_a_handler_that_cancels_itself_is_an_error_too():
    async def cancel(request: Ask) -> Answer:
        raise asyncio.CancelledError("by itself")

    async with serving(cancel) as server, calling(server.endpoint) as client:
        with pytest.raises(RemoteError, match="CancelledError"):
            await client.call(Ask(""), timeout_s=60, what="x")


@in_a_loop
async def test_bodies_of_a_wrong_type_or_size_are_told_to_the_caller():
    async def grow(request: Ask) -> Answer:
        return Answer("x" * 2000)

    async with (
        serving(grow, max_message_bytes=1500) as server,
        calling(server.endpoint) as client,
    ):
        with pytest.raises(ProtocolError, match="Ask"):
            await client.call(Answer(""), timeout_s=60, what="x")
        with pytest.raises(ProtocolError, match=r"Answer has \d+ bytes, the limit is 1500"):
            await client.call(Ask(""), timeout_s=60, what="x")


@in_a_loop
async def test_a_deadline_names_the_peer_the_call_and_the_link():
    handler = Counting()
    handler.may_answer.set()
    async with serving(handler) as server, calling(server.endpoint) as client:
        await client.call(Ask("x"), timeout_s=60, what="a first one, which connects")
        handler.may_answer.clear()
        with pytest.raises(WaitTimeout) as caught:
            await client.call(Ask("x"), timeout_s=0.4, what="actor_train step 7")
        assert caught.value.what == (
            "no reply from model_worker/0 to actor_train step 7 in 0.4 s (link: connected)"
        )
        assert caught.value.where == server.endpoint
    async with calling("tcp://127.0.0.1:9") as client:
        with pytest.raises(WaitTimeout, match="never"):
            await client.call(Ask("x"), timeout_s=0.2, what="x")


# --- repeats ------------------------------------------------------------------------------------


@in_a_loop
async def test_a_repeated_request_is_run_once():
    handler = Counting()
    async with (
        serving(handler) as server,
        raw_dealer(server.endpoint) as first,
        raw_dealer(server.endpoint) as second,
    ):
        for socket in (first, first, second):
            await socket.send(encode(frame()))
        await until(lambda: handler.num_calls > 0)
        await asyncio.sleep(0.2)
        handler.may_answer.set()
        replies = [await reply_to(first), await reply_to(second)]  # one for each peer
        await first.send(encode(frame()))  # long after
        replies.append(await reply_to(first))
        assert [decode(r.body, Answer).text for r in replies] == ["hi 1"] * 3
        await first.send(encode(frame("r2")))
        assert decode((await reply_to(first)).body, Answer).text == "hi 2"


@in_a_loop
async def test_a_client_that_repeats_itself_gets_one_answer():
    handler = Counting()
    async with serving(handler) as server, calling(server.endpoint, resend_s=0.05) as client:
        call = asyncio.create_task(client.call(Ask("x"), timeout_s=60, what="x"))
        await asyncio.sleep(0.4)
        handler.may_answer.set()
        assert await call == Answer("x 1")
        assert handler.num_calls == 1


@in_a_loop
async def test_a_server_that_comes_back_on_its_port_answers_open_calls():
    lost = Counting()  # never answers
    ports = [free_ports(1)]
    async with AsyncExitStack() as first_life:
        server = await first_life.enter_async_context(serving(lost, ports=ports))
        async with calling(server.endpoint, resend_s=0.1) as client:
            call = asyncio.create_task(client.call(Ask("x"), timeout_s=60, what="x"))
            await until(lambda: lost.num_calls == 1)
            await first_life.aclose()
            async with serving(ports=ports):
                assert await call == Answer("x")


# --- refusals -----------------------------------------------------------------------------------


@in_a_loop
async def test_strangers_are_refused_and_the_server_goes_on():
    other = TrialKeypairs.generate()
    wrong_client = TrialKeypairs(
        server_public=KEYS.server_public,
        server_secret=other.server_secret,
        client_public=other.client_public,
        client_secret=other.client_secret,
    )
    handler = Counting()
    handler.may_answer.set()
    async with serving(handler) as server:
        async with raw_dealer(server.endpoint, wrong_client) as socket:
            await socket.send(encode(frame()))
            await until(lambda: server.refused.get("wrong_key", 0) > 0)
        before = server.refused.get("no_handshake", 0)
        async with raw_dealer(server.endpoint, other) as socket:  # another trial's server key
            await socket.send(encode(frame()))
            await until(lambda: server.refused.get("no_handshake", 0) > before)
        before = server.refused["no_handshake"]
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:  # no CURVE
            socket.linger = 0
            socket.connect(server.endpoint)
            await socket.send(encode(frame()))
            await until(lambda: server.refused["no_handshake"] > before)
        host, port = server.endpoint.removeprefix("tcp://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 100)
        with suppress(ConnectionResetError):
            async with asyncio.timeout(60):
                await reader.read()  # returns when the server has cut us off
        writer.close()
        assert handler.num_calls == 0
        async with calling(server.endpoint) as client:
            assert await client.call(Ask("x"), timeout_s=60, what="x") == Answer("x 1")


@in_a_loop
async def test_a_refused_client_hears_why_at_its_deadline():
    other = TrialKeypairs.generate()
    mixed = TrialKeypairs(
        server_public=KEYS.server_public,
        server_secret=KEYS.server_secret,
        client_public=other.client_public,
        client_secret=other.client_secret,
    )
    async with (
        asyncio.timeout(60),
        serving() as server,
        calling(server.endpoint, keypairs=mixed) as client,
    ):
        heard = ""
        while "another trial's keys" not in heard:  # its server may be slow to say so
            with pytest.raises(WaitTimeout) as late:
                await client.call(Ask("x"), timeout_s=0.5, what="x")
            heard = late.value.what


@in_a_loop
async def test_garbage_of_a_known_peer_is_counted_and_dropped():
    async with serving() as server, raw_dealer(server.endpoint) as socket:
        await socket.send(b"\xc1garbage")
        await socket.send_multipart([b"two", b"parts"])
        await socket.send(encode(frame(trial="ppo-math/run10")))
        await socket.send(encode(frame("last")))
        assert (await reply_to(socket)).request_id == "last"
        assert server.refused == {"malformed": 2, "other_trial": 1}


@in_a_loop
async def test_other_attempts_are_refused():
    async with serving() as server:
        async with calling(server.endpoint, attempt=ATTEMPT - 1) as client:
            with pytest.raises(StaleAttempt, match="attempt 2, model_worker/0 of attempt 3") as old:
                await client.call(Ask("x"), timeout_s=60, what="x")
            assert old.value.fix == "master_worker/0 was superseded and must exit"
        async with calling(server.endpoint, attempt=ATTEMPT + 1) as client:
            with pytest.raises(StaleAttempt) as new:
                await client.call(Ask("x"), timeout_s=60, what="x")
            assert new.value.fix == "model_worker/0 was superseded and must exit"
        assert server.refused == {"stale": 2}


@in_a_loop
async def test_another_incarnation_of_the_same_attempt_is_refused():
    handler = Counting()
    handler.may_answer.set()
    async with serving(handler) as server:
        for token in ("", "5e" * 16, TOKEN + "5"):
            async with calling(server.endpoint, token=token) as client:
                with pytest.raises(
                    StaleAttempt, match="attempt 3, model_worker/0 of attempt 3"
                ) as e:
                    await client.call(Ask("x"), timeout_s=60, what="x")
                assert e.value.fix == "master_worker/0 was superseded and must exit"
                for text in (str(e.value), *e.value.__notes__):
                    assert TOKEN not in text
        assert (handler.num_calls, server.refused) == (0, {"stale": 3})


@in_a_loop
async def test_a_repeat_under_a_known_id_needs_the_token_too():
    async with serving() as server, raw_dealer(server.endpoint) as socket:
        await socket.send(encode(frame("r1")))
        assert (await reply_to(socket)).ok
        await socket.send(encode(frame("r1", token="")))
        reply = await reply_to(socket)
        assert not reply.ok
        assert reply.body == b""


@in_a_loop
async def test_another_protocol_version_is_refused_with_both_numbers():
    older = frame("old", version=PROTOCOL_VERSION - 1)
    changed = {**msgspec.to_builtins(frame("new")), "version": 99, "body": ["of", "99"]}
    async with serving() as server, raw_dealer(server.endpoint) as socket:
        for data, version in ((encode(older), PROTOCOL_VERSION - 1), (encode(changed), 99)):
            await socket.send(data)
            error = (await reply_to(socket)).error
            assert error is not None
            assert error.kind == "ProtocolError"
            assert f"received protocol version {version}" in error.what
            assert f"speaks version {PROTOCOL_VERSION}" in error.what
        assert server.refused == {"version": 2}


@in_a_loop
async def test_a_reply_of_an_older_attempt_is_dropped():
    context = zmq.asyncio.Context()
    router = context.socket(zmq.ROUTER)
    router.curve_server, router.curve_secretkey = True, KEYS.server_secret
    router.linger = 0
    port = router.bind_to_random_port("tcp://127.0.0.1")
    async with calling(f"tcp://127.0.0.1:{port}") as client:
        call = asyncio.create_task(client.call(Ask("x"), timeout_s=60, what="x"))
        peer, data = await router.recv_multipart()
        request_id = decode(data, RequestFrame).request_id
        await router.send_multipart([peer, b"garbage"])
        for attempt in (ATTEMPT - 1, ATTEMPT):
            body = encode(Answer(str(attempt)))
            reply = ReplyFrame(
                version=PROTOCOL_VERSION,
                request_id=request_id,
                attempt=attempt,
                ok=True,
                body=body,
            )
            await router.send_multipart([peer, encode(reply)])
        assert await call == Answer(str(ATTEMPT))
        assert client.num_dropped == 2
    router.close()
    context.term()


# --- ends ---------------------------------------------------------------------------------------


@in_a_loop
async def test_fail_wakes_all_waiting_calls_at_once_and_refuses_later_ones():
    async with serving(Counting()) as server, calling(server.endpoint) as client:
        calls = [
            asyncio.create_task(client.call(Ask("x"), timeout_s=600, what=f"call {i}"))
            for i in range(10)
        ]
        await asyncio.sleep(0.1)
        client.fail("node7 is DOWN")
        async with asyncio.timeout(60):
            errors = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(error, WorkerLost) for error in errors)
        assert "model_worker/0 was lost, no reply to call 3: node7 is DOWN" in str(errors[3])
        with pytest.raises(WorkerLost, match="node7"):
            await client.call(Ask("x"), timeout_s=60, what="a later call")


@in_a_loop
async def test_closing_a_client_ends_its_calls():
    async with serving(Counting()) as server:
        async with calling(server.endpoint) as client:
            call = asyncio.create_task(client.call(Ask("x"), timeout_s=60, what="x"))
            await asyncio.sleep(0.05)
        with pytest.raises(WorkerLost, match="closed"):
            await call


@in_a_loop
async def test_a_cancelled_call_leaves_nothing_behind():
    handler = Counting()
    async with serving(handler) as server, calling(server.endpoint) as client:
        call = asyncio.create_task(client.call(Ask("x"), timeout_s=60, what="x"))
        await until(lambda: handler.num_calls == 1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        handler.may_answer.set()
        await until(lambda: client.num_dropped == 1)
        assert (await client.call(Ask("y"), timeout_s=60, what="y")).text == "y 2"


@in_a_loop
async def test_a_reply_after_the_deadline_is_said_in_the_log():
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("realsys.transport.server")
    logger.addHandler(handler)
    try:
        async with serving() as server, raw_dealer(server.endpoint) as socket:
            slow = encode(Ask("x", pause_s=0.1))
            await socket.send(encode(frame(body=slow, deadline_s=0.01)))
            assert (await reply_to(socket)).ok
    finally:
        logger.removeHandler(handler)
    assert any(line.startswith("replied late to=master_worker/0") for line in logged)


@in_a_loop
async def test_a_taken_port_or_an_unknown_host_is_explained():
    async with serving() as server:
        port = int(server.endpoint.rsplit(":")[-1])
        with pytest.raises(ClusterError, match="can't listen"):
            async with serving(ports=[port]):
                pass
    with pytest.raises(ClusterError, match="can't listen"):
        async with serving(bind_host="no.such.host.invalid"):
            pass
