"""The conformance suite over the memory and the file store, and what is theirs alone.

The cases are in tests/support/name_resolve_cases.py. ``clock`` judges the leases here and is moved by hand.
"""

import errno
import fcntl
import inspect
import os
import select
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import golden
import pytest
from name_resolve_cases import *  # noqa: F403 (the suite)
from name_resolve_cases import run_threads

from realsys.api.cluster import EtcdSpec
from realsys.api.errors import (
    ConfigError,
    KeyExists,
    LeaseLost,
    StoreUnavailable,
    WaitTimeout,
)
from realsys.name_resolve import keyspace, store_refusals
from realsys.name_resolve.etcd.access import EtcdAccess, endpoints_of
from realsys.name_resolve.etcd.etcd_failures import judge
from realsys.name_resolve.file import commit_log, file_store, folder_changes
from realsys.name_resolve.file.commit_log import file_system_of
from realsys.name_resolve.file.file_store import FileStore, PollSchedule
from realsys.name_resolve.file.folder_changes import Changes, FileWrites, FolderChanges
from realsys.name_resolve.key_table import TrialKeys
from realsys.name_resolve.keyspace import (
    MAX_HISTORY_EVENTS,
    DeleteKey,
    EndLease,
    GrantLease,
    KeySpace,
    PutKey,
    difference,
)
from realsys.name_resolve.keyspace_store import KeySpaceStore
from realsys.name_resolve.memory_store import MemoryStore, SharedMemory
from realsys.name_resolve.open import open_store
from realsys.name_resolve.store import Compare, Entry, Event, EventKind, Lease, NameResolve, Put
from realsys.runtime.process_identity import is_known_dead, this_process

ROOT = "realsys/v1/site/anna/ppo-math/run1"
PUT, DELETE = EventKind.PUT, EventKind.DELETE
OpenAnother = Callable[[], KeySpaceStore]


class HandClock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


class PassingByHand:
    """See Passing in the cases."""

    ttl_s = 10.0

    def __init__(self, clock: HandClock) -> None:
        self._clock = clock

    def most_of(self, lease: Lease) -> None:
        self._clock.now_s += 0.7 * lease.ttl_s

    def all_of(self, lease: Lease) -> None:
        self._clock.now_s += lease.ttl_s + 0.5


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
            store = FileStore(tmp_path / "store", clock=clock, poll_s=0.005, lock_timeout_s=240)
        opened.append(store)
        return store

    yield open_one
    for store in opened:
        store.close()


@pytest.fixture
def root() -> str:
    return ROOT


@pytest.fixture
def passing(clock: HandClock) -> PassingByHand:
    return PassingByHand(clock)


@pytest.fixture
def store(open_another: OpenAnother) -> NameResolve:
    return open_another()


@pytest.mark.parametrize("name", ["", "a/b", "..", "."])
def test_names_that_would_break_keys_are_refused(name: str):
    with golden.raises(ConfigError):
        TrialKeys(cluster="site", user="anna", experiment="ppo", trial=name)


def test_a_lease_renewed_too_late_is_lost_though_nobody_looked(
    store: NameResolve, clock: HandClock
):
    lease = store.grant(ttl_s=10)
    store.add(f"{ROOT}/worker/0", b"x", lease=lease)
    clock.now_s += 10.5
    with golden.raises(LeaseLost) as lost:
        lease.keep_alive()
    assert "10.5 s" in lost.value.what
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


# --- what both hold, and how they say it -----------------------------------------------------------


def of(method: object) -> list[tuple[str, object]]:
    return [(p.name, p.default) for p in inspect.signature(method).parameters.values()]


def test_the_stores_take_what_the_protocol_says():
    calls = [name for name in vars(NameResolve) if not name.startswith("_")]
    assert [of(getattr(KeySpaceStore, n)) for n in calls] == [
        of(getattr(NameResolve, n)) for n in calls
    ]


def test_what_readers_share_can_not_be_changed_and_is_tagged_in_the_log():
    shared = [Entry, Event, Compare, Put, PutKey, DeleteKey, GrantLease, EndLease]
    configs = [kind.__struct_config__ for kind in (*shared, keyspace.KeySpaceSnapshot)]
    assert [config.frozen for config in configs] == [True] * 9
    named = (Entry, Event, keyspace.KeySpaceSnapshot)
    kinds = {p.kind for kind in named for p in inspect.signature(kind).parameters.values()}
    assert kinds == {inspect.Parameter.KEYWORD_ONLY}
    assert [c.tag for c in configs] == [None] * 4 + ["put", "delete", "grant", "end", None]


