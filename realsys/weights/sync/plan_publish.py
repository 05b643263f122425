"""Plans which worker publishes which part of which weight for generation servers (pure).

The plan equals that of a reallocation to a single worker with a whole copy: every element is published
once, and replicas share the work. All workers derive the same plan; the servers need not be known.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from realsys.models.shape import Weight
from realsys.weights.layouts.boxes import Box, Layout
from realsys.weights.realloc.buckets import Bucket, WeightPiece, cut_into_buckets
from realsys.weights.realloc.realloc_plan import plan_realloc

# Large enough to make requests cheap, small enough to have several in flight
BUCKET_BYTES = 16 << 20
_WHOLE_COPY = -1  # not a worker's index


@dataclass(frozen=True, kw_only=True)
class PublishPlan:
    """Assignment of parts of weights to publishing workers.

    Attributes:
        weights: all weights of the model, adapters after them; full shapes.
        dtypes: weight → dtype in which it is published.
        pieces: worker → its pieces, in the order of the weights. Workers without any are omitted.
    """

    weights: tuple[Weight, ...]
    dtypes: Mapping[str, str]
    pieces: Mapping[int, tuple[WeightPiece, ...]]

    def buckets(
        self, worker: int, *, apart: Collection[str] = (), max_bytes: int = BUCKET_BYTES
    ) -> list[Bucket]:
        """Packs what ``worker`` publishes into buckets of at most ``max_bytes``.

        Args:
            apart: weights that must not share a bucket with others (trained ones with frozen ones).
        """
        mine = self.pieces.get(worker, ())
        return [
            bucket
            for is_apart in (False, True)
            for bucket in cut_into_buckets(
                [p for p in mine if (p.name in apart) == is_apart],
                self.dtypes,
                max_bytes=max_bytes,
            )
        ]


def plan_publish(
    layout: Layout, workers: Sequence[int], *, dtypes: Mapping[str, str]
) -> PublishPlan:
    """Plans the publication of one copy of a model.

    Args:
        layout: its holdings by parallelism rank. workers: model workers by parallelism rank.
        dtypes: weight → dtype in which it is published.
    Raises:
        ConfigError: a dtype is unknown or missing.
    """
    weights = weights_of(layout)
    whole = ({w.name: (Box.whole(w.shape),) for w in weights},)
    plan = plan_realloc(weights, layout, workers, whole, [_WHOLE_COPY], dtype=dtypes)
    return PublishPlan(
        weights=weights,
        dtypes=plan.dtypes,
        pieces={sender: pieces for (sender, _), pieces in plan.streams.items()},
    )


def weights_of(layout: Layout) -> tuple[Weight, ...]:
    """Lists the weights of a copy, adapters included; all ranks together hold each completely."""
    shapes: dict[str, tuple[int, ...]] = {}
    for holding in layout:
        for name, boxes in holding.items():
            for box in boxes:
                shapes[name] = tuple(map(max, box.stop, shapes.get(name, box.stop)))
    return tuple(Weight(name, shape) for name, shape in shapes.items())


def wire_dtypes(weights: Collection[Weight], *, dtype: str, wire: str = "") -> dict[str, str]:
    """Maps each weight to its published dtype: ``wire``, or the compute dtype of model and servers.

    Adapters of a half-precision model are held in float32, and are always published as held, so that
    their product is rounded only once.
    """
    adapters = "float32" if dtype.endswith("float16") else dtype
    return {w.name: adapters if ".lora_" in w.name else wire or dtype for w in weights}
