"""The conformance suite over the memory and the file store, and what is theirs alone.

The cases are in tests/support/name_resolve_cases.py. ``clock`` judges the leases here and is moved by hand.
"""

import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

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
)
from realsys.name_resolve.etcd.access import EtcdAccess, endpoints_of
from realsys.name_resolve.etcd.etcd_failures import judge
from realsys.name_resolve.file import commit_log, file_store, folder_changes
from realsys.name_resolve.file.commit_log import file_system_of
from realsys.name_resolve.file.file_store import FileStore, PollSchedule
from realsys.name_resolve.key_table import TrialKeys
from realsys.name_resolve.keyspace import MAX_HISTORY_EVENTS
from realsys.name_resolve.keyspace_store import KeySpaceStore
from realsys.name_resolve.memory_store import MemoryStore, SharedMemory
from realsys.name_resolve.open import open_store
from realsys.name_resolve.store import Compare, EventKind, Lease, NameResolve, Put
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
    with golden.raises(LeaseLost):
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
    store.close()


def test_a_held_lock_ends_in_an_error_and_never_in_a_hang(tmp_path: Path):
    holder = FileStore(tmp_path / "store")
    waiter = FileStore(tmp_path / "store", lock_timeout_s=0.1)
    with holder._log.exclusive(), golden.raises(StoreUnavailable):
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

    link = os.link
    monkeypatch.setattr(os, "link", link_twice)
    store.add(f"{ROOT}/a", b"x")
    assert store.transaction([Compare.absent(f"{ROOT}/b")], puts=[Put(f"{ROOT}/b", b"y")])
    assert store.revision() == 2
    store.close()


@pytest.mark.parametrize("inotify", [True, False])
@pytest.mark.parametrize("file_system", ["ext4", "lustre", "nfs4"])
def test_watches_and_reads_see_what_others_write(
    tmp_path: Path, monkeypatch, file_system: str, inotify: bool
):
    monkeypatch.setattr(commit_log, "file_system_of", lambda path: file_system)
    if not inotify:
        monkeypatch.setattr(folder_changes, "_watch", lambda *args: -1)
    reader, writer = FileStore(tmp_path / "store"), FileStore(tmp_path / "store")
    with reader.watch(ROOT) as watch:
        assert watch.poll(0.3) == []
        for i in range(5):
            writer.add(f"{ROOT}/k{i}", b"x")
            assert [event.key for event in watch.poll(60)] == [f"{ROOT}/k{i}"]
    writer.add(f"{ROOT}/last", b"x")
    if file_system != "ext4" and not inotify:
        time.sleep(file_store.POLL_S)
    assert reader.get(f"{ROOT}/last").value == b"x"
    reader.close()
    writer.close()


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


def test_the_file_system_of_a_path_is_found():
    assert file_system_of(Path("/proc/self")) == "proc"


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
