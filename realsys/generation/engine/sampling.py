"""Samples the next token of each row and computes its log-probability.

Randomness is counter-based: the uniform number behind token ``t`` of a row is a hash of the row's
seed and ``t``. There is no generator state that could depend on other rows of the batch, on the
data-parallel layout or on what was sampled before, so a run can be repeated and a row replayed.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from realsys.api.model import GenerationHyperparameters
from realsys.data.answers_layout import KEPT_BITS

# splitmix64 (Steele, Lea and Flood, OOPSLA 2014), modulo 2^64.
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)

# Probabilities become integers in units of 2^-52: their running sum is exact, hence the same for
# every order of summation (CPU, CUDA, any batch), and never moves at a token of weight 0. The sum
# stays below 2^53, where float64 still holds every integer.
_WEIGHT_ONE = float(1 << 52)
_WORD = 32  # bits of a word of a kept set
_RARE = -80.0  # log-probs below this are of probabilities near float32's smallest, 1e-38


def row_seed(base_seed: int, sample_id: str, index_in_group: int, version: int) -> int:
    """Computes the seed of one answer as an int64, the same in every process.

    Args:
        base_seed: of the run.
        sample_id: of the prompt.
        index_in_group: 0 … n-1 among the answers to this prompt.
        version: version of the weights, so that a second visit to the prompt draws other numbers.
    """
    # The id comes last: the numbers hold no separator, so that two inputs never spell one text.
    text = f"{base_seed}:{index_in_group}:{version}:{sample_id}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def uniforms(row_seeds: Tensor, num_positions: int) -> Tensor:
    """Computes random numbers in [0, 1) for each row and position, float64 ``[B, num_positions]``.

    Args:
        row_seeds: int64 ``[B]``; any values, neighbouring ones too.
    """
    keys = stream_keys(row_seeds.cpu().numpy())
    numbers = uniforms_at(keys[:, None], np.arange(num_positions, dtype=np.uint64))
    return torch.from_numpy(numbers).to(row_seeds.device)


def stream_keys(row_seeds: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Precomputes what ``uniforms_at`` needs of each seed."""
    return _mix(row_seeds.view(np.uint64))


