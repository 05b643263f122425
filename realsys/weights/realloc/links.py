"""Interface of links that carry buckets between workers, implemented by shared memory and torch.

A link moves one message per round between a pair of workers, in order. Filling, posting and receiving are
separate operations, so that they can overlap. Every wait has a deadline and names the peer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from realsys.api.errors import WaitTimeout


@dataclass(frozen=True)
class Send:
    """A filled message, uint8. ``tag``: a checksum of its description, which the receiver expects."""

    buffer: Tensor
    tag: int


@dataclass(frozen=True)
class Receive:
    """An expected message. ``into``: the caller's memory for it, uint8 ``[num_bytes]``."""

    num_bytes: int
    tag: int
    into: Tensor | None = None


class Link(Protocol):
    """Message transport between this worker and others, which are identified by their indices."""

    def connect(self, sends_to: Collection[int], receives_from: Collection[int]) -> None:
        """Opens these pairs. Every worker of a transfer must call it before its first message."""

    def bucket_bytes(self, sender: int, receiver: int, fan_out: int) -> int:
        """Largest message of a pair, equal on both ends. ``fan_out``: number of pairs at its busier end."""

    def alone_bytes(self, sender: int, receiver: int) -> int | None:
        """Size from which a part of a weight gets its own message, since the link can send it unpacked."""

    def accepts(self, x: Tensor) -> bool:
        """True if the memory of ``x`` can serve as a message itself, sent or written in place."""

    def out_buffer(self, peer: int, num_bytes: int) -> Tensor:
        """Returns a buffer uint8 ``[num_bytes]`` for the next message to ``peer``. May wait for space."""

    def post(self, sends: Mapping[int, Send], receives: Mapping[int, Receive]) -> None:
        """Starts the messages of a round, by peer. Does not wait."""

    def arrivals(self, receives: Mapping[int, Receive]) -> Iterator[tuple[int, Tensor]]:
        """Yields (peer, message) of a posted round as they arrive; each is valid until the next is
        requested.
        """

    def drain(self) -> None:
        """Waits until all posted messages have left the caller's memory."""


def peer_timeout(peer: int, what: str, timeout_s: float) -> WaitTimeout:
    """Makes the error for a wait that ended without ``peer``."""
    return WaitTimeout(
        f"model_worker/{peer} did not {what} in {timeout_s:g} s",
        where="weight reallocation",
        fix=f"see the log of model_worker/{peer}; all workers of both copies must take part",
    )
