"""Forward pass of generation through a Hugging Face model's own code and cache.

For every causal language model that decoder.py has no fast path for. Slower, because the cache
grows by copying and each step goes through the library's bookkeeping. Not batch invariant: rows of a
batch are padded on the left, and its sums come in the kernels' order.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from realsys.runtime.progress import tick


class GenericDecoder:
    """Computes next-token logits with a cache of each row's earlier tokens."""

    def __init__(self, module: nn.Module) -> None:
        self.module: Any = module
        accepted = inspect.signature(module.forward).parameters
        self.takes_positions = "position_ids" in accepted
        # transformers calls it `cache` since 5.24, in what a model takes and in what it returns.
        self.cache_name = "cache" if "cache" in accepted else "past_key_values"
        # Otherwise prefill would compute the logits of every prompt token, only to drop them.
        self.last_only = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}

    def prefill(self, input_ids: Tensor, real: Tensor) -> Tensor:
        """Clears the cache, processes prompts, and returns the logits ``[B, V]`` of their next tokens.

        Args:
            input_ids: int64 ``[B, P]``, padded on the left.
            real: bool ``[B, P]``, False on padding.
        """
        self.cache: Any = None
        self.attention_mask = real.long()
        positions = (self.attention_mask.cumsum(dim=1) - 1).clamp_(min=0)
        self.next_position = positions[:, -1:] + 1
        return self._forward(input_ids, positions)

    def step(self, tokens: Tensor) -> Tensor:
        """Appends one token to each row (int64 ``[B]``); returns logits ``[B, V]`` of the next."""
        seen = self.attention_mask.new_ones(len(tokens), 1)
        self.attention_mask = torch.cat([self.attention_mask, seen], dim=1)
        positions, self.next_position = self.next_position, self.next_position + 1
        return self._forward(tokens[:, None], positions)

    def extend(self, tokens: Tensor) -> Tensor:
        """Appends some tokens to the only row (int64 ``[1, P]``); returns logits ``[1, V]`` of the next."""
        seen = self.attention_mask.new_ones(tokens.shape)
        self.attention_mask = torch.cat([self.attention_mask, seen], dim=1)
        positions = self.next_position + torch.arange(tokens.shape[1], device=tokens.device)
        self.next_position = positions[:, -1:] + 1
        return self._forward(tokens, positions)

    def select(self, rows: Tensor) -> None:
        """Keeps only these rows (int64), in this order; a row may be repeated."""
        self.cache.batch_select_indices(rows)
        self.attention_mask = self.attention_mask[rows]
        self.next_position = self.next_position[rows]

    def _forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        extra = {self.cache_name: self.cache}
        if self.takes_positions:
            extra["position_ids"] = positions
        output = self.module(
            input_ids=input_ids,
            attention_mask=self.attention_mask,
            use_cache=True,
            return_dict=True,
            **extra,
            **self.last_only,
        )
        self.cache = output[self.cache_name]
        logits: Tensor = output.logits[:, -1]
        return logits


# Of `layer_types`; what a recurrent layer keeps is continued by one token at a time.
_ATTENTION = {"full_attention", "sliding_attention"}


def continues_texts(module: Any) -> bool:
    """True if a model's code reads a text in several calls as it does in one."""
    kinds = set(getattr(module.config, "layer_types", None) or ())
    return not getattr(module, "_is_stateful", False) and kinds <= _ATTENTION


@contextmanager
def without_dropout(module: nn.Module) -> Iterator[None]:
    """Within the context, puts every part that was training into evaluation mode."""
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


# ---- Slots for models without a fast path: each row separately, with a cache of transformers.
#
# Correct and slow: a step runs the model once per row. A row's results can't depend on others.


@dataclass
class _PartialRow:
    """A text that is read in pieces."""

    text: tuple[int, ...]
    row: GenericDecoder
    num_read: int = 0
    logits: Tensor | None = None


class GenericSlots:
    """``Slots`` (slots.py) over any causal LM of transformers. Nothing is shared or remembered."""

    shares_texts = False

    def __init__(self, module: nn.Module) -> None:
        self.module: Any = module
        self.device = next(module.parameters()).device
        self.rows: dict[int, GenericDecoder] = {}
        self._partial: _PartialRow | None = None

    def read(
        self, texts: Sequence[tuple[int, ...]], slots: Sequence[int]
    ) -> tuple[Tensor, list[int]]:
        logits = []
        with without_dropout(self.module):
            for text, slot in zip(texts, slots, strict=True):
                tick()
                partial = self._partial
                if partial is not None and partial.text == text and partial.logits is not None:
                    self.rows[slot], self._partial = partial.row, None
                    logits.append(partial.logits)
                    continue
                row = self.rows[slot] = GenericDecoder(self.module)
                tokens = torch.tensor([text], device=self.device)
                logits.append(row.prefill(tokens, torch.ones_like(tokens, dtype=torch.bool)))
        return torch.cat(logits), [0] * len(texts)

    def num_new(self, text: tuple[int, ...]) -> int:
        return len(text)

    @property
    def reads_in_pieces(self) -> bool:
        return continues_texts(self.module)

    def begin(self, text: tuple[int, ...]) -> None:
        self._partial = _PartialRow(text, GenericDecoder(self.module))

    def read_piece(self, num_tokens: int) -> int:
        partial = self._partial
        assert partial is not None
        piece = partial.text[partial.num_read : partial.num_read + num_tokens]
        tokens = torch.tensor([piece], device=self.device)
        with without_dropout(self.module):
            if partial.num_read:
                after = partial.row.extend(tokens)
            else:
                after = partial.row.prefill(tokens, torch.ones_like(tokens, dtype=torch.bool))
        partial.num_read += len(piece)
        if not (left := len(partial.text) - partial.num_read):
            partial.logits = after
        return left

    def drop(self) -> None:
        self._partial = None

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
