"""Eight processes hold one model: none of them ever makes, or holds, the whole of it.

Loading, training, gathering for generation and saving are watched by a spy on every tensor made. The
model's layers are large beside its embedding, so that a whole model can't hide behind its largest weight.
"""

import json
from types import SimpleNamespace

import pytest
import torch
from parallel_ranks import groups_of, join, read, run_ranks, write
from safetensors.torch import load_file
from tensor_spy import TensorSpy
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from realsys.api.model import FinetuneSpec, Model, ModelName, ProcessTopology
from realsys.api.options import OptimizerOptions
from realsys.backends.fsdp import FSDPBackend
from realsys.backends.hf import sharding
from realsys.backends.megatron_backend import MegatronBackend
from realsys.data.sequence_sample import SequenceSample
from realsys.interfaces.answers import num_answer_tokens
from realsys.interfaces.supervised import next_token_loss
from realsys.models import hf
from realsys.models.source import HFSource

pytestmark = pytest.mark.process
WORLD = 8
SPEC = FinetuneSpec(total_train_epochs=1, dataset_size=100, train_batch_size=10)
TOKENIZER = SimpleNamespace(eos_token_id=1, pad_token_id=0, save_pretrained=lambda folder: None)
SIZES = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
MEGATRON = "d2t2p2"
CASES = {
    "d8t1p1": FSDPBackend(optimizer=OptimizerOptions(lr=1e-4)),
    "d4t2p1": FSDPBackend(optimizer=OptimizerOptions(lr=1e-4)),
    MEGATRON: MegatronBackend(optimizer=OptimizerOptions(lr=1e-4)),
}
FILE_BYTES = 1 << 20
SMALL = 40_000  # rotary frequencies, offsets, flags


def batch():
    tokens = torch.arange(24) % 60 + 3
    keys = ("packed_input_ids", "prompt_mask")
    data = dict(zip(keys, (tokens, torch.arange(24) % 12 < 2), strict=True))
    return SequenceSample.from_tensors("ab", {key: [[12], [12]] for key in keys}, data)


def watched(does):
    """What ``does`` makes beyond what is there: (largest tensor, most bytes together, result)."""
    with TensorSpy() as spy:
        result = does()
    return spy, result


def rank_main(rank, folder):
    join(rank, WORLD, folder)
    sharding._AT_ONCE = (
        1 << 14
    )  # numbers gathered together; a real one is far smaller than a model, too
    sharding.FSDP_WHOLE_BYTES = 0  # this model is not a small one
    hf.MAX_FILE_BYTES = FILE_BYTES
    for layout, backend in CASES.items():
        topo = ProcessTopology.parse(layout)
        groups = groups_of(topo, range(WORLD))
        write(folder, f"{layout}.{rank}", one_case(folder, layout, backend, topo, rank, groups))


def one_case(folder, layout, backend, topo, rank, groups):
    source = HFSource(f"{folder}/start", critic=False, dtype="float32", device="cpu")
    model = Model(
        name=ModelName("m"),
        module=source,
        tokenizer=TOKENIZER,
        device="cpu",
        dtype="float32",
        topology=topo,
        rank=rank,
        groups=groups,
    )
    found = {}

    def told(phase, spy):
        found[phase] = {"largest": spy.largest_bytes, "most": spy.most_bytes}
        found[phase]["where"] = [spy.largest_where, spy.most_where]

    spy, model = watched(lambda: backend.initialize(model, SPEC))
    told("loading", spy)
    engine = model.module
    held = [x for parts in engine.held_weights().values() for _, x in parts]
    found["own"] = sum(x.numel() * x.element_size() for x in held)

    def train():
        return engine.train_batch(
            batch(), loss_fn=next_token_loss, loss_weight_fn=num_answer_tokens
        )

    spy, _ = watched(train)
    told("training", spy)
    spy, whole = watched(engine.whole_module)
    told("gathering", spy)
    numbers = {n: x.clone() for n, x in whole.named_parameters()} if rank == 0 else {}
    del whole
    engine.drop_copies()
    state = engine.own_memory()
    with TensorSpy() as spy:
        spy.look(state)
        found["state"] = spy.most_bytes
        engine.save_to_hf(tokenizer=TOKENIZER, save_dir=f"{folder}/{layout}.hf")
    told("saving", spy)
    if rank == 0:
        saved = AutoModelForCausalLM.from_pretrained(f"{folder}/{layout}.hf")
        found["saved"] = all(torch.equal(x, numbers[n]) for n, x in saved.named_parameters())
    return found


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(**SIZES)).save_pretrained(folder / "start")
    run_ranks("test_model_memory", WORLD, folder)
    return folder


@pytest.mark.parametrize("layout", CASES)
def test_no_process_makes_or_holds_a_whole_model(world, layout):
    weights = load_file(world / "start" / "model.safetensors")
    largest = max(x.nbytes for x in weights.values())
    whole = sum(x.nbytes for x in weights.values())
    layer = sum(x.nbytes for n, x in weights.items() if ".layers.0." in n)
    assert whole > 7 * layer > 20 * largest
    for rank in range(WORLD):
        found = read(world, f"{layout}.{rank}")
        loading, saving = found["loading"], found["saving"]
        parts = (
            found["own"] if layout == MEGATRON else largest
        )  # it keeps a part's gradients in one
        assert loading["largest"] <= parts < whole / 3, loading["where"][0]
        assert found["training"]["largest"] <= max(layer, whole / 4) * 1.1, found["training"][
            "where"
        ]
        assert found["gathering"]["largest"] <= parts, found["gathering"]["where"][0]
        assert saving["largest"] <= parts, saving["where"][0]
        copies = 3 if layout == MEGATRON else 1  # and moves the weights beside them
        bound = copies * found["own"] + 2 * largest + SMALL
        assert loading["most"] <= bound < whole, loading["where"][1]
        # While a weight is put together: its parts, padded, from all ranks, and joined.
        assert saving["most"] <= found["state"] + 5 * largest + SMALL, saving["where"][1]
    assert read(world, f"{layout}.0")["saved"]


@pytest.mark.parametrize("layout", CASES)
def test_what_they_save_is_in_files_of_bounded_size(world, layout):
    folder = world / f"{layout}.hf"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert len(files) > 4
    assert all((folder / f).stat().st_size < FILE_BYTES + 10_000 for f in files)
