"""Link through memory shared by two workers of one host: one copy in, one copy out.

Pairs are probed: each writer offers a ring through a store that all workers share, and the reader replies
whether it could open it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from datetime import timedelta
from typing import Any, Protocol

from torch import Tensor

from realsys.api.errors import InternalError
from realsys.weights.realloc.links import Receive, Send, peer_timeout
from realsys.weights.realloc.rings import SLOT_BYTES, Ring, RingRefused, wait_any


class Store(Protocol):
    """The methods of ``torch.distributed.Store`` that are used."""

    def set(self, key: str, value: str, /) -> None:
        """Writes a value."""

    def get(self, key: str, /) -> bytes:
        """Reads a value."""

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        """Blocks until all keys exist; raises RuntimeError at the timeout."""


class SharedMemoryLink:
    """Rings to and from workers of this host, for tensors in CPU memory.

    Args:
        worker: this worker's index.
        store: shared by all workers of this attempt only.
    """

    def __init__(self, worker: int, store: Store, *, timeout_s: float) -> None:
        self.worker, self._store, self._timeout_s = worker, store, timeout_s
        self._out: dict[int, Ring | None] = {}  # None: probed, and not possible
        self._in: dict[int, Ring | None] = {}
        self.refusals: dict[int, str] = {}  # peer → reason of the refusal

    def carries(self, sender: int, receiver: int) -> bool:
        """True if this pair, which includes this worker, has a ring."""
        if sender == self.worker:
            return self._out.get(receiver) is not None
        return self._in.get(sender) is not None

    def connect(self, sends_to: Collection[int], receives_from: Collection[int]) -> None:
        """Probes pairs that were not probed yet. Every worker offers before it waits, so none blocks.

        Raises:
            WaitTimeout: names a peer that did not respond.
        """
        new_out = sorted(set(sends_to) - set(self._out))
        new_in = sorted(set(receives_from) - set(self._in))
        for peer in new_out:
            self._offer(peer)
        for peer in new_in:
            self._answer(peer)
        for peer in new_out:
            answer = self._get(f"answer/{self.worker}/{peer}", peer, "answer an offer of memory")
            ring = self._out[peer]
            if ring is not None:
                ring.opened()
            if "no" in answer:
                self._out[peer] = None
                self.refusals[peer] = str(answer["no"])

    def bucket_bytes(self, sender: int, receiver: int, fan_out: int) -> int:
        return SLOT_BYTES

    def alone_bytes(self, sender: int, receiver: int) -> int | None:
        return None

    def accepts(self, x: Tensor) -> bool:
        return False

    def out_buffer(self, peer: int, num_bytes: int) -> Tensor:
        slot = self._ring(self._out, peer).reserve(num_bytes, self._timeout_s)
        if slot is None:
            raise peer_timeout(peer, "take in weights", self._timeout_s)
        return slot

    def post(self, sends: Mapping[int, Send], receives: Mapping[int, Receive]) -> None:
        for peer, send in sends.items():
            self._ring(self._out, peer).publish(send.buffer.numel(), send.tag)

    def arrivals(self, receives: Mapping[int, Receive]) -> Iterator[tuple[int, Tensor]]:
        rings = {peer: self._ring(self._in, peer) for peer in receives}
        while rings:
            ready = {peer: ring.has_message for peer, ring in rings.items()}
            peer = wait_any(ready, self._timeout_s)
            if peer is None:
                raise peer_timeout(min(rings), "send weights", self._timeout_s)
            ring, expected = rings.pop(peer), receives[peer]
            message, tag = ring.message()
            if (message.numel(), tag) != (expected.num_bytes, expected.tag):
                raise InternalError(
                    f"model_worker/{peer} sent {message.numel()} bytes of other weights than the "
                    f"{expected.num_bytes} expected",
                    where=f"weight reallocation, model_worker/{self.worker}",
                    fix="report this as a bug: the two workers made different plans",
                )
            yield peer, message
            ring.release()

    def drain(self) -> None:
        """Returns at once: posted messages are already in shared memory."""

    def _offer(self, peer: int) -> None:
        try:
            self._out[peer], offer = Ring.create()
        except RingRefused as error:
            self._out[peer], offer = None, {"no": str(error)}
        self._store.set(f"realloc/offer/{self.worker}/{peer}", json.dumps(offer))

    def _answer(self, peer: int) -> None:
        offer = self._get(f"offer/{peer}/{self.worker}", peer, "offer memory")
        try:
            if "no" in offer:
                raise RingRefused(str(offer["no"]))
            self._in[peer], answer = Ring.open(offer), {}
        except RingRefused as error:
            self._in[peer], answer = None, {"no": str(error)}
            self.refusals[peer] = str(error)
        self._store.set(f"realloc/answer/{peer}/{self.worker}", json.dumps(answer))

    def _get(self, key: str, peer: int, what: str) -> dict[str, Any]:
        try:
            self._store.wait([f"realloc/{key}"], timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            raise peer_timeout(peer, what, self._timeout_s) from error
        found: dict[str, Any] = json.loads(self._store.get(f"realloc/{key}"))
        return found

    def _ring(self, rings: Mapping[int, Ring | None], peer: int) -> Ring:
        ring = rings.get(peer)
        if ring is None:
            raise InternalError(
                f"no shared memory with model_worker/{peer}: {self.refusals.get(peer, 'not tried')}",
                where=f"weight reallocation, model_worker/{self.worker}",
            )
        return ring
