"""Slots for models without a fast path: each row separately, with a cache of transformers.

Correct and slow: a step runs the model once per row. A row's results can't depend on others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from realsys.generation.decoding.generic_decoder import GenericDecoder, without_dropout
from realsys.runtime.progress import tick


class GenericSlots:
    """``Slots`` (slots.py) over any causal LM of transformers. Nothing is shared or remembered."""

    def __init__(self, module: nn.Module) -> None:
        self.module: Any = module
        self.device = next(module.parameters()).device
        self.rows: dict[int, GenericDecoder] = {}

    def read(
        self, texts: Sequence[tuple[int, ...]], slots: Sequence[int]
    ) -> tuple[Tensor, list[int]]:
        logits = []
        with without_dropout(self.module):
            for text, slot in zip(texts, slots, strict=True):
                tick()
                row = self.rows[slot] = GenericDecoder(self.module)
                tokens = torch.tensor([text], device=self.device)
                logits.append(row.prefill(tokens, torch.ones_like(tokens, dtype=torch.bool)))
        return torch.cat(logits), [0] * len(texts)

    def num_new(self, text: tuple[int, ...]) -> int:
        return len(text)

    def step(self, tokens: Tensor, num_slots: int) -> Tensor:
        found: dict[int, Tensor] = {}
        with without_dropout(self.module):
            for slot, row in self.rows.items():
                found[slot] = row.step(tokens[slot : slot + 1])[0]
        nothing = torch.zeros_like(next(iter(found.values())))
        return torch.stack([found.get(slot, nothing) for slot in range(num_slots)])

    def out_of_order(self) -> bool:
        return False

    def arrange(self, order: Sequence[int]) -> None:
        self.rows = {i: self.rows[slot] for i, slot in enumerate(order)}

    def free(self, slots: Sequence[int]) -> None:
        for slot in slots:
            del self.rows[slot]

    def keep(self, slots: Sequence[int], texts: Sequence[tuple[int, ...]]) -> None:
        pass

    def forget_prefixes(self) -> None:
        pass

    def reload(self) -> None:
        pass
