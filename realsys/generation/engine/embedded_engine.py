"""Generates answers to prompts with the weights of a module in this process.

Used by the backends' ``PipelinableEngine.generate`` and by evaluation. A thin layer over
``ContinuousEngine``, so that a generation server's answers are the same, bit for bit. Models without a fast
path (decoder.py) are decoded in fixed batches until all rows have ended, padded on the left: there a row
depends on its neighbours through rounding. Works on tokens only: no tokenizer, no ``SequenceSample``, no
process group.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from realsys.api.errors import DataError, InternalError
from realsys.api.model import GenerationHyperparameters
from realsys.generation.decoding.decoder import fast_path_obstacle
from realsys.generation.decoding.generic_decoder import GenericDecoder, without_dropout
from realsys.generation.engine.continuous import ContinuousEngine
from realsys.generation.engine.engine_requests import GenerationOutput, GenerationRequest
from realsys.generation.engine.sampling import Sampler, uniforms
from realsys.runtime.progress import tick

logger = logging.getLogger(__name__)

_AHEAD = 64  # allowance for positions beyond a row's end: a cache that doubles overshoots
# Dropping finished rows copies the cache of the others: it pays once many have finished.
_COMPACT_BELOW = 0.75
# Querying a GPU for finished rows makes the host wait, so it is done less often.
_STEPS_BETWEEN_CHECKS = {"cpu": 1, "cuda": 8}


@dataclass(frozen=True)
class GenerationResult:
    """Answers in the order of the prompts, without the prompts; tensors on the module's device.

    Attributes:
        tokens: int64 ``[T]`` each; the last one is the stop token, unless truncated.
        logprobs: float32 ``[T]`` each, at the configured temperature; over the kept sets, or if there are
            none over the whole vocabulary.
        truncated: bool ``[B]``, True where ``max_new_tokens`` passed without a stop token.
        kept: one kept set for each token (``sampling.encode_kept_sets``); None unless
            ``gconfig.restricts``.
    """

    tokens: list[Tensor]
    logprobs: list[Tensor]
    truncated: Tensor
    kept: list[list[bytes]] | None = None


def generate(
    module: nn.Module,
    prompts: Sequence[Tensor],
    gconfig: GenerationHyperparameters,
    *,
    eos_token_ids: Sequence[int],
    pad_token_id: int,
    row_seeds: Tensor,
    max_batch: int | None = None,
    max_tokens: int | None = None,
    textless: Sequence[int] = (),
) -> GenerationResult:
    """Generates one answer to each prompt, without dropout; repeat a prompt for several answers.

    Equal prompts are prefilled once. ``gconfig.n`` is ignored.

    Args:
        module: causal LM of transformers with whole, not sharded, weights.
        prompts: int64 ``[P_i]`` each, at least one token.
        eos_token_ids: end an answer, as do ``gconfig.stop_token_ids``.
        row_seeds: int64 ``[B]``, one per prompt: ``sampling.row_seed``.
        max_batch: most rows decoded together; None for all at once.
        max_tokens: size of the key-value cache in tokens, at least one whole row's; None: no
            bound. Answers do not depend on it where they don't depend on their neighbours.
        textless: ids that are never sampled, see textless_ids.py.
    Raises:
        DataError: an empty prompt, or one too long for the model's positions.
    """
    _check(module, prompts, gconfig, row_seeds)
    stop_ids = frozenset(eos_token_ids) | frozenset(gconfig.stop_token_ids)
    # Rows of similar length are prefilled together, which saves padding.
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    num_rows = max_batch or max(len(prompts), 1)
    longest = max(map(len, prompts), default=0) + gconfig.max_new_tokens
    if (obstacle := fast_path_obstacle(module)) is None:
        # Without a limit the maximum that all can reach, so that the cache does not outgrow it.
        room = num_rows * (longest + _AHEAD) if max_tokens is None else max(max_tokens, longest)
        engine = ContinuousEngine(
            module,
            eos_token_ids=sorted(stop_ids),
            pad_token_id=pad_token_id,
            max_running=num_rows,
            max_tokens=room,
            keep_answers=False,
            textless=textless,
        )
        return _generate_continuously(engine, prompts, gconfig, row_seeds, order)
    logger.debug("generic decoder chosen reason=%r", obstacle)
    if max_tokens is not None:
        num_rows = min(num_rows, max(1, max_tokens // longest))
    device = next(module.parameters()).device
    sampler = Sampler(
        gconfig,
        torch.tensor(sorted(stop_ids), device=device).long(),
        torch.tensor(textless, device=device).long() if textless else None,
    )
    return _generate_in_batches(module, prompts, sampler, pad_token_id, row_seeds, order, num_rows)


def _generate_continuously(
    engine: ContinuousEngine,
    prompts: Sequence[Tensor],
    gconfig: GenerationHyperparameters,
    row_seeds: Tensor,
    order: Sequence[int],
) -> GenerationResult:
    seeds = row_seeds.tolist()
    for i in order:
        prompt = tuple(prompts[i].tolist())
        engine.submit(
            GenerationRequest(
                rid=str(i),
                prompt=prompt,
                gconfig=gconfig,
                seed=seeds[i],
                return_kept=gconfig.restricts,
            )
        )
    ended: dict[int, GenerationOutput] = {}
    while engine.num_running or engine.num_waiting:
        ended.update((int(o.rid), o) for o in engine.step() if o.finish)
        tick()
    device = engine.device
    outputs = [ended[i] for i in range(len(prompts))]
    return GenerationResult(
        [torch.tensor(o.tokens, device=device) for o in outputs],
        [torch.tensor(o.logprobs, device=device, dtype=torch.float32) for o in outputs],
        torch.tensor([o.finish != "stop" for o in outputs], dtype=torch.bool, device=device),
        [o.kept for o in outputs] if gconfig.restricts else None,
    )


def _generate_in_batches(
    module: nn.Module,
    prompts: Sequence[Tensor],
    sampler: Sampler,
    pad_token_id: int,
    row_seeds: Tensor,
    order: Sequence[int],
    max_batch: int,
) -> GenerationResult:
    device, gconfig = next(module.parameters()).device, sampler.gconfig
    tokens: list[Tensor] = [torch.empty(0)] * len(prompts)
    logprobs = list(tokens)
    kept: list[list[bytes]] = [[] for _ in prompts]
    truncated = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    with torch.inference_mode(), without_dropout(module):
        decoder = GenericDecoder(module)
        for start in range(0, len(prompts), max_batch):
            rows = list(order[start : start + max_batch])
            batch = _Batch(decoder, sampler, pad_token_id, device)
            answers, answer_logprobs = batch.run([prompts[i] for i in rows], row_seeds[rows])
            ended, lengths = _lengths(answers, sampler.stop_ids)
            truncated[rows] = ~ended
            for i, length, a, b in zip(rows, lengths, answers, answer_logprobs, strict=True):
                tokens[i], logprobs[i] = a[:length], b[:length]
            for i, length, c in zip(rows, lengths, batch.kept, strict=True):
                kept[i] = c[:length]
    # Copied outside of inference mode: autograd refuses to save tensors made in it.
    return GenerationResult(
        [t.clone() for t in tokens],
        [t.clone() for t in logprobs],
        truncated,
        kept if gconfig.restricts else None,
    )


def _check(
    module: nn.Module,
    prompts: Sequence[Tensor],
    gconfig: GenerationHyperparameters,
    row_seeds: Tensor,
) -> None:
    if len(row_seeds) != len(prompts):
        raise InternalError(f"{len(row_seeds)} seeds for {len(prompts)} prompts", where="generate")
    if any(isinstance(p, DTensor) for p in module.parameters()):
        what = "generation got a module with sharded weights"
        raise InternalError(what, where="generate", fix="gather the weights first, then generate")
    lengths = [len(p) for p in prompts]
    if 0 in lengths:
        raise DataError(
            f"prompt {lengths.index(0)} of {len(prompts)} has no tokens",
            where="generate",
            fix="drop it, or begin prompts with a BOS token",
        )
    limit: int | None = getattr(module.config, "max_position_embeddings", None)
    if limit is not None and lengths and (longest := max(lengths)) + gconfig.max_new_tokens > limit:
        raise DataError(
            f"a prompt of {longest} tokens and max_new_tokens={gconfig.max_new_tokens} "
            f"do not fit the model's max_position_embeddings={limit}",
            where=f"generate, prompt {lengths.index(longest)} of {len(prompts)}",
            fix=f"lower max_new_tokens (of the generation settings, e.g. gen.max_new_tokens) to "
            f"{max(limit - longest, 0)}, or the data set's longest prompt",
        )


def _lengths(answers: Tensor, stop_ids: Tensor) -> tuple[Tensor, list[int]]:
    """Returns which rows hold a stop token (bool ``[B]``), and the length up to it or the whole length."""
    is_stop = torch.isin(answers, stop_ids)
    ended = is_stop.any(dim=1)
    first = is_stop.int().argmax(dim=1) + 1
    return ended, torch.where(ended, first, answers.shape[1]).tolist()


class _Batch:
    """Rows that are decoded together, from their prompts to the last stop token."""

    def __init__(
        self, decoder: GenericDecoder, sampler: Sampler, pad_token_id: int, device: torch.device
    ) -> None:
        self.decoder, self.sampler, self.device = decoder, sampler, device
        self.pad_token_id = pad_token_id
        self.kept: list[list[bytes]] = []  # of the newest run, by row

    def run(self, prompts: Sequence[Tensor], row_seeds: Tensor) -> tuple[Tensor, Tensor]:
        """Returns tokens and log-probs ``[B, max_new_tokens]``; arbitrary after a row's stop token."""
        room = self.sampler.gconfig.max_new_tokens
        tokens = torch.full((len(prompts), room), self.pad_token_id, device=self.device)
        logprobs = torch.zeros(len(prompts), room, device=self.device)
        uniform = uniforms(row_seeds.to(self.device), room)
        live = torch.arange(len(prompts), device=self.device)  # row of the result, by batch row
        done = torch.zeros_like(live, dtype=torch.bool)
        self.kept = [[] for _ in prompts]
        logits = self._read(prompts)
        check_every = _STEPS_BETWEEN_CHECKS.get(self.device.type, 1)
        for t in range(room):
            token, logprob = self._pick(logits, uniform[live, t], t, live)
            tokens[live, t], logprobs[live, t] = token, logprob
            done |= (token[:, None] == self.sampler.stop_ids).any(dim=1)
            if t + 1 == room:
                break
            if t % check_every == 0:
                kept = (~done).nonzero()[:, 0]
                if len(kept) == 0:
                    break
                if len(kept) <= _COMPACT_BELOW * len(live):
                    self.decoder.select(kept)
                    live, done, token = live[kept], done[kept], token[kept]
            tick()
            logits = self.decoder.step(token)
        return tokens, logprobs

    def _pick(self, logits: Tensor, uniform: Tensor, t: int, live: Tensor) -> tuple[Tensor, Tensor]:
        if not self.sampler.gconfig.restricts:
            return self.sampler.pick(logits, uniform, t)
        token, logprob, kept = self.sampler.pick_kept(logits, uniform, t)
        for row, kept_set in zip(live.tolist(), kept, strict=True):
            self.kept[row].append(kept_set)
        return token, logprob

    def _read(self, prompts: Sequence[Tensor]) -> Tensor:
        """Prefills the prompts, equal ones once; returns the logits after each."""
        keys = [tuple(p.tolist()) for p in prompts]
        distinct = list(dict.fromkeys(keys))
        length = max(map(len, distinct))
        padded = [[self.pad_token_id] * (length - len(key)) + list(key) for key in distinct]
        real = [[False] * (length - len(key)) + [True] * len(key) for key in distinct]
        logits = self.decoder.prefill(
            torch.tensor(padded, device=self.device), torch.tensor(real, device=self.device)
        )
        if len(distinct) == len(keys):
            return logits
        index_of = {key: i for i, key in enumerate(distinct)}
        rows = torch.tensor([index_of[key] for key in keys], device=self.device)
        self.decoder.select(rows)
        return logits[rows]
