"""A model worker's own shards, published and fetched while they train: real engines, no sockets."""

from dataclasses import replace
from pathlib import Path

import golden
import pytest
import torch
from weight_sync_world import Receiver, assert_same

from realsys.api.dataflow import MFCDef
from realsys.api.errors import ConfigError, InternalError
from realsys.api.model import (
    FinetuneSpec,
    ModelAbstraction,
    ModelBackendAbstraction,
    ModelInterfaceAbstraction,
    ModelInterfaceType,
    ModelName,
    ModelShardID,
    ParallelGroups,
    ProcessTopology,
)
from realsys.api.worker_configs import ModelShard, ModelWorker
from realsys.data.sequence_sample import SequenceSample
from realsys.data.transfer.tensor_store import TensorStore
from realsys.interfaces.answers import num_answer_tokens
from realsys.interfaces.supervised import next_token_loss
from realsys.model_worker.publishing import WeightPublications
from realsys.model_worker.shards import Shards
from realsys.transport.generation_messages import WeightPart, WeightSource

torch.set_num_threads(1)
NAME = ModelName("actor")
SPEC = FinetuneSpec(total_train_epochs=1, dataset_size=100, train_batch_size=10)
LORA = {"rank": 3, "alpha": 6.0, "target_modules": ["q_proj", "o_proj", "up_proj"]}


class World:
    """One worker with one model; ``stores`` is what a receiver's client sees."""

    def __init__(self, path: Path, *, lora=None, dtype="float32", **options):
        backend = {"optimizer": {"lr": 1e-2}, "lora": lora or {}}
        self.config = ModelWorker(
            shards=(
                ModelShard(
                    id=ModelShardID(model_name=NAME, topo=ProcessTopology()),
                    model=ModelAbstraction("hf_causal_lm", {"path": str(path), "dtype": dtype}),
                    backend=ModelBackendAbstraction("fsdp", backend),
                ),
            ),
            instantiate=(NAME,),
            model_rpcs=(
                MFCDef(
                    name="actor_train",
                    n_seqs=1,
                    interface_type=ModelInterfaceType.TRAIN_STEP,
                    interface_impl=ModelInterfaceAbstraction("sft"),
                    model_name=NAME,
                ),
            ),
        )
        shards = Shards(self.config, device="cpu")
        shards.make_models({NAME: ParallelGroups()})
        shards.initialize(SPEC)
        self.engine = shards.models[NAME].module
        self.stores = [TensorStore()]
        self.publications = WeightPublications(
            shards, [self.config], worker=0, store=self.stores[0], **options
        )

    def publish(self, version):
        said = self.publications.publish(str(NAME), version)
        part = WeightPart(endpoint="store://0", name=said.name)
        return WeightSource(version=version, parts=(part,)), said

    def train(self):
        tokens = torch.randint(3, 500, (20,), generator=torch.Generator().manual_seed(0))
        keys, mask = ("packed_input_ids", "prompt_mask"), torch.arange(20) < 2
        sample = SequenceSample.from_tensors(
            "a", dict.fromkeys(keys, ((20,),)), dict(zip(keys, (tokens, mask), strict=True))
        )
        self.engine.train_batch(sample, loss_fn=next_token_loss, loss_weight_fn=num_answer_tokens)

    def whole(self):
        """What the trainer itself would generate with: a full sync."""
        module = self.engine.whole_module()
        return {name: x.detach().clone() for name, x in module.named_parameters()}


@pytest.mark.thorough
@pytest.mark.parametrize("lora", [None, LORA], ids=["all", "adapters"])
@pytest.mark.parametrize("delta", [False, True])
def test_every_version_is_what_the_trainer_had_then(tiny_policy, lora, delta):
    world = World(tiny_policy, lora=lora, delta=delta)
    receiver = Receiver(world)
    first = 0
    for version in range(4):
        source, said = world.publish(version)
        expected = world.whole()
        world.train()
        assert_same(receiver.fetch(source, timeout_s=240), expected)
        first = first or said.new_bytes
        if version and lora:
            assert said.new_bytes < first / 4  # adapters alone
    assert said.num_bytes == first


def test_a_parked_engine_is_taken_back(tiny_policy):
    world = World(tiny_policy)
    expected = world.whole()
    world.engine.offload()
    source, _ = world.publish(3)
    assert_same(Receiver(world).fetch(source, timeout_s=240), expected)


def test_a_version_is_published_once(tiny_policy):
    world = World(tiny_policy)
    world.publish(3)
    with golden.raises(InternalError):
        world.publish(3)


def test_half_the_bytes_in_bfloat16_and_no_dtype_of_another_name(tiny_policy):
    world = World(tiny_policy, wire_dtype="bfloat16")
    source, said = world.publish(0)
    expected = {name: x.bfloat16() for name, x in world.whole().items()}
    assert_same(Receiver(world).fetch(source, timeout_s=240), expected)
    assert said.num_bytes == sum(2 * x.numel() for x in expected.values())
    with golden.raises(ConfigError):
        World(tiny_policy, wire_dtype="int4")


def test_servers_get_what_the_model_computes_in_and_not_its_masters(tiny_policy):
    world = World(tiny_policy, dtype="bfloat16")
    assert {x.dtype for ((_, x),) in world.engine.held_weights().values()} == {torch.float32}
    receiver = Receiver(world)
    for version in range(2):
        source, said = world.publish(version)
        expected = world.whole()
        assert {x.dtype for x in expected.values()} == {torch.bfloat16}
        world.train()
        assert_same(receiver.fetch(source, timeout_s=240), expected)
    assert said.num_bytes == sum(2 * x.numel() for x in expected.values())
    exact = World(tiny_policy, dtype="bfloat16", wire_dtype="float32")
    held = {name: x.clone() for name, ((_, x),) in exact.engine.held_weights().items()}
    assert_same(Receiver(exact).fetch(exact.publish(0)[0], timeout_s=240), held)


def test_an_engine_that_holds_another_type_than_its_backend_says_gives_nothing(tiny_policy):
    world = World(tiny_policy, dtype="bfloat16")
    world.config = replace(world.config, model_rpcs=())  # who knows nothing of the training
    shards = Shards(world.config, device="cpu")
    shards.models = world.publications._shards.models
    shards.sources = world.publications._shards.sources
    others = WeightPublications(shards, [world.config], worker=0, store=TensorStore())
    with pytest.raises(InternalError) as refused:
        others.publish(str(NAME), 0)
    assert "torch.bfloat16" in refused.value.what