def put(key: str, value: bytes = b"", lease_id: str | None = None) -> PutKey:
    return PutKey(key, value, lease_id)


def test_the_contents_by_revision_and_again_from_a_snapshot(monkeypatch):
    space, me = KeySpace(), this_process()
    leases = [GrantLease(name, 10.0, me) for name in ("l1", "l2")]
    steps = [
        [leases[0], put("a/x", b"1", "l1"), put("b", b"2")],
        [leases[1], put("a/y", b"3", "l2"), put("a/x", b"4", "l2")],
        [put("a/x/z", b"5", "l1"), DeleteKey("none"), EndLease("none", expired=True)],
        [DeleteKey("a/y"), put("ax", b"6", "l1")],
    ]
    for number, operations in enumerate(steps, 1):
        space.apply(number, operations)
    entries = {
        "a/x": Entry(key="a/x", value=b"4", revision=2, version=2, lease_id="l2"),
        "b": Entry(key="b", value=b"2", revision=1, version=1),
        "a/x/z": Entry(key="a/x/z", value=b"5", revision=3, version=1, lease_id="l1"),
        "ax": Entry(key="ax", value=b"6", revision=4, version=1, lease_id="l1"),
    }
    again = KeySpace(space.snapshot())
    for each in (space, again):
        assert (each.revision, each.entries) == (4, entries)
        assert each.leases == {"l1": leases[0], "l2": leases[1]}
        assert each.keys_of_lease == {"l1": {"a/x/z", "ax"}, "l2": {"a/x"}}
        under = [each.leases_under(prefix) for prefix in ("a", "a/x/z", "b", "ax")]
        assert under == [["l1", "l2"], ["l1"], [], ["l1"]]
        assert [e.key for e in each.subtree("a/x")] == ["a/x", "a/x/z"]
        assert each.events_from(5) == []
    assert again.events_from(4) is None
    told = [
        [(e.revision, e.kind, e.key, e.value) for e in space.events_from(revision) or ()]
        for revision in (4, 2)
    ]
    assert told[0] == [(4, DELETE, "a/y", b"3"), (4, PUT, "ax", b"6")]
    assert told[1] == [
        (2, PUT, "a/y", b"3"),
        (2, PUT, "a/x", b"4"),
        (3, PUT, "a/x/z", b"5"),
        *told[0],
    ]
    for each in (space, again):
        each.apply(5, [EndLease("l1", expired=True), EndLease("l2", expired=False)])
        assert [(e.kind, e.key) for e in each.events_from(5) or ()] == [
            (EventKind.EXPIRE, "a/x/z"),
            (EventKind.EXPIRE, "ax"),
            (DELETE, "a/x"),
        ]
        assert (each.leases, each.keys_of_lease, list(each.entries)) == ({}, {}, ["b"])


@pytest.mark.parametrize(("most_events", "most_bytes"), [(3, 100), (100, 30), (3, 30)])
def test_a_history_keeps_the_newest_events(monkeypatch, most_events: int, most_bytes: int):
    monkeypatch.setattr(keyspace, "MAX_HISTORY_EVENTS", most_events)
    monkeypatch.setattr(keyspace, "MAX_HISTORY_BYTES", most_bytes)
    space = KeySpace()
    for revision in range(1, 9):
        space.apply(revision, [put(f"{revision}", b"x" * 10)])
        kept = [space.events_from(at) is not None for at in range(1, revision + 1)]
        assert kept == [at > revision - 3 for at in range(1, revision + 1)]


def test_what_a_watcher_missed():
    entries = [
        Entry(key=key, value=key.encode(), revision=revision, version=1)
        for key, revision in (("same", 2), ("new", 9), ("changed", 7))
    ]
    known = {"same": 2, "changed": 3, "gone": 4, "away": 5}
    assert difference(known, entries, revision=8) == [
        Event(kind=PUT, key="changed", value=b"changed", revision=7),
        Event(kind=DELETE, key="away", value=b"", revision=8),
        Event(kind=DELETE, key="gone", value=b"", revision=8),
        Event(kind=PUT, key="new", value=b"new", revision=9),
    ]


