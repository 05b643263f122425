"""What an answer loses by coming near the longest length allowed (DAPO)."""

from __future__ import annotations

import torch

from realsys.api.errors import ConfigError


@torch.no_grad()
def overlong_penalty(
    length_B: torch.Tensor, *, max_length: int, buffer_length: int, factor: float = 1.0
) -> torch.Tensor:
    """float32 ``[B]``, 0 down to ``-factor``: linear over the last ``buffer_length`` tokens.

    "Soft overlong punishment" (arXiv:2503.14476, eq. 13), which is added to the score.

    Args:
        length_B: tokens of each answer.
        max_length: of an answer; it loses ``factor`` there and beyond.
    """
    if not 1 <= buffer_length <= max_length:
        raise ConfigError(
            f"overlong_buffer_len is {buffer_length}, an answer has at most {max_length} tokens",
            where="overlong_penalty",
            fix="use 1 … max_new_tokens",
        )
    excess_B = length_B.float() - (max_length - buffer_length)
    return -factor * (excess_B / buffer_length).clamp(0.0, 1.0)
