"""Attention of many tokens of a row on a CPU: block by block, each against no more than it sees.

For prompts. The products, softmax and sums are those of ``Lanes.attend``, bit for bit, so that a token may
be read or decoded (decoder.py, batch invariance). What is saved:

- nothing is multiplied with positions behind a block, and nothing is masked in front of it;
- a block's scores stay in a processor's cache between their four uses;
- key heads that share a lane for a few queries' sake part again;
- each thread has blocks of its own. Threads that share each product wait for one another at each, for
  milliseconds where something else runs on their cores.

Kernels that sum otherwise (the oldest of MKL do) are found by a trial, and texts are then read as before.

Shape suffixes as in attention.py; S lanes of texts in a lane of the cache.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from realsys.generation.decoding.attention import PIECE, KeyValues, Lanes, seen_width

# Scores of a block: few enough for a processor's cache, enough for a call to be worth its overhead.
_SCORES = 1 << 21
_SCORES_OF_THREADS = 1 << 21  # of a layer; with fewer the calling thread computes all
_TOKENS = 128  # of a block: on average half of them are looked at for nothing
_MIN_COLUMNS = 16  # narrower values take other kernels, with other last bits
_MAX_TERMS = 192  # longer sums are made in another order: with heads apart they would be shorter
_START_S = 300.0
_SHORT = 256  # positions; rows of fewer are attended to together (``Lanes.attend``)


class TextAttention:
    """Attends the tokens of texts to their rows.

    Args:
        lanes: of the cache.
        granule: least number of rows of a product.
    """

    def __init__(self, lanes: Lanes, granule: int) -> None:
        self._granule = granule
        self._own, self._split = lanes, _split_of(lanes)  # S
        self._lanes = lanes.apart(self._split)
        self._pool: ThreadPoolExecutor | None = None
        self._num_threads = 0  # of these
        self._agrees: bool | None = None

    def suits(self, width: int, dtype: torch.dtype) -> bool:
        """True if this gives what ``Lanes.attend`` does, sooner, for rows of ``width`` positions."""
        if dtype != torch.float32 or width < _SHORT or self._lanes.width < _MIN_COLUMNS:
            return False
        if self._agrees is None:
            self._agrees = self._tried()
        return self._agrees

    def _tried(self) -> bool:
        """Tries on random numbers whether this processor's kernels sum in the same order either way."""
        lanes, draw = self._own, torch.Generator().manual_seed(1)
        begin, length = 5 * PIECE + 44, 64
        cache = KeyValues(lanes, 1, 1, seen_width(begin + length), torch.zeros(1))
        for x in cache.tensors:
            x[0, :, : begin + length].normal_(generator=draw)
        heads = lanes.num_lanes * lanes.shared * lanes.group
        q = torch.randn(length, heads, lanes.head_dim, generator=draw)
        mask = lanes.mask(torch.arange(begin, begin + length)[None], cache.width, q.dtype)
        y = lanes.attend(lanes.queries(q, length), cache.keys[0], cache.values[0], mask)
        return torch.equal(self.attend(q, cache, 0, [begin]), lanes.outputs(y, length))

    def attend(self, q_NHD: Tensor, cache: KeyValues, layer: int, begins: list[int]) -> Tensor:
        """Computes ``[N, H * D]`` for row i's tokens at ``begins[i]`` and the positions behind it.

        Their keys and values have been written.
        """
        lanes, num_rows = self._lanes, len(begins)
        length = len(q_NHD) // num_rows
        queries = lanes.queries(q_NHD, length)  # [B * L * S, P * Q, E]
        num_queries = queries.shape[1] // length
        keys, values = cache.apart(layer, self._split)
        y = torch.empty_like(queries)

        @torch.inference_mode()
        def work(block: tuple[int, int, int]) -> None:
            i, begin, end = block
            lane, part = divmod(i, self._split)
            first = begins[i // lanes.num_lanes]
            own = slice(begin * num_queries, end * num_queries)
            seen = min(seen_width(first + end), cache.width)
            y[i, own] = _attend_block(
                queries[i, own],
                keys[lane, part, :, :seen],
                values[lane, :seen, part],
                first + begin,
                num_queries,
                lanes.scale,
            )

        blocks = [
            (i, *block)
            for i in range(len(queries))
            for block in self._blocks(length, begins[i // lanes.num_lanes], num_queries)
        ]
        widest = max(begins) + length
        if len(blocks) > 1 and len(queries) * queries.shape[1] * widest >= _SCORES_OF_THREADS:
            # The largest first, so that no thread is left with one at the end.
            list(self._threads().map(work, reversed(blocks)))
        else:
            for block in blocks:
                work(block)
        return lanes.outputs(y, length)

    def _threads(self) -> ThreadPoolExecutor:
        """Returns as many threads as the calling one computes with, each computing alone."""
        num = torch.get_num_threads()
        if self._pool is None or self._num_threads != num:
            self._pool = ThreadPoolExecutor(
                num,
                thread_name_prefix="attention of texts",
                initializer=torch.set_num_threads,
                initargs=(1,),
            )
            self._num_threads = num
            # All of them begin now: what each sets for itself is the default of threads that come later.
            together = threading.Barrier(num)
            list(self._pool.map(lambda _: together.wait(_START_S), range(num)))
            torch.set_num_threads(num)
        return self._pool

    def _blocks(self, length: int, first: int, num_queries: int) -> list[tuple[int, int]]:
        """Cuts a row's tokens: bounded scores, and no product of fewer rows than a granule."""
        blocks, begin, least = [], 0, self._granule
        while begin < length:
            most = _SCORES // (num_queries * (first + begin + _TOKENS))
            size = max(least, min(_TOKENS, most) // least * least)
            end = length if length - begin < size + least else begin + size
            blocks.append((begin, end))
            begin = end
        return blocks


def _split_of(lanes: Lanes) -> int:
    """Returns into how many lanes one can be split without another bit."""
    if lanes.width > _MAX_TERMS:
        return 1
    shared = lanes.shared
    least = min(lanes.width, _MIN_COLUMNS)
    return max(s for s in range(1, shared + 1) if shared % s == 0 and lanes.width // s >= least)


def _attend_block(
    queries: Tensor, keys: Tensor, values: Tensor, first: int, num_queries: int, scale: float
) -> Tensor:
    """Computes ``[P * Q, E]`` from keys ``[E, T]`` and values ``[T, E]`` for tokens from ``first`` on."""
    num_rows, width = len(queries), keys.shape[1]
    unused = queries.new_empty(1, 1, 1)  # times beta, 0
    scores = torch.baddbmm(unused, queries[None], keys[None], beta=0, alpha=scale)
    places = torch.arange(first, width, device=queries.device)
    later = places > places[: num_rows // num_queries, None]
    by_token = scores.view(-1, num_queries, width)[:, :, first:]
    by_token.masked_fill_(later[:, None], -torch.inf)
    weights = torch.softmax(scores, dim=-1, out=scores)[0]
    num, rest = divmod(width, PIECE)
    if not num:
        return torch.mm(weights, values)
    whole = values[: num * PIECE].unflatten(0, (num, PIECE))  # type: ignore[no-untyped-call]
    pieces = weights.as_strided((num, num_rows, PIECE), (PIECE, width, 1))
    products = torch.bmm(pieces, whole)
    sums = products[:1]
    if num > 1:  # one after the other, as they are added there
        sums.index_add_(0, torch.zeros(num - 1, dtype=torch.int64), products[1:])
    if rest:
        sums.baddbmm_(weights[None, :, num * PIECE :], values[None, num * PIECE :])
    return sums[0]
