"""Plans against dense weights, bytes against what must cross, and rounds against every order of events.

Plans are carried out here in one process: each rank's holding is an array, each piece is read from the
sender's and written to the receiver's.
"""

import os
from collections import Counter
from dataclasses import replace
from itertools import pairwise, product
from math import lcm

import golden
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realsys.api.errors import ConfigError, InternalError
from realsys.api.model import ProcessTopology
from realsys.models.shape import ModelShape, Weight
from realsys.weights.layouts import regions
from realsys.weights.layouts.boxes import Box
from realsys.weights.layouts.holdings import fsdp_layout, megatron_layout, whole_layout
from realsys.weights.layouts.regions import regions_of, subtract
from realsys.weights.realloc.buckets import (
    WeightPiece,
    bucket_share,
    cut_into_buckets,
    first_part,
    rounds,
)
from realsys.weights.realloc.realloc_plan import plan_realloc
from realsys.weights.realloc.senders import RegionDemand, assign_senders, busiest_bound

TOPOLOGIES = [
    ProcessTopology(data=d, tensor=t, pipeline=p)
    for d, t, p in product(range(1, 9), repeat=3)
    if d * t * p <= 8
]
EVERY = 1 if os.environ.get("REALSYS_TESTS_ALL_LAYOUTS") else 3
BASE = ModelShape(
    family="llama",
    hidden_size=3,
    intermediate_size=1,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=1,
    vocab_size=1,
)


def shape_for(*topos, **changes):
    """A tiny shape that all these layouts can cut."""
    tensor, layers = lcm(*(t.tensor for t in topos)), lcm(*(t.pipeline for t in topos))
    return replace(
        BASE,
        intermediate_size=tensor,
        num_heads=2 * tensor,
        num_kv_heads=tensor,
        num_layers=layers,
        vocab_size=tensor,
        **changes,
    )


def layout_of(kind, shape, topo):
    if kind == "megatron":
        return megatron_layout(shape, topo)
    if kind == "fsdp":
        return fsdp_layout(
            shape.weights(), replace(topo, data=topo.data * topo.pipeline, pipeline=1)
        )
    return whole_layout(shape.weights(), ProcessTopology(data=topo.world_size))


class Counts:
    """How often each number of the model was touched."""

    def __init__(self, weights):
        self.all = np.zeros(sum(w.numel for w in weights), int)
        self._by_name, end = {}, 0
        for w in weights:
            self._by_name[w.name] = self.all[end : end + w.numel].reshape(w.shape)
            end += w.numel

    def add(self, name, box):
        self._by_name[name][index(box)] += 1

    def clear(self, name, box):
        self._by_name[name][index(box)] = 0

    @classmethod
    def of(cls, weights, holding):
        """1 for each number that a rank holds, however often."""
        found = cls(weights)
        for name, boxes in holding.items():
            for box in boxes:
                found._by_name[name][index(box)] = 1
        return found


def index(box):
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))


def carry_out(plan, weights, source, source_workers, target, target_workers):
    """Fails where a piece is not in a view, or the target's numbers are not written once each."""
    views = dict(zip(source_workers, source, strict=True))
    written = {w: Counts(weights) for w in target_workers}
    moves = [(s, r, piece) for (s, r), pieces in plan.streams.items() for piece in pieces]
    moves += [(w, w, piece) for w, pieces in plan.copies.items() for piece in pieces]
    for sender, receiver, (name, box) in moves:
        assert any(held.intersection(box) == box for held in views[sender].get(name, ())), (
            "not held"
        )
        written[receiver].add(name, box)
    for worker, holding in zip(target_workers, target, strict=True):
        needed = Counts.of(weights, holding)
        assert np.array_equal(written[worker].all, needed.all), "each number once, no others"


def must_cross(weights, source, source_workers, target, target_workers, itemsize):
    """Bytes that target workers need and do not hold in the source copy, counted number by number."""
    total, own = 0, dict(zip(source_workers, source, strict=True))
    for worker, holding in zip(target_workers, target, strict=True):
        needed = Counts.of(weights, holding)
        for name, boxes in own.get(worker, {}).items():
            for box in boxes:
                needed.clear(name, box)
        total += int(needed.all.sum()) * itemsize
    return total


