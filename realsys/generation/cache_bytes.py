"""Computes the memory that generation needs besides the weights: cache, prompts, logits (pure, no torch).

For the planner, which says what fits, and for the engine, which takes a GPU's free memory for its cache.
"""

from __future__ import annotations

from dataclasses import dataclass

# These bound memory, not results.
READ_TOKENS_FUSED = 8192  # tokens read in one pass by fused attention, which keeps no scores
READ_CELLS = 4  # cells of the rows of a pass, known beginnings included, for each of its tokens
# More rows would lengthen steps more than they reduce their number, and each row has its logits.
ROWS_OF_GPU = 1024
_FLOAT32 = 4


@dataclass(frozen=True, kw_only=True)
class BytesOfGeneration:
    """Bytes by what they grow with.

    Attributes:
        token: keys and values of one token.
        row: logits of one row, and what is picked from.
        work: what a layer computes at once for one token that is read.
        layers: of which one is there twice while the cache grows.
    """

    token: int
    row: int
    work: int
    layers: int

    @classmethod
    def of_sizes(
        cls,
        *,
        layers: int,
        hidden: int,
        queries: int,
        keys: int,
        middle: int,
        vocabulary: int,
        item: int,
    ) -> BytesOfGeneration:
        """Derives the needs from a model's sizes.

        Args:
            queries, keys: rows of the query and of the key projection.
            middle: columns of the MLP.
            item: bytes of a number.
        """
        # At once: three of the hidden state, queries to values twice, the MLP's two and their product.
        return cls(
            token=2 * layers * keys * item,
            row=vocabulary * (item + 2 * _FLOAT32),
            work=(3 * hidden + 2 * (queries + 2 * keys) + 3 * middle) * item,
            layers=layers,
        )

    @property
    def cached_token(self) -> float:
        """Bytes of one token in a cache that grows."""
        return self.token * (1 + 1 / self.layers)

    def reading(self, tokens: int, positions: int) -> int:
        """Bytes while ``tokens`` are read in one pass into a cache of their own, of ``positions``."""
        return tokens * self.work + positions * self.token

    def logits(self, rows: int) -> int:
        """Bytes of the rows that are decoded together, of ``rows``."""
        return min(rows, ROWS_OF_GPU) * self.row