def uniforms_at(keys: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Computes random numbers of streams at positions (from 0); the two shapes broadcast.

    In numpy, on the host: some rows a step, where each call of torch would cost more than the numbers.
    """
    bits = _mix(keys + (positions + np.uint64(1)) * _GAMMA)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True)
class Sampler:
    """Samples tokens according to a ``GenerationHyperparameters``.

    Attributes:
        stop_ids: int64 ``[S]``, tokens that end an answer; not picked before ``min_new_tokens``.
        textless: int64, ids that are never picked; None: there are none.
    """

    gconfig: GenerationHyperparameters
    stop_ids: Tensor
    textless: Tensor | None = None

    def pick(self, logits: Tensor, uniform: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """Samples tokens (int64 ``[B]``) and computes their log-probs (float32 ``[B]``).

        The log-prob is that of ``softmax(logits / temperature)`` over the whole vocabulary, for
        greedy picks too: what a trainer recomputes from the same weights.

        Args:
            logits: ``[B, V]`` of the next token.
            uniform: float64 ``[B]`` in [0, 1).
            position: index of the token in the answer, from 0.
        """
        logprob_BV, allowed = self._logprobs(logits, position)
        if self.gconfig.greedy:
            token = allowed.argmax(dim=-1)
        else:
            # Where the ids that are left out have nearly all, exp would leave nothing
            probs = allowed.exp() if self.textless is None else torch.softmax(allowed, dim=-1)
            token = sample(probs, uniform, top_k=self.gconfig.top_k, top_p=self.gconfig.top_p)
        return token, logprob_BV.gather(1, token[:, None])[:, 0]

    def pick_kept(
        self, logits: Tensor, uniform: Tensor, position: int
    ) -> tuple[Tensor, Tensor, list[bytes]]:
        """Samples as ``pick``; log-probs are of the distribution that was sampled from.

        That is the renormalised one over each row's kept set, which is returned too
        (``encode_kept_sets``). Not for greedy picks.
        """
        logprob_BV, allowed = self._logprobs(logits, position)
        probs = torch.softmax(allowed, dim=-1)
        draw = draw_from_kept(probs, uniform, top_k=self.gconfig.top_k, top_p=self.gconfig.top_p)
        # Ids without a text alone make no kept sets: each would name all of them
        is_whole = draw.kept is None and position >= self.gconfig.min_new_tokens
        if is_whole and self.textless is not None:
            every = torch.ones_like(allowed, dtype=torch.bool)
            logprob = logprob_BV.gather(1, draw.token[:, None])[:, 0]
            return draw.token, logprob, encode_kept_sets(every)
        kept = allowed > -torch.inf if draw.kept is None else draw.kept
        picked = probs.gather(1, draw.token[:, None])[:, 0].double()
        logprob = picked.log() - draw.share.log()
        return draw.token, logprob.float(), encode_kept_sets(kept)

    def _logprobs(self, logits: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """Returns log-probs ``[B, V]`` over all tokens, and these with -inf for those not allowed (yet)."""
        logprob_BV = torch.log_softmax(logits.float() / self.gconfig.temperature, dim=-1)
        allowed = logprob_BV
        if self.textless is not None:
            allowed = allowed.index_fill(1, self.textless, -torch.inf)
        if position < self.gconfig.min_new_tokens:
            allowed = allowed.index_fill(1, self.stop_ids, -torch.inf)
        return logprob_BV, allowed


def encode_kept_sets(kept: Tensor) -> list[bytes]:
    """Encodes each row of ``kept`` (bool ``[B, V]``): the tokens that it could have drawn.

    int32, little-endian, see realsys/data/answers_layout.py. Empty: the whole vocabulary.

    >>> encode_kept_sets(torch.tensor([[True, False, False], [True, True, True]]))
    [b'\x00\x00\x00\x00', b'']
    """
    num_rows, vocab = kept.shape
    num_words = -(-vocab // _WORD)
    num_kept = kept.sum(dim=1)
    inverted = num_kept > vocab - num_kept
    dense = torch.minimum(num_kept, vocab - num_kept) > num_words + 1
    row, token = ((kept ^ inverted[:, None]) & ~dense[:, None]).nonzero(as_tuple=True)
    code = torch.where(inverted[row], ~token, token)
    # In one go, because each is a wait for a GPU.
    host = torch.stack([row, code]).cpu().numpy()
    ends = np.searchsorted(host[0], np.arange(num_rows), side="right").tolist()
    codes = host[1].astype("<i4")
    sets = [codes[a:b].tobytes() for a, b in zip([0, *ends[:-1]], ends, strict=True)]
    dense_rows = dense.nonzero()[:, 0].tolist()
    if dense_rows:
        bits = torch.nn.functional.pad(kept[dense_rows], (0, num_words * _WORD - vocab))
        unit = 2 ** torch.arange(_WORD, device=kept.device)
        words = (bits.view(-1, num_words, _WORD) * unit).sum(-1).cpu().numpy()
        mark = np.array([KEPT_BITS], dtype="<i4").tobytes()
        for i, own in zip(dense_rows, words.astype("<u4"), strict=True):
            sets[i] = mark + own.tobytes()
    return sets


@dataclass(frozen=True)
class Draw:
    """Tokens drawn from kept sets.

    Attributes:
        token: int64 ``[B]``.
        share: float64 ``[B]``, total probability of each row's kept set; 1 where nothing is left out.
        kept: bool ``[B, V]``; None: neither ``top_k`` nor ``top_p`` leaves anything out.
    """

    token: Tensor
    share: Tensor
    kept: Tensor | None


def draw_from_kept(
    probs: Tensor,
    uniform: Tensor,
    *,
    top_k: int | Tensor = 0,
    top_p: float | Tensor = 1.0,
) -> Draw:
    """Draws the tokens that ``sample`` draws, and says from which.

    A token whose probability is too small to be drawn (below 2^-52) is not kept.
    """
    if not (isinstance(top_k, Tensor) or isinstance(top_p, Tensor) or top_k or top_p < 1):
        return Draw(sample(probs, uniform), torch.ones_like(uniform), None)
    sorted_probs, order = probs.sort(dim=-1, descending=True, stable=True)
    sorted_probs = _only_first(sorted_probs, top_k)
    index, kept, total = _draw_sorted(sorted_probs, uniform, top_p)
    kept_BV = torch.zeros_like(probs, dtype=torch.bool)
    kept_BV.scatter_(1, order[:, : kept.shape[1]], kept)
    return Draw(order.gather(1, index)[:, 0], total[:, 0] / _WEIGHT_ONE, kept_BV)


def sample(
    probs: Tensor,
    uniform: Tensor,
    *,
    top_k: int | Tensor = 0,
    top_p: float | Tensor = 1.0,
) -> Tensor:
    """Draws by inverse CDF (int64 ``[B]``). Never a token of probability 0, never out of range.

    ``top_k`` (0: off) keeps the most probable tokens, the first of equals; ``top_p`` then keeps the
    fewest whose share of what is left reaches it, at least one. One number for all rows, or a
    tensor ``[B]``.

    Args:
        probs: float32 ``[B, V]``; need not sum to 1, at most to a little more.
        uniform: float64 ``[B]`` in [0, 1).
    """
    order = None
    if isinstance(top_k, Tensor) or isinstance(top_p, Tensor) or top_k or top_p < 1:
        probs, order = probs.sort(dim=-1, descending=True, stable=True)
        probs = _only_first(probs, top_k)
    index, _, _ = _draw_sorted(probs, uniform, top_p)
    return (index if order is None else order.gather(1, index))[:, 0]


def _draw_sorted(
    probs: Tensor, uniform: Tensor, top_p: float | Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Draws an index ``[B, 1]`` of each row of ``probs``, which descend if ``top_p`` is below 1.

    Returns also which could be drawn (bool, as ``probs``), and their total (float64 ``[B, 1]``) in units of
    2^-52.
    """
    # A power of two scales a float32 exactly.
    weight = (probs.float() * _WEIGHT_ONE).long()
    running = weight.cumsum(dim=-1)
    total = running[:, -1:].double()
    kept = weight > 0
    if isinstance(top_p, Tensor) or top_p < 1:
        share = top_p[:, None] if isinstance(top_p, Tensor) else top_p
        kept &= running - weight < total * share
        total = (running * kept).amax(dim=-1, keepdim=True).double()
    # uniform < 1 and total < 2^53: the product rounds to less than total.
    target = (uniform[:, None] * total).long()
    # Beyond the last only where there is no distribution (NaN): an index all the same.
    index = torch.searchsorted(running, target, right=True).clamp_(max=probs.shape[1] - 1)
    return index, kept, total


def _only_first(probs: Tensor, top_k: int | Tensor) -> Tensor:
    """Returns sorted probabilities, with 0 for tokens outside ``top_k``."""
    if not isinstance(top_k, Tensor):
        return probs[:, :top_k] if top_k else probs
    rank = torch.arange(probs.shape[1], device=probs.device)
    return probs.masked_fill((top_k[:, None] > 0) & (rank >= top_k[:, None]), 0)


@dataclass(frozen=True)
class Picking:
    """Sampling settings of one row, by which the rows of a batch are grouped.

    Attributes:
        kept: its log-probs are of the renormalised kept set, which is returned too.
    """

    temperature: float
    greedy: bool
    top_k: int
    top_p: float
    kept: bool = False

    @classmethod
    def of(cls, gconfig: GenerationHyperparameters, *, kept: bool = False) -> Picking:
        """Extracts the settings; greedy rows ignore ``top_k``, ``top_p`` and ``kept``."""
        if gconfig.greedy:
            return cls(gconfig.temperature, True, 0, 1.0)
        return cls(gconfig.temperature, False, gconfig.top_k, gconfig.top_p, kept)


class SlotSampler:
    """Samples the next tokens of rows by slot, each row with its own settings.

    A row's token depends only on its own logits, settings, seed and position, as with ``Sampler``.

    Args:
        textless: ids that are never picked; log-probs stay those over all tokens, kept sets apart.
    """

    def __init__(self, device: torch.device, textless: Sequence[int] = ()) -> None:
        self.device = device
        ids = torch.tensor(textless, dtype=torch.int64, device=device)
        self._textless = ids if len(ids) else None
        self._keys = np.zeros(0, dtype=np.uint64)
        self._positions = np.zeros(0, dtype=np.uint64)
        self._pickings: dict[int, Picking] = {}
        self._count: Counter[Picking] = Counter()
        self._vectors: _Vectors | None = None  # of the present rows, if they differ

    def add(self, slot: int, picking: Picking, *, seed: int, position: int) -> None:
        """Starts a row in ``slot``; its next token is number ``position`` of the answer."""
        if slot >= len(self._keys):
            more = np.zeros(max(2 * slot, 16) + 1 - len(self._keys), dtype=np.uint64)
            self._keys = np.concatenate([self._keys, more])
            self._positions = np.concatenate([self._positions, more])
        self._keys[slot] = stream_keys(np.array([seed], dtype=np.int64))[0]
        self._positions[slot] = position
        self._pickings[slot] = picking
        self._count[picking] += 1
        self._vectors = None

    def free(self, slot: int) -> None:
        """Removes the row in ``slot``."""
        picking = self._pickings.pop(slot)
        self._count[picking] -= 1
        if not self._count[picking]:
            del self._count[picking]
        self._vectors = None

    def arrange(self, order: Sequence[int]) -> None:
        """Moves all rows: slot i gets the row of slot ``order[i]``."""
        self._pickings = {i: self._pickings[slot] for i, slot in enumerate(order)}
        self._keys[: len(order)] = self._keys[order]
        self._positions[: len(order)] = self._positions[order]
        self._vectors = None

    def pick(self, logits: Tensor, banned: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Samples tokens (int64 ``[B]``) and log-probs (float32 ``[B]``) of slots 0 … B - 1.

        Results of slots without a row are meaningless but valid tokens. Each row's position advances.

        Args:
            logits: ``[B, V]``.
            banned: bool ``[B, V]``, True on tokens that must not be picked, never on all of a row;
                log-probs stay those over all tokens.
        """
        return self.pick_kept(logits, banned)[:2]

    def pick_kept(
        self, logits: Tensor, banned: Tensor | None = None
    ) -> tuple[Tensor, Tensor, list[bytes] | None]:
        """Samples as ``pick``, and returns the kept sets of all slots (``encode_kept_sets``).

        Log-probs of rows with ``Picking.kept`` are over their kept sets; the others' sets are empty. None:
        all kept sets are the whole vocabulary.
        """
        num_rows = len(logits)
        numbers = uniforms_at(self._keys[:num_rows], self._positions[:num_rows])
        self._positions[:num_rows] += np.uint64(1)
        uniform = torch.from_numpy(numbers).to(self.device)
        logits = logits.float()
        vectors = self._vectors_of(num_rows) if len(self._count) > 1 else None
        if vectors is not None:
            logits = logits / vectors.temperature[:, None]
        elif (temperature := next(iter(self._count)).temperature) != 1:
            logits = logits / temperature
        probs = torch.softmax(logits, dim=-1)
        allowed, allowed_probs = logits, probs
        if self._textless is not None:
            allowed = allowed.index_fill(1, self._textless, -torch.inf)
        if banned is not None:
            allowed = allowed.masked_fill(banned, -torch.inf)
        is_restricted = allowed is not logits
        if is_restricted:
            allowed_probs = torch.softmax(allowed, dim=-1)
        share = kept = None
        picking = next(iter(self._count))
        if vectors is not None:
            token, share, kept = _each_its_own(allowed, allowed_probs, uniform, vectors)
        elif picking.greedy:
            token = allowed.argmax(dim=-1)
        elif picking.kept:
            draw = draw_from_kept(allowed_probs, uniform, top_k=picking.top_k, top_p=picking.top_p)
            token, share, kept = draw.token, draw.share, draw.kept
        else:
            token = sample(allowed_probs, uniform, top_k=picking.top_k, top_p=picking.top_p)
        # In double: the logarithm of few numbers must not depend on where in a vector they stand.
        logprob = probs.gather(1, token[:, None])[:, 0].double().log_().float()
        if is_restricted:
            # Where what is likely is banned, what is left may have a probability that float32 can't hold.
            exact = torch.log_softmax(logits, dim=-1).gather(1, token[:, None])[:, 0]
            logprob = torch.where(logprob < _RARE, exact, logprob)
        # Ids without a text alone make no kept sets: each would name all of them
        if share is None or (kept is None and banned is None):
            return token, logprob, None
        picked = allowed_probs.gather(1, token[:, None])[:, 0].double()
        of_kept = (picked.log() - share.log()).float()
        if is_restricted:
            possible = ~allowed.isneginf()
            kept = possible if kept is None else kept & possible
        assert kept is not None
        if vectors is not None:
            logprob, kept = (
                torch.where(vectors.kept, of_kept, logprob),
                kept | ~vectors.kept[:, None],
            )
        else:
            logprob = of_kept
        return token, logprob, encode_kept_sets(kept)

    def _vectors_of(self, num_rows: int) -> _Vectors:
        if self._vectors is None or len(self._vectors.temperature) != num_rows:
            nobody = Picking(1.0, False, 0, 1.0)
            rows = [self._pickings.get(slot, nobody) for slot in range(num_rows)]
            self._vectors = _Vectors.of(rows, self.device)
        return self._vectors


@dataclass(frozen=True)
class _Vectors:
    temperature: Tensor  # float32 [B]
    greedy: Tensor  # bool [B]
    kept: Tensor  # bool [B]
    any_kept: bool
    filtered: Tensor  # int64: rows with a top_k or top_p
    top_k: Tensor  # of those
    top_p: Tensor

    @classmethod
    def of(cls, rows: Sequence[Picking], device: torch.device) -> _Vectors:
        filtered = [i for i, row in enumerate(rows) if row.top_k or row.top_p < 1]
        return cls(
            temperature=torch.tensor([row.temperature for row in rows], device=device),
            greedy=torch.tensor([row.greedy for row in rows], device=device),
            kept=torch.tensor([row.kept for row in rows], device=device),
            any_kept=any(row.kept for row in rows),
            filtered=torch.tensor(filtered, dtype=torch.int64, device=device),
            top_k=torch.tensor([rows[i].top_k for i in filtered], device=device),
            top_p=torch.tensor([rows[i].top_p for i in filtered], device=device).double(),
        )


def _each_its_own(
    logits: Tensor, probs: Tensor, uniform: Tensor, vectors: _Vectors
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Samples each row by its own settings; with the kept sets' shares and members if a row wants them."""
    token, rows = sample(probs, uniform), vectors.filtered
    limits = {"top_k": vectors.top_k, "top_p": vectors.top_p}
    share = torch.ones_like(uniform) if vectors.any_kept else None
    kept = None
    if len(rows) and share is not None:
        draw = draw_from_kept(probs[rows], uniform[rows], **limits)
        assert draw.kept is not None
        kept = torch.ones_like(probs, dtype=torch.bool)
        token[rows], share[rows], kept[rows] = draw.token, draw.share, draw.kept
    elif len(rows):
        token[rows] = sample(probs[rows], uniform[rows], **limits)
    return torch.where(vectors.greedy, logits.argmax(dim=-1), token), share, kept
