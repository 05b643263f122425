"""What trainers publish is what a receiver gets, bit for bit, whatever changed and whatever is broken."""

import threading
import weakref
from itertools import chain

import golden
import pytest
import torch
from safetensors.torch import save_file
from weight_sync_world import (
    MODEL,
    SHAPE,
    TIED,
    Engine,
    Receiver,
    Trainers,
    assert_same,
    dense,
    layout_of,
)

from realsys.api.errors import CheckpointError, InternalError, RemoteError, WaitTimeout
from realsys.models.shape import Weight
from realsys.transport.codec import ProtocolError
from realsys.transport.generation_messages import WeightSource
from realsys.weights.layouts.boxes import Box
from realsys.weights.sync.adapters import adapted, merged
from realsys.weights.sync.buffer_pool import MIN_BYTES, BufferPool
from realsys.weights.sync.manifest import KEY

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = 700  # bytes a bucket: weights are cut, and several share one


LAYOUTS = [
    ("whole", "d1", SHAPE),
    ("whole", "d3", TIED),
    ("fsdp", "d2", SHAPE),
    ("fsdp", "d3t2", SHAPE),
    ("megatron", "t2", SHAPE),
    ("megatron", "p2", TIED),
    ("megatron", "d2t2p2", TIED),
    ("megatron", "t4p4", SHAPE),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "topo", "shape"), LAYOUTS, ids=lambda x: str(x)[:12])
@pytest.mark.parametrize("delta", [False, True])
def test_any_layout_arrives_bit_for_bit_version_after_version(kind, topo, shape, delta):
    weights = shape.weights()
    trainers = Trainers(
        layout_of(kind, topo, shape), dense(weights), bucket_bytes=SMALL, delta=delta
    )
    receiver = Receiver(trainers)
    for version in (0, 1, 5):
        whole = dense(weights, seed=version)
        trainers.train(whole)
        source, _ = trainers.publish(version)
        trainers.train(dense(weights, seed=99))  # goes on while servers fetch
        assert_same(receiver.fetch(source, timeout_s=240), whole)


def test_replicas_share_the_work_and_nothing_is_given_twice():
    weights = SHAPE.weights()
    trainers = Trainers(layout_of("whole", "d3"), dense(weights), bucket_bytes=SMALL)
    _, said = trainers.publish(0)
    whole = 4 * sum(w.numel for w in weights)
    assert sum(one.num_bytes for one in said) == whole
    assert max(one.num_bytes for one in said) < 0.4 * whole


def test_a_worker_without_a_part_publishes_nothing():
    trainers = Trainers(({"w": (Box((0,), (4,)),)}, {}), dense([Weight("w", (4,))]))
    source, said = trainers.publish(0)
    assert [bool(one.name) for one in said] == [True, False]
    assert Receiver(trainers).fetch(source, timeout_s=240).keys() == {"w"}


def test_bfloat16_on_the_wire_rounds_once():
    whole = dense(SHAPE.weights())
    trainers = Trainers(layout_of("fsdp", "d2"), whole, wire="bfloat16")
    source, said = trainers.publish(0)
    expected = {name: x.to(torch.bfloat16) for name, x in whole.items()}
    assert_same(Receiver(trainers).fetch(source, timeout_s=240), expected)
    assert sum(one.num_bytes for one in said) == 2 * sum(x.numel() for x in whole.values())


def test_rounding_that_nobody_asked_for_is_refused():
    trainers = Trainers(layout_of("whole", "d1"), dense(SHAPE.weights()), held="bfloat16")
    with pytest.raises(InternalError) as refused:
        trainers.publish(0)
    assert "torch.bfloat16" in refused.value.what


