"""One conformance suite for all name-resolution stores, and the pure parts beside them.

Each test runs over the memory and the file store. ``store`` is open; ``clock`` is the one that judges
its leases, moved by hand.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from realsys.api.errors import (
    ConfigError,
    KeyExists,
    KeyNotFound,
    LeaseLost,
    StoreError,
    StoreUnavailable,
    WaitTimeout,
)
from realsys.name_resolve import file as file_store
from realsys.name_resolve.commit_log import file_system_of
from realsys.name_resolve.file import FileStore
from realsys.name_resolve.keys import KEY_TABLE, TrialKeys
from realsys.name_resolve.keyspace import MAX_HISTORY_EVENTS
from realsys.name_resolve.keyspace_store import KeySpaceStore
from realsys.name_resolve.lease_keeper import LeaseKeeper
from realsys.name_resolve.memory import MemoryStore, SharedMemory
from realsys.name_resolve.open import open_store
from realsys.name_resolve.process_identity import is_known_dead, this_process
from realsys.name_resolve.store import Compare, EventKind, NameResolve, Put, canonical

ROOT = "realsys/v1/site/anna/ppo-math/run1"
PUT, DELETE, EXPIRE = EventKind.PUT, EventKind.DELETE, EventKind.EXPIRE
OpenAnother = Callable[[], KeySpaceStore]


class HandClock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture(params=["memory", "file"])
def open_another(
    request: pytest.FixtureRequest, tmp_path: Path, clock: HandClock
) -> Iterator[OpenAnother]:
    """Opens one more store with the same contents, as another process would."""
    shared, opened = SharedMemory(), []

    def open_one() -> KeySpaceStore:
        store: KeySpaceStore
        if request.param == "memory":
            store = MemoryStore(shared, clock=clock)
        else:
            store = FileStore(tmp_path / "store", clock=clock, poll_s=0.005)
        opened.append(store)
        return store

    yield open_one
    for store in opened:
        store.close()


@pytest.fixture
def store(open_another: OpenAnother) -> NameResolve:
    return open_another()


# --- keys ---------------------------------------------------------------------------------------


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
        ("a" * 5000, "5000 bytes"),
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
        lambda: store.wait([key], timeout_s=0),
        lambda: store.transaction([], puts=[Put(key, b"x")]),
        lambda: store.transaction([], deletes=[key]),
        lambda: store.transaction([Compare.absent(key)]),
    ]
    for call in calls:
        with pytest.raises(StoreError, match=why):
            call()


@pytest.mark.parametrize(
    "segment",
    ["two words", "naïve-Ω-日本", 'it\'s "quoted"', "line\nbreak", "%2F", "...", "-rf", "*"],
)
def test_odd_segments_come_back_as_they_were(open_another: OpenAnother, segment: str):
    key = f"{ROOT}/{segment}"
    open_another().add(key, segment.encode())
    assert open_another().find_subtree(ROOT) == [key]
    assert open_another().get(key).value == segment.encode()


def test_the_table_has_every_key_of_a_trial_and_its_pattern():
    keys = TrialKeys(cluster="site", user="anna", experiment="ppo-math", trial="run1")
    arguments = {"<type>": "model_worker", "<index>": 3}
    for row in KEY_TABLE:
        blanks = [part for part in row.pattern.split("/") if part.startswith("<")]
        filled = [arguments.get(blank, "actor") for blank in blanks]
        member = getattr(keys, row.name)
        key = member(*filled) if blanks else member
        expected = row.pattern
        for blank, value in zip(blanks, filled, strict=True):
            expected = expected.replace(blank, str(value))
        assert key == canonical(f"{ROOT}/{expected}")
    prefixes = {"root", "workers", "worker_statuses", "gen_servers", "streams"}
    prefixes |= {"components", "component_reports"}
    slots = set(TrialKeys.__slots__)
    members = {name for name in dir(TrialKeys) if not name.startswith("_")} - slots
    assert members - prefixes == {row.name for row in KEY_TABLE}


@pytest.mark.parametrize("name", ["", "a/b", "..", "."])
def test_names_that_would_break_keys_are_refused(name: str):
    with pytest.raises(ConfigError, match="trial"):
        TrialKeys(cluster="site", user="anna", experiment="ppo", trial=name)


# --- add, get, delete ---------------------------------------------------------------------------


@pytest.mark.parametrize("value", [b"", b" x \n", bytes(range(256)), "Ω".encode(), b"y" * 100_000])
def test_values_are_exact_bytes(open_another: OpenAnother, value: bytes):
    open_another().add(f"{ROOT}/a", value)
    assert open_another().get(f"{ROOT}/a").value == value


@pytest.mark.parametrize(
    ("value", "why"), [("text", "str"), (None, "NoneType"), (b"x" * 2**20 + b"x", "1048577 bytes")]
)
def test_other_values_are_refused(store: NameResolve, value, why):
    with pytest.raises(StoreError, match=why):
        store.add(f"{ROOT}/a", value)


def test_add_is_exclusive_and_names_the_holder(open_another: OpenAnother):
    first, second = open_another(), open_another()
    first.add(f"{ROOT}/a", b"node7:4000")
    with pytest.raises(KeyExists, match="node7:4000"):
        second.add(f"{ROOT}/a", b"node8:4000")
    assert second.get(f"{ROOT}/a").value == b"node7:4000"
    first.add(f"{ROOT}/long", b"x" * 1000)
    with pytest.raises(KeyExists) as caught:
        second.add(f"{ROOT}/long", b"")
    assert "xxx" not in str(caught.value)


def test_revisions_grow_over_the_store_and_versions_per_key(open_another: OpenAnother):
    first, second = open_another(), open_another()
    assert first.revision() == 0
    r1 = first.add(f"{ROOT}/a", b"1")
    r2 = second.add(f"{ROOT}/b", b"1")
    r3 = first.add(f"{ROOT}/a", b"2", replace=True)
    assert r1 < r2 < r3 == second.revision()
    entry = second.get(f"{ROOT}/a")
    assert (entry.value, entry.revision, entry.version, entry.lease_id) == (b"2", r3, 2, None)
    second.delete(f"{ROOT}/a")
    first.add(f"{ROOT}/a", b"3")
    assert first.get(f"{ROOT}/a").version == 1


def test_missing_keys_are_said_to_be_missing(store: NameResolve):
    with pytest.raises(KeyNotFound, match=f"{ROOT}/a"):
        store.get(f"{ROOT}/a")
    with pytest.raises(KeyNotFound, match=f"{ROOT}/a"):
        store.delete(f"{ROOT}/a")
    store.delete(f"{ROOT}/a", missing_ok=True)
    assert store.get_subtree(ROOT) == []
    assert store.clear_subtree(ROOT) == 0
    assert store.revision() == 0  # what changes nothing takes no revision


def test_a_key_may_hold_a_value_and_have_keys_below(store: NameResolve):
    for key in (f"{ROOT}/a/b/c", f"{ROOT}/a", f"{ROOT}/a/b"):
        store.add(key, key.encode())
    assert store.find_subtree(f"{ROOT}/a") == [f"{ROOT}/a", f"{ROOT}/a/b", f"{ROOT}/a/b/c"]
    store.delete(f"{ROOT}/a/b")
    assert store.find_subtree(f"{ROOT}/a") == [f"{ROOT}/a", f"{ROOT}/a/b/c"]


def test_subtrees_are_sorted_and_exclude_neighbours(store: NameResolve):
    for name in ("run1/b", "run1/a", "run10/a", "run1-b/a", "run1.x"):
        store.add(f"realsys/v1/site/anna/ppo-math/{name}", name.encode())
    assert [entry.value for entry in store.get_subtree(ROOT)] == [b"run1/a", b"run1/b"]
    assert store.clear_subtree(ROOT) == 2
    left = store.find_subtree("realsys/v1/site/anna/ppo-math")
    assert [key.rsplit("math/")[1] for key in left] == ["run1-b/a", "run1.x", "run10/a"]


@pytest.mark.parametrize("prefix", ["realsys", "realsys/v1/site/anna", "realsys/v1/site/anna/ppo"])
def test_more_than_a_trial_is_never_cleared(store: NameResolve, prefix: str):
    store.add(f"{ROOT}/a", b"x")
    with pytest.raises(StoreError, match="one trial at a time"):
        store.clear_subtree(prefix)
    assert store.get(f"{ROOT}/a").value == b"x"


def test_one_of_64_threads_wins_a_key(open_another: OpenAnother):
    stores, start, winners, losers = [open_another() for _ in range(4)], threading.Event(), [], []

    def contend(i: int) -> None:
        start.wait()
        try:
            stores[i % 4].add(f"{ROOT}/leader", b"%d" % i)
        except KeyExists:
            losers.append(i)
        else:
            winners.append(i)

    run_threads([lambda i=i: contend(i) for i in range(64)], start)
    assert (len(winners), len(losers)) == (1, 63)
    assert stores[0].get(f"{ROOT}/leader").value == b"%d" % winners[0]


def test_deleting_a_sibling_never_takes_one_just_added(open_another: OpenAnother):
    stores, start = [open_another() for _ in range(2)], threading.Event()

    def add_all() -> None:
        start.wait()
        for i in range(100):
            stores[0].add(f"{ROOT}/folder/a{i}", b"x")

    def add_and_delete_all() -> None:
        start.wait()
        for i in range(100):
            stores[1].add(f"{ROOT}/folder/b{i}", b"x")
            stores[1].delete(f"{ROOT}/folder/b{i}")

    run_threads([add_all, add_and_delete_all], start)
    assert len(stores[0].find_subtree(f"{ROOT}/folder")) == 100


def test_concurrent_increments_by_transaction_lose_none(open_another: OpenAnother):
    stores, start = [open_another() for _ in range(4)], threading.Event()
    stores[0].add(f"{ROOT}/attempt", b"0")

    def increment(store: NameResolve) -> None:
        start.wait()
        for _ in range(20):
            while True:
                now = store.get(f"{ROOT}/attempt")
                put = Put(f"{ROOT}/attempt", b"%d" % (int(now.value) + 1))
                if store.transaction([Compare.at_revision(now.key, now.revision)], puts=[put]):
                    break

    run_threads([lambda s=s: increment(s) for s in stores], start)
    assert stores[0].get(f"{ROOT}/attempt").value == b"80"


def test_a_closed_store_says_so(store: NameResolve):
    store.close()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.get(f"{ROOT}/a")
    with pytest.raises(StoreError, match="closed"):
        store.add(f"{ROOT}/a", b"x")


# --- transactions -------------------------------------------------------------------------------


def test_a_transaction_happens_whole_or_not_at_all(store: NameResolve):
    revision = store.add(f"{ROOT}/a", b"1")
    puts, deletes = [Put(f"{ROOT}/b", b"2"), Put(f"{ROOT}/c", b"3")], [f"{ROOT}/a", f"{ROOT}/none"]
    assert not store.transaction(
        [Compare.holds(f"{ROOT}/a", b"1"), Compare.at_revision(f"{ROOT}/a", revision + 1)],
        puts=puts,
        deletes=deletes,
    )
    assert store.find_subtree(ROOT) == [f"{ROOT}/a"]
    assert store.transaction(
        [Compare.at_revision(f"{ROOT}/a", revision)], puts=puts, deletes=deletes
    )
    entries = store.get_subtree(ROOT)
    assert [entry.key for entry in entries] == [f"{ROOT}/b", f"{ROOT}/c"]
    assert {entry.revision for entry in entries} == {revision + 1}


def test_conditions_mean_what_they_say(store: NameResolve):
    key = f"{ROOT}/a"
    assert store.transaction([Compare.absent(key)])
    assert not store.transaction([Compare.holds(key, b"")])
    revision = store.add(key, b"")
    assert not store.transaction([Compare.absent(key)])
    assert store.transaction([Compare.holds(key, b"")])
    assert store.transaction([Compare.at_revision(key, revision)])
    assert not store.transaction([Compare.holds(key, b"x")])


def test_a_transaction_writes_each_key_once(store: NameResolve):
    with pytest.raises(StoreError, match="twice"):
        store.transaction([], puts=[Put(f"{ROOT}/a", b"")], deletes=[f"{ROOT}/a"])


# --- leases -------------------------------------------------------------------------------------


def test_keys_end_with_their_lease(open_another: OpenAnother, clock: HandClock):
    holder, reader = open_another(), open_another()
    lease = holder.grant(ttl_s=10)
    holder.add(f"{ROOT}/worker/0", b"x", lease=lease)
    holder.add(f"{ROOT}/free", b"x")
    assert reader.get(f"{ROOT}/worker/0").lease_id == lease.id
    clock.now_s += 10
    assert reader.get(f"{ROOT}/worker/0").value == b"x"
    clock.now_s += 0.5
    with pytest.raises(KeyNotFound):
        reader.get(f"{ROOT}/worker/0")
    assert holder.find_subtree(ROOT) == [f"{ROOT}/free"]
    with pytest.raises(LeaseLost, match=lease.id):
        holder.add(f"{ROOT}/worker/0", b"x", lease=lease)


def test_a_renewed_lease_lives_on(open_another: OpenAnother, clock: HandClock):
    holder, reader = open_another(), open_another()
    lease = holder.grant(ttl_s=10)
    holder.add(f"{ROOT}/worker/0", b"x", lease=lease)
    for _ in range(5):
        clock.now_s += 7
        lease.keep_alive()
        assert reader.find_subtree(ROOT) == [f"{ROOT}/worker/0"]


def test_a_lease_renewed_too_late_is_lost_though_nobody_looked(
    store: NameResolve, clock: HandClock
):
    lease = store.grant(ttl_s=10)
    store.add(f"{ROOT}/worker/0", b"x", lease=lease)
    clock.now_s += 10.5
    with pytest.raises(LeaseLost, match=r"10\.5 s"):
        lease.keep_alive()
    assert store.find_subtree(ROOT) == []


def test_a_lease_ended_by_others_is_lost(open_another: OpenAnother, clock: HandClock):
    holder, reader = open_another(), open_another()
    lease = holder.grant(ttl_s=10)
    holder.add(f"{ROOT}/worker/0", b"x", lease=lease)
    assert reader.find_subtree(ROOT)
    clock.now_s += 10.5
    assert not reader.find_subtree(ROOT)
    clock.now_s -= 5  # the holder's clock need not agree
    with pytest.raises(LeaseLost):
        lease.keep_alive()


@pytest.mark.parametrize("open_another", ["file"], indirect=True)  # memory has one clock for all
def test_a_reader_that_looks_for_the_first_time_waits_a_whole_ttl(
    store: NameResolve, open_another: OpenAnother, clock: HandClock
):
    lease = store.grant(ttl_s=10)
    store.add(f"{ROOT}/worker/0", b"x", lease=lease)
    clock.now_s += 60  # a late reader can't know when the last renewal was
    reader = open_another()
    assert reader.find_subtree(ROOT)
    clock.now_s += 9
    assert reader.find_subtree(ROOT)
    clock.now_s += 1.5
    assert not reader.find_subtree(ROOT)


def test_a_revoked_lease_deletes_its_keys_once(store: NameResolve):
    lease = store.grant(ttl_s=10)
    store.add(f"{ROOT}/a", b"x", lease=lease)
    with store.watch(ROOT) as watch:
        lease.revoke()
        lease.revoke()
        assert [(e.kind, e.key) for e in watch.poll(1)] == [(DELETE, f"{ROOT}/a")]
        assert watch.poll(0) == []
    with pytest.raises(LeaseLost):
        lease.keep_alive()


def test_a_replaced_key_leaves_its_old_lease(store: NameResolve):
    lease = store.grant(ttl_s=10)
    store.add(f"{ROOT}/a", b"x", lease=lease)
    store.add(f"{ROOT}/a", b"y", replace=True)
    lease.revoke()
    assert store.get(f"{ROOT}/a").value == b"y"


def test_the_place_of_a_dead_holder_can_be_taken(open_another: OpenAnother, clock: HandClock):
    holder, heir = open_another(), open_another()
    holder.add(f"{ROOT}/a", b"old", lease=holder.grant(ttl_s=10))
    with pytest.raises(KeyExists):
        heir.add(f"{ROOT}/a", b"new")
    clock.now_s += 10.5
    heir.add(f"{ROOT}/a", b"new")
    clock.now_s += 10.5
    assert holder.get(f"{ROOT}/a").value == b"new"


@pytest.mark.parametrize("ttl_s", [0, -1, float("nan")])
def test_a_lease_needs_time(store: NameResolve, ttl_s: float):
    with pytest.raises(StoreError, match="ttl_s"):
        store.grant(ttl_s)


# --- wait ---------------------------------------------------------------------------------------


def test_wait_returns_when_all_are_there(open_another: OpenAnother):
    store, other = open_another(), open_another()
    store.add(f"{ROOT}/a", b"1")
    adder = threading.Timer(0.05, lambda: other.add(f"{ROOT}/b", b"2"))
    adder.start()
    found = store.wait([f"{ROOT}/b", f"{ROOT}/a", f"{ROOT}/a"], timeout_s=10)
    adder.join()
    assert found == {f"{ROOT}/a": b"1", f"{ROOT}/b": b"2"}
    assert store.wait([], timeout_s=0) == {}


def test_a_wait_that_ends_names_all_who_are_missing(store: NameResolve):
    store.add(f"{ROOT}/a", b"1")
    began_s = time.monotonic()
    with pytest.raises(WaitTimeout) as caught:
        store.wait(
            [f"{ROOT}/a", f"{ROOT}/b", f"{ROOT}/c"],
            timeout_s=0.1,
            describe_missing=lambda keys: f"{len(keys)} workers of 3; node7 is DOWN",
        )
    assert 0.1 <= time.monotonic() - began_s < 5
    assert caught.value.what == (
        f"2 of 3 keys did not come in 0.1 s: {ROOT}/b, {ROOT}/c\n  2 workers of 3; node7 is DOWN"
    )


# --- watch --------------------------------------------------------------------------------------


def test_a_watch_tells_every_change_in_order_and_no_other(open_another: OpenAnother):
    store, other = open_another(), open_another()
    store.add(f"{ROOT}/before", b"x")
    with store.watch(ROOT) as watch:
        other.add(f"{ROOT}/a", b"1")
        other.add("realsys/v1/site/anna/ppo-math/run10/a", b"neighbour")
        other.add(f"{ROOT}/a", b"2", replace=True)
        other.delete(f"{ROOT}/a")
        other.transaction([], puts=[Put(f"{ROOT}/b", b"3")], deletes=[f"{ROOT}/before"])
        events = watch.poll(1)
        assert [(e.kind, e.key.removeprefix(ROOT), e.value) for e in events] == [
            (PUT, "/a", b"1"),
            (PUT, "/a", b"2"),
            (DELETE, "/a", b"2"),
            (DELETE, "/before", b"x"),
            (PUT, "/b", b"3"),
        ]
        assert [e.revision for e in events] == [2, 4, 5, 6, 6]
        assert watch.poll(0.01) == []


def test_a_watch_from_a_revision_misses_nothing(store: NameResolve):
    store.add(f"{ROOT}/a", b"1")
    revision = store.revision()
    store.add(f"{ROOT}/b", b"2")
    store.delete(f"{ROOT}/a")
    with store.watch(ROOT, from_revision=revision + 1) as watch:
        assert [(e.kind, e.value) for e in watch.poll(1)] == [(PUT, b"2"), (DELETE, b"1")]


def test_the_end_of_a_lease_is_told_as_expired(open_another: OpenAnother, clock: HandClock):
    holder, reader = open_another(), open_another()
    lease = holder.grant(ttl_s=10)
    for name in ("b", "a"):
        holder.add(f"{ROOT}/{name}", name.encode(), lease=lease)
    with reader.watch(ROOT) as watch:
        assert watch.poll(0) == []
        clock.now_s += 10.5
        events = watch.poll(1)
        assert [(e.kind, e.value) for e in events] == [(EXPIRE, b"a"), (EXPIRE, b"b")]


@pytest.mark.parametrize("open_another", ["memory"], indirect=True)  # thousands of writes
def test_a_watcher_far_behind_gets_the_difference(store: NameResolve):
    store.add(f"{ROOT}/gone", b"x")
    store.add(f"{ROOT}/same", b"x")
    with store.watch(ROOT) as watch, store.watch(ROOT, from_revision=1) as from_start:
        store.delete(f"{ROOT}/gone")
        for i in range(MAX_HISTORY_EVENTS + 1):
            store.add(f"{ROOT}/busy", b"%d" % i, replace=True)
        last = b"%d" % MAX_HISTORY_EVENTS
        events = watch.poll(1)
        assert sorted((e.kind, e.key.removeprefix(ROOT), e.value) for e in events) == [
            (DELETE, "/gone", b""),
            (PUT, "/busy", last),
        ]
        assert [e.revision for e in events] == sorted(e.revision for e in events)
        assert {e.key.removeprefix(ROOT) for e in from_start.poll(1)} >= {"/same", "/busy"}
        store.add(f"{ROOT}/busy", b"on", replace=True)
        assert [e.value for e in watch.poll(1)] == [b"on"]


def test_iterating_a_watch_ends_when_it_is_closed(open_another: OpenAnother):
    store, other = open_another(), open_another()
    watch = store.watch(ROOT)
    other.add(f"{ROOT}/a", b"1")
    values = []
    for event in watch:
        values.append(event.value)
        watch.close()
    assert values == [b"1"]
    assert watch.poll(5) == []


# --- the keeper ---------------------------------------------------------------------------------


def test_the_keeper_keeps_a_lease_and_gives_it_back(tmp_path: Path):
    store = FileStore(tmp_path / "store", poll_s=0.01)
    lease = store.grant(ttl_s=0.3)
    store.add(f"{ROOT}/a", b"x", lease=lease)
    lost: list[str] = []
    with LeaseKeeper(lease, name="model_worker/0", on_lost=lost.append) as keeper:
        began_s = keeper.last_renewed_s
        time.sleep(0.8)
        assert store.get(f"{ROOT}/a").value == b"x"
        assert keeper.last_renewed_s > began_s
        keeper.check()
    assert store.find_subtree(ROOT) == []
    assert lost == []
    assert not [t for t in threading.enumerate() if "lease" in t.name]
    store.close()


class BrokenLease:
    """A lease whose renewal does ``renew``."""

    id, ttl_s = "0123", 0.3

    def __init__(self, renew: Callable[[], None]) -> None:
        self.keep_alive = renew

    def revoke(self) -> None:
        raise AssertionError("a lost lease is not revoked")


def refuse() -> None:
    raise StoreUnavailable("no answer", where="store", fix="none")


def lose() -> None:
    raise LeaseLost("lease 0123 has ended", where="store", fix="none")


@pytest.mark.parametrize(
    ("renew", "reason"),
    [
        (lambda: time.sleep(0.6), "could not be renewed for 0.2 s"),  # a hung file system
        (refuse, "could not be renewed for 0.2 s"),
        (lose, "lease 0123 has ended"),
        (lambda: 1 / 0, "ZeroDivisionError"),
    ],
    ids=["hangs", "refuses", "lost", "broken"],
)
def test_the_keeper_fences_itself_before_the_ttl_is_over(renew, reason):
    heard, told = [], threading.Event()

    def on_lost(why: str) -> None:
        heard.append((why, time.monotonic()))
        told.set()

    with LeaseKeeper(BrokenLease(renew), name="w/0", on_lost=on_lost) as keeper:
        assert told.wait(5)
        with pytest.raises(LeaseLost, match=reason):
            keeper.check()
        time.sleep(0.2)
    assert len(heard) == 1
    assert reason in heard[0][0]


# --- the file store alone -----------------------------------------------------------------------


def test_snapshots_replace_old_files_and_readers_follow(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(file_store, "SNAPSHOT_EVERY", 8)
    root = tmp_path / "store"
    early, writer = FileStore(root), FileStore(root)
    early.add(f"{ROOT}/first", b"x")
    watch = early.watch(ROOT)
    lease = writer.grant(ttl_s=60)
    writer.add(f"{ROOT}/leased", b"x", lease=lease)
    (root / "leases" / "orphan").write_bytes(b"of a killed writer")
    (root / "tmp" / "orphan").write_bytes(b"of a killed writer")
    for i in range(100):
        writer.add(f"{ROOT}/k{i % 5}", b"%d" % i, replace=True)
    late = FileStore(root)
    expected = [(e.key, e.value, e.version) for e in writer.get_subtree(ROOT)]
    assert len(expected) == 7
    for reader in (early, late):
        assert [(e.key, e.value, e.version) for e in reader.get_subtree(ROOT)] == expected
    assert {e.key for e in watch.poll(1)} >= {f"{ROOT}/k0", f"{ROOT}/leased"}
    assert len(os.listdir(root / "log")) <= 16
    assert len(os.listdir(root / "snapshots")) == 2
    assert os.listdir(root / "leases") == [lease.id]
    assert os.listdir(root / "tmp") == []
    early.add(f"{ROOT}/again", b"x")
    lease.keep_alive()
    for opened in (early, writer, late):
        opened.close()


def test_a_half_written_file_is_never_a_write(tmp_path: Path):
    store = FileStore(tmp_path / "store")
    store.add(f"{ROOT}/a", b"x")
    (tmp_path / "store" / "tmp" / "123-abc").write_bytes(b"\x91")  # killed before its link
    other = FileStore(tmp_path / "store")
    other.add(f"{ROOT}/b", b"y")
    assert store.find_subtree(ROOT) == [f"{ROOT}/a", f"{ROOT}/b"]
    store.close()
    other.close()


def test_the_store_stays_in_its_folder(tmp_path: Path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    store = FileStore(tmp_path / "store")
    store.add(f"{ROOT}/..%2F..%2Foutside", b"x")
    store.add(f"{ROOT}/a", b"x")
    os.symlink(outside / "precious", tmp_path / "store" / "log" / f"{3:016d}")
    with pytest.raises(StoreUnavailable):
        store.get(f"{ROOT}/a")
    os.unlink(tmp_path / "store" / "log" / f"{3:016d}")
    store.clear_subtree(ROOT)
    assert (outside / "precious").read_text() == "x"
    store.close()
    moved = tmp_path / "linked"
    moved.mkdir()
    os.symlink(outside, moved / "log")
    with pytest.raises(StoreUnavailable):
        FileStore(moved)


def test_a_folder_of_something_else_is_refused(tmp_path: Path):
    (tmp_path / "checkpoint.pt").write_text("x")
    with pytest.raises(ConfigError, match=r"checkpoint\.pt"):
        FileStore(tmp_path)
    with pytest.raises(ConfigError, match="root folder"):
        FileStore(Path("/tmp/.."))
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "FORMAT").write_text("layout 99")
    with pytest.raises(ConfigError, match="layout 99"):
        FileStore(tmp_path / "store")


def test_a_damaged_or_removed_store_is_unavailable(tmp_path: Path):
    root = tmp_path / "store"
    store = FileStore(root)
    store.add(f"{ROOT}/a", b"x")
    (root / "log" / f"{2:016d}").write_bytes(b"\xc1 no msgpack")
    with pytest.raises(StoreUnavailable, match="revision 2"):
        store.get(f"{ROOT}/a")
    for file in (root / "log").iterdir():
        file.unlink()
    with pytest.raises(StoreUnavailable, match="removed"):
        store.get(f"{ROOT}/a")
    store.close()


def test_a_held_lock_ends_in_an_error_and_never_in_a_hang(tmp_path: Path):
    holder = FileStore(tmp_path / "store")
    waiter = FileStore(tmp_path / "store", lock_timeout_s=0.1)
    with holder._log.exclusive(), pytest.raises(StoreUnavailable, match=r"lock for 0\.1 s"):
        waiter.add(f"{ROOT}/a", b"x")
    waiter.add(f"{ROOT}/a", b"x")
    holder.close()
    waiter.close()


def test_without_locks_one_writer_still_wins(tmp_path: Path):
    stores, start = [FileStore(tmp_path / "store") for _ in range(4)], threading.Event()
    winners = []
    for store in stores:
        store._log._flock_works = False  # as on a file system mounted without flock

    def contend(store: FileStore) -> None:
        start.wait()
        for i in range(50):
            try:
                store.add(f"{ROOT}/k{i}", b"x")
                winners.append(i)
            except KeyExists:
                pass

    run_threads([lambda s=s: contend(s) for s in stores], start)
    assert sorted(winners) == list(range(50))
    for store in stores:
        assert store.revision() == 50
        store.close()


def test_this_process_lives_and_a_reused_pid_is_another():
    me = this_process()
    assert not is_known_dead(me)
    earlier = type(me)(
        host=me.host,
        boot_id=me.boot_id,
        pid_namespace=me.pid_namespace,
        pid=me.pid,
        start_ticks=me.start_ticks - 1,
    )
    assert is_known_dead(earlier)
    elsewhere = type(me)(
        host="node8", boot_id="other", pid_namespace="x", pid=me.pid, start_ticks=1
    )
    assert not is_known_dead(elsewhere)


def test_the_file_system_of_a_path_is_found():
    assert file_system_of(Path("/proc/self")) == "proc"


# --- opening ------------------------------------------------------------------------------------


def test_stores_open_by_address(tmp_path: Path):
    for url in (f"file://{tmp_path}/a%20store", "memory://test_stores_open_by_address"):
        first, second = open_store(url), open_store(url)
        first.add(f"{ROOT}/a", b"x")
        assert second.get(f"{ROOT}/a").value == b"x"
        first.close()
        second.close()
    assert (tmp_path / "a store").is_dir()


@pytest.mark.parametrize("url", ["etcd://a:2379", "fiel:///tmp/x", "/tmp/x", "", "file://host/x"])
def test_unknown_addresses_are_explained(url: str):
    with pytest.raises(ConfigError, match=r"file:///") as caught:
        open_store(url)
    if url.startswith("fiel"):
        assert "did you mean 'file'" in caught.value.fix


def run_threads(calls: list[Callable[[], None]], start: threading.Event) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    start.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