def check(shape, source, source_workers, target, target_workers, **options):
    weights = shape.weights()
    sides = (source, source_workers, target, target_workers)
    plan = plan_realloc(weights, *sides, dtype="bfloat16", **options)
    carry_out(plan, weights, *sides)
    sent = {w: sum(map(plan.num_bytes, plan.sends(w).values())) for w in source_workers}
    assert {w: n for w, n in sent.items() if n} == plan.bytes_sent
    assert sum(sent.values()) == plan.lower_bound == must_cross(weights, *sides, itemsize=2)
    assert max(sent.values()) >= plan.busiest_bound
    return plan


@pytest.mark.thorough
@pytest.mark.parametrize("source", TOPOLOGIES, ids=str)
def test_pairs_of_layouts_up_to_eight_ranks(source):
    """A third of all pairs, in which each layout has a third of the others on either side, and all of two
    ranks at most."""
    index = TOPOLOGIES.index(source)
    for number, target in enumerate(TOPOLOGIES):
        few = max(source.world_size, target.world_size) <= 2
        if (number + index + index // 8 + 2) % EVERY and not few:
            continue
        shape = shape_for(source, target, tied_embeddings=bool(number % 2))
        first = number // EVERY % (source.world_size + 1)  # from all workers in common to none
        check(
            shape,
            megatron_layout(shape, source),
            range(source.world_size),
            megatron_layout(shape, target),
            range(first, first + target.world_size),
        )


kinds = st.sampled_from(["megatron", "fsdp", "whole"])
topologies = st.sampled_from(TOPOLOGIES)


@pytest.mark.thorough
@settings(max_examples=60, deadline=None)
@given(kinds, topologies, kinds, topologies, st.data())
def test_any_backends_on_any_workers(source_kind, source, target_kind, target, data):
    shape = shape_for(source, target, qkv_bias=True, critic=data.draw(st.booleans()))
    workers = st.permutations(range(10))
    check(
        shape,
        layout_of(source_kind, shape, source),
        data.draw(workers)[: source.world_size],
        layout_of(target_kind, shape, target),
        data.draw(workers)[: target.world_size],
        min_cut_bytes=data.draw(st.sampled_from([1, 64, 1 << 16])),
    )


@st.composite
def scattered_layouts(draw):
    """Holdings of one matrix that no backend would make: overlapping boxes, several a rank."""

    def rank():
        cuts = sorted(draw(st.lists(st.integers(0, 6), min_size=2, max_size=4, unique=True)))
        columns = sorted(draw(st.lists(st.integers(0, 5), min_size=2, max_size=2, unique=True)))
        return {"w": tuple(Box((a, columns[0]), (b, columns[1])) for a, b in pairwise(cuts))}

    return tuple(rank() for _ in range(draw(st.integers(1, 4))))


@settings(max_examples=75, deadline=None)
@given(scattered_layouts(), scattered_layouts(), st.booleans())
def test_overlapping_holdings_too(source, target, has_whole):
    weights = [Weight("w", (6, 5))]
    if has_whole:
        source = (*source, {"w": (Box.whole((6, 5)),)})
    sides = (source, range(len(source)), target, range(2, 2 + len(target)))
    if not covers(source, target):
        with pytest.raises(ConfigError, match="does not hold all of 1 weights"):
            plan_realloc(weights, *sides)
        return
    plan = plan_realloc(weights, *sides, dtype="float32", min_cut_bytes=1)
    carry_out(plan, weights, *sides)
    assert plan.lower_bound == must_cross(weights, *sides, itemsize=4)


def covers(source, target):
    held, needed = np.zeros((6, 5), bool), np.zeros((6, 5), bool)
    for mask, layout in ((held, source), (needed, target)):
        for box in (box for holding in layout for box in holding["w"]):
            mask[index(box)] = True
    return not (needed & ~held).any()


def test_one_layout_on_its_own_workers_sends_nothing():
    topo = ProcessTopology(data=2, tensor=2, pipeline=2)
    shape = shape_for(topo)
    plan = check(
        shape, megatron_layout(shape, topo), range(8), megatron_layout(shape, topo), range(8)
    )
    assert (plan.streams, plan.lower_bound) == ({}, 0)


def test_replicas_share_the_sending_evenly():
    """d4 whole copies to two other workers: each of the four sends a quarter of both."""
    weights = [Weight("a", (64, 4)), Weight("b", (64, 4))]  # 2 kB in all, twice
    whole = {w.name: (Box.whole(w.shape),) for w in weights}
    plan = plan_realloc(weights, (whole,) * 4, range(4), (whole,) * 2, (7, 5), min_cut_bytes=1)
    assert plan.bytes_sent == dict.fromkeys(range(4), 1024)
    # In runs: each receiver hears from two senders, not from all four.
    assert sorted(plan.streams) == [(0, 5), (1, 5), (2, 7), (3, 7)]
    assert plan.busiest_bound == 1024


def test_a_region_that_one_worker_holds_comes_first_and_others_make_up_for_it():
    """0 alone has a; 0 and 1 have b, of the same size: 1 sends all of b."""
    weights = [Weight("a", (8,)), Weight("b", (8,))]
    a, b = {"a": (Box((0,), (8,)),)}, {"b": (Box((0,), (8,)),)}
    plan = plan_realloc(weights, ({**a, **b}, b), (0, 1), ({**a, **b},), (2,), min_cut_bytes=1)
    assert plan.streams == {
        (0, 2): (WeightPiece("a", a["a"][0]),),
        (1, 2): (WeightPiece("b", b["b"][0]),),
    }


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_nested_holders_are_dealt_as_well_as_can_be(data):
    """The busiest of nested or disjoint holders is at most a row over the bound."""
    sets = [(0,), (1,), (2,), (3,), (0, 1), (2, 3), (0, 1, 2, 3)]
    chosen = data.draw(st.lists(st.sampled_from(sets), min_size=1, unique=True))
    sizes = st.lists(st.integers(1, 50), min_size=1, max_size=6)
    groups = {
        holders: [
            RegionDemand(9 + i % 3, i, Box((0,), (n,)), n) for i, n in enumerate(data.draw(sizes))
        ]
        for holders in chosen
    }
    load = Counter()
    for sender, demand in assign_senders(groups, min_cut_bytes=1):
        assert demand.num_bytes == demand.box.numel
        load[sender] += demand.num_bytes
    totals = {h: sum(d.num_bytes for d in found) for h, found in groups.items()}
    assert sum(load.values()) == sum(totals.values())
    assert busiest_bound(totals) <= max(load.values()) <= busiest_bound(totals) + 1


def test_only_named_weights_move():
    shape = shape_for(ProcessTopology(pipeline=2))
    layouts = (megatron_layout(shape, ProcessTopology(pipeline=2)), (0, 1))
    whole = whole_layout(shape.weights(), ProcessTopology())
    plan = plan_realloc(shape.weights(), *layouts, whole, (2,), names={"model.norm.weight"})
    assert plan.streams == {(1, 2): (WeightPiece("model.norm.weight", Box((0,), (3,))),)}
    assert plan.lower_bound == 12
    for unknown in (5, 6):
        names = {f"model.nrom{i}" for i in range(unknown)}
        with golden.raises(ConfigError):
            plan_realloc(shape.weights(), *layouts, whole, (2,), names=names)


def test_weights_that_only_the_layouts_name_move_after_the_others():
    adapter = {"w": (Box((0,), (2,)),), "a.lora_A": (Box((0,), (4,)),)}
    plan = plan_realloc([Weight("w", (2,))], (adapter,), (0,), (adapter,), (1,))
    assert [piece.name for piece in plan.streams[0, 1]] == ["w", "a.lora_A"]


def test_dtypes_by_name_count_their_own_bytes():
    holding = {"w": (Box((0,), (2,)),), "a": (Box((0,), (4,)),)}
    weights = [Weight("w", (2,)), Weight("a", (4,))]
    plan = plan_realloc(
        weights, (holding,), (0,), (holding,), (1,), dtype={"w": "bfloat16", "a": "float32"}
    )
    assert plan.bytes_sent == {0: 20}
    with golden.raises(ConfigError):
        plan_realloc(weights, (holding,), (0,), (holding,), (1,), dtype={"w": "bfloat16"})


def test_what_the_source_lacks_is_named():
    topo = ProcessTopology()
    actor, critic = shape_for(topo), shape_for(topo, critic=True)
    sides = megatron_layout(actor, topo), (0,), megatron_layout(critic, topo), (1,)
    with golden.raises(ConfigError):
        plan_realloc(critic.weights(), *sides)
    half = ({"w": (Box((0, 0), (2, 3)),)},)
    whole = ({"w": (Box((0, 0), (4, 3)),)},)
    with golden.raises(ConfigError):
        plan_realloc([Weight("w", (4, 3))], half, (0,), whole, (1,))


def test_a_rank_without_a_worker_of_its_own_is_our_mistake():
    holding = ({"w": (Box((0,), (2,)),)},) * 2
    with golden.raises(InternalError):
        plan_realloc([Weight("w", (2,))], holding, (0, 1), holding, (1, 1))


def test_no_holder_and_disjoint_cells_of_a_box():
    left, right = Box((0, 0), (2, 2)), Box((0, 2), (2, 4))
    cells = regions_of([(0, [left]), (1, [left])], [(5, [Box((1, 0), (2, 4))])])
    assert sorted(cells) == [
        (Box((1, 0), (2, 2)), (0, 1), (5,)),
        (Box((1, 2), (2, 4)), (), (5,)),
    ]
    assert subtract(Box((0, 0), (2, 4)), right) == [left]


def test_boxes_that_do_not_overlap_are_cut_the_quick_way(monkeypatch):
    monkeypatch.setattr(regions, "_cut_by_any", None)
    left, right = Box((0,), (2,)), Box((2,), (4,))
    found = regions_of([(0, [left]), (1, [right])], [(5, [Box((1,), (4,))])])
    assert found == [(Box((1,), (2,)), (0,), (5,)), (right, (1,), (5,))]


boxes = st.tuples(*[st.tuples(st.integers(0, 4), st.integers(1, 5))] * 3).map(
    lambda ranges: Box(tuple(a for a, _ in ranges), tuple(a + n for a, n in ranges))
)


@given(boxes, st.integers(1, 130))
def test_first_part_and_rest_are_the_box_in_its_order(box, max_numel):
    order = np.arange(9**3).reshape(9, 9, 9)
    head, rest = first_part(box, max_numel)
    assert 0 < head.numel <= max_numel
    parts = [order[index(part)].ravel() for part in (head, *rest)]
    assert np.array_equal(np.concatenate(parts), order[index(box)].ravel())


@given(
    st.lists(boxes, max_size=6),
    st.integers(2, 300),
    st.one_of(st.none(), st.integers(1, 200)),
)
def test_buckets_hold_all_pieces_in_order_and_are_not_too_big(stream, max_bytes, alone_bytes):
    pieces = [WeightPiece(f"w{i}", box) for i, box in enumerate(stream)]
    dtypes = {p.name: ("bfloat16", "float32")[i % 2] for i, p in enumerate(pieces)}
    itemsize = {name: 2 if kind == "bfloat16" else 4 for name, kind in dtypes.items()}
    order = np.arange(9**3).reshape(9, 9, 9)
    found = {p.name: [] for p in pieces}
    names = []
    for bucket in cut_into_buckets(pieces, dtypes, max_bytes=max_bytes, alone_bytes=alone_bytes):
        end = 0
        for piece, begin in zip(bucket.pieces, bucket.offsets, strict=True):
            size = itemsize[piece.name]
            assert begin % size == 0
            assert end <= begin < end + size
            end = begin + piece.box.numel * size
            found[piece.name].append(order[index(piece.box)].ravel())
            names.append(piece.name)
            if alone_bytes is not None and dict(pieces)[piece.name].numel * size >= alone_bytes:
                assert len(bucket.pieces) == 1
        assert bucket.num_bytes == end <= max(max_bytes, 4)
    assert names == sorted(names)
    for name, box in pieces:
        assert np.array_equal(np.concatenate(found[name]), order[index(box)].ravel())


FLOATS, HALVES = "float32", "bfloat16"


@pytest.mark.parametrize(
    ("shapes", "alone_bytes", "buckets"),
    [
        # A bucket holds 32 bytes: 8 floats. Pieces that fit go together.
        ([(5,), (3,)], None, [[5, 3]]),
        ([(8,), ()], None, [[8], [1]]),
        # Over half full, it is left for one that fits into the next whole; else that is split.
        ([(5,), (4,)], None, [[5], [4]]),
        ([(4,), (5,)], None, [[4, 4], [1]]),
        ([(5,), (8,)], None, [[5], [8]]),
        ([(5,), (9,)], None, [[5, 3], [6]]),
        # Rows are not split where one fits into the next.
        ([(5,), (3, 4)], None, [[5], [8], [4]]),
        ([(4,), (3, 4)], None, [[4, 4], [8]]),
        ([(2, 9)], None, [[8], [1], [8], [1]]),
        # What need not be packed is alone.
        ([(1,), (4,), (1,)], 16, [[1], [4], [1]]),
        ([(1,), (3,), (1,)], 16, [[1, 3, 1]]),
    ],
    ids=str,
)
def test_where_a_bucket_ends(shapes, alone_bytes, buckets):
    pieces = [WeightPiece(str(i), Box.whole(shape)) for i, shape in enumerate(shapes)]
    dtypes = dict.fromkeys((piece.name for piece in pieces), FLOATS)
    found = list(cut_into_buckets(pieces, dtypes, max_bytes=32, alone_bytes=alone_bytes))
    assert [[piece.box.numel for piece in bucket.pieces] for bucket in found] == buckets
    assert [bucket.num_bytes for bucket in found] == [4 * sum(numels) for numels in buckets]


@pytest.mark.parametrize(("floats", "numels"), [(7, [[1, 7]]), (8, [[1, 7], [1]])])
def test_a_piece_begins_at_a_multiple_of_its_item(floats, numels):
    pieces = [WeightPiece("a", Box.whole((1,))), WeightPiece("b", Box.whole((floats,)))]
    found = list(cut_into_buckets(pieces, {"a": HALVES, "b": FLOATS}, max_bytes=32))
    assert [[piece.box.numel for piece in bucket.pieces] for bucket in found] == numels
    assert (found[0].offsets, found[0].num_bytes) == ((0, 4), 32)


def test_a_tag_tells_other_weights_apart():
    box = Box((0, 0), (2, 2))
    tags = {
        next(cut_into_buckets([WeightPiece(name, part)], {name: "float32"}, max_bytes=99)).tag
        for name, part in (("a", box), ("b", box), ("a", box.with_range(0, 1, 3)))
    }
    assert len(tags) == 3


def test_a_worker_with_many_peers_has_no_more_under_way():
    assert [bucket_share(64, fan_out) for fan_out in (1, 4, 100)] == [64, 16, 1]


def test_the_busier_end_of_a_pair_counts_in_both_directions():
    shape = shape_for(ProcessTopology(tensor=4))
    one, four = ProcessTopology(), ProcessTopology(tensor=4)
    spread = plan_realloc(
        shape.weights(),
        whole_layout(shape.weights(), one),
        [0],
        megatron_layout(shape, four),
        [1, 2, 3, 4],
    )
    assert [spread.fan_out(0, worker) for worker in (1, 2, 3, 4)] == [4] * 4
    joined = plan_realloc(
        shape.weights(),
        megatron_layout(shape, four),
        [1, 2, 3, 4],
        whole_layout(shape.weights(), one),
        [0],
    )
    assert [joined.fan_out(worker, 0) for worker in (1, 2, 3, 4)] == [4] * 4


class Race:
    """Workers that walk their rounds, one event at a time, over pairs with ``room`` for that many messages.

    A worker fills its sends one by one (waiting for room), posts them all at once, then takes in what came
    in the round before, in any order.
    """

    def __init__(self, num_buckets, room):
        self.room, workers = room, sorted({w for pair in num_buckets for w in pair})
        self.programs = {}
        for w in workers:
            out = {r: iter(range(n)) for (s, r), n in num_buckets.items() if s == w}
            into = {s: iter(range(n)) for (s, r), n in num_buckets.items() if r == w}
            self.programs[w] = [
                step
                for sends, _, arrivals in rounds(out, into)
                for step in (
                    *(("fill", {peer}) for peer in sends),
                    ("post", set(sends)),
                    ("take", set(arrivals)),
                )
            ]
        pairs = list(num_buckets)
        self.start = (
            tuple((0, frozenset()) for _ in workers),  # next step, and whom it took in from
            tuple((0, 0, 0) for _ in pairs),  # filled, posted, taken
        )
        self.workers, self.pair_at = workers, {pair: i for i, pair in enumerate(pairs)}

    def moves(self, state):
        """States one event later."""
        places, pairs = state
        for at, worker in enumerate(self.workers):
            step, done = places[at]
            if step == len(self.programs[worker]):
                continue
            kind, peers = self.programs[worker][step]
            if kind == "take":
                waiting = peers - done
                for peer in waiting:
                    i = self.pair_at[peer, worker]
                    filled, posted, taken = pairs[i]
                    if posted > taken:
                        moved = _put(pairs, i, (filled, posted, taken + 1))
                        yield self._after(places, at, step, done | {peer}, peers), moved
                if not waiting:
                    yield self._after(places, at, step, done, peers), pairs
                continue
            changed = pairs
            for peer in peers:
                i = self.pair_at[worker, peer]
                filled, posted, taken = changed[i]
                if kind == "post":
                    changed = _put(changed, i, (filled, filled, taken))
                elif filled - taken < self.room:
                    changed = _put(changed, i, (filled + 1, posted, taken))
                else:
                    break
            else:
                yield _put(places, at, (step + 1, frozenset())), changed

    def _after(self, places, at, step, done, peers):
        through = done >= peers
        return _put(places, at, (step + 1, frozenset()) if through else (step, done))

    def is_over(self, state):
        return all(
            step == len(self.programs[w])
            for w, (step, _) in zip(self.workers, state[0], strict=True)
        )


def _put(values, at, value):
    return (*values[:at], value, *values[at + 1 :])


def blocked_states(race):
    """Every state that any order of events can reach, and in which nothing can happen before the end."""
    seen, todo, found = {race.start}, [race.start], []
    while todo:
        state = todo.pop()
        after = list(race.moves(state))
        if not after and not race.is_over(state):
            found.append(state)
        new = set(after) - seen
        seen |= new
        todo += new
    return found


SMALL = [
    {(0, 1): 3, (1, 0): 3},
    {(0, 1): 4, (1, 0): 1},
    {(0, 1): 2, (1, 2): 2, (2, 0): 2},
    {(0, 1): 3, (1, 2): 1, (2, 0): 2, (1, 0): 1},
    {(0, 2): 3, (1, 2): 2, (2, 3): 2, (3, 0): 1},
]


@pytest.mark.parametrize("num_buckets", SMALL, ids=str)
def test_no_order_of_events_blocks(num_buckets):
    assert blocked_states(Race(num_buckets, room=2)) == []


def test_the_search_finds_what_blocks():
    """With room for one message only, two workers that fill their second one wait for each other."""
    assert blocked_states(Race(SMALL[0], room=1)) != []


@settings(max_examples=60, deadline=None)
@given(
    topologies, topologies, st.integers(0, 8), st.integers(8, 64), st.randoms(use_true_random=False)
)
def test_random_orders_of_real_plans_end(source, target, first, max_bytes, random):
    shape = shape_for(source, target)
    plan = plan_realloc(
        shape.weights(),
        megatron_layout(shape, source),
        range(source.world_size),
        megatron_layout(shape, target),
        range(first, first + target.world_size),
        min_cut_bytes=1,
    )
    num_buckets = {
        pair: min(5, len(list(cut_into_buckets(pieces, plan.dtypes, max_bytes=max_bytes))))
        for pair, pieces in plan.streams.items()
    }
    race = Race(num_buckets, room=2)
    state = race.start
    while not race.is_over(state):
        after = list(race.moves(state))
        assert after, "blocked"
        state = random.choice(after)


def test_layers_that_are_cut_alike_are_worked_out_once(monkeypatch):
    """What makes plans of large models quick: 80 layers are no more geometry than one a stage."""
    from realsys.weights.realloc import realloc_plan

    calls = []
    monkeypatch.setattr(
        realloc_plan, "regions_of", lambda *sides: calls.append(1) or regions_of(*sides)
    )
    shape = replace(shape_for(ProcessTopology(tensor=8)), num_layers=80)
    source = megatron_layout(shape, ProcessTopology(data=4, tensor=4, pipeline=4))
    target = megatron_layout(shape, ProcessTopology(data=4, tensor=8))
    plan_realloc(shape.weights(), source, range(64), target, range(32))
    # A stage: q, k = v, o, gate = up, down, norms; and embedding, final norm and head.
    assert len(calls) <= 4 * 6 + 3
