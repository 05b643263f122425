"""Two small Llamas of one shape with room for long answers, and what transformers says of their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from realsys.data.sources.arithmetic_problems import arithmetic_word_problems
from realsys.models.from_scratch.tiny_llama import train_tokenizer
from realsys.models.hf import load_causal_lm, save_hf

VOCAB_SIZE = 320
TEXTLESS = range(
    VOCAB_SIZE, VOCAB_SIZE + 16
)  # rows of the embedding that the tokenizer does not have
BEFORE_NO_TEXT = (11, 74, 120, 33, 200, 201)  # a prompt whose best next id is the first of these
MAX_POSITIONS = 4096


@dataclass(frozen=True)
class SmallModel:
    """A Hugging Face folder and its weights here."""

    path: Path

    @cached_property
    def module(self) -> Any:
        return load_causal_lm(self.path)

    def logprobs(
        self, prompt: Sequence[int], answer: Sequence[int], *, temperature: float = 1.0
    ) -> list[float]:
        """Of each token of ``answer``, by a forward of transformers over all of them."""
        picked = self._all(prompt, answer, temperature)
        return picked.gather(1, torch.tensor(answer)[:, None])[:, 0].tolist()

    def lead(self, prompt: Sequence[int], answer: Sequence[int]) -> float:
        """By how much the best token's log-prob is above the answer's, at worst: 0 if greedy."""
        every = self._all(prompt, answer, 1.0)
        picked = every.gather(1, torch.tensor(answer)[:, None])[:, 0]
        return float((every.amax(1) - picked).max())

    def best_with_text(self, prompt: Sequence[int]) -> int:
        """The next id with the highest logit of those that the tokenizer has."""
        return int(self._all(prompt, [0], 1.0)[0, : TEXTLESS.start].argmax())

    @torch.inference_mode()
    def _all(self, prompt: Sequence[int], answer: Sequence[int], temperature: float) -> Any:
        logits = self.module(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
        return torch.log_softmax(logits.float() / temperature, dim=-1)


def make_models(folder: Path) -> tuple[SmallModel, SmallModel]:
    """Written to ``folder``, with one tokenizer; those that are there are taken."""
    made = []
    for seed in (1, 2):
        path = folder / f"model-{seed}"
        if not (path / "config.json").exists():
            _make(path, seed)
        made.append(SmallModel(path))
    return made[0], made[1]


def _make(path: Path, seed: int) -> None:
    problems = arithmetic_word_problems(num_problems=500, seed=0, split="train")
    tokenizer = train_tokenizer(
        [p["prompt"] + p["answer"] for p in problems], vocab_size=VOCAB_SIZE
    )
    config = LlamaConfig(
        vocab_size=TEXTLESS.stop,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.08,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        last = model.model(torch.tensor([BEFORE_NO_TEXT])).last_hidden_state[0, -1]
        rows = model.lm_head.weight[TEXTLESS.start :]
        rows.zero_()
        rows[0] = 0.04 * last
    save_hf(model, tokenizer, path)
