"""Do the trainers' lists make one whole version, and what of it must come? (pure)"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum

from realsys.transport.codec import ProtocolError
from realsys.weights.layouts.boxes import Box
from realsys.weights.sync.manifest import GivenBucket, Manifest


class FetchMode(StrEnum):
    """How a bucket is had."""

    HELD = "held"  # it is here, from an earlier version
    PATCH = "patch"  # what changed since the version that is here
    WHOLE = "whole"


def way_of(bucket: GivenBucket, *, version: int, held_version: int | None) -> FetchMode:
    """The cheapest way to a bucket of ``version``.

    Args:
        held_version: what the receiver has whole from the same publisher; None: nothing.
    """
    if held_version is None or held_version > version:
        return FetchMode.WHOLE
    if bucket.changed_in <= held_version:
        return FetchMode.HELD
    if bucket.patch is not None and bucket.patch.base == held_version:
        return FetchMode.PATCH
    return FetchMode.WHOLE


def check_parts(parts: Sequence[Manifest], *, version: int) -> None:
    """Every number of every weight comes exactly once.

    Raises:
        ProtocolError: parts of another version or model, a part that is missing or came twice, numbers
            that nobody gives or that two give.
    """
    if problem := next(_problems(parts, version), ""):
        raise ProtocolError(
            f"the parts of version {version} do not make one whole: {problem}",
            where="receiving weights from "
            + (", ".join(f"model_worker/{p.giver}" for p in parts) or "nobody"),
            fix="name the newest version's parts, each once",
        )


def _problems(parts: Sequence[Manifest], version: int) -> Iterator[str]:
    if not parts:
        yield "there are none"
        return
    first = parts[0]
    for part in parts:
        who = f"model_worker/{part.giver}"
        if part.version != version:
            yield f"{who} gives version {part.version}"
        same = ("model", "givers", "weights", "adapter_scale")
        for field in same:
            if getattr(part, field) != getattr(first, field):
                yield f"{who} and model_worker/{first.giver} differ in {field}"
    came = [part.giver for part in parts]
    if missing := sorted(set(first.givers) - set(came)):
        yield "no part of " + ", ".join(f"model_worker/{n}" for n in missing)
    if len(set(came)) != len(came):
        yield f"parts of model workers {sorted(came)}"
    boxes: list[list[Box]] = [[] for _ in first.weights]
    for part in parts:
        for bucket in part.buckets:
            for piece in bucket.pieces:
                boxes[piece.weight].append(Box(piece.start, piece.stop))
    for weight, of_weight in zip(first.weights, boxes, strict=True):
        whole = Box.whole(weight.shape).numel
        found = sum(box.numel for box in of_weight)
        if found < whole:
            yield f"{whole - found} of the {whole} numbers of {weight.name} are missing"
        if found > whole or overlap(of_weight):
            yield f"numbers of {weight.name} come twice"


def overlap(boxes: Iterable[Box]) -> bool:
    """Whether any two of them have a number in common."""
    near: list[Box] = []
    for box in sorted(boxes):
        near = [other for other in near if not box.start or other.stop[0] > box.start[0]]
        if any(box.meet(other) for other in near):
            return True
        near.append(box)
    return False
