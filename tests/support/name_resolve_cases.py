"""What every name-resolution store must do: the cases of one suite, for all stores.

Imported by tests/unit/name_resolve/test_name_resolve.py (memory and file, time moved by hand) and by
tests/etcd/test_conformance.py (these and etcd, in real time). They provide the fixtures: ``open_another``
opens one more store with the same contents, as another process would; ``store`` is one; ``root`` a trial's
root of the test's own; ``passing`` lets a lease's time pass.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

import pytest

from realsys.api.errors import KeyExists, KeyNotFound, LeaseLost, StoreError, WaitTimeout
from realsys.name_resolve.store import (
    MAX_TXN_OPS,
    Compare,
    Event,
    EventKind,
    Lease,
    NameResolve,
    Put,
    Watch,
    canonical,
)

PUT, DELETE, EXPIRE = EventKind.PUT, EventKind.DELETE, EventKind.EXPIRE
NUM_MANY = 10_000
OpenAnother = Callable[[], NameResolve]


class Passing(Protocol):
    """How time passes for the leases of the store under test."""

    ttl_s: float  # to ask for

    def most_of(self, lease: Lease) -> None:
        """Lets time pass that a lease just renewed must outlive."""

    def all_of(self, lease: Lease) -> None:
        """Lets time pass that no lease outlives without a renewal."""


def collect(watch: Watch, num_events: int, *, timeout_s: float = 60) -> list[Event]:
    """The next events, which may come in several pieces."""
    events: list[Event] = []
    deadline_s = time.monotonic() + timeout_s
    while len(events) < num_events and time.monotonic() < deadline_s:
        events += watch.poll(0.1)
    return events


def run_threads(calls: list[Callable[[], None]], start: threading.Event) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    start.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


# --- keys ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("", "empty"),
        ("/etc/passwd", "absolute"),
        ("a//b", "empty segment"),
        ("a/", "empty segment"),
        ("a/./b", "'.'"),
        ("../a", "'..'"),
        ("a/../../b", "'..'"),
        ("a\0b", "NUL"),
        ("a/\ud800", "UTF-8"),
        ("a" * 4097, "4097 bytes"),
        (None, "not a string"),
        (b"a", "not a string"),
    ],
)
def test_improper_keys_are_refused_by_every_call(store: NameResolve, key, why):
    calls = [
        lambda: canonical(key),
        lambda: store.add(key, b"x"),
        lambda: store.get(key),
        lambda: store.delete(key),
        lambda: store.get_subtree(key),
        lambda: store.clear_subtree(key),
        lambda: store.watch(key),
        lambda: store.watch("a", key),
        lambda: store.wait([key], timeout_s=0),
        lambda: store.transaction([], puts=[Put(key, b"x")]),
        lambda: store.transaction([], deletes=[key]),
        lambda: store.transaction([Compare.absent(key)]),
    ]
    assert canonical("a" * 4096)
    for call in calls:
        with pytest.raises(StoreError, match=why):
            call()


@pytest.mark.parametrize(
    "segment",
    ["two words", "naïve-Ω-日本", 'it\'s "quoted"', "line\nbreak", "%2F", "...", "-rf", "*"],
)
def test_odd_segments_come_back_as_they_were(open_another: OpenAnother, segment: str, root: str):
    key = f"{root}/{segment}"
    open_another().add(key, segment.encode())
    assert open_another().find_subtree(root) == [key]
    assert open_another().get(key).value == segment.encode()


# --- add, get, delete ----------------------------------------------------------------------------


@pytest.mark.parametrize("value", [b"", b" x \n", bytes(range(256)), "Ω".encode(), b"y" * 2**20])
def test_values_are_exact_bytes(open_another: OpenAnother, value: bytes, root: str):
    open_another().add(f"{root}/a", value)
    assert open_another().get(f"{root}/a").value == value


@pytest.mark.parametrize(
    ("value", "why"), [("text", "str"), (None, "NoneType"), (b"x" * 2**20 + b"x", "1048577 bytes")]
)
def test_other_values_are_refused(store: NameResolve, value, why, root: str):
    with pytest.raises(StoreError, match=why):
        store.add(f"{root}/a", value)


def test_add_is_exclusive_and_names_the_holder(open_another: OpenAnother, root: str):
    first, second = open_another(), open_another()
    first.add(f"{root}/a", b"node7:4000")
    with pytest.raises(KeyExists, match="node7:4000"):
        second.add(f"{root}/a", b"node8:4000")
    assert second.get(f"{root}/a").value == b"node7:4000"
    first.add(f"{root}/long", b"x" * 1000)
    with pytest.raises(KeyExists) as caught:
        second.add(f"{root}/long", b"")
    assert "xxx" not in str(caught.value)


def test_revisions_grow_over_the_store_and_versions_per_key(open_another: OpenAnother, root: str):
    first, second = open_another(), open_another()
    r1 = first.add(f"{root}/a", b"1")
    r2 = second.add(f"{root}/b", b"1")
    r3 = first.add(f"{root}/a", b"2", replace=True)
    assert r1 < r2 < r3 == second.revision()
    entry = second.get(f"{root}/a")
    assert (entry.value, entry.revision, entry.version, entry.lease_id) == (b"2", r3, 2, None)
    second.delete(f"{root}/a")
    first.add(f"{root}/a", b"3")
    assert first.get(f"{root}/a").version == 1


def test_missing_keys_are_said_to_be_missing(store: NameResolve, root: str):
    before = store.revision()
    with pytest.raises(KeyNotFound, match=f"{root}/a"):
        store.get(f"{root}/a")
    with pytest.raises(KeyNotFound, match=f"{root}/a"):
        store.delete(f"{root}/a")
    store.delete(f"{root}/a", missing_ok=True)
    assert store.get_subtree(root) == []
    assert store.clear_subtree(root) == 0
    assert store.revision() == before  # what changes nothing takes no revision


def test_a_key_may_hold_a_value_and_have_keys_below(store: NameResolve, root: str):
    for key in (f"{root}/a/b/c", f"{root}/a", f"{root}/a/b"):
        store.add(key, key.encode())
    assert store.find_subtree(f"{root}/a") == [f"{root}/a", f"{root}/a/b", f"{root}/a/b/c"]
    store.delete(f"{root}/a/b")
    assert store.find_subtree(f"{root}/a") == [f"{root}/a", f"{root}/a/b/c"]


def test_subtrees_are_sorted_and_exclude_neighbours(store: NameResolve, root: str):
    above = root.removesuffix("/run1")
    for name in ("run1/b", "run1/a", "run10/a", "run1-b/a", "run1.x"):
        store.add(f"{above}/{name}", name.encode())
    assert [entry.value for entry in store.get_subtree(root)] == [b"run1/a", b"run1/b"]
    assert store.clear_subtree(root) == 2
    left = store.find_subtree(above)
    assert [key.removeprefix(f"{above}/") for key in left] == ["run1-b/a", "run1.x", "run10/a"]


@pytest.mark.parametrize("prefix", ["realsys", "realsys/v1/site/anna", "realsys/v1/site/anna/ppo"])
def test_more_than_a_trial_is_never_cleared(store: NameResolve, prefix: str, root: str):
    store.add(f"{root}/a", b"x")
    with pytest.raises(StoreError, match="one trial at a time"):
        store.clear_subtree(prefix)
    assert store.get(f"{root}/a").value == b"x"


def test_one_of_64_threads_wins_a_key(open_another: OpenAnother, root: str):
    stores, start, winners, losers = [open_another() for _ in range(4)], threading.Event(), [], []

    def contend(i: int) -> None:
        start.wait()
        try:
            stores[i % 4].add(f"{root}/leader", b"%d" % i)
        except KeyExists:
            losers.append(i)
        else:
            winners.append(i)

    run_threads([lambda i=i: contend(i) for i in range(64)], start)
    assert (len(winners), len(losers)) == (1, 63)
    assert stores[0].get(f"{root}/leader").value == b"%d" % winners[0]


def test_deleting_a_sibling_never_takes_one_just_added(open_another: OpenAnother, root: str):
    stores, start = [open_another() for _ in range(2)], threading.Event()

    def add_all() -> None:
        start.wait()
        for i in range(100):
            stores[0].add(f"{root}/folder/a{i}", b"x")

    def add_and_delete_all() -> None:
        start.wait()
        for i in range(100):
            stores[1].add(f"{root}/folder/b{i}", b"x")
            stores[1].delete(f"{root}/folder/b{i}")

    run_threads([add_all, add_and_delete_all], start)
    assert len(stores[0].find_subtree(f"{root}/folder")) == 100


def test_adds_and_deletes_of_one_key_alternate(open_another: OpenAnother, root: str):
    stores, start = [open_another() for _ in range(4)], threading.Event()
    added, deleted = [], []

    def add_or_delete(i: int) -> None:
        start.wait()
        for n in range(25):
            try:
                stores[i].add(f"{root}/a", b"%d %d" % (i, n))
                added.append((i, n))
            except KeyExists:
                pass
            try:
                stores[i].delete(f"{root}/a")
                deleted.append((i, n))
            except KeyNotFound:
                pass

    with stores[0].watch(root) as watch:
        run_threads([lambda i=i: add_or_delete(i) for i in range(4)], start)
        events = collect(watch, len(added) + len(deleted))
    assert len(added) - len(deleted) == len(stores[0].find_subtree(root))
    kinds = [e.kind for e in events]
    assert kinds == [PUT if i % 2 == 0 else DELETE for i in range(len(kinds))]


def test_concurrent_increments_by_transaction_lose_none(open_another: OpenAnother, root: str):
    stores, start = [open_another() for _ in range(4)], threading.Event()
    stores[0].add(f"{root}/attempt", b"0")

    def increment(store: NameResolve) -> None:
        start.wait()
        for _ in range(20):
            while True:
                now = store.get(f"{root}/attempt")
                put = Put(f"{root}/attempt", b"%d" % (int(now.value) + 1))
                if store.transaction([Compare.at_revision(now.key, now.revision)], puts=[put]):
                    break

    run_threads([lambda s=s: increment(s) for s in stores], start)
    assert stores[0].get(f"{root}/attempt").value == b"80"


def test_ten_thousand_keys(store: NameResolve, root: str):
    keys = [f"{root}/worker/{i:05}" for i in range(NUM_MANY)]
    for start in range(0, NUM_MANY, MAX_TXN_OPS):
        page = keys[start : start + MAX_TXN_OPS]
        assert store.transaction([], puts=[Put(key, key.encode()) for key in page])
    assert store.find_subtree(root) == keys
    assert [e.value for e in store.get_subtree(root)] == [key.encode() for key in keys]
    with store.watch(root) as watch:
        assert store.clear_subtree(root) == NUM_MANY
        events = collect(watch, NUM_MANY, timeout_s=60)
    assert sorted(e.key for e in events) == keys
    assert {e.kind for e in events} == {DELETE}
    assert store.find_subtree(root) == []


def test_a_closed_store_says_so(store: NameResolve, root: str):
    store.close()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.get(f"{root}/a")
    with pytest.raises(StoreError, match="closed"):
        store.add(f"{root}/a", b"x")


# --- transactions --------------------------------------------------------------------------------


def test_a_transaction_happens_whole_or_not_at_all(store: NameResolve, root: str):
    revision = store.add(f"{root}/a", b"1")
    puts, deletes = [Put(f"{root}/b", b"2"), Put(f"{root}/c", b"3")], [f"{root}/a", f"{root}/none"]
    assert not store.transaction(
        [Compare.holds(f"{root}/a", b"1"), Compare.at_revision(f"{root}/a", revision + 1)],
        puts=puts,
        deletes=deletes,
    )
    assert store.find_subtree(root) == [f"{root}/a"]
    assert store.transaction(
        [Compare.at_revision(f"{root}/a", revision)], puts=puts, deletes=deletes
    )
    entries = store.get_subtree(root)
    assert [entry.key for entry in entries] == [f"{root}/b", f"{root}/c"]
    assert {entry.revision for entry in entries} == {revision + 1}


def test_conditions_mean_what_they_say(store: NameResolve, root: str):
    key = f"{root}/a"
    assert store.transaction([Compare.absent(key)])
    assert not store.transaction([Compare.holds(key, b"")])
    revision = store.add(key, b"")
    assert not store.transaction([Compare.absent(key)])
    assert store.transaction([Compare.holds(key, b"")])
    assert store.transaction([Compare.at_revision(key, revision)])
    assert not store.transaction([Compare.holds(key, b"x")])


def test_a_transaction_writes_each_key_once(store: NameResolve, root: str):
    with pytest.raises(StoreError, match="twice"):
        store.transaction([], puts=[Put(f"{root}/a", b"")], deletes=[f"{root}/a"])


def test_a_transaction_has_at_most_max_txn_ops(store: NameResolve, root: str):
    keys = [f"{root}/{i:03}" for i in range(MAX_TXN_OPS + 1)]
    lease = store.grant(ttl_s=60)
    puts = [Put(key, b"x", lease) for key in keys]
    assert store.transaction([Compare.absent(k) for k in keys[1:]], puts=puts[1:])
    assert store.find_subtree(root) == keys[1:]
    assert store.transaction([], deletes=keys[1:])
    for too_much in ({"puts": puts}, {"deletes": keys}):
        with pytest.raises(StoreError, match=f"{len(keys)} writes, the limit is {MAX_TXN_OPS}"):
            store.transaction([], **too_much)
    with pytest.raises(StoreError, match=f"{len(keys)} conditions"):
        store.transaction([Compare.absent(key) for key in keys])
    assert store.find_subtree(root) == []


# --- leases --------------------------------------------------------------------------------------


def test_keys_end_with_their_lease(open_another: OpenAnother, passing: Passing, root: str):
    holder, reader = open_another(), open_another()
    lease = holder.grant(ttl_s=passing.ttl_s)
    assert lease.ttl_s >= passing.ttl_s
    holder.add(f"{root}/worker/0", b"x", lease=lease)
    holder.add(f"{root}/free", b"x")
    assert reader.get(f"{root}/worker/0").lease_id == lease.id
    passing.most_of(lease)
    assert reader.get(f"{root}/worker/0").value == b"x"
    passing.all_of(lease)
    with pytest.raises(KeyNotFound):
        reader.get(f"{root}/worker/0")
    assert holder.find_subtree(root) == [f"{root}/free"]
    with pytest.raises(LeaseLost, match=lease.id):
        holder.add(f"{root}/worker/0", b"x", lease=lease)
    with pytest.raises(LeaseLost, match=lease.id):
        holder.transaction([], puts=[Put(f"{root}/worker/0", b"x", lease)])
    with pytest.raises(LeaseLost):
        lease.keep_alive()
    lease.revoke()  # too late, and no error
    assert holder.find_subtree(root) == [f"{root}/free"]


def test_a_renewed_lease_lives_on(open_another: OpenAnother, passing: Passing, root: str):
    holder, reader = open_another(), open_another()
    lease = holder.grant(ttl_s=passing.ttl_s)
    holder.add(f"{root}/worker/0", b"x", lease=lease)
    for _ in range(5):
        passing.most_of(lease)
        lease.keep_alive()
        assert reader.find_subtree(root) == [f"{root}/worker/0"]
    renewed_ago_s = reader.renewed_ago_s(lease.id)
    assert renewed_ago_s is not None
    assert 0 <= renewed_ago_s <= lease.ttl_s


def test_a_revoked_lease_deletes_its_keys_once(store: NameResolve, root: str):
    lease = store.grant(ttl_s=600)
    store.add(f"{root}/a", b"x", lease=lease)
    with store.watch(root) as watch:
        lease.revoke()
        lease.revoke()
        assert [(e.kind, e.key) for e in collect(watch, 1)] == [(DELETE, f"{root}/a")]
        assert watch.poll(0.1) == []
    with pytest.raises(LeaseLost):
        lease.keep_alive()
    assert store.renewed_ago_s(lease.id) is None


def test_a_replaced_key_leaves_its_old_lease(store: NameResolve, root: str):
    lease = store.grant(ttl_s=600)
    store.add(f"{root}/a", b"x", lease=lease)
    store.add(f"{root}/a", b"y", replace=True)
    lease.revoke()
    assert store.get(f"{root}/a").value == b"y"


def test_the_place_of_a_dead_holder_can_be_taken(
    open_another: OpenAnother, passing: Passing, root: str
):
    holder, heir = open_another(), open_another()
    lease = holder.grant(ttl_s=passing.ttl_s)
    holder.add(f"{root}/a", b"old", lease=lease)
    with pytest.raises(KeyExists):
        heir.add(f"{root}/a", b"new")
    passing.all_of(lease)
    heir.add(f"{root}/a", b"new")
    passing.most_of(lease)
    assert holder.get(f"{root}/a").value == b"new"


@pytest.mark.parametrize("ttl_s", [0, -1, float("nan")])
def test_a_lease_needs_time(store: NameResolve, ttl_s: float):
    with pytest.raises(StoreError, match="ttl_s"):
        store.grant(ttl_s)


# --- wait ----------------------------------------------------------------------------------------


def test_wait_returns_when_all_are_there(open_another: OpenAnother, root: str):
    store, other = open_another(), open_another()
    store.add(f"{root}/a", b"1")
    adder = threading.Timer(0.05, lambda: other.add(f"{root}/b", b"2"))
    adder.start()
    found = store.wait([f"{root}/b", f"{root}/a", f"{root}/a"], timeout_s=60)
    adder.join()
    assert found == {f"{root}/a": b"1", f"{root}/b": b"2"}
    assert store.wait([], timeout_s=0) == {}


def test_a_wait_sees_all_at_once_and_not_what_came_and_went(open_another: OpenAnother, root: str):
    store, other = open_another(), open_another()
    other.add(f"{root}/a", b"1")

    def come_and_go() -> None:
        other.delete(f"{root}/a")
        other.add(f"{root}/b", b"2")
        time.sleep(0.1)
        other.add(f"{root}/a/below", b"no")
        other.add(f"{root}/a", b"3")

    adder = threading.Timer(0.05, come_and_go)
    adder.start()
    found = store.wait([f"{root}/a", f"{root}/b"], timeout_s=60)
    adder.join()
    assert found == {f"{root}/a": b"3", f"{root}/b": b"2"}


def test_a_wait_that_ends_names_all_who_are_missing(store: NameResolve, root: str):
    store.add(f"{root}/a", b"1")
    began_s = time.monotonic()
    with pytest.raises(WaitTimeout) as caught:
        store.wait(
            [f"{root}/a", f"{root}/b", f"{root}/c"],
            timeout_s=0.1,
            describe_missing=lambda keys: f"{len(keys)} workers of 3; node7 is DOWN",
        )
    assert time.monotonic() - began_s >= 0.1
    assert caught.value.what == (
        f"2 of 3 keys did not appear in 0.1 s: {root}/b, {root}/c\n  2 workers of 3; node7 is DOWN"
    )


# --- watch ---------------------------------------------------------------------------------------


def test_a_watch_tells_every_change_in_order_and_no_other(open_another: OpenAnother, root: str):
    store, other = open_another(), open_another()
    store.add(f"{root}/before", b"x")
    with store.watch(root) as watch:
        first = other.add(f"{root}/a", b"1")
        other.add(f"{root}0/a", b"neighbour")
        second = other.add(f"{root}/a", b"2", replace=True)
        other.delete(f"{root}/a")
        other.transaction([], puts=[Put(f"{root}/b", b"3")], deletes=[f"{root}/before"])
        events = collect(watch, 5)
        assert [(e.kind, e.key.removeprefix(root), e.value) for e in events] == [
            (PUT, "/a", b"1"),
            (PUT, "/a", b"2"),
            (DELETE, "/a", b"2"),
            (DELETE, "/before", b"x"),
            (PUT, "/b", b"3"),
        ]
        last = other.get(f"{root}/b").revision
        assert [e.revision for e in events] == [first, second, events[2].revision, last, last]
        assert second < events[2].revision < last
        assert watch.poll(0.05) == []
        assert watch.is_connected


def test_one_watch_keeps_order_over_several_prefixes(open_another: OpenAnother, root: str):
    store, other = open_another(), open_another()
    store.add(f"{root}/stop", b"old")
    revision = store.revision()
    store.add(f"{root}/worker/3", b"early")
    with store.watch(f"{root}/stop", f"{root}/attempt", from_revision=revision + 1) as watch:
        for i in range(50):
            other.add(f"{root}/stop", b"%d" % i, replace=True)
            other.add(f"{root}/between/{i}", b"not asked for")
            other.add(f"{root}/attempt/{i % 7}", b"%d" % i, replace=True)
            other.add(f"{root}/stopper", b"a neighbour", replace=True)
        events = collect(watch, 100)
        assert watch.poll(0.05) == []
    values = [(e.key.removeprefix(f"{root}/").split("/")[0], int(e.value)) for e in events]
    assert values == [(name, i) for i in range(50) for name in ("stop", "attempt")]
    revisions = [e.revision for e in events]
    assert revisions == sorted(set(revisions))


def test_a_watch_needs_something_to_watch(store: NameResolve):
    with pytest.raises(StoreError, match="without a prefix"):
        store.watch()


def test_a_watch_from_a_revision_misses_nothing(store: NameResolve, root: str):
    store.add(f"{root}/a", b"1")
    revision = store.revision()
    store.add(f"{root}/b", b"2")
    store.delete(f"{root}/a")
    with store.watch(root, from_revision=revision + 1) as watch:
        assert [(e.kind, e.value) for e in collect(watch, 2)] == [(PUT, b"2"), (DELETE, b"1")]


def test_the_end_of_a_lease_is_told_as_expired(
    open_another: OpenAnother, passing: Passing, root: str
):
    holder, reader = open_another(), open_another()
    lease = holder.grant(ttl_s=passing.ttl_s)
    for name in ("b", "a", "given back"):
        holder.add(f"{root}/{name}", name.encode(), lease=lease)
    holder.add(f"{root}/kept", b"x")
    with reader.watch(root) as watch, reader.watch(f"{root}/a") as narrow:
        holder.delete(f"{root}/given back")
        assert [(e.kind, e.value) for e in collect(watch, 1)] == [(DELETE, b"given back")]
        passing.all_of(lease)
        events = collect(watch, 2)
        assert [(e.kind, e.value) for e in events] == [(EXPIRE, b"a"), (EXPIRE, b"b")]
        assert [(e.kind, e.value) for e in collect(narrow, 1)] == [(EXPIRE, b"a")]
        holder.clear_subtree(root)
        assert [(e.kind, e.value) for e in collect(watch, 1)] == [(DELETE, b"x")]


def test_a_watch_that_is_closed_returns_at_once(open_another: OpenAnother, root: str):
    store, other = open_another(), open_another()
    watch = store.watch(root)
    other.add(f"{root}/a", b"1")
    assert [event.value for event in collect(watch, 1)] == [b"1"]
    watch.close()
    assert watch.poll(5) == []
