"""Carries a plan out: weights of one copy of a model become those of another one.

All workers of both copies call ``run`` with the same plan. What a worker has in both copies is copied
without a buffer; all else goes in buckets, of which one is filled while another flies.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from realsys.api.errors import ConfigError, InternalError
from realsys.param_realloc.buckets import Bucket, Piece, cut_into_buckets, rounds
from realsys.param_realloc.links import Link, Receive, Send
from realsys.param_realloc.realloc_plan import ReallocPlan
from realsys.param_realloc.views import Views, as_bytes, copy_within, pack, unpack


@dataclass(frozen=True, kw_only=True)
class ReallocReport:
    """What one worker did: bytes in the source copy's dtype, and wall time."""

    bytes_sent: int
    bytes_received: int
    bytes_copied: int
    seconds: float


class Reallocator:
    """Moves weights to and from this worker.

    Args:
        link: None where nothing ever leaves this worker.
    """

    def __init__(self, worker: int, link: Link | None = None) -> None:
        self.worker, self._link = worker, link
        self._broken = ""

    def run(
        self,
        plan: ReallocPlan,
        source_views: Views | None,
        target_views: Views | None,
        eta: float = 1.0,
    ) -> ReallocReport:
        """Blocks until this worker's part is done. Bit-exact for ``eta`` = 1 and equal dtypes.

        Tell the target's engine afterwards (``weights_changed``).

        Args:
            source_views, target_views: what this worker holds of each copy; None: nothing.
            eta: target ← eta · source + (1 − eta) · target.
        Raises:
            WaitTimeout, WorkerLost: a peer did not do its part; names it. InternalError: a former
                transfer failed, or views do not fit the plan.
        """
        if not 0 < eta <= 1:
            raise ConfigError(
                f"eta is {eta}", where="Reallocator.run", fix="use a number in (0, 1]"
            )
        if self._broken:  # what is left of that transfer would be taken for weights
            raise InternalError(
                f"an earlier transfer failed half way: {self._broken}",
                where=f"weight reallocation, model_worker/{self.worker}",
                fix="start a new attempt",
            )
        began_s = time.perf_counter()
        try:
            with torch.no_grad():
                _Transfer(self.worker, self._link, plan, source_views, target_views, eta).run()
        except BaseException as error:
            self._broken = str(error) or type(error).__name__
            raise
        return ReallocReport(
            bytes_sent=sum(map(plan.num_bytes, plan.sends(self.worker).values())),
            bytes_received=sum(map(plan.num_bytes, plan.receives(self.worker).values())),
            bytes_copied=plan.num_bytes(plan.copies.get(self.worker, ())),
            seconds=time.perf_counter() - began_s,
        )


class _Transfer:
    """One run of a plan on one worker."""

    def __init__(
        self,
        worker: int,
        link: Link | None,
        plan: ReallocPlan,
        source: Views | None,
        target: Views | None,
        eta: float,
    ) -> None:
        self.worker, self._plan, self._eta = worker, plan, eta
        self._source, self._target = source or {}, target or {}
        self._sends, self._receives = plan.sends(worker), plan.receives(worker)
        self._maybe_link = link

    @property
    def _link(self) -> Link:
        if self._maybe_link is None:
            raise InternalError(
                f"weights must come from or go to model_worker/"
                f"{min([*self._sends, *self._receives])}, and there is no link",
                where=f"weight reallocation, model_worker/{self.worker}",
            )
        return self._maybe_link

    def run(self) -> None:
        if self._sends or self._receives:
            self._link.connect(self._sends, self._receives)
        outgoing = {peer: self._buckets(self.worker, peer) for peer in self._sends}
        incoming = {peer: self._buckets(peer, self.worker) for peer in self._receives}
        under_way: dict[int, Receive] = {}
        own = iter(self._plan.copies.get(self.worker, ()))
        for sends, receives, arrivals in rounds(outgoing, incoming):
            filled = {peer: self._filled(peer, bucket) for peer, bucket in sends.items()}
            opened = {peer: self._opened(peer, bucket) for peer, bucket in receives.items()}
            self._link.post(filled, opened)
            self._copy_own(own)  # while the first buckets fly
            self._take_in(arrivals, under_way)
            under_way = opened
        self._copy_own(own)
        if self._sends or self._receives:
            self._link.drain()

    def _buckets(self, sender: int, receiver: int) -> Iterator[Bucket]:
        crowd = self._plan.crowd(sender, receiver)
        return cut_into_buckets(
            self._plan.streams[sender, receiver],
            self._plan.dtypes,
            max_bytes=self._link.bucket_bytes(sender, receiver, crowd),
            alone_bytes=self._link.alone_bytes(sender, receiver),
        )

    def _filled(self, peer: int, bucket: Bucket) -> Send:
        buffer: Tensor | None = None
        if self._link.alone_bytes(self.worker, peer) is not None:
            buffer = as_bytes(self._source, bucket, self._plan.dtypes)
        if buffer is None:
            buffer = self._link.out_buffer(peer, bucket.num_bytes)
            pack(self._source, bucket, self._plan.dtypes, buffer)
        return Send(buffer, bucket.tag)

    def _opened(self, peer: int, bucket: Bucket) -> Receive:
        into: Tensor | None = None
        if self._eta == 1.0 and self._link.alone_bytes(peer, self.worker) is not None:
            into = as_bytes(self._target, bucket, self._plan.dtypes)
        return Receive(bucket.num_bytes, bucket.tag, into)

    def _take_in(self, buckets: dict[int, Bucket], opened: dict[int, Receive]) -> None:
        if not opened:
            return
        for peer, message in self._link.arrivals(opened):
            if opened[peer].into is None:
                unpack(self._target, buckets[peer], self._plan.dtypes, message, self._eta)

    def _copy_own(self, pieces: Iterator[Piece]) -> None:
        for piece in pieces:
            copy_within(self._source, self._target, piece, self._eta)
