"""What every engine over a Hugging Face module does: forward, evaluation, generation, saving.

Batches come packed and go through the module as a rectangle padded on the right, where causal
attention never looks from a token to the padding behind it: no mask is needed, and the result
doesn't depend on how a batch is cut. Training is fsdp.py's. Modules stay in evaluation mode
throughout: dropout would make a policy differ from the one that sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from realsys.api.data import MicroBatchSpec
from realsys.api.errors import DataError
from realsys.api.model import (
    GenerationHyperparameters,
    LossFn,
    LossWeightFn,
    Model,
    PipelinableEngine,
)
from realsys.api.progress import tick
from realsys.backends.data_parallel import DataParallel
from realsys.backends.weighted_means import WeightedMeans
from realsys.data_plane.ragged import pad_packed, unpad_to_packed
from realsys.data_plane.sequence_sample import SequenceSample
from realsys.generation.engine import generate
from realsys.generation.sampling import row_seed
from realsys.models.hf import save_hf

INPUT, PROMPTS = "packed_input_ids", "packed_prompts"
PostHook = Callable[[Tensor, SequenceSample], Tensor]


class HFEngine(PipelinableEngine):
    """An engine over ``model.module``, a causal LM or critic of transformers."""

    def __init__(self, model: Model) -> None:
        self.module: nn.Module = model.module.eval()
        self.device = torch.device(model.device)
        self.base_seed = model.base_seed
        self.rank = model.rank
        self.ranks = DataParallel.of(model)

    @torch.no_grad()
    def eval_batch(
        self,
        input_: SequenceSample,
        *,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn,
        mb_spec: MicroBatchSpec | None = None,
    ) -> dict[str, float]:
        microbatches = self.microbatches(input_, mb_spec)
        means = WeightedMeans(self.ranks, weights_of(microbatches, loss_weight_fn), "global")
        for (_, mb), scale in zip(microbatches, means.scales, strict=True):
            means.add(loss_fn(self.run_module(mb), mb), scale)
        return means.result()

    @torch.no_grad()
    def forward(
        self,
        input_: SequenceSample,
        *,
        mb_spec: MicroBatchSpec | None = None,
        post_hook: PostHook | None = None,
    ) -> Tensor:
        per_id: list[Tensor] = [torch.empty(0)] * input_.batch_size
        for indices, mb in self.microbatches(input_, mb_spec):
            output = self.run_module(mb)
            if post_hook is not None:
                output = post_hook(output, mb)
            rows = torch.split(output, list(mb.meta.rows_per_id(INPUT)))
            for i, x in zip(indices, rows, strict=False):  # a repeat has no indices
                per_id[i] = x
        return torch.cat(per_id)

    def generate(
        self,
        input_: SequenceSample,
        *,
        tokenizer: Any,
        gconfig: GenerationHyperparameters,
        mb_spec: MicroBatchSpec | None = None,
        seed: int = 0,
    ) -> SequenceSample:
        module = self.whole_module()
        prompts = [x.data[PROMPTS].to(self.device) for x in input_.select([PROMPTS]).unpack()]
        base_seed = self.base_seed ^ seed
        seeds = [row_seed(base_seed, i, k, 0) for i in input_.ids for k in range(gconfig.n)]
        result = generate(
            module,
            [prompt for prompt in prompts for _ in range(gconfig.n)],
            gconfig,
            eos_token_ids=_eos_token_ids(tokenizer, module),
            pad_token_id=tokenizer.pad_token_id or 0,
            row_seeds=torch.tensor(seeds, dtype=torch.int64),
            max_batch=_rows_that_fit(prompts, gconfig, mb_spec),
        )
        return _answers(input_, prompts, result.tokens, result.logprobs, result.truncated)

    def save_to_hf(self, *, tokenizer: Any, save_dir: str) -> None:
        state = self.whole_state_dict()
        if self.rank == 0:
            save_hf(self.module, tokenizer, save_dir, state_dict=state)
        self.ranks.max(0.0)  # nobody goes on before the directory is whole

    # ---- what sharded engines change ----------------------------------------------------------

    def whole_module(self) -> nn.Module:
        """The module with full weights, for generation."""
        return self.module

    def whole_state_dict(self) -> Mapping[str, Tensor] | None:
        """Full weights for saving; None where the module itself has them."""
        return None

    def microbatches(
        self, input_: SequenceSample, mb_spec: MicroBatchSpec | None
    ) -> list[tuple[list[int], SequenceSample]]:
        """Indices and micro-batches of ``input_`` on this engine's device.

        One without indices is a repeat that only keeps ranks in step: its output counts nowhere.
        """
        return input_.to(self.device).microbatches(mb_spec or MicroBatchSpec())

    def run_module(self, mb: SequenceSample) -> Tensor:
        """Logits ``[tokens, vocabulary]`` of a language model, values ``[tokens]`` of a critic."""
        tick()
        lengths = mb.piece_lengths(INPUT)
        input_ids_BT = pad_packed(mb.data[INPUT], lengths)
        output = unpad_to_packed(
            self.module(input_ids=input_ids_BT, use_cache=False).logits, lengths
        )
        return output.squeeze(-1) if output.shape[-1] == 1 else output


def weights_of(
    microbatches: Sequence[tuple[list[int], SequenceSample]], loss_weight_fn: LossWeightFn
) -> list[float]:
    """Weight of each micro-batch; a repeat weighs nothing."""
    return [loss_weight_fn(mb) if indices else 0.0 for indices, mb in microbatches]


def _eos_token_ids(tokenizer: Any, module: nn.Module) -> list[int]:
    """Ends of an answer: the tokenizer's, and those of the model's own generation settings."""
    config = getattr(module, "generation_config", None)
    own = getattr(config, "eos_token_id", None)
    several = own if isinstance(own, list | tuple) else [own]
    return sorted({int(i) for i in (tokenizer.eos_token_id, *several) if i is not None})


def _rows_that_fit(
    prompts: Sequence[Tensor], gconfig: GenerationHyperparameters, mb_spec: MicroBatchSpec | None
) -> int | None:
    """How many rows to decode together so that their cache stays under the micro-batch's tokens."""
    if mb_spec is None or mb_spec.max_tokens_per_mb is None:
        return None
    longest = max(map(len, prompts), default=0) + gconfig.max_new_tokens
    return max(1, mb_spec.max_tokens_per_mb // longest)


def _answers(
    input_: SequenceSample,
    prompts: Sequence[Tensor],
    tokens: Sequence[Tensor],
    logprobs: Sequence[Tensor],
    truncated: Tensor,
) -> SequenceSample:
    """The sample that ``PipelinableEngine.generate`` describes; answers are grouped by prompt."""
    if not prompts:
        raise DataError("no prompts", where="generate", fix="pass at least one id")
    n = len(tokens) // len(prompts)
    rows = list(zip([p for p in prompts for _ in range(n)], tokens, logprobs, strict=True))
    lengths = [len(prompt) + len(answer) for prompt, answer, _ in rows]
    grouped = [lengths[i : i + n] for i in range(0, len(lengths), n)]
    on, off = torch.ones_like, torch.zeros_like
    data = {
        INPUT: [x for prompt, answer, _ in rows for x in (prompt, answer)],
        "prompt_mask": [x for p, a, _ in rows for x in (on(p).bool(), off(a).bool())],
        "packed_logprobs": [x for p, _, lp in rows for x in (off(p).float(), lp)],
    }
    return SequenceSample.from_tensors(
        input_.ids,
        {**dict.fromkeys(data, grouped), "seq_no_eos_mask": [[1] * n] * len(prompts)},
        {**{key: torch.cat(x) for key, x in data.items()}, "seq_no_eos_mask": truncated},
        metadata=input_.meta.metadata,
    )
