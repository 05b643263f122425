"""Measures, before an update, how stale and how far off-policy a batch is, and computes correction weights.

Used by ppo_actor.py; the statistics are equal on all data-parallel ranks. Two optional keys are
read, both with one entry per token: ``packed_versions`` (int64, version of the weights that sampled
it) and ``packed_prox_logprobs`` (float32, log-probs by the weights that are about to be trained).
Decisions and formulas are in realsys/algorithms (staleness.py, correction.py).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch

from realsys.algorithms.policy.correction import correction_weights, judge_mismatch, mismatch
from realsys.algorithms.staleness_figures import LAG_BUCKETS, TokenLags, token_lags, tokens_by_lag
from realsys.api.errors import DataError, InternalError, PolicyMismatch
from realsys.backends.hf.data_parallel import DataParallel
from realsys.data.sequence_sample import SequenceSample
from realsys.interfaces.answers import INPUT, answer_mask
from realsys.interfaces.interface_arguments import PPOSettings
from realsys.interfaces.ppo.batch_checks import BEHAVIOUR, PROXIMAL, VERSIONS

logger = logging.getLogger(__name__)

WEIGHTS = "correction_weights"  # float32 per token, constant during the update


@dataclass(frozen=True)
class CorrectedBatch:
    """A batch that is ready for the update.

    Attributes:
        batch: with the key ``correction_weights`` if the loss is weighted.
        left_out: True if the policies are too far apart for an update.
    """

    batch: SequenceSample
    stats: dict[str, float]
    skipped: bool = False


# ---- age ----------------------------------------------------------------------------------------


def staleness_stats(
    data: SequenceSample, *, version: int, max_staleness: int | None, ranks: DataParallel
) -> dict[str, float]:
    """Computes staleness statistics of a batch about to train weights of ``version``; empty without
    versions.

    Raises:
        InternalError: a token is older than ``max_staleness`` steps, or of a future version. Raised on
            all ranks; those that hold such a token name the datapoint.
    """
    if VERSIONS not in data.keys:
        return {}
    mask_N, lengths = answer_mask(data).cpu(), data.piece_lengths(INPUT)
    lags = token_lags(data.data[VERSIONS].cpu(), mask_N, lengths, version=version)
    # All ranks learn the worst lags first: a rank that raised alone would leave the others waiting.
    worst = ranks.max(_largest(lags.oldest_B))
    ahead = ranks.max(_largest(-lags.newest_B))
    limit = version if max_staleness is None else min(max_staleness, version)
    if worst > limit or ahead > 0:
        raise _version_error(data, lags, version, limit)
    mixed_B = lags.oldest_B > lags.newest_B
    own = [
        float(mask_N.sum()),
        len(lags.oldest_B),
        float(lags.oldest_B.sum()),
        float(mixed_B.sum()),
    ]
    by_lag = tokens_by_lag(lags.lag_N, mask_N)
    sums = ranks.sum(torch.cat([torch.tensor(own).double(), by_lag])).tolist()
    tokens, sequences, oldest, mixed, *buckets = sums
    return {
        "staleness/mean": oldest / max(sequences, 1.0),
        "staleness/max": worst,
        "staleness/mixed_sequences": mixed / max(sequences, 1.0),
        "staleness/tokens_checked": tokens,
        **{
            f"staleness/tokens_by_lag/{name}": number / max(tokens, 1.0)
            for name, number in zip(LAG_BUCKETS, buckets, strict=True)
        },
    }


def _version_error(
    data: SequenceSample, lags: TokenLags, version: int, limit: int
) -> InternalError:
    """Describes tokens that are older than ``limit``, of no version, or of a future version."""
    groups = zip(data.ids, data.meta.seqlens[INPUT], strict=True)
    id_of_sequence = [name for name, pieces in groups for _ in pieces]
    rows = zip(*(x.tolist() for x in (lags.sequence_B, lags.oldest_B, lags.newest_B)), strict=True)
    bad = [
        f"{id_of_sequence[b]} has {version - oldest} … {version - newest}"
        for b, oldest, newest in rows
        if oldest > limit or newest < 0
    ]
    more = f" and {len(bad) - 8} more sequences" if len(bad) > 8 else ""
    return InternalError(
        f"weights of version {version} train on tokens of versions {version - limit} … {version} "
        f"only, but {', '.join(bad[:8]) or 'another data-parallel rank holds others'}{more}",
        where=f"packed_versions of step {version + 1}",
    )


def _largest(x: torch.Tensor) -> float:
    return float(x.max()) if len(x) else 0.0


# ---- distance -----------------------------------------------------------------------------------


def correct_batch(
    data: SequenceSample, settings: PPOSettings, *, version: int, ranks: DataParallel
) -> CorrectedBatch:
    """Measures the batch if it has proximal log-probs, and weights it according to the settings.

    Raises:
        DataError: the settings need proximal log-probs, which are missing.
        PolicyMismatch: ``mismatch_kl_max`` is exceeded with ``on_mismatch=stop``.
    """
    if PROXIMAL not in data.keys:
        if settings.needs_prox_logprobs:
            raise _missing_proximal_error(settings)
        return CorrectedBatch(data, {})
    stats = _mismatch_stats(data, version, ranks)
    skipped = _is_left_out(data, settings, stats["mismatch/kl_k3"], version)
    stats["mismatch/skipped"] = float(skipped)
    if not (settings.use_decoupled_loss or settings.correction != "none"):
        return CorrectedBatch(data, stats, skipped)
    mask_N = answer_mask(data)
    weight_N, figures = correction_weights(
        data.data[PROXIMAL],
        data.data[BEHAVIOUR],
        mask_N,
        lengths=data.piece_lengths(INPUT),
        **_bounds(settings),
    )
    count, weight, square, masked, clamped = _sums(
        mask_N, ranks, weight_N, weight_N.double() ** 2, figures["masked"], figures["clamped"]
    )
    stats |= {
        "correction/weight_mean": weight / count,
        "correction/masked": masked / count,
        "correction/clamped": clamped / count,
        "correction/ess": weight * weight / (count * square) if square else 0.0,
    }
    new = SequenceSample.from_tensors(
        data.ids, {WEIGHTS: data.meta.seqlens[INPUT]}, {WEIGHTS: weight_N}
    )
    return CorrectedBatch(data.update(new), stats, skipped)


def _bounds(settings: PPOSettings) -> dict[str, Any]:
    """Arguments of ``correction_weights``."""
    level = {"level": settings.correction_level}
    arguments: dict[str, dict[str, Any]] = {
        "none": {},
        "cap": {
            "high": settings.behav_imp_weight_cap,
            "cap_mode": settings.behav_imp_weight_mode,
            **level,
        },
        "tis": {"high": settings.tis_imp_ratio_cap, **level},
        "icepop": {"low": settings.icepop_low, "high": settings.icepop_high, **level},
        "sequence_mask": {"low": settings.sequence_mask_low, "high": settings.sequence_mask_high},
    }
    return {"method": settings.correction, **arguments.get(settings.correction, {})}


def _mismatch_stats(data: SequenceSample, version: int, ranks: DataParallel) -> dict[str, float]:
    """Means over answer tokens of all ranks; ``kl_k3_lag_0`` only over tokens sampled by the
    current weights.
    """
    mask_N = answer_mask(data)
    apart = mismatch(data.data[PROXIMAL], data.data[BEHAVIOUR], mask_N)
    kl_N, abs_N, weight_N = apart["kl_k3"], apart["abs"], apart["weight"]
    fresh_N = data.data[VERSIONS] == version if VERSIONS in data.keys else torch.zeros_like(mask_N)
    count, kl, differ, prob, weight, square, fresh, fresh_kl = _sums(
        mask_N,
        ranks,
        kl_N,
        abs_N,
        apart["prob_abs"],
        weight_N,
        weight_N.double() ** 2,
        fresh_N,
        kl_N * fresh_N,
    )
    own_R = abs_N[mask_N], weight_N[mask_N]
    stats = {
        "mismatch/kl_k3": kl / count,
        "mismatch/abs_mean": differ / count,
        "mismatch/abs_max": ranks.max(_largest(own_R[0])),
        "mismatch/prob_abs_mean": prob / count,
        "mismatch/weight_mean": weight / count,
        "mismatch/weight_max": ranks.max(_largest(own_R[1])),
        "mismatch/ess": weight * weight / (count * square),
    }
    return stats | ({"mismatch/kl_k3_lag_0": fresh_kl / fresh} if fresh else {})


def _sums(mask_N: torch.Tensor, ranks: DataParallel, *per_token: torch.Tensor) -> list[float]:
    """Number of tokens where ``mask_N`` and sums over them, over all ranks, in float64. There are some: the
    batch was checked (batch_figures.py).
    """
    own = torch.stack([mask_N.double().sum(), *(x[mask_N].double().sum() for x in per_token)])
    count, *rest = ranks.sum(own).tolist()
    return [count, *rest]


def _is_left_out(data: SequenceSample, settings: PPOSettings, kl: float, version: int) -> bool:
    action = judge_mismatch(kl, limit=settings.mismatch_kl_max, on_mismatch=settings.on_mismatch)
    if action == "train":
        return False
    what = (
        f"sampling and training policy differ by {kl:.3g} nats a token (k3), "
        f"mismatch_kl_max is {settings.mismatch_kl_max}"
    )
    where = f"step {version + 1}, {data.batch_size} datapoints on this rank from {data.ids[0]} on"
    if action == "stop":
        raise PolicyMismatch(what, where=where, fix=_WHERE_TO_LOOK)
    logger.warning("policies differ %s where=%s action=%s", what, where, action)
    return action == "skip"


_WHERE_TO_LOOK = (
    "look at mismatch/kl_k3_lag_0: if that is large too, sampling and training compute differently (same "
    "weights? temperature, dtype, attention kernel); else answers are old: lower max_staleness or the "
    "learning rate"
)


def _missing_proximal_error(settings: PPOSettings) -> DataError:
    name = "use_decoupled_loss" if settings.use_decoupled_loss else "recompute_logprob"
    return DataError(
        f"no {PROXIMAL!r} in the batch, which {name} needs",
        where="ppo_actor",
        fix="let an inference call of the actor write it (output_key_remap logprobs → "
        f"{PROXIMAL}) before actor_train, and name it in actor_train's input keys",
    )