def test_a_long_wait_is_announced_and_ends(monkeypatch, clock: HandClock, caplog):
    monkeypatch.setattr(store_refusals, "time", SimpleNamespace(monotonic=clock))
    clock.now_s = 0.0
    wait = store_refusals.KeyWait(list("abcdefgh"), 60.0, None, "memory://x")
    wait._began_s = wait._announced_s = 0.0
    caplog.set_level("INFO")
    left = []
    for now_s in (1.0, 29.0, 30.0, 31.0, 59.0):
        clock.now_s = now_s
        left.append((wait.left_s({"b", "c"}), len(caplog.messages)))
    assert left == [(59.0, 0), (31.0, 0), (30.0, 1), (29.0, 1), (1.0, 1)]
    golden.check(caplog.messages)
    clock.now_s = 60.0
    with golden.raises(WaitTimeout):
        wait.left_s({"b", "c"})


# --- the file store alone -------------------------------------------------------------------------


def test_snapshots_replace_old_files_and_readers_follow(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(file_store, "SNAPSHOT_EVERY", 8)
    monkeypatch.setattr(commit_log, "KEEP_S", 0.0)
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
    with golden.raises(ConfigError):
        FileStore(tmp_path)
    with golden.raises(ConfigError):
        FileStore(Path("/tmp/.."))
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "FORMAT").write_text("layout 99")
    with golden.raises(ConfigError):
        FileStore(tmp_path / "store")


def test_a_damaged_or_removed_store_is_unavailable(tmp_path: Path):
    root = tmp_path / "store"
    store = FileStore(root)
    store.add(f"{ROOT}/a", b"x")
    (root / "log" / f"{2:016d}").write_bytes(b"\xc1 no msgpack")
    with golden.raises(StoreUnavailable):
        store.get(f"{ROOT}/a")
    for file in (root / "log").iterdir():
        file.unlink()
    with golden.raises(StoreUnavailable):
        store.get(f"{ROOT}/a")
    for file in (root / "snapshots").iterdir():
        file.unlink()
    with golden.raises(StoreUnavailable):
        store.get(f"{ROOT}/a")
    store.close()


def test_a_held_lock_ends_in_an_error_and_never_in_a_hang(tmp_path: Path, monkeypatch):
    holder = FileStore(tmp_path / "store")
    waiter = FileStore(tmp_path / "store", lock_timeout_s=0.1)
    clock, pauses = HandClock(), list[float]()

    def sleep(seconds: float) -> None:
        clock.now_s += seconds
        pauses.append(seconds)

    monkeypatch.setattr(commit_log, "time", SimpleNamespace(monotonic=clock, sleep=sleep))
    with holder._log.exclusive(), golden.raises(StoreUnavailable):
        waiter.add(f"{ROOT}/a", b"x")
    assert pauses == pytest.approx([0.0001 * 2**n for n in range(6)] + [0.005] * 19)
    waiter.add(f"{ROOT}/a", b"x")
    holder.close()
    waiter.close()


@pytest.mark.parametrize("number", commit_log._NO_FLOCK)
def test_without_locks_one_writer_still_wins(tmp_path: Path, monkeypatch, number: int):
    def refuse(fd: int, how: int) -> None:  # as on a file system mounted without flock
        raise OSError(number, "no locks")

    monkeypatch.setattr(fcntl, "flock", refuse)
    stores, start = [FileStore(tmp_path / "store") for _ in range(4)], threading.Event()
    winners = []

    def contend(store: FileStore) -> None:
        start.wait()
        for i in range(15):
            try:
                store.add(f"{ROOT}/k{i}", b"x")
                winners.append(i)
            except KeyExists:
                pass

    run_threads([lambda s=s: contend(s) for s in stores], start)
    assert sorted(winners) == list(range(15))
    for store in stores:
        assert store.revision() == 15
        store.close()


def test_what_a_disk_refuses_is_told_and_leaves_nothing(tmp_path: Path, monkeypatch):
    store, writer = FileStore(tmp_path), FileStore(tmp_path)
    store._log.changes.close()
    writer.add(f"{ROOT}/b", b"x")
    num_open = len(os.listdir("/proc/self/fd"))

    def refuse(*args: object) -> None:
        raise OSError(errno.EIO, "broken disk")

    for module, name, by in (
        (fcntl, "flock", refuse),
        (os, "read", refuse),
        (os, "write", lambda fd, data: len(data) - 1),
    ):
        with monkeypatch.context() as patch, golden.raises(StoreUnavailable):
            patch.setattr(module, name, by)
            store.add(f"{ROOT}/a", b"x")
    assert os.listdir(tmp_path / "tmp") == []
    assert len(os.listdir("/proc/self/fd")) == num_open
    store.add(f"{ROOT}/a", b"x")
    store.grant(ttl_s=60.0)
    store.close()
    writer.close()
    assert len(os.listdir("/proc/self/fd")) == num_open - 6 - 7  # folders, the lock, changes


