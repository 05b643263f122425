"""Validates that the trainers' manifests cover one version exactly, and chooses what to fetch (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum

from realsys.transport.codec import ProtocolError
from realsys.weights.layouts.boxes import Box
from realsys.weights.sync.manifest import Manifest, PublishedBucket


class FetchMode(StrEnum):
    """How a bucket is obtained."""

    REUSE = "held"  # already present, from an earlier version
    DELTA = "patch"  # what changed since the version that is present
    FULL = "whole"


def choose_fetch_mode(
    bucket: PublishedBucket, *, version: int, held_version: int | None
) -> FetchMode:
    """Chooses the cheapest way to obtain a bucket of ``version``.

    Args:
        held_version: complete version that the receiver has from the same publisher; None: none.
    """
    if held_version is None or held_version > version:
        return FetchMode.FULL
    if bucket.changed_in <= held_version:
        return FetchMode.REUSE
    if bucket.patch is not None and bucket.patch.base == held_version:
        return FetchMode.DELTA
    return FetchMode.FULL


def check_parts(parts: Sequence[Manifest], *, version: int) -> None:
    """Checks that the parts contain every element of every weight exactly once.

    Raises:
        ProtocolError: a part is of another version or model, missing or duplicated; or elements are
            missing or contained twice.
    """
    if problem := next(_problems(parts, version), ""):
        raise ProtocolError(
            f"the parts of version {version} are not complete: {problem}",
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
    """True if any two boxes intersect."""
    near: list[Box] = []
    for box in sorted(boxes):
        near = [other for other in near if not box.start or other.stop[0] > box.start[0]]
        if any(box.intersection(other) for other in near):
            return True
        near.append(box)
    return False