def test_versions_go_up_and_the_newest_two_stay():
    trainers = Trainers(layout_of("whole", "d1"), dense(SHAPE.weights()))
    sources = [trainers.publish(version)[0] for version in (3, 4, 7)]
    receiver = Receiver(trainers)
    assert trainers.publishers[0].versions == (4, 7)
    for source in sources[1:]:
        assert len(receiver.fetch(source, timeout_s=240)) == len(SHAPE.weights())
    with golden.raises(RemoteError):
        receiver.fetch(sources[0], timeout_s=240)
    with golden.raises(InternalError):
        trainers.publish(7)
    trainers.publishers[0].forget(4)
    trainers.publishers[0].forget(7)
    assert len(trainers.stores[0]) == len(trainers.publishers[0]._last)  # what may be built upon


def test_a_version_is_never_mixed_with_the_next():
    """A receiver reads rows one by one; between any two of them the trainer publishes again."""
    trainers = Trainers(layout_of("fsdp", "d2"), dense(SHAPE.weights()), bucket_bytes=SMALL)
    source, _ = trainers.publish(1)
    receiver = Receiver(trainers)
    whole = {n: x.clone() for n, x in dense(SHAPE.weights()).items()}
    make = receiver._make_client

    def make_slow(endpoints):
        client = make(endpoints)
        stream, asked = client.stream, []

        def slow(*args, **kwargs):
            for number, found in enumerate(stream(*args, **kwargs)):
                asked.append(number)
                if len(asked) == 20:  # one more version, so that the first is kept still
                    trainers.train(dense(SHAPE.weights(), seed=2))
                    trainers.publish(2)
                yield found

        client.stream = slow
        return client

    receiver._make_client = make_slow
    assert_same(receiver.fetch(source, timeout_s=240), whole)


# ---- what is broken ---------------------------------------------------------------------------------


def published(**options):
    trainers = Trainers(
        layout_of("fsdp", "d2"), dense(SHAPE.weights()), bucket_bytes=SMALL, **options
    )
    return trainers, trainers.publish(4)[0]


def test_one_flipped_bit_is_noticed_and_told():
    trainers, source = published()
    (x,) = trainers.stores[1].rows(KEY, [f"{MODEL}/4/11/3"])
    x[17] ^= 4
    with golden.raises(ProtocolError) as caught:
        Receiver(trainers).fetch(source, timeout_s=240)
    assert caught.value.where == f"row {MODEL}/4/11/3"
    assert "version 4" in caught.value.what


def test_a_bucket_of_another_length_is_refused():
    trainers, source = published()
    name = f"{MODEL}/4/11/3"
    (x,) = trainers.stores[1].rows(KEY, [name])
    trainers.stores[1].put_rows(KEY, [(name, x[:-4])])
    with golden.raises(ProtocolError):
        Receiver(trainers).fetch(source, timeout_s=240)


def test_a_trainer_that_is_left_out_is_named():
    trainers, source = published()
    less = WeightSource(version=4, parts=source.parts[:1])
    with golden.raises(ProtocolError):
        Receiver(trainers).fetch(less, timeout_s=240)


def test_a_part_of_another_version_is_named():
    trainers, first = published()
    second, _ = trainers.publish(5)
    mixed = WeightSource(version=5, parts=(second.parts[0], first.parts[1]))
    with golden.raises(ProtocolError):
        Receiver(trainers).fetch(mixed, timeout_s=240)


def test_a_list_that_is_garbage_is_refused():
    trainers, source = published()
    trainers.stores[0].put_rows(KEY, [(source.parts[0].name, torch.zeros(9, dtype=torch.uint8))])
    with golden.raises(ProtocolError):
        Receiver(trainers).fetch(source, timeout_s=240)


def test_no_parts_and_no_folder_is_an_error():
    trainers, _ = published()
    with golden.raises(ProtocolError):
        Receiver(trainers).fetch(WeightSource(version=4), timeout_s=240)


def test_a_failed_fetch_leaves_the_receiver_usable():
    trainers, source = published(delta=True)
    receiver = Receiver(trainers)
    assert_same(receiver.fetch(source, timeout_s=240), dense(SHAPE.weights()))
    whole = dense(SHAPE.weights(), seed=5)
    trainers.train(whole)
    again, _ = trainers.publish(5)
    row = f"{MODEL}/5/10/0"
    (x,) = trainers.stores[0].rows(KEY, [row])
    x[0] ^= 1
    with pytest.raises(ProtocolError):
        receiver.fetch(again, timeout_s=240)
    x[0] ^= 1
    assert_same(receiver.fetch(again, timeout_s=240), whole)


