"""Lists, checksums and patches: what they promise, and what they refuse."""

from itertools import product
from math import prod

import golden
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from realsys.models.shape import Weight
from realsys.transport.codec import ProtocolError
from realsys.weights.layouts.boxes import Box
from realsys.weights.sync.manifest import (
    Manifest,
    Patch,
    PublishedBucket,
    PublishedPiece,
    WholeWeight,
    decode_manifest,
    encode_manifest,
    manifest_name,
    published_pieces,
    trainer_of,
)
from realsys.weights.sync.parts import FetchMode, check_parts, choose_fetch_mode, overlap
from realsys.weights.sync.patches import apply_patch, make_patch
from realsys.weights.sync.plan_publish import plan_publish, weights_of, wire_dtypes

# ---- checksums ------------------------------------------------------------------------------------


def numbers(num_bytes, seed=0):
    return np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)


@pytest.mark.parametrize("num_bytes", [1, 7, 8, 4095, 4096, 4097, 3 << 20, (1 << 20) + 13])
def test_any_one_byte_changes_the_checksum(num_bytes):
    x = numbers(num_bytes)
    before = xxh3_64_intdigest(x)
    assert xxh3_64_intdigest(x.copy()) == before
    for place in {0, num_bytes // 2, num_bytes - 1}:
        x[place] ^= 128
        assert xxh3_64_intdigest(x) != before, place
        x[place] ^= 128
    assert xxh3_64_intdigest(x) == before


def test_words_that_have_changed_places_change_the_checksum():
    x = np.arange(4 * 512, dtype=np.uint64)
    before = xxh3_64_intdigest(x.view(np.uint8))
    for a, b in ((0, 1), (0, 512), (3, 1027)):  # in a row, in a column, in neither
        x[a], x[b] = x[b], x[a]
        assert xxh3_64_intdigest(x.view(np.uint8)) != before
        x[a], x[b] = x[b], x[a]


def test_length_is_part_of_the_checksum():
    sums = {xxh3_64_intdigest(np.zeros(n, np.uint8)) for n in (0, 1, 8, 4096, 8192)}
    assert len(sums) == 5


# ---- patches ----------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(
    words=st.integers(1, 200_000),
    changed=st.lists(st.integers(0, 10**9), max_size=30),
    seed=st.integers(0, 99),
)
def test_a_patch_makes_the_new_bytes_of_the_old(words, changed, seed):
    old = numbers(2 * words, seed)
    new = old.copy()
    for place in changed:
        new[place % len(new)] ^= 1 + place % 255
    patch = make_patch(old, new, max_bytes=10**6)
    if np.array_equal(old, new):
        assert patch.size == 0
        return
    assert len(patch) <= 4 + 4 * (len(changed) + 1 + words // 0xFFFF)
    found = old.copy()
    apply_patch(patch, found)
    assert np.array_equal(found, new)


def test_a_patch_that_would_be_long_is_not_made():
    old, new = numbers(1000, 1), numbers(1000, 2)
    assert make_patch(old, new, max_bytes=500) is None
    assert make_patch(old, new, max_bytes=4000) is not None


@pytest.mark.parametrize("share", [0.0, 0.004, 0.02, 0.1, 1.0])
def test_of_a_large_bucket_a_sample_says_when_a_patch_is_hopeless(share):
    old = numbers(4 << 20)
    new, words = old.copy(), 2 << 20
    where = np.random.default_rng(1).choice(words, int(share * words), replace=False)
    new.view(np.uint16)[where] ^= 1
    patch = make_patch(old, new, max_bytes=len(old) // 20)
    assert (patch is None) == (4 * len(where) > len(old) // 20)
    if patch is not None:
        found = old.copy()
        if share:
            apply_patch(patch, found)
        assert np.array_equal(found, new)


@pytest.mark.parametrize("damage", ["short", "long", "empty", "beyond"])
def test_a_patch_that_does_not_fit_is_refused(damage):
    old, new = numbers(1000), numbers(1000)
    new[998] ^= 3
    patch = make_patch(old, new, max_bytes=1000)
    patch = {"short": patch[:-2], "long": np.append(patch, patch[:2]), "empty": patch[:0]}.get(
        damage, patch
    )
    with golden.raises(ProtocolError):
        apply_patch(patch, old[:500].copy() if damage == "beyond" else old.copy())


# ---- lists ----------------------------------------------------------------------------------------------

WEIGHTS = (Weight("a", (6, 4)), Weight("b", (5,)), Weight("s", ()))


def lists(cut=3, *, version=2, bucket_bytes=24, **changes):
    """Lists of two workers: rows of ``a`` are cut at ``cut``, the rest is the second one's."""
    layout = (
        {"a": (Box((0, 0), (cut, 4)),)},
        {"a": (Box((cut, 0), (6, 4)),), "b": (Box((0,), (5,)),), "s": (Box((), ()),)},
    )
    giving = plan_publish(layout, [4, 7], dtypes=wire_dtypes(weights_of(layout), dtype="float32"))
    index = {w.name: i for i, w in enumerate(giving.weights)}
    return [
        Manifest(
            model="m",
            version=version,
            origin="x",
            giver=worker,
            givers=(4, 7),
            weights=tuple(WholeWeight(w.name, w.shape, "float32") for w in giving.weights),
            buckets=tuple(
                PublishedBucket(f"r{n}", b.num_bytes, 0, version, published_pieces(b, index))
                for n, b in enumerate(giving.buckets(worker, max_bytes=bucket_bytes))
            ),
            **changes,
        )
        for worker in (4, 7)
    ]


def test_lists_come_back_as_they_were_and_are_whole():
    for bucket_bytes in (4, 24, 1000):
        parts = lists(bucket_bytes=bucket_bytes)
        assert [decode_manifest(encode_manifest(part)) for part in parts] == parts
        check_parts(parts, version=2)
        check_parts(parts[::-1], version=2)


def test_what_is_kept_apart_shares_no_bucket():
    layout = ({w.name: (Box.whole(w.shape),) for w in WEIGHTS},)
    giving = plan_publish(layout, [0], dtypes=wire_dtypes(WEIGHTS, dtype="float32"))
    assert [[p.name for p in b.pieces] for b in giving.buckets(0)] == [["a", "b", "s"]]
    assert [[p.name for p in b.pieces] for b in giving.buckets(0, apart={"b"})] == [
        ["a", "s"],
        ["b"],
    ]


def test_adapters_travel_as_they_are_held():
    weights = (Weight("x.weight", (2, 2)), Weight("base_model.model.x.lora_A.weight", (1, 2)))
    for held, wire, expected in (
        ("bfloat16", "", ["bfloat16", "float32"]),
        ("float32", "bfloat16", ["bfloat16", "float32"]),
        ("float64", "", ["float64", "float64"]),
    ):
        assert list(wire_dtypes(weights, dtype=held, wire=wire).values()) == expected


def test_a_name_says_who_gives():
    assert trainer_of(manifest_name("actor@0", 12, 3)) == "model_worker/3"
    assert trainer_of("something else") == "something else"


def replaced(part, **changes):
    return msgspec.structs.replace(part, **changes)


def first_bucket(part, **changes):
    return replaced(part, buckets=(replaced(part.buckets[0], **changes), *part.buckets[1:]))


def first_piece(part, **changes):
    piece = replaced(part.buckets[0].pieces[0], **changes)
    return first_bucket(part, pieces=(piece, *part.buckets[0].pieces[1:]))


NONSENSE = {
    "weight 9 of 3": lambda p: first_piece(p, weight=9),
    "weight -1 of 3": lambda p: first_piece(p, weight=-1),
    "no part": lambda p: first_piece(p, stop=(7, 4)),
    "has no part": lambda p: first_piece(p, stop=(2,)),
    "no part ": lambda p: first_piece(p, start=(3, 0)),
    "bytes of a begin at 2": lambda p: first_piece(p, offset=2),
    "bytes of a begin at -4": lambda p: first_piece(p, offset=-4),
    "it has 20": lambda p: first_bucket(p, num_bytes=20),
    "pieces have 0 bytes": lambda p: first_bucket(p, pieces=()),
    "changed in version 3 of 2": lambda p: first_bucket(p, changed_in=3),
    "made from version 2": lambda p: first_bucket(p, patch=Patch("r", 2, 8)),
    "worker 4 of": lambda p: replaced(p, givers=(7,)),
    "named twice": lambda p: replaced(p, weights=(p.weights[0], *p.weights)),
    "dtype 'int3'": lambda p: replaced(p, weights=(replaced(p.weights[0], dtype="int3"),)),
    "has shape": lambda p: replaced(p, weights=(WholeWeight("a", (0, 4), "float32"),)),
}


@pytest.mark.parametrize("why", NONSENSE)
def test_a_list_that_makes_no_sense_is_refused(why):
    (part, _) = lists()
    with golden.raises(ProtocolError):
        decode_manifest(encode_manifest(NONSENSE[why](part)))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_bytes_that_were_changed_give_a_list_or_a_protocol_error(data):
    encoded = bytearray(encode_manifest(lists()[1]))
    for _ in range(data.draw(st.integers(1, 4))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = decode_manifest(bytes(encoded))
    except ProtocolError:
        return
    for bucket in found.buckets:  # whatever it says now, it stays within its own bytes
        for piece in bucket.pieces:
            shape = Box(piece.start, piece.stop).shape
            assert 0 <= piece.offset <= bucket.num_bytes - prod(shape)


PARTS = {
    "no part of model_worker/7": lambda a, b: [a],
    "there are none": lambda a, b: [],
    r"parts of model workers \[4, 7, 7\]": lambda a, b: [a, b, b],
    "model_worker/7 gives version 9": lambda a, b: [a, replaced(b, version=9)],
    "differ in model": lambda a, b: [a, replaced(b, model="n")],
    "differ in adapter_scale": lambda a, b: [a, replaced(b, adapter_scale=2.0)],
    "differ in weights": lambda a, b: [a, replaced(b, weights=b.weights[::-1])],
    "8 of the 24 numbers of a are missing": lambda a, b: [lists(1)[0], b],
    "numbers of a come twice": lambda a, b: [a, lists(1)[1]],
    "come twice": lambda a, b: [a, replaced(b, buckets=(*b.buckets, b.buckets[-1]))],
}


@pytest.mark.parametrize("why", PARTS)
def test_parts_that_are_not_whole_are_refused(why):
    with golden.raises(ProtocolError):
        check_parts(PARTS[why](*lists()), version=2)


def test_one_number_given_for_another_is_noticed():
    """As many numbers as there should be, but one twice and one not at all."""
    part = replaced(lists()[0], weights=(WholeWeight("w", (4,), "float32"),), givers=(4,))
    pieces = (PublishedPiece(0, (0,), (2,), 0), PublishedPiece(0, (1,), (3,), 8))
    part = replaced(part, buckets=(PublishedBucket("r", 16, 0, 2, pieces),))
    with golden.raises(ProtocolError):
        check_parts([decode_manifest(encode_manifest(part))], version=2)


boxes_2d = st.builds(
    lambda a, b, h, w: Box((a, b), (a + h, b + w)),
    *(st.integers(0, 6), st.integers(0, 6), st.integers(1, 4), st.integers(1, 4)),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(boxes_2d, max_size=8))
def test_overlap_is_what_counting_cells_says(boxes):
    cells = [
        cell for b in boxes for cell in product(*map(range, b.start, b.stop))
    ]  # one entry a number
    assert overlap(boxes) == (len(set(cells)) < len(cells))


def test_scalars_overlap():
    assert overlap([Box((), ()), Box((), ())])
    assert not overlap([Box((), ())])


@pytest.mark.parametrize(
    ("changed_in", "base", "held", "expected"),
    [
        (5, 4, 4, FetchMode.DELTA),
        (5, 4, 3, FetchMode.FULL),  # it lacks a version in between
        (5, None, 4, FetchMode.FULL),
        (3, 2, 4, FetchMode.REUSE),
        (3, 2, 3, FetchMode.REUSE),
        (3, 2, 2, FetchMode.DELTA),  # changed once since, and not again
        (5, 4, None, FetchMode.FULL),
        (3, 2, 6, FetchMode.FULL),  # what is here is newer than what is asked for
    ],
)
def test_the_cheapest_way(changed_in, base, held, expected):
    patch = Patch("p", base, 8) if base is not None else None
    bucket = PublishedBucket("r", 8, 0, changed_in, (), patch)
    assert choose_fetch_mode(bucket, version=5, held_version=held) is expected
