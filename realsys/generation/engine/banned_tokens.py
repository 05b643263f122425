"""Which tokens the running rows must not sample in a step: early stop tokens, what a grammar leaves out."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from realsys.generation.engine.row import Row


@dataclass
class BannedTokens:
    """Tokens that rows must not sample now: stop tokens that come too early, what a grammar leaves out.

    Attributes:
        mask: bool ``[slots, vocabulary]``; None: no bans.
        steps_left: for which this holds, unless other rows run, or in other slots.
    """

    mask: torch.Tensor | None = None
    steps_left: int = 0


def find_banned(running: Mapping[int, Row], vocabulary: int, device: torch.device) -> BannedTokens:
    """Finds what rows must not sample, by slot, and for how many steps that holds."""
    early, words, steps_left = dict[int, list[int]](), dict[int, Any](), sys.maxsize
    for slot, row in running.items():
        if row.grammar is not None:
            steps_left, words[slot] = 1, row.grammar.allowed()
        elif (left := row.request.gconfig.min_new_tokens - len(row.output.tokens)) > 0:
            steps_left = min(steps_left, left)
            early[slot] = [token for token in row.stop_ids if token < vocabulary]
    if not early and not words:
        return BannedTokens(None, steps_left)
    shape = (max(running) + 1, vocabulary)
    mask = torch.zeros(shape, dtype=torch.bool, device=device)
    for slot, tokens in early.items():
        mask[slot, tokens] = True
    if words:
        packed = torch.from_numpy(np.stack(list(words.values()))).to(device)
        bits = packed[:, :, None] >> torch.arange(32, device=device) & 1
        mask[list(words)] = bits.flatten(1)[:, :vocabulary] == 0
    return BannedTokens(mask, steps_left)