def test_a_deadline_that_has_passed_is_told():
    trainers, source = published()
    receiver = Receiver(trainers)

    def nothing(endpoints):
        class Silent:
            def stream(self, sources, *, timeout_s, in_flight, silence_s, sink_for):
                raise WaitTimeout(
                    f"{self.names[0]} did not send", where=endpoints[0], fix="see its log"
                )

            def close(self):
                pass

        return Silent()

    receiver._make_client = nothing
    with golden.raises(WaitTimeout):
        receiver.fetch(source, timeout_s=0.0)


# ---- only what changed --------------------------------------------------------------------------------


def nudge(whole, count, seed):
    """The same weights but for ``count`` numbers of one of them."""
    name = "model.layers.1.mlp.up_proj.weight"
    found = {n: x.clone() for n, x in whole.items()}
    where = torch.randperm(found[name].numel(), generator=torch.Generator().manual_seed(seed))
    found[name].view(-1)[where[:count]] += 1.0
    return found


@pytest.mark.parametrize(("kind", "topo"), [("fsdp", "d2"), ("megatron", "t2p2")])
def test_delta_moves_only_what_changed_and_gives_the_same(kind, topo):
    whole = dense(SHAPE.weights(), dtype=torch.bfloat16)
    layout = layout_of(kind, topo)
    trainers = Trainers(layout, whole, held="bfloat16", delta=True, bucket_bytes=512)
    receiver, late = Receiver(trainers), Receiver(trainers)
    all_of_it = 2 * sum(x.numel() for x in whole.values())
    for version in range(6):
        whole = nudge(whole, 7, version) if version else whole
        trainers.train(whole)
        source, said = trainers.publish(version)
        before = receiver.num_bytes
        assert_same(receiver.fetch(source, timeout_s=240), whole)
        if version:
            assert sum(one.new_bytes for one in said) <= 7 * 512
            data = sum(
                trainers.stores[w - 10].rows(KEY, [row])[0].numel()
                for row in receiver.rows
                if row.count("/") == 3
                for w in [int(row.split("/")[2])]
            )
            assert data <= 7 * (4 + 8)  # four bytes a number, and four a bucket; fillers of gaps
            assert receiver.num_bytes - before >= data
        else:
            assert receiver.num_bytes >= all_of_it
            receiver.rows.clear()
    assert_same(late.fetch(source, timeout_s=240), whole)  # came later: no patch fits, it gets all


def test_delta_with_a_version_left_out_takes_the_whole_bucket():
    whole = dense(SHAPE.weights())
    trainers = Trainers(layout_of("fsdp", "d2"), whole, delta=True, bucket_bytes=SMALL)
    receiver = Receiver(trainers)
    receiver.fetch(trainers.publish(0)[0], timeout_s=240)
    for version in (1, 2, 3):
        whole = nudge(whole, 3, version)
        trainers.train(whole)
        source, _ = trainers.publish(version)
    assert_same(receiver.fetch(source, timeout_s=240), whole)


def test_nothing_changed_moves_nothing_but_the_list():
    trainers = Trainers(
        layout_of("fsdp", "d2"), dense(SHAPE.weights()), delta=True, bucket_bytes=SMALL
    )
    receiver = Receiver(trainers)
    first = receiver.fetch(trainers.publish(0)[0], timeout_s=240)
    assert receiver.rows
    again = receiver.fetch(trainers.publish(1)[0], timeout_s=240)
    assert receiver.rows == [f"{MODEL}/1/11", f"{MODEL}/1/10"]
    assert all(again[name] is first[name] for name in first)


