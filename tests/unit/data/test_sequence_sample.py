import time

import golden
import pytest
import torch

from realsys.api.data import MicroBatchSpec, SequenceMeta
from realsys.api.errors import DataError
from realsys.data.sequence_sample import SequenceSample

IDS = ("a", "b", "c")
PIECES = ((2, 1), (3,), (1, 1))  # answers of each prompt


def sample():
    """Prompt a has answers of 2 and 1 tokens, b one of 3, c two of 1: eight tokens in all."""
    ones = tuple((1,) * len(pieces) for pieces in PIECES)
    return SequenceSample.from_tensors(
        IDS,
        {"packed_input_ids": PIECES, "rewards": ones, "hidden": PIECES},
        {
            "packed_input_ids": torch.arange(8) + 2**53 + 1,
            "rewards": torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5]),
            "hidden": torch.arange(16, dtype=torch.bfloat16).reshape(8, 2),
        },
        {"task": ["math", "code", "math"]},
    )


def assert_same(x, y):
    assert x.meta == y.meta
    assert x.data.keys() == y.data.keys()
    for key in x.data:
        assert x.data[key].dtype == y.data[key].dtype
        assert torch.equal(x.data[key], y.data[key]), key


def test_description_is_read_off_the_tensors():
    meta = sample().meta
    assert meta.dtypes == {"packed_input_ids": "int64", "rewards": "float32", "hidden": "bfloat16"}
    assert meta.trailing_shapes == {"packed_input_ids": (), "rewards": (), "hidden": (2,)}
    assert meta.metadata == {"task": ("math", "code", "math")}


def test_taking_ids_takes_their_rows_and_pieces():
    taken = sample().take([2, 0])
    assert taken.ids == ("c", "a")
    # rows of a: 0 1 2, of b: 3 4 5, of c: 6 7
    assert (taken.data["packed_input_ids"] - 2**53 - 1).tolist() == [6, 7, 0, 1, 2]
    assert taken.data["hidden"].tolist() == [[12, 13], [14, 15], [0, 1], [2, 3], [4, 5]]
    assert torch.equal(taken.data["rewards"], torch.tensor([0.4, 0.5, 0.1, 0.2]))
    assert taken.meta.seqlens["packed_input_ids"] == ((1, 1), (2, 1))
    assert taken.meta.metadata == {"task": ("math", "math")}


@pytest.mark.parametrize(
    "order", [[0, 2, 1, 3], [1, 3, 2, 4], [0, 3], [0, 3, 2], [3, 2, 1, 0], [4, 0, 1]]
)
def test_what_only_begins_and_ends_like_neighbours_is_gathered_id_by_id(order):
    lengths = [(2,), (1,), (3,), (0,), (1, 2)]
    rows = [[10, 11], [20], [30, 31, 32], [], [50, 51, 52]]
    x = torch.tensor([n for of_id in rows for n in of_id])
    taken = SequenceSample.from_tensors(list("abcde"), {"x": lengths}, {"x": x}).take(order)
    assert taken.ids == tuple("abcde"[i] for i in order)
    assert taken.data["x"].tolist() == [n for i in order for n in rows[i]]


def test_reorder_goes_by_name():
    assert_same(sample().reorder(["c", "a"]), sample().take([2, 0]))
    with golden.raises(DataError):
        sample().reorder(["z"])


def test_neighbouring_ids_share_memory_with_the_batch():
    whole = sample()
    part = whole.take([1, 2])
    start = whole.data["hidden"][3:]
    assert part.data["hidden"].data_ptr() == start.data_ptr()


@pytest.mark.parametrize("parts", [[2, 1], [0, 3], [[0, 1], [2]], [[1], [0, 2]], [[2, 1, 0]]])
def test_split_parts_gather_back(parts):
    pieces = sample().split(parts)
    order = [i for piece in pieces for i in piece.ids]
    assert len(pieces) == len(parts)
    assert_same(SequenceSample.gather(pieces), sample().reorder(order))
    assert_same(SequenceSample.gather(pieces).reorder(IDS), sample())


def test_unpacking_gives_one_sample_an_id():
    singles = sample().unpack()
    assert [s.ids for s in singles] == [("a",), ("b",), ("c",)]
    assert_same(SequenceSample.gather(singles), sample())


@pytest.mark.parametrize("parts", [[2, 2], [1], [[0], [0, 1, 2]], [[0, 1, 3]], [[0, 1]]])
def test_a_split_must_hold_every_id_once(parts):
    with golden.raises(DataError):
        sample().split(parts)


def test_an_index_outside_the_batch_is_refused():
    for index in (3, -1):
        with golden.raises(DataError):
            sample().take([index])


def test_an_empty_part_keeps_keys_and_dtypes():
    empty = sample().take([])
    assert empty.batch_size == 0
    assert {k: tuple(x.shape) for k, x in empty.data.items()} == {
        "packed_input_ids": (0,),
        "rewards": (0,),
        "hidden": (0, 2),
    }
    assert_same(SequenceSample.gather([empty, sample()]), sample())


@pytest.mark.parametrize(
    "x",
    [
        torch.tensor([2**53 + 1, -(2**62) - 1, 5]),
        torch.tensor([0.1, 1 / 3, 1e300], dtype=torch.float64),
        torch.tensor([0.1, 3.0, 1e38], dtype=torch.bfloat16),
        torch.tensor([True, False, True]),
        torch.tensor([2**31 - 1, -(2**31), 7], dtype=torch.int32),
        torch.tensor([255, 0, 7], dtype=torch.uint8),
    ],
    ids=lambda x: str(x.dtype),
)
def test_every_dtype_survives_bit_for_bit(x):
    whole = SequenceSample.from_tensors(IDS, {"x": ((1,), (1,), (1,))}, {"x": x})
    back = SequenceSample.gather(whole.take([2, 0, 1]).unpack()).reorder(IDS)
    assert back.data["x"].dtype == x.dtype
    assert torch.equal(back.data["x"], x)