def test_only_its_owner_reads_a_store_and_no_program_inherits_its_files(tmp_path: Path):
    root = tmp_path / "a" / "store"
    store = FileStore(root)
    store.grant(ttl_s=10.0)
    log = store._log
    fds = [*log._folders.values(), *log._counter_fds.values(), log._lock_fd, log.changes._fd]
    assert (len(fds), [fd for fd in fds if os.get_inheritable(fd)]) == (8, [])
    modes = [(p.is_dir(), p.stat().st_mode & 0o7777) for p in (root, *root.rglob("*"))]
    assert set(modes) == {(True, 0o700), (False, 0o600)}
    store.close()


def test_a_child_takes_a_lock_of_its_own(tmp_path: Path):
    log = FileStore(tmp_path)._log
    fds = [log._lock_fd]
    for pid in (os.getpid(), -1, os.getpid()):
        log._lock_pid = pid  # as after a fork
        with log.exclusive():
            fds.append(log._lock_fd)
    assert fds[0] == fds[1] != fds[2] == fds[3]
    assert log._lock_pid == os.getpid()


@pytest.mark.parametrize(("file_system", "synced"), [("xfs", 0), ("lustre", os.O_SYNC)])
def test_a_counter_is_on_the_server_where_other_hosts_read_it(
    tmp_path: Path, monkeypatch, file_system: str, synced: int
):
    monkeypatch.setattr(commit_log, "file_system_of", lambda path: file_system)
    store = FileStore(tmp_path)
    lease = store.grant(ttl_s=10.0)
    (fd,) = store._log._counter_fds.values()
    lease.keep_alive()
    assert list(store._log._counter_fds.values()) == [fd]
    assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_SYNC == synced
    with pytest.raises(StoreUnavailable):
        store._log.write_counter("none", 1)
    store.close()


@pytest.mark.parametrize(
    ("made_s", "kept"),
    [([0], 0), ([0, 1], 0), ([0, 60], 0), ([0, 1, 60], 0), ([0, 1, 61], 1), ([0, 1, 61, 121], 2)],
)
def test_a_snapshot_is_kept_for_a_minute(tmp_path: Path, made_s: Sequence[int], kept: int):
    store = FileStore(tmp_path)
    for revision, at_s in enumerate(made_s):
        path = tmp_path / "snapshots" / f"{revision:016d}"
        path.touch()
        os.utime(path, (1e9 + at_s, 1e9 + at_s))
    assert store._log._oldest_needed() == f"{kept:016d}"
    for revision in range(5):
        (tmp_path / "log" / f"{revision:016d}").touch()
    store._log.compact(len(made_s), b"", lambda name: True)
    store.close()


def test_changes_of_a_folder(tmp_path: Path, monkeypatch):
    fd, num_open = os.open(tmp_path, os.O_RDONLY), len(os.listdir("/proc/self/fd"))
    changes, writes = FolderChanges(fd, "ext4"), FileWrites(tmp_path)
    assert (changes.is_active, changes.reports_all, writes.is_active) == (True, True, True)
    shared = FolderChanges(fd, "lustre")
    assert (shared.is_active, shared.reports_all) == (True, False)
    shared.close()
    nothing = Changes("", others=False)
    assert changes.take() == nothing
    for name in ("b", "longer than one", "a"):
        (tmp_path / name).touch()
    assert changes.take() == Changes("longer than one", others=False)
    assert changes.take() == nothing
    (tmp_path / "c").hardlink_to(tmp_path / "a")
    (tmp_path / "b").rename(tmp_path / "d")
    (tmp_path / "a").unlink()
    assert changes.take() == Changes("d", others=True)
    assert not writes.has("c")
    (tmp_path / "c").write_text("x")
    (tmp_path / "d").write_text("x")
    assert changes.take() == nothing
    assert [writes.has(name) for name in ("c", "c", "none", "d")] == [True, False, False, True]
    polled = list[tuple[int, ...]]()
    poll = SimpleNamespace(
        poll=lambda: SimpleNamespace(
            register=lambda *of: polled.append(of), poll=lambda ms: polled.append((ms,))
        ),
        POLLIN=select.POLLIN,
    )
    monkeypatch.setattr(folder_changes, "select", poll)
    monkeypatch.setattr(
        folder_changes, "time", SimpleNamespace(sleep=lambda s: polled.append((s,)))
    )
    changes.wait(1.5)
    assert polled == [(changes._fd, select.POLLIN), (1500.0,)]
    changes.close()
    changes.close()
    changes.wait(2.5)
    assert polled[2:] == [(2.5,)]
    assert (changes.take(), FolderChanges(-1, "ext4").is_active) == (nothing, False)
    none = FileWrites(tmp_path / "none")
    assert (none.is_active, none.has("a")) == (False, False)
    del writes
    os.close(fd)
    assert len(os.listdir("/proc/self/fd")) == num_open - 1


