"""Two data-parallel processes train on pairs as one process does, KTO's estimate of the KL included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from near import near
from parallel_ranks import join, read, run_ranks, write
from test_fsdp import groups

from realsys.api.basics.preference_losses import DPOLoss, IPOLoss, KTOLoss, PairLoss, SimPOLoss
from realsys.api.data import MicroBatchSpec
from realsys.api.model import FinetuneSpec, Model
from realsys.api.options import OptimizerOptions
from realsys.backends.fsdp import FSDPBackend
from realsys.data.sequence_sample import SequenceSample
from realsys.interfaces.preferences.direct_preference import DirectPreferenceInterface
from realsys.models.factories import hf_causal_lm, tiny_llama
from realsys.models.hf import save_hf

pytestmark = pytest.mark.process
SPEC = FinetuneSpec(total_train_epochs=1, dataset_size=100, train_batch_size=4)
LENGTHS = ((5, 7), (4, 4), (9, 6), (3, 8))
SHARES = ([0], [1, 2, 3])  # rank 1 has more pairs, in more micro-batches
LOSSES: tuple[PairLoss, ...] = (DPOLoss(), IPOLoss(), KTOLoss(), SimPOLoss())
STEPS = 2


def pairs() -> SequenceSample:
    """Pairs with log-probs of a reference from which the policy is far, most of all on the first."""
    rng = torch.Generator().manual_seed(0)
    flat = [n for pair in LENGTHS for n in pair]
    keys = ("packed_input_ids", "prompt_mask", "packed_ref_logprobs")
    tokens = torch.randint(3, 512, (sum(flat),), generator=rng)
    reference = -7 + torch.rand(sum(flat), generator=rng)
    reference[:12] -= 3
    data = (tokens, torch.cat([torch.arange(n) < 2 for n in flat]), reference)
    return SequenceSample.from_tensors(
        "abcd", dict.fromkeys(keys, LENGTHS), dict(zip(keys, data, strict=True))
    )


def found(folder: str, share: SequenceSample, *company: Any) -> dict[str, list[dict[str, float]]]:
    """Statistics of two steps and an evaluation with each loss."""
    results = {}
    for loss in LOSSES:
        made: Model = hf_causal_lm(path=f"{folder}/start", **groups(*company))
        adam = OptimizerOptions(lr=1e-3, eps=1e-5)
        model = FSDPBackend(optimizer=adam).initialize(made, SPEC)
        does = DirectPreferenceInterface(loss=loss)
        spec = MicroBatchSpec(max_tokens_per_mb=16)
        held_out = share.select(["packed_input_ids", "prompt_mask"])
        stats = [does.evaluate(model, [held_out], spec)]
        stats += [does.train_step(model, share, spec) for _ in range(STEPS)]
        results[loss.kind] = [*stats, does.evaluate(model, [held_out], spec)]
    return results


def rank_main(rank: int, folder: str) -> None:
    join(rank, 2, folder)
    write(
        folder, f"rank{rank}", found(folder, pairs().take(SHARES[rank]), rank, 2, dist.group.WORLD)
    )
    dist.destroy_process_group()


def test_two_ranks_train_as_one(tmp_path: Path) -> None:
    made = tiny_llama(hidden_size=32, num_layers=1, **groups(0, 1, None))
    save_hf(made.module, made.tokenizer, tmp_path / "start")
    run_ranks("test_preference_ranks", 2, tmp_path)
    alone = found(str(tmp_path), pairs(), 0, 1, None)
    for rank in range(2):
        for kind, stats in read(tmp_path, f"rank{rank}").items():
            for ours, one in zip(stats, alone[kind], strict=True):
                assert ours == near(one, rel=1e-4), kind
    assert all(stats["kl_estimate"] > 1 for stats in alone["kto"][1:-1])