def test_keys_are_selected_renamed_and_added():
    rewards = sample().select(["rewards"])
    assert rewards.keys == {"rewards"}
    scores = rewards.remap({"rewards": "scores"})
    assert scores.keys == {"scores"}
    merged = sample().select(["hidden"]).update(scores)
    assert merged.keys == {"hidden", "scores"}
    assert torch.equal(merged.data["scores"], sample().data["rewards"])
    with golden.raises(DataError):
        sample().select(["reward"])


def test_updating_from_another_order_is_refused():
    with golden.raises(DataError):
        sample().update(sample().take([1, 0, 2]))


def test_pieces_and_their_bounds_are_flat():
    assert sample().piece_lengths("packed_input_ids") == [2, 1, 3, 1, 1]
    bounds = sample().cu_seqlens("packed_input_ids")
    assert bounds.dtype == torch.int32
    assert bounds.tolist() == [0, 2, 3, 6, 7, 8]
    with golden.raises(DataError):
        sample().cu_seqlens("x")


def test_microbatches_hold_whole_ids_under_the_limit():
    # tokens a id: 3, 3, 2; a limit of 5 fits 3 + 2
    pieces = sample().microbatches(MicroBatchSpec(max_tokens_per_mb=5))
    assert [[run.id_index for run in runs] for runs, _ in pieces] == [[0, 2], [1]]
    assert_same(pieces[0][1], sample().take([0, 2]))
    assert_same(pieces[1][1], sample().take([1]))
    assert len(sample().microbatches(MicroBatchSpec(n_mbs=3))) == 3


def test_of_a_split_id_each_run_has_its_rows_also_where_another_id_is_copied_whole():
    """Key x: of a it is cut with the sequences, of b it is one number for both of them."""
    whole = SequenceSample.from_tensors(
        ["a", "b"],
        {"tokens": [(2, 1, 3, 1), (2, 2)], "x": [(2, 1, 3, 1), (1,)]},
        {"tokens": torch.arange(11), "x": torch.tensor([[10, 11, 12, 13, 14, 15, 16, 20]]).T},
    )
    pieces = whole.microbatches(MicroBatchSpec(max_tokens_per_mb=3))
    rows = {
        (run.id_index, run.start): tuple(x.flatten().tolist() for x in mb.take([i]).data.values())
        for runs, mb in pieces
        for i, run in enumerate(runs)
    }
    assert rows == {
        (0, 0): ([0, 1, 2], [10, 11, 12]),
        (0, 2): ([3, 4, 5], [13, 14, 15]),
        (0, 3): ([6], [16]),
        (1, 0): ([7, 8], [20]),
        (1, 1): ([9, 10], [20]),
    }


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(2),
        torch.zeros(()),
        torch.zeros(3, dtype=torch.float64),
        torch.zeros(3, 1),
    ],
)
def test_a_tensor_unlike_its_description_is_named(x):
    meta = SequenceMeta(
        ids=("a",), seqlens={"x": ((3,),)}, dtypes={"x": "float32"}, trailing_shapes={"x": ()}
    )
    with golden.raises(DataError):
        SequenceSample.from_meta(meta, {"x": x})


def test_from_meta_picks_the_described_keys():
    whole = sample()
    assert_same(
        SequenceSample.from_meta(whole.meta.select(["rewards"]), whole.data),
        whole.select(["rewards"]),
    )
    with golden.raises(DataError):
        SequenceSample.from_meta(whole.meta, whole.select(["rewards"]).data)
    with golden.raises(DataError):
        SequenceSample(whole.meta.select(["rewards"]), whole.data)


def test_cutting_64_ids_with_10_keys_takes_milliseconds():
    lengths = [(100 + i,) for i in range(64)]
    tokens = sum(n for (n,) in lengths)
    keys = [f"key{k}" for k in range(10)]
    whole = SequenceSample.from_tensors(
        [str(i) for i in range(64)],
        dict.fromkeys(keys, lengths),
        {k: torch.zeros(tokens) for k in keys},
    )
    seconds = []
    for _ in range(5):
        start = time.thread_time()  # others may have the machine meanwhile
        whole.unpack()
        seconds.append(time.thread_time() - start)
    assert min(seconds) < 0.05  # about 5 ms on an idle core


@pytest.mark.parametrize("lengths", [[None], [[None]], [["2"]], [[1.5]], None])
def test_lengths_that_are_no_numbers_are_refused_with_their_key(lengths):
    with golden.raises(DataError):
        SequenceSample.from_tensors(["a"], {"x": lengths}, {"x": torch.zeros(2)})


def test_negative_lengths_are_refused_with_their_id():
    """3 and -1 add up to the two rows that there are."""
    with golden.raises(DataError):
        SequenceSample.from_tensors(["a", "b"], {"x": [[0], [3, -1]]}, {"x": torch.zeros(2)})


@pytest.mark.parametrize("x", [None, [1.0, 2.0], 2.0])
def test_what_is_no_tensor_is_refused(x):
    with golden.raises(DataError):
        SequenceSample.from_tensors(["a"], {"x": [[2]]}, {"x": x})
    meta = SequenceSample.from_tensors(["a"], {"x": [[2]]}, {"x": torch.zeros(2)}).meta
    with golden.raises(DataError):
        SequenceSample.from_meta(meta, {"x": x})