def test_a_store_that_can_not_be_opened_keeps_no_descriptors(tmp_path: Path):
    root = tmp_path / "store"
    FileStore(root).close()
    (root / "FORMAT").write_text("layout 99")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with golden.raises(ConfigError):
            FileStore(root)
    (root / "FORMAT").write_bytes(commit_log.FORMAT)
    (root / "snapshots" / f"{0:016d}").write_bytes(b"\xc1 no msgpack")
    for _ in range(20):
        with golden.raises(StoreUnavailable):
            FileStore(root)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_commit_whose_answer_was_lost_is_ours(tmp_path: Path, monkeypatch):
    store = FileStore(tmp_path / "store")

    def link_twice(*args: object, **where: object) -> None:  # as NFS sends a request again
        link(*args, **where)
        link(*args, **where)

    link, num_open = os.link, len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "link", link_twice)
    store.add(f"{ROOT}/a", b"x")
    assert store.transaction([Compare.absent(f"{ROOT}/b")], puts=[Put(f"{ROOT}/b", b"y")])
    assert store.revision() == 2
    assert len(os.listdir("/proc/self/fd")) == num_open
    store.close()


@pytest.mark.parametrize(
    ("file_system", "inotify"), [("ext4", True), ("lustre", True), ("nfs4", False)]
)
def test_watches_and_reads_see_what_others_write(
    tmp_path: Path, monkeypatch, file_system: str, inotify: bool
):
    monkeypatch.setattr(commit_log, "file_system_of", lambda path: file_system)
    if not inotify:
        monkeypatch.setattr(folder_changes, "_watch", lambda *args: -1)
    reader, writer = FileStore(tmp_path / "store"), FileStore(tmp_path / "store")
    with reader.watch(ROOT) as watch:
        assert watch.poll(0.05) == []
        for i in range(5):
            writer.add(f"{ROOT}/k{i}", b"x")
            assert [event.key for event in watch.poll(60)] == [f"{ROOT}/k{i}"]
    writer.add(f"{ROOT}/last", b"x")
    if file_system != "ext4" and not inotify:
        time.sleep(file_store.POLL_S)
    assert reader.get(f"{ROOT}/last").value == b"x"
    reader.close()
    writer.close()


class FileSpy:
    """A file store on a clock of its own, and what it reads of its log."""

    def __init__(self, folder: Path, clock: HandClock, monkeypatch: pytest.MonkeyPatch) -> None:
        hands = SimpleNamespace(monotonic=clock, time=clock)
        monkeypatch.setattr(file_store, "time", hands)
        self.clock, self.store = clock, FileStore(folder, clock=clock)
        self.calls = list[str]()
        for name in ("read", "has", "read_counter"):
            monkeypatch.setattr(self.store._log, name, self._spied(name))

    def _spied(self, name: str) -> Callable[[object], object]:
        call = getattr(self.store._log, name)
        return lambda of: self.calls.append(name) or call(of)

    def calls_at(self, at_s: float, call: Callable[[], object]) -> str:
        self.clock.now_s = 1000.0 + at_s
        self.calls.clear()
        with self.store.lock:
            call()
        return " ".join(self.calls)


NEWS, SURE, LOOK = "read read has", "read has", "read"


