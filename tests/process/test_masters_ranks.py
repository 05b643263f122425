"""Two processes that compute in bfloat16: what is held, what is sent, and that it learns."""

import pytest
import torch
import torch.distributed as dist
from parallel_ranks import groups_of, join, read, run_ranks, write
from test_fsdp import SHARES, batch, groups, train
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

from realsys.api.model import FinetuneSpec, ProcessTopology
from realsys.api.options import LoRAOptions, OptimizerOptions
from realsys.backends.fsdp import FSDPBackend
from realsys.backends.hf import sharding
from realsys.data.sequence_sample import SequenceSample
from realsys.interfaces.answers import num_answer_tokens
from realsys.models.factories import hf_causal_lm, hf_critic, tiny_llama
from realsys.models.hf import save_hf

pytestmark = pytest.mark.process
SPEC = FinetuneSpec(total_train_epochs=1, dataset_size=100, train_batch_size=10)
ADAPTERS = LoRAOptions(rank=2, alpha=4.0, target_modules=("q_proj", "o_proj"))
TYPES = ("float32", "bfloat16")
HALF, FULL = "torch.bfloat16", "torch.float32"


def engine_of(folder, dtype, rank, *, make=hf_causal_lm, **settings):
    model = make(path=f"{folder}/start", dtype=dtype, **groups(rank, 2, dist.group.WORLD))
    return (
        FSDPBackend(**{"optimizer": OptimizerOptions(lr=1e-6), **settings})
        .initialize(model, SPEC)
        .module
    )


def held(engine):
    return {name: view.clone() for name, ((_, view),) in engine.held_weights().items()}


def share_changed(before, after):
    """Of the whole model's numbers."""
    counts = [sum(int((x != after[n]).sum()) for n, x in before.items())]
    counts.append(sum(x.numel() for x in before.values()))
    total = torch.tensor(counts)
    dist.all_reduce(total)
    return float(total[0] / total[1])


class Sent:
    """Types of what FSDP gathers and reduces, and of what whole weights are gathered from."""

    def __init__(self, monkeypatch):
        self.kinds = {"gathered": set(), "reduced": set(), "whole": set()}

        def spied(place, name, what, argument):
            call = getattr(place, name)

            def spy(*args, **kwargs):
                x = kwargs["input"] if argument is None else args[argument]
                self.kinds[what].add(str(x.dtype))
                return call(*args, **kwargs)

            monkeypatch.setattr(place, name, spy)

        spied(_fsdp_collectives.dist, "all_gather_single", "gathered", 1)
        spied(_fsdp_collectives.dist, "reduce_scatter_single", "reduced", None)
        spied(sharding.dist, "all_gather", "whole", 1)

    def take(self):
        found = {what: sorted(kinds) for what, kinds in self.kinds.items()}
        for kinds in self.kinds.values():
            kinds.clear()
        return found


def rank_main(rank, folder):
    join(rank, 2, folder)
    share, found = batch().take(SHARES[rank]), {}
    with pytest.MonkeyPatch.context() as monkeypatch:
        sent = Sent(monkeypatch)
        for how, whole_bytes, steps in (("in one piece", 1 << 30, 40), ("in layers", 0, 10)):
            monkeypatch.setattr(sharding, "FSDP_WHOLE_BYTES", whole_bytes)
            for dtype in TYPES:
                engine = engine_of(folder, dtype, rank)
                before = held(engine)
                sent.take()
                stats = [train(engine, share) for _ in range(steps)]
                of_training = sent.take()
                engine.whole_module()
                found[f"{dtype} {how}"] = {
                    "changed": share_changed(before, held(engine)),
                    "first": stats[0],
                    "gain": stats[0]["loss"] - stats[-1]["loss"],
                    "held": sorted({str(x.dtype) for x in before.values()}),
                    "sent": {**of_training, "whole": sent.take()["whole"]},
                }
            found[f"resumed {how}"] = resumed(folder, rank, share)
            found[f"adapters {how}"] = adapters(folder, rank, share)
    found["tensor"] = {dtype: over_tensor_axis(folder, dtype, rank) for dtype in TYPES}
    write(folder, f"rank{rank}", found)
    dist.barrier()
    dist.destroy_process_group()


