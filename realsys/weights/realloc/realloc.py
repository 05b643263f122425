"""Executes a reallocation plan: transfers weights from one copy of a model to another.

All workers of both copies call ``run`` with the same plan. What a worker holds of both copies is copied
directly; everything else is sent in buckets, of which one is filled while another is in flight.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import torch

from realsys.api.errors import ConfigError, InternalError
from realsys.weights.realloc.buckets import WeightPiece, cut_into_buckets, rounds
from realsys.weights.realloc.links import Link, Receive, Send
from realsys.weights.realloc.realloc_plan import ReallocPlan
from realsys.weights.realloc.views import (
    Move,
    Views,
    addresses_of,
    check_lossless,
    copy_within,
    message_in_place,
    moves_of,
    pack,
    unpack,
)

PREPARED_AT_ONCE = 64  # messages of a pair that are prepared at once


@dataclass(frozen=True, kw_only=True)
class ReallocReport:
    """Transfer statistics of one worker: bytes in the source copy's dtype."""

    bytes_sent: int
    bytes_received: int
    bytes_copied: int


def report_of(plan: ReallocPlan, worker: int) -> ReallocReport:
    """Computes what ``worker`` has moved after completing its part of ``plan``."""
    return ReallocReport(
        bytes_sent=sum(map(plan.num_bytes, plan.sends(worker).values())),
        bytes_received=sum(map(plan.num_bytes, plan.receives(worker).values())),
        bytes_copied=plan.num_bytes(plan.copies.get(worker, ())),
    )


class Reallocator:
    """Moves weights to and from this worker.

    Args:
        link: None if nothing ever leaves this worker.
    """

    def __init__(self, worker: int, link: Link | None = None) -> None:
        self.worker, self._link = worker, link
        self._broken = ""
        self._prepared: _PreparedByPair = {}

    def run(
        self,
        plan: ReallocPlan,
        source_views: Views | None,
        target_views: Views | None,
        eta: float = 1.0,
    ) -> ReallocReport:
        """Executes this worker's part and blocks until it is done. Bit-exact for ``eta`` = 1 and
        equal dtypes.

        Call the target engine's ``weights_changed`` afterwards.

        Args:
            source_views, target_views: views of what this worker holds of each copy; None: nothing.
            eta: target ← eta · source + (1 − eta) · target.
        Raises:
            WaitTimeout, WorkerLost: names the peer that did not complete its part. InternalError: a former
                transfer failed, or views do not match the plan.
        """
        if not 0 < eta <= 1:
            raise ConfigError(
                f"eta is {eta}", where="Reallocator.run", fix="use a number in (0, 1]"
            )
        if self._broken:  # remains of that transfer would be mistaken for weights
            raise InternalError(
                f"an earlier transfer failed half way: {self._broken}",
                where=f"weight reallocation, model_worker/{self.worker}",
                fix="start a new attempt",
            )
        try:
            with torch.no_grad():
                views = source_views or {}, target_views or {}
                _Transfer(self.worker, self._link, plan, *views, eta, self._prepared).run()
        except BaseException as error:
            self._broken = str(error) or type(error).__name__
            raise
        return report_of(plan, self.worker)


class _Message(NamedTuple):
    """One end of a bucket: its moves and transport. ``receive.into`` is set if it is sent or
    received unpacked.
    """

    moves: list[Move]
    receive: Receive


class _PreparedMessages(NamedTuple):
    """Prepared messages of a pair for these views. Holds ``plan`` so that its id is not reused."""

    plan: ReallocPlan
    views: Hashable
    messages: list[_Message]


_PreparedByPair = dict[tuple[int, int, int, bool], _PreparedMessages]


@dataclass(eq=False, repr=False)
class _Transfer:
    """One run of a plan on one worker."""

    worker: int
    maybe_link: Link | None
    plan: ReallocPlan
    source: Views
    target: Views
    eta: float
    prepared: _PreparedByPair

    def __post_init__(self) -> None:
        self._sends, self._receives = self.plan.sends(self.worker), self.plan.receives(self.worker)

    @property
    def _link(self) -> Link:
        if self.maybe_link is None:
            raise InternalError(
                f"weights must come from or go to model_worker/"
                f"{min([*self._sends, *self._receives])}, and there is no link",
                where=f"weight reallocation, model_worker/{self.worker}",
            )
        return self.maybe_link

    def run(self) -> None:
        if self._sends or self._receives:
            self._link.connect(self._sends, self._receives)
        outgoing = {peer: self._messages(self.worker, peer) for peer in self._sends}
        incoming = {peer: self._messages(peer, self.worker) for peer in self._receives}
        own = iter(self.plan.copies.get(self.worker, ()))
        for sends, receives, arrivals in rounds(outgoing, incoming):
            self._link.post(
                {peer: self._filled(peer, message) for peer, message in sends.items()},
                {peer: message.receive for peer, message in receives.items()},
            )
            self._copy_own(own)  # while the first messages are in flight
            self._receive(arrivals)
        self._copy_own(own)
        if self._sends or self._receives:
            self._link.drain()

    def _messages(self, sender: int, receiver: int) -> Iterator[_Message]:
        """Yields the prepared messages of the plan's last run if the weights' memory is unchanged,
        else new ones.
        """
        key = (id(self.plan), sender, receiver, self.eta == 1.0)
        views = addresses_of(self.source if sender == self.worker else self.target)
        known = self.prepared.get(key)
        if known is not None and known.views == views:
            yield from known.messages
            return
        made = []
        for message in self._new_messages(sender, receiver):
            made.append(message)
            yield message
        self.prepared[key] = _PreparedMessages(self.plan, views, made)

    def _new_messages(self, sender: int, receiver: int) -> Iterator[_Message]:
        """Prepares messages in batches, because copying in between evicts everything from the CPU
        caches.
        """
        fan_out, alone = (
            self.plan.fan_out(sender, receiver),
            self._link.alone_bytes(sender, receiver),
        )
        buckets = cut_into_buckets(
            self.plan.streams[sender, receiver],
            self.plan.dtypes,
            max_bytes=self._link.bucket_bytes(sender, receiver, fan_out),
            alone_bytes=alone,
        )
        is_sender = sender == self.worker
        views = self.source if is_sender else self.target
        while batch := list(islice(buckets, PREPARED_AT_ONCE)):
            found = []
            for bucket in batch:
                moves = moves_of(views, bucket, self.plan.dtypes)
                if is_sender:
                    names = {piece.name for piece in bucket.pieces}
                    check_lossless(views, names, self.plan.dtypes, self.plan.rounded)
                may_skip_buffer = alone is not None and (is_sender or self.eta == 1.0)
                own = message_in_place(moves, bucket.num_bytes) if may_skip_buffer else None
                if own is not None and not self._link.accepts(own):
                    own = None
                found.append(_Message(moves, Receive(bucket.num_bytes, bucket.tag, own)))
            yield from found

    def _filled(self, peer: int, message: _Message) -> Send:
        buffer = message.receive.into
        if buffer is None:
            buffer = self._link.out_buffer(peer, message.receive.num_bytes)
            pack(message.moves, buffer)
        return Send(buffer, message.receive.tag)

    def _receive(self, messages: Mapping[int, _Message]) -> None:
        if not messages:
            return
        receives = {peer: message.receive for peer, message in messages.items()}
        for peer, buffer in self._link.arrivals(receives):
            if receives[peer].into is None:
                unpack(messages[peer].moves, buffer, self.eta)

    def _copy_own(self, pieces: Iterator[WeightPiece]) -> None:
        for piece in pieces:
            copy_within(self.source, self.target, piece, self.eta)