@pytest.mark.parametrize(
    ("file_system", "inotify", "asked", "polled"),
    [
        # at second 0; a little later twice; after POLL_S, LONGEST_S, SURE_S; after that: news of others
        ("ext4", True, [SURE, "", "", "", SURE, NEWS], [SURE, "", "", "", SURE, NEWS]),
        (
            "ext4",
            False,
            [SURE, LOOK, LOOK, LOOK, SURE, "read read"],
            [SURE, "", "", LOOK, SURE, ""],
        ),
        ("lustre", True, [SURE, "", LOOK, LOOK, SURE, NEWS], [SURE, "", "", LOOK, SURE, NEWS]),
        ("nfs4", False, [SURE, "", LOOK, LOOK, SURE, ""], [SURE, "", "", LOOK, SURE, ""]),
    ],
)
@pytest.mark.parametrize("how", ["current", "recent"])
def test_a_look_reads_what_may_have_changed(
    tmp_path: Path, monkeypatch, clock: HandClock, file_system, inotify, asked, polled, how
):
    monkeypatch.setattr(commit_log, "file_system_of", lambda path: file_system)
    fresh = list[str]()
    monkeypatch.setattr(commit_log, "fresh", lambda folder, dir_fd: fresh.append(folder))
    if not inotify:
        monkeypatch.setattr(folder_changes, "_watch", lambda *args: -1)
    spy, writer = FileSpy(tmp_path, clock, monkeypatch), FileStore(tmp_path)
    look = getattr(spy.store, how)
    reads = [spy.calls_at(at_s, look) for at_s in (0.0, 0.05, 0.0625, 2.0625, 12.125)]
    writer.add(f"{ROOT}/a", b"x")
    reads.append(spy.calls_at(12.14, look))
    assert reads == (asked if how == "current" else polled)
    assert set(fresh) == ({"log"} if file_system == "nfs4" else set())
    with monkeypatch.context() as patch:
        patch.setattr(spy.store._log, "has", lambda revision: os.stat("/none"))
        with pytest.raises(OSError):
            spy.calls_at(30.0, look)
    assert spy.calls_at(30.01, look) == SURE  # after one that failed
    spy.store.close()
    writer.close()


def test_a_lease_of_another_host_is_read_five_times_a_ttl_and_a_holder_here_looked_for_more_often(
    tmp_path: Path, monkeypatch, clock: HandClock
):
    spy, known_dead = FileSpy(tmp_path, clock, monkeypatch), False
    monkeypatch.setattr(
        file_store, "is_known_dead", lambda holder: spy.calls.append("pid") or known_dead
    )
    lease = spy.store.grant(ttl_s=10.0)
    granted = spy.store.current().leases[lease.id]

    def judged(at_s: float, at_once: bool = False) -> tuple[bool, str]:
        answers = list[bool]()
        calls = spy.calls_at(
            at_s, lambda: answers.append(spy.store.is_dead(granted, at_once=at_once))
        )
        return answers[0], calls

    both = "pid read_counter"
    assert [judged(at_s) for at_s in (0.0, 0.125, 0.25, 1.75, 2.0, 3.75, 3.875)] == [
        *[(False, both), (False, ""), (False, "pid"), (False, "pid"), (False, both)],
        *[(False, "pid"), (False, "")],
    ]
    assert judged(3.875, at_once=True) == (False, both)
    lease.keep_alive()
    lease.keep_alive()
    assert (tmp_path / "leases" / lease.id).read_bytes() == b"%016d" % 2
    assert [judged(at_s) for at_s in (6.0, 13.75, 16.0, 16.25)] == [
        *[(False, both), (False, both), (False, both), (True, both)],
    ]
    known_dead = True
    assert judged(16.5) == (True, "pid")
    os.utime(tmp_path / "leases" / lease.id, (1010.0, 1010.0))
    assert spy.store.renewed_ago_s(lease.id) == 6.5
    clock.now_s = 1009.0  # the file server's clock is ahead
    assert spy.store.renewed_ago_s(lease.id) == 0.0
    counters, num_open = spy.store._log._counter_fds, len(os.listdir("/proc/self/fd"))
    known_dead = False
    lease.revoke()
    left = (spy.store._bumps, spy.store._seen, spy.store._read_s, spy.store._judged_s, counters)
    assert left == ({}, {}, {}, {}, {})
    assert len(os.listdir("/proc/self/fd")) == num_open - 1
    assert os.listdir(tmp_path / "leases") == []
    spy.store.close()


@pytest.mark.parametrize(
    ("file_system", "inotify", "longest_s", "pauses"),
    [
        ("ext4", True, 60.0, [0.2, 0.2]),
        ("ext4", True, 0.125, [0.125, 0.125]),
        ("lustre", True, 60.0, [0.05, 0.2]),
        ("nfs4", False, 60.0, [0.05, 0.2]),
    ],
)
def test_a_wait_pauses_until_something_is_due(
    tmp_path: Path, monkeypatch, clock: HandClock, file_system, inotify, longest_s, pauses
):
    monkeypatch.setattr(commit_log, "file_system_of", lambda path: file_system)
    if not inotify:
        monkeypatch.setattr(folder_changes, "_watch", lambda *args: -1)
    spy, waited = FileSpy(tmp_path, clock, monkeypatch), list[float]()
    monkeypatch.setattr(spy.store._log.changes, "wait", waited.append)
    spy.store.add(f"{ROOT}/a", b"x")
    spy.store.pause(longest_s, seen=0)
    assert waited == []  # there is something new already
    spy.store.pause(longest_s, seen=1)
    clock.now_s += 1.75  # the next look is due, and after it in 0.175 s or more
    spy.store.current()
    clock.now_s += 0.25
    spy.store.current()
    spy.store.pause(longest_s, seen=1)
    assert waited == pytest.approx(pauses)
    if not inotify or file_system != "ext4":
        clock.now_s += 5.0
        spy.store.pause(longest_s, seen=1)
        assert waited[-1] == 0.0
    spy.store.close()


