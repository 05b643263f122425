"""Two data-parallel processes train as one process does, and save what one process can load."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from near import assert_near, near
from parallel_ranks import run_ranks
from torch.distributed.fsdp import FSDPModule

from realsys.api.data import MicroBatchSpec
from realsys.api.model import (
    FinetuneSpec,
    GenerationHyperparameters,
    ModelName,
    ParallelGroups,
    ProcessTopology,
)
from realsys.api.options import OptimizerOptions
from realsys.backends.fsdp import FSDPBackend
from realsys.backends.hf import sharding
from realsys.data.sequence_sample import SequenceSample
from realsys.interfaces.answers import num_answer_tokens
from realsys.interfaces.ppo.ppo_actor import PPOActorInterface
from realsys.interfaces.ppo.ppo_critic import PPOCriticInterface
from realsys.interfaces.supervised import next_token_loss
from realsys.models.factories import hf_causal_lm, hf_critic, tiny_llama
from realsys.models.hf import save_hf

pytestmark = pytest.mark.process
SPEC = FinetuneSpec(total_train_epochs=1, dataset_size=100, train_batch_size=10)
OPTIMIZER = OptimizerOptions(lr=1e-3, eps=1e-5, gradient_clipping=0.5)
LENGTHS = ((9, 5), (20,), (3, 12, 7), (16,))  # rank 0 gets the first id, rank 1 the others
SHARES = ([0], [1, 2, 3])
STEPS = 3
IN_LAYERS = "in layers"


def batch():
    generator = torch.Generator().manual_seed(0)
    flat = [n for pieces in LENGTHS for n in pieces]
    tokens = torch.randint(3, 512, (sum(flat),), generator=generator)
    mask = torch.cat([torch.arange(n) < 2 for n in flat])
    keys = ("packed_input_ids", "prompt_mask")
    return SequenceSample.from_tensors(
        "abcd", dict.fromkeys(keys, LENGTHS), dict(zip(keys, (tokens, mask), strict=True))
    )


def groups(rank, world_size, group):
    topology = ProcessTopology(data=world_size)
    common = {"name": ModelName("m"), "device": "cpu", "base_seed": 1}
    return {
        **common,
        "topology": topology,
        "rank": rank,
        "groups": ParallelGroups(copy=group, data=group),
    }


def make_model(path, rank=0, world_size=1, group=None):
    model = hf_causal_lm(path=path, **groups(rank, world_size, group))
    return FSDPBackend(optimizer=OPTIMIZER).initialize(model, SPEC)


def train(engine, sample, loss_fn=next_token_loss):
    # Rank 1 cuts its share into more micro-batches than rank 0 has.
    return engine.train_batch(
        sample,
        loss_fn=loss_fn,
        loss_weight_fn=num_answer_tokens,
        mb_spec=MicroBatchSpec(max_tokens_per_mb=25),
    )


def experience():
    """``batch`` with everything else that PPO trains on, drawn at random."""
    base, generator = batch(), torch.Generator().manual_seed(1)
    per_token = ("packed_logprobs", "packed_ref_logprobs", "values")
    tokens = sum(base.piece_lengths("packed_input_ids"))
    sequences = [[1] * len(pieces) for pieces in LENGTHS]
    data = {key: torch.rand(tokens, generator=generator) - 6 for key in per_token}
    data["rewards"] = torch.rand(7, generator=generator)
    data["seq_no_eos_mask"] = torch.rand(7, generator=generator) < 0.5
    lengths = {key: LENGTHS if key in per_token else sequences for key in data}
    return base.update(SequenceSample.from_tensors("abcd", lengths, data))


def ppo(start, share, rank=0, world_size=1, group=None):
    """Statistics of two epochs on ``share``, of actor and critic, and the interfaces' states."""
    place = groups(rank, world_size, group)
    backend, mb_spec = FSDPBackend(optimizer=OPTIMIZER), MicroBatchSpec(max_tokens_per_mb=25)
    found = []
    for interface, make in ((PPOActorInterface, hf_causal_lm), (PPOCriticInterface, hf_critic)):
        does = interface(
            ppo_n_minibatches=1,
            ppo_epochs=2,
            use_adaptive_kl_ctl=True,
            kl_ctl=0.1,
            truncation="bootstrap",
            value_norm=True,
            early_stop_imp_ratio=None,
        )
        stats = does.train_step(backend.initialize(make(path=start, **place), SPEC), share, mb_spec)
        states = {k: v for k, v in does.state_dict().items() if v}
        found.append({**stats, **{f"{k}/{n}": x for k, v in states.items() for n, x in v.items()}})
    return found


