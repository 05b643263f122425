"""Weight movements as requests: who takes part, and which are not needed."""

import golden

from realsys.api.dataflow import MFCDef, OffloadHook, ParamReallocHook
from realsys.api.model import (
    ModelInterfaceAbstraction,
    ModelInterfaceType,
    ModelName,
    ModelShardID,
    ProcessTopology,
)
from realsys.master.graph.weight_hooks import WeightHooks
from realsys.transport.worker_requests import Offload, Reallocate

TRAINED, COPY, REF = ModelName("actor"), ModelName("actor", 1), ModelName("ref")


def call(name, model, kind="inference", **hooks):
    return MFCDef(
        name=name,
        n_seqs=1,
        interface_type=ModelInterfaceType(kind),
        interface_impl=ModelInterfaceAbstraction("test"),
        model_name=model,
        input_keys=("x",),
        **hooks,
    )


def shards(name, topo, workers):
    return [
        (ModelShardID(model_name=name, topo=topo, parallelism_rank=rank), worker)
        for rank, worker in enumerate(workers)
    ]


GEN = call("actor_gen", COPY, "generate", pre_hooks=(ParamReallocHook(source=TRAINED),))
TRAIN = call("actor_train", TRAINED, "train_step")
HELD = (
    *shards(TRAINED, ProcessTopology(tensor=2), (0, 1)),
    *shards(COPY, ProcessTopology(data=2), (1, 2)),
    *shards(REF, ProcessTopology(), (3,)),
)


def made(movement):
    return {worker: make(order=0) for worker, make in movement.requests.items()}


def test_both_ends_of_a_copy_take_part():
    (movement,) = WeightHooks(HELD).before(GEN, step=4)
    request = Reallocate(order=0, call="actor_gen", step=4, source="actor@0", target="actor@1")
    assert made(movement) == {0: request, 1: request, 2: request}
    golden.check(movement)


def test_weights_are_copied_again_only_when_the_source_was_trained():
    hooks = WeightHooks(HELD)
    assert len(hooks.before(GEN, step=1)) == 1
    assert hooks.before(GEN, step=1) == []
    hooks.after(TRAIN, step=1)
    assert len(hooks.before(GEN, step=2)) == 1
    assert hooks.before(GEN, step=2) == []


def test_an_average_moves_each_time():
    train = call("actor_train", TRAINED, "train_step", post_hooks=(
        ParamReallocHook(target=REF, eta=0.1),
    ))  # fmt: skip
    hooks = WeightHooks(HELD)
    for step in (1, 2, 3):
        (movement,) = hooks.after(train, step=step)
        assert made(movement).keys() == {0, 1, 3}
        assert made(movement)[3].eta == 0.1


def test_a_copy_that_was_written_by_another_hook_is_copied_again():
    hooks = WeightHooks(HELD)
    other = call("mix", COPY, pre_hooks=(ParamReallocHook(source=REF),))
    hooks.before(GEN, step=1)
    assert len(hooks.before(other, step=1)) == 1
    assert len(hooks.before(GEN, step=1)) == 1, "the copy holds the reference's weights now"


def test_offloading_concerns_the_calls_own_model():
    inference = call("ref_inf", REF, post_hooks=(OffloadHook(),))
    (movement,) = WeightHooks(HELD).after(inference, step=2)
    assert made(movement) == {3: Offload(order=0, call="ref_inf", step=2, model="ref@0")}


def test_an_evaluated_copy_is_refreshed_as_its_calls_would():
    hooks = WeightHooks(HELD)
    assert len(hooks.refresh(COPY, (GEN, TRAIN), step=0)) == 1
    assert hooks.refresh(COPY, (GEN, TRAIN), step=0) == []
    assert hooks.refresh(TRAINED, (GEN, TRAIN), step=0) == []
