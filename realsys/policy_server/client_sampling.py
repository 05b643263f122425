"""What clients write about sampling → the engine's settings (pure).

What the engine can't do is refused, not ignored, unless its value changes nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from realsys.api.model import LEAST_TEMPERATURE
from realsys.rollout.dialects.body_fields import refused
from realsys.transport.generation_messages import Sampling

NO_LIMIT = 1 << 20  # tokens of an answer, for models that name no context length
_SEED_BITS = 63
# Field → the values that change nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "stop_token_ids": ([],),
    "ignore_eos": (False,),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "repeat_penalty": (1,),
    "typical_p": (1,),
    "tfs_z": (1,),
    "top_a": (0,),
    "top_n_sigma": (-1, 0),
    "mirostat": (0,),
    "dry_multiplier": (0,),
    "xtc_probability": (0,),
    "dynatemp_range": (0,),
}


def engine_sampling(
    wished: Mapping[str, Any],
    *,
    limit: int | None,
    stop: Sequence[str] = (),
    seed: int,
    grammar: str = "",
) -> Sampling:
    """Returns the engine's settings of one answer.

    Args:
        wished: fields of the request, by the names that all dialects have for them.
        limit: most tokens; None: as many as the context holds.
        seed: of this answer.
        grammar: what it must be; empty: anything.
    Raises:
        DataError: a value is out of range, or asks for what the engine can't do.
    """
    for name, neutral in _NEUTRAL.items():
        value = wished.get(name)
        if name == "logit_bias" and value and not any(value.values()):
            continue
        if value is not None and value not in neutral:
            raise refused(
                f"{value!r:.60} is not served",
                where=name,
                fix=f"send {neutral[0]!r}, or leave it out",
            )
    limit = NO_LIMIT if limit is None else limit
    return Sampling(
        max_new_tokens=limit,
        min_new_tokens=_min_tokens(wished.get("min_tokens", 0), limit),
        temperature=_temperature(wished.get("temperature", 1.0)),
        top_p=_top_p(wished.get("top_p", 1.0)),
        top_k=_top_k(wished.get("top_k", -1)),
        stop=tuple(stop),
        sampling_seed=seed,
        grammar=grammar,
    )


def answer_seed(seed: int, number: int) -> int:
    """Returns the seed of answer ``number`` of a request with ``seed``; that of the first is the request's.

    >>> answer_seed(7, 0), answer_seed(7, 1) == answer_seed(7, 1) != answer_seed(7, 2)
    (7, True)
    """
    if number == 0:
        return seed % (1 << _SEED_BITS)
    digest = hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - _SEED_BITS)


def _temperature(value: float) -> float:
    if value != 0 and not LEAST_TEMPERATURE <= value < float("inf"):
        raise refused(
            f"{value} is no temperature",
            where="temperature",
            fix=f"send 0 for the likeliest token, or {LEAST_TEMPERATURE:g} or more",
        )
    return float(value)


def _top_p(value: float) -> float:
    if not 0 < value <= 1:
        raise refused(f"{value} is not in (0, 1]", where="top_p", fix="send 1, or leave it out")
    return float(value)


def _top_k(value: int) -> int:
    if value < -1:
        raise refused(f"{value} is not allowed", where="top_k", fix="send 1 or more; -1 is off")
    return value or -1


def _min_tokens(value: int, limit: int) -> int:
    if not 0 <= value <= limit:
        raise refused(
            f"{value} with at most {limit} tokens",
            where="min_tokens",
            fix="send 0, or leave it out",
        )
    return value