def test_a_thread_that_waits_hears_of_a_write_by_another_thread_of_its_store(tmp_path: Path):
    store, waits, found = FileStore(tmp_path / "store"), threading.Event(), []

    def wait() -> None:
        with store.watch(ROOT) as watch:
            waits.set()
            found.extend(watch.poll(60))

    thread = threading.Thread(target=wait)
    thread.start()
    assert waits.wait(60)
    store.add(f"{ROOT}/a", b"x")
    thread.join(60)
    assert [event.key for event in found] == [f"{ROOT}/a"]
    store.close()


def test_who_looks_waits_at_most_a_tenth_longer_than_he_must():
    looking = PollSchedule(0.05)
    assert looking.due_in_s(0.0) <= 0
    looking.looked(100.0, found=True)
    pauses, now_s = [], 100.0
    while now_s < 160.0:
        pause_s = looking.due_in_s(now_s)
        now_s += pause_s
        pauses.append(pause_s)
        looking.looked(now_s, found=False)
        assert pause_s <= max(0.05, 0.1 * (now_s - 100.0))
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (pytest.approx(0.05), pytest.approx(2.0))
    looking.looked(now_s, found=True)
    assert looking.due_in_s(now_s) == pytest.approx(0.05)


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


MOUNTS = """\
21 1 8:1 / / rw shared:1 - ext4 /dev/sda1 rw
22 21 0:5 / /home rw - autofs auto rw
23 21 0:6 / /home rw - nfs4 server:/home rw
24 23 0:7 / /home/my\\040data rw - lustre mgs:/fs rw
"""


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("/", "ext4"),
        ("/homestead", "ext4"),
        ("/home", "nfs4"),  # the last one that was mounted there
        ("/home/anna", "nfs4"),
        ("/home/my data/a", "lustre"),
    ],
)
def test_the_file_system_of_a_path_is_found(monkeypatch, path: str, found: str):
    assert file_system_of(Path("/proc/self")) == "proc"
    monkeypatch.setattr(Path, "read_text", lambda self: MOUNTS)
    assert file_system_of(Path(path)) == found
    monkeypatch.setattr(Path, "read_text", lambda self: os.stat("/none"))
    assert file_system_of(Path(path)) == ""


def test_stores_open_by_address(tmp_path: Path):
    for url in (f"file://{tmp_path}/a%20store", "memory://test_stores_open_by_address"):
        first, second = open_store(url), open_store(url)
        first.add(f"{ROOT}/a", b"x")
        assert second.get(f"{ROOT}/a").value == b"x"
        first.close()
        second.close()
    assert (tmp_path / "a store").is_dir()


@pytest.mark.parametrize("url", ["redis://a:2379", "fiel:///tmp/x", "/tmp/x", "", "file://host/x"])
def test_unknown_addresses_are_explained(url: str):
    with golden.raises(ConfigError) as caught:
        open_store(url)
    if url.startswith("fiel"):
        golden.check(caught.value)


@pytest.mark.parametrize(
    ("url", "endpoints"),
    [
        ("etcd://a", ("a:2379",)),
        ("etcd://node1:23790,10.0.0.2/", ("node1:23790", "10.0.0.2:2379")),
        ("etcd://[fe80::1],[::1]:4001", ("[fe80::1]:2379", "[::1]:4001")),
    ],
)
def test_addresses_of_etcd_name_its_servers(url: str, endpoints: tuple[str, ...]):
    assert endpoints_of(url) == endpoints


@pytest.mark.parametrize("url", ["etcd://", "etcd://a,", "etcd://me:secret@a", "etcd://a:port"])
def test_addresses_without_a_server_are_refused(url: str):
    with golden.raises(ConfigError):
        open_store(url)


def test_a_jobs_own_etcd_needs_its_access():
    with golden.raises(ConfigError):
        open_store("etcd+job://")


# --- the access to an etcd ----------------------------------------------------------------------

ACCESS = EtcdAccess(endpoints=("a:1", "b:2"), user="anna", password="secret", ca_pem="CA")


