"""Which worker gives which part of which weight to generation servers (pure).

The plan of a reallocation to one worker that holds a whole copy: every number is given once, and replicas
share the work. All workers make the same; servers need not be known, nor how many there are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from realsys.models.shape import Weight
from realsys.weights.layouts.boxes import Box, Layout
from realsys.weights.realloc.buckets import Bucket, WeightPiece, cut_into_buckets
from realsys.weights.realloc.realloc_plan import plan_realloc

BUCKET_BYTES = (
    16 << 20
)  # large enough that asking costs nothing, small enough to have several under way
_WHOLE_COPY = -1  # no worker's index


@dataclass(frozen=True, kw_only=True)
class Giving:
    """Who gives what.

    Attributes:
        weights: all weights of the model, adapters after them; whole shapes.
        dtypes: weight → dtype in which it is given.
        pieces: worker → what it gives, in the order of the weights. Workers without any are missing.
    """

    weights: tuple[Weight, ...]
    dtypes: Mapping[str, str]
    pieces: Mapping[int, tuple[WeightPiece, ...]]

    def buckets(
        self, worker: int, *, apart: Collection[str] = (), max_bytes: int = BUCKET_BYTES
    ) -> list[Bucket]:
        """What ``worker`` gives, in buckets of at most ``max_bytes``.

        Args:
            apart: weights that share no bucket with others (what trains, with what is frozen).
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


def plan_publish(layout: Layout, workers: Sequence[int], *, dtypes: Mapping[str, str]) -> Giving:
    """The plan for one copy of a model.

    Args:
        layout: its holdings by parallelism rank. workers: model workers by the same.
        dtypes: weight → dtype in which it is given.
    Raises:
        ConfigError: an unknown dtype, or none.
    """
    weights = weights_of(layout)
    whole = ({w.name: (Box.whole(w.shape),) for w in weights},)
    plan = plan_realloc(weights, layout, workers, whole, [_WHOLE_COPY], dtype=dtypes)
    return Giving(
        weights=weights,
        dtypes=plan.dtypes,
        pieces={sender: pieces for (sender, _), pieces in plan.streams.items()},
    )


def weights_of(layout: Layout) -> tuple[Weight, ...]:
    """The weights of a copy, adapters among them: all ranks together hold each wholly."""
    shapes: dict[str, tuple[int, ...]] = {}
    for holding in layout:
        for name, boxes in holding.items():
            for box in boxes:
                shapes[name] = tuple(map(max, box.stop, shapes.get(name, box.stop)))
    return tuple(Weight(name, shape) for name, shape in shapes.items())


def wire_dtypes(weights: Collection[Weight], *, dtype: str, wire: str = "") -> dict[str, str]:
    """Weight → dtype in which it is given: ``wire``, or what the model and its servers compute in.

    Adapters are held in float32 where the model is of half precision, and are always given as held:
    their product is what must not be rounded twice.
    """
    adapters = "float32" if dtype.endswith("float16") else dtype
    return {w.name: adapters if ".lora_" in w.name else wire or dtype for w in weights}