def test_what_was_returned_is_not_written_to_by_the_next_fetch():
    whole = dense(SHAPE.weights())
    trainers = Trainers(layout_of("fsdp", "d2"), whole, delta=True, bucket_bytes=SMALL)
    receiver = Receiver(trainers)
    first = receiver.fetch(trainers.publish(0)[0], timeout_s=240)
    for version in (1, 2):
        trainers.train(nudge(whole, 9, version))
        receiver.fetch(trainers.publish(version)[0], timeout_s=240)
    assert_same(first, whole)


def test_weights_that_somebody_wrote_to_are_fetched_anew():
    whole = dense(SHAPE.weights())
    trainers = Trainers(layout_of("fsdp", "d2"), whole, delta=True, bucket_bytes=SMALL)
    receiver = Receiver(trainers)
    found = receiver.fetch(trainers.publish(0)[0], timeout_s=240)
    found["model.norm.weight"][3] = 7.0  # an engine that does what it must not
    changed = nudge(whole, 2, 1)
    trainers.train(changed)
    assert_same(receiver.fetch(trainers.publish(1)[0], timeout_s=240), changed)


@pytest.mark.parametrize("check_held", [True, False])
def test_a_trainer_that_began_anew_is_not_trusted_with_old_numbers(check_held):
    first = Trainers(layout_of("fsdp", "d2"), dense(SHAPE.weights()), delta=True)
    receiver = Receiver(first, check_held=check_held)
    receiver.fetch(first.publish(3)[0], timeout_s=240)
    other = dense(SHAPE.weights(), seed=8)
    second = Trainers(layout_of("fsdp", "d2"), other, delta=True)
    first.stores[:] = second.stores  # the same endpoints
    assert_same(receiver.fetch(second.publish(3)[0], timeout_s=240), other)


# ---- adapters --------------------------------------------------------------------------------------------

RANK, ALPHA = 2, 5.0
TARGETS = ("q_proj", "down_proj")


def adapters_of(weights):
    """By the names that engines give them."""
    found = []
    for w in weights:
        layer = w.name.removesuffix(".weight")
        if layer.endswith(TARGETS) and w.name.endswith(".weight"):
            found.append(Weight(f"base_model.model.{layer}.lora_A.weight", (RANK, w.shape[1])))
            found.append(Weight(f"base_model.model.{layer}.lora_B.weight", (w.shape[0], RANK)))
    return tuple(found)


def with_adapters_layout(data):
    """Base and adapters by rows over the data axis."""
    weights = (*SHAPE.weights(), *adapters_of(SHAPE.weights()))
    cut = [{} for _ in range(data)]
    for w in weights:
        rows = -(-w.shape[0] // data)
        for rank in range(data):
            start, stop = min(rank * rows, w.shape[0]), min((rank + 1) * rows, w.shape[0])
            if start < stop:
                box = Box.whole(w.shape).with_range(0, start, stop)
                cut[rank][w.name] = (box,)
    return weights, tuple(cut)


@pytest.mark.parametrize("held", ["float32", "bfloat16"])
def test_many_rounds_of_adapters_equal_one_full_sync(held):
    weights, layout = with_adapters_layout(2)
    trained = [w.name for w in adapters_of(SHAPE.weights())]
    base = dense(SHAPE.weights(), dtype=getattr(torch, held))
    whole = {**base, **dense(adapters_of(SHAPE.weights()))}
    scale = ALPHA / RANK
    trainers = Trainers(layout, whole, held=held, trained=trained, scale=scale, bucket_bytes=SMALL)
    receiver = Receiver(trainers)
    sizes = {w.name: w.numel for w in weights}
    for version in range(12):
        whole = {**base, **dense(adapters_of(SHAPE.weights()), seed=100 + version)}
        trainers.train(whole)
        source, said = trainers.publish(version)
        found = receiver.fetch(source, timeout_s=240)
        # By hand: once from the base, in float32, rounded once.
        for name, x in base.items():
            layer = f"base_model.model.{name.removesuffix('.weight')}"
            if f"{layer}.lora_A.weight" in whole:
                delta = whole[f"{layer}.lora_B.weight"] @ whole[f"{layer}.lora_A.weight"]
                x = (x.float() + delta * scale).to(x.dtype)
            assert torch.equal(found[name], x), (version, name)
        assert sorted(found) == sorted(base)
        if version:
            assert sum(one.new_bytes for one in said) == 4 * sum(sizes[n] for n in trained)
    newcomer = Receiver(trainers)  # gets the base, too
    assert_same(newcomer.fetch(source, timeout_s=240), found)


def test_adapters_are_merged_as_the_trainer_merges_them():
    """The trainer's own ``merged_weights``, on a real module with adapters."""
    from realsys.api.options import LoRAOptions
    from realsys.backends.hf.lora import add_adapters, exchange_name, merged_weights

    module = torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict({"up_proj": torch.nn.Linear(6, 4)})})
    options = LoRAOptions(rank=3, alpha=7.0, target_modules=("up_proj",))
    add_adapters(module, options, seed=1)
    with torch.no_grad():
        for name, x in module.named_parameters():
            if "lora_B" in name:
                x.normal_(generator=torch.Generator().manual_seed(3))
    own = dict(module.named_parameters())
    outside = {exchange_name(name): x.detach() for name, x in own.items()}
    assert set(chain(*adapted(outside).values())) == {n for n in outside if ".lora_" in n}
    assert_same(merged(outside, 7.0 / 3), dict(merged_weights(own, options)))


