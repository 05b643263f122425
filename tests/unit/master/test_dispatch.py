"""How a call's batch is cut over data-parallel ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realsys.api.data import SequenceMeta
from realsys.api.dataflow import MFCDef
from realsys.api.model import (
    ModelInterfaceAbstraction,
    ModelInterfaceType,
    ModelName,
    ModelShardID,
    ProcessTopology,
)
from realsys.data.packing import balanced_partition, contiguous
from realsys.master.graph.model_function_call import placement_of, split_over_ranks


def call(kind, **more):
    return MFCDef(
        name="call",
        n_seqs=8,
        interface_type=ModelInterfaceType(kind),
        interface_impl=ModelInterfaceAbstraction("test"),
        model_name=ModelName("actor"),
        input_keys=("x",),
        **more,
    )


def batch(lengths):
    return SequenceMeta(
        ids=tuple(f"i{i}" for i in range(len(lengths))),
        seqlens={"x": tuple((n,) for n in lengths)},
        dtypes={"x": "int64"},
        trailing_shapes={"x": ()},
    )


@pytest.mark.parametrize("kind", list(ModelInterfaceType))
def test_one_rank_gets_the_batch_as_it_is(kind):
    assert split_over_ranks(call(kind), batch([5, 1, 9]), 1) == [[0, 1, 2]]


def test_generation_is_cut_in_runs_whatever_the_prompts_lengths():
    assert split_over_ranks(call("generate"), batch([100, 1, 1, 1, 1]), 2) == [[0, 1], [2, 3, 4]]


def test_inference_is_balanced_by_tokens():
    # Longest first to the lighter rank: 9 | 5, 3, 1 (sums 9 and 9).
    assert split_over_ranks(call("inference"), batch([5, 9, 1, 3]), 2) == [[1], [0, 2, 3]]


def test_training_has_equal_counts_on_every_rank():
    # Rounds of two, the longer to the lighter: 9|5, then 3 to the rank with 5, 1 to the one with 9.
    assert split_over_ranks(call("train_step"), batch([5, 9, 1, 3]), 2) == [[1, 2], [0, 3]]


@pytest.mark.parametrize("kind", ["inference", "train_step"])
def test_what_is_balanced_in_runs_stays_where_it_was_made(kind):
    assert split_over_ranks(call(kind), batch([5, 5, 9, 1]), 2) == [[0, 1], [2, 3]]
    assert split_over_ranks(call(kind), batch([7, 8, 7, 8]), 2) == [[0, 1], [2, 3]]
    assert split_over_ranks(call(kind), batch([100, 102, 101, 101]), 2) == [[0, 1], [2, 3]]
    assert split_over_ranks(call(kind), batch([100, 106, 101, 98]), 2) == [[1, 3], [0, 2]]


@given(
    lengths=st.lists(st.integers(0, 50), min_size=1, max_size=20),
    ranks=st.integers(1, 6),
)
def test_staying_costs_a_hundredth_of_the_mean_at_most(lengths, ranks):
    def heaviest(parts):
        return max(sum(lengths[i] for i in part) for part in parts)

    found = heaviest(split_over_ranks(call("inference"), batch(lengths), ranks))
    best_known = heaviest(balanced_partition(lengths, ranks))
    assert found <= max(best_known, 1.01 * sum(lengths) / ranks)


@given(
    kind=st.sampled_from(list(ModelInterfaceType)),
    lengths=st.lists(st.integers(0, 50), min_size=1, max_size=20),
    ranks=st.integers(1, 6),
)
def test_every_datapoint_goes_to_exactly_one_rank(kind, lengths, ranks):
    parts = split_over_ranks(call(kind), batch(lengths), ranks)
    assert len(parts) == ranks
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    assert all(part == sorted(part) for part in parts)
    if kind in (ModelInterfaceType.TRAIN_STEP, ModelInterfaceType.GENERATE):
        counts = [len(part) for part in parts]
        assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize(
    ("count", "parts", "runs"),
    [(5, 2, [[0, 1], [2, 3, 4]]), (4, 2, [[0, 1], [2, 3]]), (1, 3, [[], [], [0]]), (0, 1, [[]])],
)
def test_runs_differ_by_at_most_one(count, parts, runs):
    assert contiguous(count, parts) == runs


@given(
    st.integers(1, 4),
    st.sampled_from([1, 2, 4]),
    st.lists(st.integers(1, 50), min_size=16, max_size=16),
)
def test_all_ranks_together_see_the_same_minibatches_whatever_their_number(num, ranks, lengths):
    lengths = lengths * num  # as many as ranks and minibatches divide
    parts = split_over_ranks(call("train_step", n_minibatches=num), batch(lengths), ranks)
    for k, wanted in enumerate(contiguous(len(lengths), num)):
        seen = [i for part in parts for i in [part[j] for j in contiguous(len(part), num)[k]]]
        assert sorted(seen) == wanted


def test_a_calls_place_is_that_of_its_own_models_shards():
    two, one = ProcessTopology(tensor=2), ProcessTopology()
    shards = [(ModelShardID(model_name=ModelName("reward"), topo=one), 5)]
    actor = [
        ModelShardID(model_name=ModelName("actor"), topo=two, parallelism_rank=t) for t in range(2)
    ]
    shards += zip(actor, (3, 2), strict=True)
    assert placement_of(call("generate"), tuple(shards)) == (two, {0: 3, 1: 2})
    assert placement_of(call("generate"), tuple(shards[:2])) == (two, {0: 3})
