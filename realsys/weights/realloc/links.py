"""What carries buckets between workers: a promise that shared memory and torch both keep.

A link moves one message a round between a pair of workers, in order. Filling, posting and taking in are
separate, so that they can overlap. Every wait has a deadline and names the peer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from realsys.api.errors import WaitTimeout


@dataclass(frozen=True)
class Send:
    """A filled message, uint8. ``tag``: a checksum of what is in it, which the receiver expects."""

    buffer: Tensor
    tag: int


@dataclass(frozen=True)
class Receive:
    """A message to come. ``into``: the caller's memory for it, uint8 ``[num_bytes]``."""

    num_bytes: int
    tag: int
    into: Tensor | None = None


class Link(Protocol):
    """Messages between this worker and others, which are named by their indices."""

    def connect(self, sends_to: Collection[int], receives_from: Collection[int]) -> None:
        """Opens these pairs. Every worker of a transfer calls it before its first message."""

    def bucket_bytes(self, sender: int, receiver: int, crowd: int) -> int:
        """Largest message of a pair, alike on both ends. ``crowd``: pairs that share its busier end."""

    def alone_bytes(self, sender: int, receiver: int) -> int | None:
        """From this size on a part of a weight is its own message: the link can send it unpacked."""

    def takes(self, x: Tensor) -> bool:
        """Whether the memory of ``x`` can be a message itself, sent or written where it lies."""

    def out_buffer(self, peer: int, num_bytes: int) -> Tensor:
        """uint8 ``[num_bytes]``, to be filled with the next message for ``peer``. May wait for room."""

    def post(self, sends: Mapping[int, Send], receives: Mapping[int, Receive]) -> None:
        """Starts the messages of a round, by peer. Does not wait."""

    def arrivals(self, receives: Mapping[int, Receive]) -> Iterator[tuple[int, Tensor]]:
        """(peer, its message) of a posted round, as they come; each valid until the next is asked for."""

    def drain(self) -> None:
        """Waits until all that was posted has left the caller's memory."""


def peer_is_late(peer: int, what: str, timeout_s: float) -> WaitTimeout:
    """The error for a wait that ended without ``peer``."""
    return WaitTimeout(
        f"model_worker/{peer} did not {what} in {timeout_s:g} s",
        where="weight reallocation",
        fix=f"see the log of model_worker/{peer}; all workers of both copies must take part",
    )