def over_tensor_axis(folder, dtype, rank):
    """Statistics of two steps on layers that are cut over the tensor axis, and types."""
    topo = ProcessTopology(tensor=2)
    place = {**groups(rank, 2, None), "topology": topo, "groups": groups_of(topo, (0, 1))}
    model = hf_causal_lm(path=f"{folder}/start", dtype=dtype, **place)
    engine = FSDPBackend(optimizer=OptimizerOptions(lr=1e-4)).initialize(model, SPEC).module
    before = held(engine)
    stats = [train(engine, batch()) for _ in range(2)]
    return {
        "stats": stats,
        "changed": share_changed(before, held(engine)),
        "held": sorted({str(x.dtype) for x in before.values()}),
        "whole": sorted({str(x.dtype) for x in engine.whole_module().parameters()}),
    }


def resumed(folder, rank, share):
    """Whether another engine goes on from a checkpoint bit for bit."""
    first = engine_of(folder, "bfloat16", rank)
    train(first, share)
    state = first.state_dict()
    stats = train(first, share)
    second = engine_of(folder, "bfloat16", rank)
    second.load_state_dict(state)
    same = train(second, share) == stats
    after = held(second)
    return same and all(torch.equal(x, after[n]) for n, x in held(first).items())


def adapters(folder, rank, share):
    """Types of adapters, a critic's head and the base, and the share of what trains that moved."""
    found = {}
    for make in (hf_causal_lm, hf_critic):
        engine = engine_of(folder, "bfloat16", rank, make=make, lora=ADAPTERS)
        before = held(engine)
        if make is hf_critic:
            values(engine, share)
        else:
            train(engine, share)
            train(engine, share)  # A has no gradient while B is 0
        after = held(engine)
        names = [n for n in before if n in engine.adapter_names]
        # A critic's head is 0 to begin with, and so is what comes through it to the adapters.
        first = [n for n in names if ("score." if make is hf_critic else ".lora_B") in n]
        found[make.__name__] = {
            "trained": sorted({str(before[n].dtype) for n in names}),
            "base": sorted({str(x.dtype) for n, x in before.items() if n not in names}),
            "base_moved": any(
                not torch.equal(x, after[n]) for n, x in before.items() if n not in names
            ),
            "moved": share_changed({n: before[n] for n in first}, after),
        }
    return found


def values(engine, share: SequenceSample):
    engine.train_batch(
        share,
        loss_fn=lambda values, mb: (values - 1.0).square().mean(),
        loss_weight_fn=num_answer_tokens,
    )


def test_two_ranks_learn_in_bfloat16_as_in_float32(tmp_path):
    tiny = tiny_llama(hidden_size=32, num_layers=2, **groups(0, 1, None))
    save_hf(tiny.module, tiny.tokenizer, str(tmp_path / "start"))
    run_ranks("test_masters_ranks", 2, tmp_path)
    first, second = (read(tmp_path, f"rank{rank}") for rank in range(2))
    for how in ("in one piece", "in layers"):
        full, half = (first[f"{dtype} {how}"] for dtype in ("float32", "bfloat16"))
        assert full["changed"] > 0.3  # the rest are rows of tokens that the batch does not have
        assert half["changed"] == pytest.approx(full["changed"], rel=0.05)
        if how == "in one piece":  # ten steps gain less than bfloat16 rounds
            assert half["gain"] == pytest.approx(full["gain"], rel=0.2)
        assert half["first"] == pytest.approx(full["first"], rel=0.02)
        assert half["held"] == [FULL]
        assert half["sent"] == {"gathered": [HALF], "reduced": [FULL], "whole": [HALF]}
        assert full["sent"] == {"gathered": [FULL], "reduced": [FULL], "whole": [FULL]}
        assert first[f"resumed {how}"]
        assert second[f"resumed {how}"]
        for found in first[f"adapters {how}"].values():
            assert (found["trained"], found["base"]) == ([FULL], [HALF])
            assert not found["base_moved"]
            assert found["moved"] > 0.9
    full, half = (first["tensor"][dtype] for dtype in TYPES)
    assert (half["held"], half["whole"]) == ([FULL], [HALF])
    assert half["changed"] == pytest.approx(full["changed"], rel=0.05)
    for step in range(2):
        assert half["stats"][step] == pytest.approx(full["stats"][step], rel=0.02)
