"""Random ragged batches that ours and theirs both read. The same seeds give the same numbers.

Shapes: B answers, T tokens padded on the right, N rows of logits. What stands where the mask is 0 is
garbage on purpose. Log-probabilities are multiples of 2^-12: their differences are exact in float32.

Three sets. ``near``: log-ratios within ±2. ``far``: some within ±19, no bound against overflow acts.
``past``: some within ±30, where such bounds act; and some answers have no token with mask 1.
"""

from __future__ import annotations

import numpy as np
from peer_io import Arrays

REACH = {"near": 2.0, "far": 19.0, "past": 30.0}  # largest |log-ratio|
BATCHES = 200
MAX_TOKENS, GRAIN = 24, 4096.0
VOCABULARY = 17


def make_batches(which: str, count: int = BATCHES) -> list[Arrays]:
    """A set by its name in ``REACH``."""
    first = 10_000 * sorted(REACH).index(which)
    return [_batch(np.random.default_rng(first + i), which, i) for i in range(count)]


def _batch(rng: np.random.Generator, which: str, number: int) -> Arrays:
    sizes = rng.integers(2, 6, size=rng.integers(1, 4))  # of groups
    ones = int(rng.integers(0, 3))  # groups of one beside them
    num_answers = int(sizes.sum()) + ones
    lengths = rng.integers(1, MAX_TOKENS + 1, size=num_answers)
    lengths[0] = max(lengths[0], 2)
    width = int(lengths.max())
    shape = (num_answers, width)
    mask = np.arange(width)[None, :] < lengths[:, None]
    holes = rng.random(shape) < 0.2  # what tools wrote, inside of answers
    holes[np.arange(num_answers), lengths - 1] = False  # the end token is the policy's
    holes[0, 0] = False
    if number % 3:
        mask &= ~holes
    if which == "past" and number % 2 and num_answers > 2:
        mask[int(rng.integers(1, num_answers))] = False

    logprobs = _logprobs(rng, shape)
    old_logprobs = _moved(rng, logprobs, which, number)
    groups = np.concatenate([np.repeat(np.arange(len(sizes)), sizes), len(sizes) + np.arange(ones)])
    ragged = np.where(groups < len(sizes), groups, 0)  # those alone join the first group
    order = rng.permutation(num_answers)
    advantage = np.round(rng.normal(size=num_answers), 3)
    advantage[rng.random(num_answers) < 0.15] = 0.0
    token_advantages = np.round(rng.normal(size=shape), 3)
    token_advantages[rng.random(shape) < 0.15] = 0.0
    values = rng.normal(size=shape)
    rows = int(rng.integers(1, 12))
    even = (int(rng.integers(1, 4)), int(rng.integers(2, 6)))
    return {
        "mask": mask,
        "logprobs": logprobs,
        "old_logprobs": old_logprobs,
        "ref_logprobs": _moved(rng, logprobs, which, number),
        "behaviour_logprobs": _moved(rng, old_logprobs, which, number),
        "advantages": token_advantages,
        "advantage_B": advantage,
        "weights": rng.uniform(0.0, 2.0, size=shape),
        "losses": rng.normal(size=shape),
        "rewards": rng.normal(size=shape) * (rng.random(shape) < 0.3),
        "values": values,
        "old_values": values + rng.normal(size=shape) * 0.4,
        "returns": rng.normal(size=shape),
        "score_B": _scores(rng, num_answers, groups[order]),
        "baseline_B": rng.normal(size=num_answers),
        "groups": ragged[order],
        "groups_with_ones": groups[order],
        "even_scores": np.round(rng.normal(size=even), 2) if number % 2 else _correct(rng, even),
        "length_B": rng.integers(1, 100, size=num_answers),
        "logits": rng.normal(size=(rows, VOCABULARY)) * 4.0,
        "labels": rng.integers(0, VOCABULARY, size=rows),
        **_pairs(rng),
        "entropies": _entropies(rng, shape, number),
        "even_other": np.round(rng.normal(size=even), 2),  # another part of the reward
        "proper_old_logprobs": np.minimum(old_logprobs, -1 / GRAIN),  # of probabilities below 1
    }


def _logprobs(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    found = -np.round(rng.exponential(1.5, size=shape) * GRAIN) / GRAIN
    return np.asarray(np.clip(found, -40.0, 0.0))


def _moved(rng: np.random.Generator, logprobs: np.ndarray, which: str, number: int) -> np.ndarray:
    """Log-probabilities of another policy: most are near, a third is the same, some are far."""
    moved = np.clip(rng.normal(size=logprobs.shape) * 0.25, -2.0, 2.0)
    if number % 4 == 0:
        extreme = rng.random(logprobs.shape) < 0.1
        moved = np.where(extreme, rng.uniform(-1, 1, size=logprobs.shape) * REACH[which], moved)
    moved[rng.random(logprobs.shape) < 0.33] = 0.0
    return np.asarray(logprobs + np.round(moved * GRAIN) / GRAIN)


def _scores(rng: np.random.Generator, count: int, groups: np.ndarray) -> np.ndarray:
    """Right or wrong, or any number; often a whole group alike."""
    found = np.round(rng.normal(size=count), 2) if rng.random() < 0.5 else _correct(rng, (count,))
    if rng.random() < 0.4:
        found[groups == groups[0]] = round(rng.normal(), 2)
    return np.asarray(found)


def _correct(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return (rng.random(shape) < 0.5).astype(np.float64)


def _entropies(rng: np.random.Generator, shape: tuple[int, ...], number: int) -> np.ndarray:
    """Exact in float32; in every other batch many are equal."""
    grain = GRAIN if number % 2 else 4.0
    return np.asarray(np.round(rng.exponential(1.0, size=shape) * grain) / grain)


def _pairs(rng: np.random.Generator) -> Arrays:
    """For losses of preferences, ``[2 P, T]``: chosen answers, then as many rejected ones."""
    pairs, width = int(rng.integers(2, 6)), int(rng.integers(2, 16))
    lengths = rng.integers(1, width + 1, size=2 * pairs)
    logprobs = _logprobs(rng, (2 * pairs, width))
    label = rng.random(pairs) < 0.5
    label[:2] = (True, False)
    return {
        "pair_logprobs": logprobs,
        "pair_ref_logprobs": _moved(rng, logprobs, "near", 1),
        "pair_mask": np.arange(width)[None, :] < lengths[:, None],
        "pair_label": np.concatenate([label, ~label]),  # of single answers: good or bad
        "pair_mismatched": _logprobs(rng, (2 * pairs, width)),
        "pair_ref_mismatched": _logprobs(rng, (2 * pairs, width)),
    }
