"""What is parked in CPU memory comes back bit for bit, and nothing is computed in between."""

import golden
import pytest
import torch
import torch.distributed as dist
from near import assert_near, near
from torch.distributed.fsdp import FSDPModule

from realsys.api.errors import InternalError
from realsys.api.model import FinetuneSpec, ModelName, ParallelGroups, ProcessTopology
from realsys.api.options import OptimizerOptions
from realsys.backends.fsdp import FSDPBackend
from realsys.backends.hf import offload
from realsys.backends.hf.offload import HostMemory
from realsys.backends.hf.singleton_group import singleton_group
from realsys.backends.inference import InferenceBackend
from realsys.data.sequence_sample import SequenceSample
from realsys.interfaces.answers import num_answer_tokens
from realsys.interfaces.supervised import next_token_loss
from realsys.models.factories import hf_causal_lm

torch.set_num_threads(1)
SPEC = FinetuneSpec(total_train_epochs=1, dataset_size=100, train_batch_size=10)
COMPANY = {
    "name": ModelName("m"),
    "device": "cpu",
    "topology": ProcessTopology(),
    "rank": 0,
    "groups": ParallelGroups(),
    "base_seed": 1,
}


def make_engine(path, backend=None):
    backend = backend or FSDPBackend(optimizer=OptimizerOptions(lr=1e-3))
    return backend.initialize(hf_causal_lm(path=str(path), **COMPANY), SPEC).module


def batch():
    tokens = torch.randint(3, 500, (20,), generator=torch.Generator().manual_seed(0))
    data = {"packed_input_ids": tokens, "prompt_mask": torch.arange(20) < 2}
    return SequenceSample.from_tensors("a", {key: [[20]] for key in data}, data)


def train(engine):
    return engine.train_batch(batch(), loss_fn=next_token_loss, loss_weight_fn=num_answer_tokens)


def test_what_need_not_be_kept_is_freed_and_comes_back_as_zeros():
    gradients, view = torch.ones(40), torch.ones(6)
    part, host = gradients[10:20], HostMemory()
    host.store([view])
    host.discard([gradients, part, view])
    assert gradients.untyped_storage().nbytes() == 0
    assert host.num_bytes == 6 * 4, "what is kept is the tensor that was taken before"
    host.restore()
    assert gradients.tolist() == [0.0] * 40
    assert part.data_ptr() == gradients[10:].data_ptr()
    assert view.tolist() == [1.0] * 6


def test_memory_is_given_back_and_taken_again():
    x = torch.randn(5, 7)
    expected = x.clone()
    row, same, other = x[2], x.view(-1), torch.arange(3)
    host = HostMemory()
    host.store([row, x, same, other, torch.empty(0)])
    assert host.num_bytes == 5 * 7 * 4 + 3 * 8, "memory that is shared is kept once"
    assert x.untyped_storage().nbytes() == other.untyped_storage().nbytes() == 0
    host.restore()
    assert torch.equal(x, expected)
    row.zero_()
    assert not x[2].any(), "views are still views"
    assert same.data_ptr() == x.data_ptr()
    assert other.tolist() == [0, 1, 2]
    assert host.num_bytes == 0


def test_training_goes_on_the_same_after_its_memory_was_away(tiny_policy):
    """As on a GPU, where ``offload`` takes this memory."""
    engine, other = make_engine(tiny_policy), make_engine(tiny_policy)
    assert train(engine) == train(other)
    views = engine.held_weights()
    host = HostMemory()
    host.store(engine.own_memory())
    weights = sum(p.numel() for p in other.parameters.values())
    assert host.num_bytes >= 3 * 4 * weights, "weights and both moments"
    assert all(p.untyped_storage().nbytes() == 0 for p in engine.parameters.values())
    host.restore()
    assert [train(engine) for _ in range(2)] == [train(other) for _ in range(2)]
    for name, ((_, view),) in other.held_weights().items():
        assert torch.equal(views[name][0][1], view)


@pytest.fixture
def no_process_group():
    """None that another test has left, and what is made here goes with the test."""
    end_process_group()
    yield
    end_process_group()


def end_process_group():
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("no_process_group")
def test_shards_in_cpu_memory_of_a_single_process_train_as_the_plain_module(tiny_policy):
    backend = FSDPBackend(optimizer=OptimizerOptions(lr=1e-3), cpu_offload=True)
    engine, other = make_engine(tiny_policy, backend), make_engine(tiny_policy)
    assert isinstance(engine.module, FSDPModule)
    for _ in range(2):
        assert train(engine) == near(train(other))
    held = engine.held_weights()
    wanted = other.held_weights()
    assert {name: box for name, ((box, _),) in held.items()} == {
        name: box for name, ((box, _),) in wanted.items()
    }
    assert_near(*({name: view for name, ((_, view),) in x.items()} for x in (held, wanted)))


@pytest.mark.usefixtures("no_process_group")
def test_a_group_of_one_belongs_to_the_world_that_it_was_made_in():
    first = singleton_group("cpu")
    assert (singleton_group("cpu"), dist.get_world_size(first)) == (first, 1)
    dist.destroy_process_group()
    second = singleton_group("cpu")
    assert second is not first
    x = torch.ones(3)
    dist.all_reduce(x, group=second)  # the first one's world is gone: this would raise
    assert x.tolist() == [1, 1, 1]


@pytest.mark.parametrize("backend", [FSDPBackend(), InferenceBackend()], ids=["fsdp", "inference"])
def test_nothing_touches_an_offloaded_model(tiny_policy, backend, tmp_path):
    engine = make_engine(tiny_policy, backend)
    before = engine.forward(batch())
    engine.offload()
    engine.offload()  # once more is nothing
    arguments = {"loss_fn": next_token_loss, "loss_weight_fn": num_answer_tokens}
    attempts = [
        lambda: engine.forward(batch()),
        lambda: engine.eval_batch(batch(), **arguments),
        lambda: engine.save_to_hf(tokenizer=None, save_dir=str(tmp_path / "x")),
        engine.held_weights,
        engine.whole_module,
    ]
    if isinstance(backend, FSDPBackend):
        attempts += [lambda: train(engine), engine.state_dict]
    for attempt in attempts:
        with golden.raises(InternalError):
            attempt()
    assert not (tmp_path / "x").exists()
    engine.onload()
    engine.onload()
    assert torch.equal(engine.forward(batch()), before)


def test_pinned_memory_is_asked_for_in_powers_of_two_that_fit(monkeypatch):
    """torch rounds it up to the next one: 5 GiB would take 8."""
    monkeypatch.setattr(offload, "_LARGEST_BLOCK", 1 << 12)
    monkeypatch.setattr(offload, "_SMALLEST_BLOCK", 1 << 6)
    sizes = (5000, 3, 8192, 77, 1)
    tensors = [torch.randint(0, 256, (n,), dtype=torch.uint8) for n in sizes]
    expected = [x.clone() for x in tensors]
    host = HostMemory()
    host.store(tensors)
    blocks = host.block_bytes
    assert all(size & (size - 1) == 0 for size in blocks)
    assert host.num_bytes == sum(sizes) <= sum(blocks) < sum(sizes) + (1 << 6)
    host.store(more := [torch.arange(10)])  # behind what is there
    host.restore()
    assert all(map(torch.equal, tensors, expected))
    assert more[0].tolist() == list(range(10))
    assert host.num_bytes == 0 == sum(host.block_bytes)
