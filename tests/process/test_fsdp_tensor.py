"""FSDP over data and tensor axes: training, exchange and generation equal one process's."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from near import assert_near, near
from parallel_ranks import groups_of, join, read, rows_asked, run_ranks, write
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForTokenClassification,
)

from realsys.api import data
from realsys.api.data import MicroBatchSpec
from realsys.api.errors import ConfigError
from realsys.api.model import (
    FinetuneSpec,
    GenerationHyperparameters,
    Model,
    ModelName,
    ParallelGroups,
    ProcessTopology,
)
from realsys.api.options import LoRAOptions, OptimizerOptions
from realsys.backends.fsdp import FSDPBackend
from realsys.backends.hf.lora import exchange_name
from realsys.backends.hf.sharding import full_weight
from realsys.backends.inference import InferenceBackend
from realsys.data.sequence_sample import SequenceSample
from realsys.interfaces.answers import num_answer_tokens
from realsys.interfaces.supervised import next_token_loss
from realsys.models.hf import save_hf
from realsys.models.source import HFSource
from realsys.weights.layouts.boxes import Box
from realsys.weights.realloc.pairwise_link import open_link
from realsys.weights.realloc.realloc import Reallocator
from realsys.weights.realloc.realloc_plan import plan_realloc

pytestmark = pytest.mark.process
ALONE, NO_GROUPS = ProcessTopology(), ParallelGroups()
SPEC = FinetuneSpec(total_train_epochs=1, dataset_size=100, train_batch_size=10)
OPTIMIZER = OptimizerOptions(lr=1e-3, eps=1e-5, gradient_clipping=0.5)
LORA = LoRAOptions(rank=3, alpha=6.0)
LENGTHS = ((9, 5), (20,), (3, 12, 7), (16,))
SHARES = {1: ([0, 1, 2, 3],), 2: ([0], [1, 2, 3])}
VOCABULARY = 66  # 33 rows a tensor rank, which two data ranks share unevenly
TOKENIZER = SimpleNamespace(eos_token_id=1, pad_token_id=0)
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
}
MODELS = {
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=16)),
    "critic": (Qwen3ForTokenClassification, Qwen3Config(**SIZES, head_dim=16, num_labels=1)),
}
# Model, layout, workers of the world of 4, further backend arguments; pairs run side by side.
PAIR, OTHER_PAIR, ALL = (0, 1), (2, 3), (0, 1, 2, 3)
CASES = (
    ("qwen3", "d2t1p1", PAIR, {}),
    ("critic", "d1t2p1", OTHER_PAIR, {}),
    ("qwen2", "d2t2p1", ALL, {}),
    ("qwen3", "d2t2p1", ALL, {}),
    ("critic", "d2t2p1", ALL, {}),
    ("qwen2", "d2t2p1", ALL, {"lora": LORA}),
    ("qwen3", "d2t1p1", PAIR, {"lora": LORA}),
    ("critic", "d1t2p1", OTHER_PAIR, {"lora": LORA}),
    ("qwen2", "d2t1p1", PAIR, {"cpu_offload": True}),
    ("critic", "d1t2p1", OTHER_PAIR, {"cpu_offload": True}),
)


def case_name(model, layout, args):
    return "-".join([model, layout, *args])


def batch():
    generator = torch.Generator().manual_seed(0)
    flat = [n for pieces in LENGTHS for n in pieces]
    tokens = torch.randint(3, VOCABULARY, (sum(flat),), generator=generator)
    mask = torch.cat([torch.arange(n) < 2 for n in flat])
    keys = ("packed_input_ids", "prompt_mask")
    return SequenceSample.from_tensors(
        "abcd", dict.fromkeys(keys, LENGTHS), dict(zip(keys, (tokens, mask), strict=True))
    )


def make_model(folder, name, topo=ALONE, rank=0, groups=NO_GROUPS, **args):
    source = HFSource(f"{folder}/{name}", critic=name == "critic", dtype="float32", device="cpu")
    model = Model(
        name=ModelName(name),
        module=source,
        tokenizer=TOKENIZER,
        device="cpu",
        dtype="float32",
        topology=topo,
        rank=rank,
        groups=groups,
    )
    args = {"optimizer": OPTIMIZER, **args}
    return source, FSDPBackend(**args), FSDPBackend(**args).initialize(model, SPEC).module


def value_loss(values, mb):
    return (values - mb.data["packed_input_ids"] / VOCABULARY).square().mean()


def train(engine, sample, *, critic, max_tokens=15):
    # The second data rank cuts its share, and a group in it, into more micro-batches than the first has.
    return engine.train_batch(
        sample,
        loss_fn=value_loss if critic else next_token_loss,
        loss_weight_fn=(lambda mb: mb.data["packed_input_ids"].numel())
        if critic
        else num_answer_tokens,
        mb_spec=MicroBatchSpec(max_tokens_per_mb=max_tokens),
    )


def answers(engine):
    prompts = SequenceSample.from_tensors(
        ["p", "q"], {"packed_prompts": [[3], [2]]}, {"packed_prompts": torch.arange(40, 45)}
    )
    gconfig = GenerationHyperparameters(n=2, max_new_tokens=4, top_p=0.9, min_new_tokens=1)
    sample = engine.generate(prompts, tokenizer=TOKENIZER, gconfig=gconfig)
    sets = [sample.data[f"packed_kept_{part}"].tolist() for part in ("counts", "ids")]
    answered = [sample.data["packed_input_ids"].tolist(), sets]
    return answered, sample.data["packed_logprobs"].tolist()


def whole_weights(engine):
    return {name: full_weight(x).clone() for name, x in engine.parameters.items()}


def rank_main(world_rank, folder):
    store = join(world_rank, 4, folder)
    data.LOGITS_AT_ONCE = 4 * VOCABULARY  # unlike the one process that they are compared with
    made = {}
    for _, layout, workers, _ in CASES:
        if (layout, workers) not in made:
            made[layout, workers] = groups_of(ProcessTopology.parse(layout), workers)
    for name, layout, workers, args in CASES:
        if world_rank not in workers:
            continue
        topo, rank = ProcessTopology.parse(layout), workers.index(world_rank)
        found = one_case(folder, name, topo, rank, made[layout, workers], args)
        write(folder, f"{case_name(name, layout, args)}.{rank}", found)
    write(
        folder, f"exchange.{world_rank}", exchange(folder, world_rank, store, made["d2t2p1", ALL])
    )
    dist.barrier()
    dist.destroy_process_group()


def one_case(folder, name, topo, rank, groups, args):
    critic, case = name == "critic", case_name(name, str(topo), args)
    source, backend, engine = make_model(folder, name, topo, rank, groups, **args)
    held = engine.held_weights()
    boxes = {n: tuple(box for box, _ in parts) for n, parts in held.items()}
    found = {"layout": boxes == dict(backend.layout(source, topo)[rank])}
    if topo.world_size == 4:
        start = {exchange_name(n): x for n, x in whole_weights(engine).items()}
        found["views"] = all(
            torch.equal(view, start[n][box.slices_in(Box.whole(tuple(start[n].shape)))])
            for n, parts in held.items()
            for box, view in parts
        )
    share = batch().take(SHARES[topo.data][topo.coordinate(rank)[1]])
    generates = (name, str(topo)) in (("qwen3", "d2t1p1"), ("qwen3", "d2t2p1"), ("qwen2", "d2t2p1"))
    if generates:
        answers(engine)  # the copy it makes must not be the one that answers after training
    rows = [] if critic else rows_asked(engine.module.lm_head)
    found["stats"] = [train(engine, share, critic=critic)]
    found["rows"] = max(rows, default=0)
    state = engine.state_dict()
    found["stats"].append(train(engine, share, critic=critic))
    after = engine.state_dict()
    whole = whole_weights(engine)
    if rank == 0:
        torch.save(whole, f"{folder}/{case}.pt")
    found["forward"] = engine.forward(share).flatten()[:50].tolist()
    if generates:
        found["answers"] = answers(engine)
    if topo.world_size == 4 or args:
        engine.save_to_hf(tokenizer=None, save_dir=f"{folder}/{case}.hf")
    engine.offload()
    engine.onload()
    engine.load_state_dict(state)
    found["repeated"] = train(engine, share, critic=critic) == found["stats"][1]
    again = engine.state_dict()
    found["same"] = all(torch.equal(x, after["weights"][n]) for n, x in again["weights"].items())
    if not critic:  # whose bias doesn't scale with the rest
        parts = engine.held_weights().get("model.norm.weight", ())
        before = engine.forward(share)
        for _, view in parts:
            view.mul_(2)
        engine.weights_changed()
        found["written"] = torch.equal(engine.forward(share), 2 * before)
    if topo.data == 1:
        parts = [view for ((_, view),) in engine.held_weights().values()]
        sizes = [(x.untyped_storage().nbytes(), x.nbytes) for x in parts]
        found["memory"] = all(whole == part for whole, part in sizes)
    if topo.world_size == 4 and name == "qwen3":
        found["gradients"] = difference_of_cuts(folder, name, topo, rank, groups, share)
    return found


def exchange(folder, worker, store, groups):
    """An actor with adapters on all workers, and a copy for generation on two of them."""
    topo, copy_workers = ProcessTopology(data=2, tensor=2), (2, 1)
    source, backend, actor = make_model(folder, "qwen3", topo, worker, groups, lora=LORA)
    copies = InferenceBackend(lora=LORA)
    copy_topo, copy = ProcessTopology(data=2), None
    if worker in copy_workers:
        model = Model(
            name=ModelName("actor", 1),
            module=HFSource(f"{folder}/qwen3", critic=False, dtype="float32", device="cpu"),
            tokenizer=TOKENIZER,
            device="cpu",
            dtype="float32",
            filled=False,
        )
        copy = copies.initialize(model, SPEC).module
    places = (
        source.weights(),
        backend.layout(source, topo),
        ALL,
        copies.layout(source, copy_topo),
        copy_workers,
    )
    reallocator = Reallocator(worker, open_link(worker, device="cpu", store=store, timeout_s=60))
    share = batch().take(SHARES[2][topo.coordinate(worker)[1]])
    found = {"bytes": [], "same": []}
    for names in (None, actor.adapter_names, actor.adapter_names):
        train(actor, share, critic=False)
        plan = plan_realloc(*places, names=names)
        held = copy.held_weights() if copy else None
        report = reallocator.run(plan, actor.held_weights(), held)
        found["bytes"].append(report.bytes_sent)
        merged = actor.whole_module()  # collective
        if copy is not None:
            copy.weights_changed()
            ids = batch().data["packed_input_ids"][None, :9]
            with torch.no_grad():
                logits = [m(input_ids=ids).logits for m in (copy.whole_module(), merged)]
            found["same"].append(torch.equal(*logits))
    return found


def difference_of_cuts(folder, name, topo, rank, groups, share):
    """Largest difference of a gradient when the share is cut into micro-batches or not."""
    gradients = []
    for max_tokens in (25, None):
        optimizer = replace(OPTIMIZER, gradient_clipping=0.0)
        _, _, engine = make_model(folder, name, topo, rank, groups, optimizer=optimizer)
        train(engine, share, critic=False, max_tokens=max_tokens)
        moments = engine.state_dict()["optimizer"]
        gradients.append({n: m["exp_avg"] / 0.1 for n, m in moments.items()})
    a, b = gradients
    return max(float((a[n] - b[n]).abs().max()) for n in a if a[n].numel())


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """The folder in which 4 processes have gone through all cases."""
    folder = tmp_path_factory.mktemp("world")
    torch.manual_seed(0)
    for name, (cls, config) in MODELS.items():
        save_hf(cls(config), None, folder / name)
    run_ranks("test_fsdp_tensor", 4, folder)
    return folder


@pytest.mark.parametrize(
    ("name", "layout", "args"), [(n, layout, a) for n, layout, _, a in CASES], ids=str
)
def test_a_copy_of_several_processes_equals_one(world, name, layout, args):
    torch.set_num_threads(1)
    case = case_name(name, layout, args)
    topo = ProcessTopology.parse(layout)
    ranks = [read(world, f"{case}.{rank}") for rank in range(topo.world_size)]
    for rank in ranks:
        assert rank["layout"], "held_weights and layout agree"
        assert rank.get("views", True)
        assert rank["repeated"], "recovered state repeats the step to the bit"
        assert rank["same"]
        assert rank.get("written", True), "what is written to the views is computed with"
        assert rank.get("memory", True), "nothing keeps the whole of a weight that was cut"
        assert rank["rows"] == (0 if name == "critic" else 4), "logits are those of a chunk"
        assert rank["stats"] == ranks[0]["stats"], "every figure is global"
        assert rank.get("gradients", 0) < 1e-6
    _, _, alone = make_model(world, name, **{k: v for k, v in args.items() if k == "lora"})
    for figures in ranks[0]["stats"]:
        expected = train(alone, batch(), critic=name == "critic")
        assert figures == near(expected)
    assert_near(torch.load(world / f"{case}.pt"), whole_weights(alone))
    share = batch().take(SHARES[topo.data][0])
    output = alone.forward(share)
    assert_near(torch.tensor(ranks[0]["forward"]), output.flatten()[:50], rel=1e-4)
    if "answers" in ranks[0]:
        tokens, logprobs = answers(alone)
        for rank in ranks:
            assert rank["answers"] == [tokens, near(logprobs)]
    if (world / f"{case}.hf").exists():
        saved = HFSource(
            str(world / f"{case}.hf"), critic=name == "critic", dtype="float32", device="cpu"
        )
        # The first sequence but for its last token, whose logits mean nothing.
        logits = saved.load()(input_ids=share.data["packed_input_ids"][None, :8]).logits[0]
        assert_near(logits.reshape(output[:8].shape), output[:8], rel=1e-4)


def test_adapters_alone_keep_a_copy_for_generation_up_to_date(world):
    ranks = [read(world, f"exchange.{rank}") for rank in range(4)]
    assert [rank["same"] for rank in ranks] == [[], [True] * 3, [True] * 3, []]
    first, *later = (sum(sizes) for sizes in zip(*(r["bytes"] for r in ranks), strict=True))
    assert 0 < later[0] == later[1] < first / 3


@pytest.mark.parametrize(
    ("model", "degree", "what"),
    [
        ("qwen3", 4, "2 key/value heads can't be split evenly over tensor degree 4"),
        ("gpt2", 2, "weights of model_type 'gpt2' can't be laid out"),
    ],
)
def test_what_the_tensor_axis_cannot_cut_is_refused(model, degree, what):
    config = MODELS["qwen3"][1] if model == "qwen3" else GPT2Config(n_layer=1, n_embd=8, n_head=2)
    module = (Qwen3ForCausalLM if model == "qwen3" else GPT2LMHeadModel)(config)
    topo = ProcessTopology(tensor=degree)
    model = Model(
        ModelName("actor"), module, TOKENIZER, device="cpu", dtype="float32", topology=topo
    )
    with pytest.raises(ConfigError, match=what):
        FSDPBackend().initialize(model, SPEC)
