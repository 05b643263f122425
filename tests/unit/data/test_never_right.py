"""A peer whose answers never come right is not asked for ever."""

from __future__ import annotations

import golden
import zmq

from realsys.data.transfer.tensor_client import MAX_REPEATS, TensorClient
from realsys.data.transfer.transfer_messages import SealedBytes, TensorReply
from realsys.transport.codec import ProtocolError, encode
from realsys.transport.curve_keys import TrialKeypairs


def test_an_answer_by_a_stream_that_nobody_opened_is_given_up():
    client = TensorClient(
        ["tcp://127.0.0.1:9"], trial="a/b", attempt=1, token="t", keypairs=TrialKeypairs.generate()
    )
    asked: list[list[bytes]] = []

    class Peer:
        def send_multipart(self, parts):
            asked.append(parts)

    nobodys = SealedBytes(stream=b"s" * 16, number=0, num_bytes=40)
    answer = encode(TensorReply(dtype="int64", trailing_shape=(), rows=(3, 2), sealed=nobodys))
    connect, client._socket = client._socket, lambda worker: Peer()
    client._receive = lambda waiting, *_: (next(iter(waiting)), [zmq.Frame(answer)])
    try:
        with golden.raises(ProtocolError):
            client.fetch(0, "x", ["a", "b"], timeout_s=240)
    finally:
        client._socket = connect
        client.close()
    assert len(asked) == MAX_REPEATS + 1