def answers(model):
    prompts = SequenceSample.from_tensors(
        ["p", "q"], {"packed_prompts": [[3], [2]]}, {"packed_prompts": torch.arange(40, 45)}
    )
    gconfig = GenerationHyperparameters(n=2, max_new_tokens=4)
    sample = model.module.generate(prompts, tokenizer=model.tokenizer, gconfig=gconfig)
    return sample.data["packed_input_ids"].tolist(), sample.data["packed_logprobs"].tolist()


def rank_main(rank, folder):
    """What each of the two processes runs; writes its figures to ``folder``."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/rendezvous", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    start = f"{folder}/start"
    if Path(folder, IN_LAYERS).exists():
        sharding.FSDP_WHOLE_BYTES = 0
    model = make_model(start, rank, 2, dist.group.WORLD)
    engine, share = model.module, batch().take(SHARES[rank])
    answers(model)  # the copy it makes must not be the one that answers after training
    stats = [train(engine, share) for _ in range(STEPS - 1)]
    state = engine.state_dict()
    torch.save(state, f"{folder}/state{rank}.pt")
    stats.append(train(engine, share))
    once = engine.module.state_dict()
    weights = {name: x.full_tensor() for name, x in once.items()}
    pieces = sum(isinstance(part, FSDPModule) for part in engine.module.modules())
    found = {"stats": stats, "answers": answers(model), "pieces": pieces}
    engine.save_to_hf(tokenizer=model.tokenizer, save_dir=f"{folder}/hf")

    engine.load_state_dict(torch.load(f"{folder}/state{rank}.pt", weights_only=True))
    poison = float("nan") if rank == 1 else 1.0  # one rank's loss is no number: no rank steps
    skipped = train(engine, share, lambda output, mb: next_token_loss(output, mb) * poison)
    found["skipped"] = skipped["skipped_steps"]
    found["repeated"] = train(engine, share)
    same = [torch.equal(x.full_tensor(), weights[n]) for n, x in engine.module.state_dict().items()]
    found["same_weights"] = all(same)
    found["ppo"] = ppo(start, experience().take(SHARES[rank]), rank, 2, dist.group.WORLD)
    Path(f"{folder}/rank{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize(("how", "pieces"), [("in one piece", 1), (IN_LAYERS, 3)])
def test_two_ranks_equal_one_process(tmp_path, how, pieces):
    (tmp_path / how).touch()
    start = str(tmp_path / "start")
    tiny = tiny_llama(hidden_size=32, num_layers=2, **groups(0, 1, None))
    save_hf(tiny.module, tiny.tokenizer, start)
    run_ranks("test_fsdp", 2, tmp_path)
    first, second = (json.loads((tmp_path / f"rank{r}.json").read_text()) for r in range(2))
    assert first == second, "every figure is global"
    assert first["pieces"] == pieces
    assert first["skipped"] == 1, "and the step after it is as without it"

    torch.set_num_threads(1)
    model = make_model(start)
    for figures in first["stats"]:
        assert figures == near(train(model.module, batch()))
    loaded = hf_causal_lm(path=str(tmp_path / "hf"), **groups(0, 1, None))
    assert_near(dict(loaded.module.load().state_dict()), dict(model.module.module.state_dict()))
    tokens, logprobs = answers(FSDPBackend().initialize(loaded, SPEC))
    assert first["answers"] == [tokens, near(logprobs)]
    assert first["repeated"] == first["stats"][-1], "recovered state repeats the step to the bit"
    assert first["same_weights"]
    for figures, alone in zip(first["ppo"], ppo(start, experience()), strict=True):
        assert figures == near(alone)