# ---- folders, threads, memory ------------------------------------------------------------------------


def test_a_folder_gives_what_was_saved(tmp_path):
    whole = dense(SHAPE.weights(), dtype=torch.bfloat16)
    save_file(whole, tmp_path / "model.safetensors", metadata={"format": "pt"})
    trainers, _ = published()
    receiver = Receiver(trainers)
    found = receiver.fetch(WeightSource(version=2, path=str(tmp_path)), timeout_s=240)
    assert_same(found, whole)


def test_a_folder_that_is_half_written_is_refused(tmp_path):
    save_file(dense(SHAPE.weights()), tmp_path / "model.safetensors")
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    trainers, _ = published()
    with golden.raises(CheckpointError):
        Receiver(trainers).fetch(WeightSource(version=2, path=str(tmp_path)), timeout_s=240)


def test_two_threads_may_ask_one_receiver():
    trainers, source = published(delta=True)
    receiver, found = Receiver(trainers), []
    threads = [
        threading.Thread(target=lambda: found.append(receiver.fetch(source, timeout_s=240)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 3
    for one in found:
        assert_same(one, dense(SHAPE.weights()))


def test_memory_comes_back_when_the_last_view_of_it_is_gone():
    memory = BufferPool()
    x = memory.allocate(MIN_BYTES)
    address, part = x.data_ptr(), x[6:10].view(torch.int16)
    del x
    assert memory.spare_bytes == 0
    assert memory.allocate(MIN_BYTES).data_ptr() != address
    del part
    assert memory.spare_bytes == 2 * MIN_BYTES
    assert address in {memory.allocate(MIN_BYTES).data_ptr() for _ in range(2)}
    memory.clear()
    assert memory.spare_bytes == 0


def test_memory_of_a_forgotten_version_that_is_being_read_is_not_used_again():
    whole = dense([Weight("w", (MIN_BYTES,))])
    layout = ({"w": (Box((0,), (MIN_BYTES,)),)},)
    trainers = Trainers(layout, whole)
    trainers.publish(0)
    (read,) = trainers.stores[0].rows(KEY, [f"{MODEL}/0/10/0"])
    for version in (1, 2, 3, 4):
        trainers.train(dense([Weight("w", (MIN_BYTES,))], seed=version))
        trainers.publish(version)
    assert torch.equal(read.view(torch.float32), whole["w"])
    gone = weakref.ref(read)
    del read
    assert gone() is None


def test_an_engine_whose_views_lack_a_part_is_refused():
    trainers, _ = published()
    trainers.engines[0] = Engine({}, {})
    with golden.raises(InternalError):
        trainers.publish(5)