def test_an_access_is_handed_on_in_a_file_of_its_owner(tmp_path: Path):
    path = tmp_path / "access"
    ACCESS.to_file(path)
    assert EtcdAccess.from_file(path) == ACCESS
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["access"]
    assert "secret" not in repr(ACCESS) + ACCESS.where
    with golden.raises(ConfigError):
        ACCESS.to_file(path)
    path.chmod(0o640)
    with golden.raises(ConfigError):
        EtcdAccess.from_file(path)
    path.chmod(0o600)
    path.write_text('{"endpoints": "secret"}')
    with golden.raises(ConfigError):
        EtcdAccess.from_file(path)


def test_an_access_is_read_from_the_files_of_a_cluster(tmp_path: Path):
    for name, text in (("password", "secret\n"), ("ca", "CA"), ("cert", "CERT"), ("key", "KEY")):
        (tmp_path / name).write_text(text)
    (tmp_path / "password").chmod(0o600)
    spec = EtcdSpec(
        user="anna",
        password_file=str(tmp_path / "password"),
        ca_file=str(tmp_path / "ca"),
        cert_file=str(tmp_path / "cert"),
        key_file=str(tmp_path / "key"),
    )
    (tmp_path / "key").chmod(0o644)
    with golden.raises(ConfigError):
        EtcdAccess.from_spec(("a:1",), spec)
    (tmp_path / "key").chmod(0o600)
    access = EtcdAccess.from_spec(("a:1",), spec)
    assert (access.user, access.password, access.ca_pem) == ("anna", "secret", "CA")
    assert (access.cert_pem, access.key_pem) == ("CERT", "KEY")
    (tmp_path / "ca").unlink()
    with golden.raises(ConfigError):
        EtcdAccess.from_spec(("a:1",), spec)
    with golden.raises(ConfigError):
        EtcdAccess.from_spec(("a:1",), EtcdSpec(user="anna"))


# --- what a failed call of etcd's means ---------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "details", "verdict"),
    [
        ("UNAVAILABLE", "failed to connect to all addresses; Connection refused", "never sent"),
        ("UNAVAILABLE", "etcdserver: no leader", "never sent"),
        ("UNAVAILABLE", "Socket closed", "unsure"),
        ("UNAVAILABLE", "etcdserver: request timed out", "unsure"),
        ("UNAVAILABLE", "etcdserver: leader changed", "unsure"),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", "unsure"),
        ("CANCELLED", "Channel closed!", "unsure"),
        ("UNKNOWN", "Stream removed", "unsure"),
        ("UNAUTHENTICATED", "etcdserver: invalid auth token", "log in"),
        ("INVALID_ARGUMENT", "etcdserver: revision of auth store is old", "log in"),
        ("RESOURCE_EXHAUSTED", "etcdserver: too many requests", "never sent"),
        ("RESOURCE_EXHAUSTED", "etcdserver: mvcc: database space exceeded", "final"),
        ("PERMISSION_DENIED", "etcdserver: permission denied", "final"),
        ("NOT_FOUND", "etcdserver: requested lease not found", "final"),
        ("UNKNOWN", "etcdserver: corrupt cluster", "final"),
    ],
)
def test_only_what_may_heal_is_tried_again(code: str, details: str, verdict: str):
    assert judge(code, details) == verdict


def test_a_watch_that_leaves_leases_to_others_reads_none_and_hears_of_their_ends(
    tmp_path: Path, monkeypatch, clock: HandClock
):
    stores = [FileStore(tmp_path / "store", clock=clock) for _ in range(3)]
    holder, judge, reader = stores
    lease = holder.grant(ttl_s=10.0)
    holder.add(f"{ROOT}/a", b"x", lease=lease)
    read = []
    real = reader._log.read_counter
    monkeypatch.setattr(reader._log, "read_counter", lambda name: read.append(name) or real(name))
    with reader.watch(ROOT, judges_leases=False) as watch:
        for _ in range(30):
            clock.now_s += 1.0
            assert watch.poll(0.0) == []
        assert read == []
        assert judge.find_subtree(ROOT) == [f"{ROOT}/a"]  # it sees the lease for the first time
        clock.now_s += 11.0
        assert judge.find_subtree(ROOT) == []
        assert [event.kind for event in watch.poll(60)] == [EventKind.EXPIRE]
    with reader.watch(ROOT) as watch:
        holder.add(f"{ROOT}/b", b"x", lease=holder.grant(ttl_s=10.0))
        assert len(watch.poll(60)) == 1
        clock.now_s += 4.0
        watch.poll(0.0)
        assert len(read) > 0
    for store in stores:
        store.close()
