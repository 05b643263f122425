"""Four processes for the tests of the megatron backend: tiny models, layouts, what each rank runs.

One world of processes runs many cases, since starting it costs more than they do. ``run_world``
is for the tests; the rest runs in the ranks too.
"""

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from parallel_ranks import run_ranks
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
)

from realsys.api.data import MicroBatchSpec
from realsys.api.model import (
    FinetuneSpec,
    Model,
    ModelName,
    ParallelGroups,
    ProcessTopology,
)
from realsys.api.options import OptimizerOptions
from realsys.data.sequence_sample import SequenceSample
from realsys.interfaces.answers import INPUT, answer_mask
from realsys.interfaces.supervised import next_token_loss
from realsys.model_worker.process_groups import rank_groups
from realsys.models.source import HFSource

WORLD = 4
SPEC = FinetuneSpec(total_train_epochs=1, dataset_size=100, train_batch_size=10)
OPTIMIZER = OptimizerOptions(lr=1e-3, eps=1e-5, gradient_clipping=0.5, weight_decay=0.1)
VOCABULARY = 64
LENGTHS = ((9, 5), (20,), (3, 12, 7), (16,))
SHARES = {1: ([0, 1, 2, 3],), 2: ([0], [1, 2, 3])}  # ids of each data-parallel rank
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "dtype": "float32",
    "initializer_range": 0.1,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
CONFIGS = {
    # A padding token is a word like others in a batch, but its embedding must not learn from it.
    "llama": LlamaConfig(
        **SIZES, tie_word_embeddings=False, rope_parameters=LLAMA3, pad_token_id=5
    ),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True, pad_token_id=6),
    "qwen3": Qwen3Config(**SIZES, tie_word_embeddings=False, head_dim=16),
    "deep": Qwen2Config(**{**SIZES, "num_hidden_layers": 4}, tie_word_embeddings=True),
    "critic": LlamaConfig(**SIZES, tie_word_embeddings=False, num_labels=1),
}
# Layout → workers that hold a copy of it; pairs that share no worker run at the same time.
LAYOUTS = {
    "d2t1p1": (0, 1),
    "d1t2p1": (2, 3),
    "d1t1p2": (0, 1),
    "d1t2p2": (0, 1, 2, 3),
    "d2t2p1": (0, 1, 2, 3),
    "d2t1p2": (0, 1, 2, 3),
    "d1t1p4": (3, 1, 0, 2),  # with stages in the middle, and workers out of order
}


def write_models(folder):
    """A Hugging Face directory per family, biases and norms drawn at random too."""
    for name, config in CONFIGS.items():
        auto = AutoModelForTokenClassification if name == "critic" else AutoModelForCausalLM
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            module = auto.from_config(config)
            with torch.no_grad():
                for x in module.parameters():
                    if x.ndim == 1:
                        x.add_(torch.randn_like(x) * 0.1)
        module.save_pretrained(folder / name)


def batch():
    generator = torch.Generator().manual_seed(0)
    flat = [n for pieces in LENGTHS for n in pieces]
    tokens = torch.randint(3, VOCABULARY, (sum(flat),), generator=generator)
    tokens[::5], tokens[1::5] = 5, 6
    mask = torch.cat([torch.arange(n) < 2 for n in flat])
    keys = (INPUT, "prompt_mask")
    return SequenceSample.from_tensors(
        "abcd", dict.fromkeys(keys, LENGTHS), dict(zip(keys, (tokens, mask), strict=True))
    )


def make_model(path, layout="d1t1p1", rank=0, groups=None, *, critic=False, dtype="float32"):
    source = HFSource(str(path), critic=critic, dtype=dtype, device="cpu")
    return Model(
        ModelName("m"),
        source,
        None,
        "cpu",
        dtype,
        topology=ProcessTopology.parse(layout),
        rank=rank,
        groups=groups or ParallelGroups(),
    )


def value_loss(values, mb):
    """To be near 1 on the answers, and a figure beside it."""
    kept = values[answer_mask(mb)]
    return ((kept - 1.0) ** 2).mean(), {"mean_value": kept.detach().mean()}


def num_answers(mb):
    return float(answer_mask(mb).sum())


def train(engine, sample, *, critic=False, max_tokens=25, **settings):
    return engine.train_batch(
        sample,
        loss_fn=value_loss if critic else next_token_loss,
        loss_weight_fn=num_answers,
        mb_spec=MicroBatchSpec(max_tokens_per_mb=max_tokens),
        **settings,
    )


class Rank:
    """One process of the world: its groups in every layout, and where it leaves its figures."""

    def __init__(self, index, folder):
        self.index, self.folder, self.found = index, Path(folder), {}
        torch.set_num_threads(1)
        store = dist.FileStore(f"{folder}/rendezvous", WORLD)
        dist.init_process_group("gloo", store=store, rank=index, world_size=WORLD)
        self.groups = {layout: self._groups(layout, LAYOUTS[layout]) for layout in LAYOUTS}

    def _groups(self, layout, workers):
        found = {}
        for axis, ranks in rank_groups(ProcessTopology.parse(layout)):
            members = [workers[rank] for rank in ranks]
            if len(members) > 1:
                # Every process makes every group, in the layout's order.
                group = dist.new_group(members, sort_ranks=False)
                if self.index in members:
                    found[axis] = group
        return ParallelGroups(**found)

    def model(self, family, layout, **settings):
        """This process's model, or None where it holds no part of ``layout``."""
        if self.index not in LAYOUTS[layout]:
            return None
        return make_model(
            self.folder / family,
            layout,
            LAYOUTS[layout].index(self.index),
            self.groups[layout],
            critic=family == "critic",
            **settings,
        )

    def share(self, model):
        _, data, _ = model.topology.coordinate(model.rank)
        return batch().take(SHARES[model.topology.data][data])

    def done(self):
        (self.folder / f"rank{self.index}.json").write_text(json.dumps(self.found))
        dist.barrier()
        dist.destroy_process_group()


@functools.cache
def run_world():
    """Runs the cases of both files in four processes, once; their folder, and what each found, by case."""
    folder = Path(tempfile.mkdtemp(prefix="megatron_world"))
    atexit.register(shutil.rmtree, folder)
    write_models(folder)
    run_ranks("megatron_ranks", WORLD, folder, timeout_s=400)
    found = {}
    for index in range(WORLD):
        for case, figures in json.loads((folder / f"rank{index}.json").read_text()).items():
            found.setdefault(case, []).append(figures)
    return folder, found
