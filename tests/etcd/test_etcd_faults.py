"""The etcd store while etcd, its disk, its logins or the network fail, for real.

What must hold: a watch loses nothing, repeats nothing and keeps the order; a write happens once; whatever
can't be done is said in time and in words; and an open store works again when etcd does.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest
from etcd_server import EtcdCluster, Tls, small_disk, wait_until
from name_resolve_cases import DELETE, EXPIRE, PUT, collect
from proxy import Proxy, Way

from realsys.api.errors import KeyExists, LeaseLost, StoreError, StoreUnavailable
from realsys.name_resolve.etcd.access import EtcdAccess
from realsys.name_resolve.etcd.etcd_store import EtcdStore
from realsys.name_resolve.etcd.etcd_watch import EtcdWatch
from realsys.name_resolve.store import Compare, Event, Put

T = TypeVar("T")
ROOT = "realsys/v1/site/anna/ppo/run1"
StartEtcd = Callable[..., EtcdCluster]


@contextmanager
def opened(access: EtcdAccess, *, call_timeout_s: float = 5.0) -> Iterator[EtcdStore]:
    store = EtcdStore.open(access, call_timeout_s=call_timeout_s)
    try:
        yield store
    finally:
        store.close()


class Writer:
    """Writes numbers to three keys from a thread, through whatever happens, and notes what was said."""

    def __init__(self, store: EtcdStore) -> None:
        self._store, self._stop = store, threading.Event()
        self.acknowledged: list[tuple[int, str, bytes]] = []
        self.unsure: list[bytes] = []
        self._thread = threading.Thread(target=self._write)

    def __enter__(self) -> Writer:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join(60)
        assert not self._thread.is_alive()

    def wait_for_more(self, num_writes: int = 20) -> None:
        goal = len(self.acknowledged) + num_writes
        wait_until(lambda: len(self.acknowledged) >= goal, lambda: "no writes", timeout_s=60)

    def _write(self) -> None:
        for number in itertools.count():
            key, value = f"{ROOT}/key{number % 3}", b"%d" % number
            if self._stop.is_set():
                return
            try:
                revision = self._store.add(key, value, replace=True)
                self.acknowledged.append((revision, key, value))
            except StoreUnavailable:
                self.unsure.append(value)
            time.sleep(0.002)


def check_history(writer: Writer, events: list[Event]) -> None:
    """Nothing acknowledged is missing, nothing comes twice or out of order."""
    assert [e.revision for e in events] == sorted({e.revision for e in events})
    values = [e.value for e in events]
    assert len(set(values)) == len(values), "a write happened twice"
    assert [int(value) for value in values] == sorted(map(int, values))
    told = {(e.revision, e.key, e.value) for e in events}
    assert not [written for written in writer.acknowledged if written not in told]
    assert {value for _, _, value in told} <= {v for _, _, v in writer.acknowledged} | set(
        writer.unsure
    )


def drain(*watches: EtcdWatch, until: Callable[[], int]) -> list[list[Event]]:
    """All events of each watch, up to a revision that is asked when the writing is over."""
    last, events = until(), [[] for _ in watches]
    for watch, found in zip(watches, events, strict=True):
        deadline_s = time.monotonic() + 240
        while (not found or found[-1].revision < last) and time.monotonic() < deadline_s:
            found += watch.poll(0.1)
        assert watch.poll(0.1) == []
    return events


# --- etcd ends and comes back -------------------------------------------------------------------


def test_kills_under_load_lose_and_repeat_nothing(start_etcd: StartEtcd) -> None:
    with start_etcd() as etcd, opened(etcd.access()) as store, opened(etcd.access()) as other:
        with (
            store.watch(ROOT) as watch,
            other.watch(f"{ROOT}/key0", f"{ROOT}/key1", f"{ROOT}/key2") as narrow,
            Writer(store) as writer,
        ):
            for _ in range(3):
                writer.wait_for_more()
                etcd.kill()
                time.sleep(0.3)
                etcd.restart()
            writer.wait_for_more()
            writer.__exit__()
            wide, parts = drain(watch, narrow, until=other.revision)
        check_history(writer, wide)
        assert parts == wide


def test_an_outage_of_ten_seconds_is_sat_out(start_etcd: StartEtcd) -> None:
    with start_etcd() as etcd, opened(etcd.access(), call_timeout_s=1) as store:
        lease = store.grant(ttl_s=8)
        store.add(f"{ROOT}/worker", b"x", lease=lease)
        with store.watch(ROOT) as watch:
            assert watch.is_connected or watch.poll(0.2) == []
            etcd.kill()
            killed_s = time.monotonic()
            calls = (
                lambda: store.get(f"{ROOT}/worker"),
                lambda: store.add(f"{ROOT}/new", b"x"),
                lease.keep_alive,
                store.revision,
            )
            while time.monotonic() - killed_s < 10:
                for call in calls:
                    began_s = time.monotonic()
                    with pytest.raises(StoreUnavailable):
                        call()
                    assert time.monotonic() - began_s > 0.9
            assert watch.poll(0) == []
            assert not watch.is_connected
            etcd.members[0].start()
            wait_until(lambda: is_listening(etcd), lambda: "etcd is not back", timeout_s=60)
            again_soon(lease.keep_alive)
            assert store.get(f"{ROOT}/worker").lease_id == lease.id
            store.add(f"{ROOT}/new", b"x")
            assert [(e.kind, e.key) for e in collect(watch, 1)] == [(PUT, f"{ROOT}/new")]
            assert watch.is_connected
        lease.keep_alive()


def test_members_fail_in_turn(start_etcd: StartEtcd) -> None:
    with start_etcd(members=3) as etcd, opened(etcd.access()) as store:
        with opened(etcd.access()) as other, other.watch(ROOT) as watch, Writer(store) as writer:
            lease = other.grant(ttl_s=60)
            for _ in range(2):
                writer.wait_for_more()
                leader = etcd.leader()
                leader.kill()
                writer.wait_for_more()
                lease.keep_alive()
                leader.start()
                etcd.wait_ready()
            writer.wait_for_more()
            writer.__exit__()
            (events,) = drain(watch, until=other.revision)
        check_history(writer, events)


def test_without_a_majority_nothing_is_claimed(three_etcds: EtcdCluster) -> None:
    first, second, third = three_etcds.members
    access = three_etcds.access(endpoints=(third.endpoint, second.endpoint))
    with opened(access, call_timeout_s=2) as store, store.watch(ROOT) as watch:
        store.add(f"{ROOT}/a", b"1", replace=True)
        assert len(collect(watch, 1)) == 1
        first.kill()
        second.kill()
        with pytest.raises(StoreUnavailable):
            store.get(f"{ROOT}/a")
        # The member that is left answers, and says that it has nobody to ask.
        wait_until(lambda: not watch.is_connected, lambda: "still connected", timeout_s=60)
        three_etcds.restart()
        again_soon(lambda: store.add(f"{ROOT}/b", b"2", replace=True))
        assert [e.value for e in collect(watch, 1)] == [b"2"]
        store.clear_subtree(ROOT)


def test_a_frozen_member_costs_a_part_of_a_calls_time(three_etcds: EtcdCluster) -> None:
    follower = next(m for m in three_etcds.members if m is not three_etcds.leader())
    others = [m.endpoint for m in three_etcds.members if m is not follower]
    access = three_etcds.access(endpoints=(follower.endpoint, *others))
    with opened(access, call_timeout_s=20) as store:
        store.client._channels._now = 0
        store.add(f"{ROOT}/a", b"1", replace=True)
        follower.freeze()
        try:
            assert store.get(f"{ROOT}/a").value == b"1"
            answered = store.client._channels._now
            assert answered != 0
            store.add(f"{ROOT}/a", b"2", replace=True)
            assert store.client._channels._now == answered  # it asked nobody else
        finally:
            follower.thaw()


# --- history that is gone -----------------------------------------------------------------------


def test_a_watch_that_compaction_overtook_gets_the_difference(etcd: EtcdCluster) -> None:
    root = ROOT + "-compaction"
    member = etcd.members[0]
    with (
        Proxy(member.endpoint) as proxy,
        opened(etcd.access()) as store,
        opened(etcd.access(endpoints=(proxy.endpoint,))) as far,
    ):
        for name in ("changed", "gone", "same"):
            store.add(f"{root}/{name}", b"old")
        store.add(f"{root}0/neighbour", b"old")
        with far.watch(root) as watch:
            store.add(f"{root}/seen", b"1")
            assert len(collect(watch, 1)) == 1
            proxy.drop()
            store.add(f"{root}/changed", b"between", replace=True)
            last = store.add(f"{root}/changed", b"new", replace=True)
            store.delete(f"{root}/gone")
            store.add(f"{root}/came", b"and")
            store.delete(f"{root}/came")
            store.add(f"{root}/here", b"now")
            etcd.etcdctl("compact", str(store.revision()))
            proxy.heal()
            events = collect(watch, 3)
            assert sorted((e.kind, e.key.removeprefix(root), e.value) for e in events) == [
                (DELETE, "/gone", b""),
                (PUT, "/changed", b"new"),
                (PUT, "/here", b"now"),
            ]
            assert events[0].revision == last
            store.add(f"{root}/seen", b"2", replace=True)
            assert [e.value for e in collect(watch, 1)] == [b"2"]
            assert watch.poll(0.2) == []
        with store.watch(root, from_revision=1) as late:
            keys = [e.key.removeprefix(root) for e in collect(late, 4)]
            assert sorted(keys) == ["/changed", "/here", "/same", "/seen"]


# --- the network --------------------------------------------------------------------------------


@pytest.fixture
def proxy(etcd: EtcdCluster) -> Iterator[Proxy]:
    with Proxy(etcd.members[0].endpoint) as between:
        yield between


@pytest.fixture
def far(etcd: EtcdCluster, proxy: Proxy) -> Iterator[EtcdStore]:
    """A store behind the proxy."""
    with opened(etcd.access(endpoints=(proxy.endpoint,)), call_timeout_s=2) as store:
        yield store


def test_a_slow_network_is_only_slow(far: EtcdStore, proxy: Proxy) -> None:
    proxy.delay(0.2)
    with far.watch(ROOT) as watch:
        far.add(f"{ROOT}/slow", b"x")
        assert [e.value for e in collect(watch, 1)] == [b"x"]
    assert far.clear_subtree(ROOT) == 1


def test_a_silent_network_ends_calls_and_heals(far: EtcdStore, proxy: Proxy) -> None:
    far.add(f"{ROOT}/a", b"x")
    lease = far.grant(ttl_s=60)
    with far.watch(ROOT) as watch:
        for cut in (proxy.half_open, proxy.drop, lambda: proxy.black_hole(Way.TO_SERVER)):
            cut()
            with pytest.raises(StoreUnavailable):
                far.get(f"{ROOT}/a")
            proxy.heal()
            again_soon(lambda: far.get(f"{ROOT}/a"))
            lease.keep_alive()
            far.add(f"{ROOT}/a", b"y", replace=True)
            assert [e.value for e in collect(watch, 1)] == [b"y"]
    far.clear_subtree(ROOT)


def with_reply_lost(proxy: Proxy, call: Callable[[], T]) -> T:
    """Makes the call; it arrives, and the first reply never does."""
    done: list[T] = []
    thread = threading.Thread(target=lambda: done.append(call()))
    proxy.black_hole(Way.TO_CLIENT)
    thread.start()
    time.sleep(0.15)
    proxy.reset_once()
    proxy.heal()
    thread.join(100)
    assert done, "the call failed"
    return done[0]


def test_a_write_whose_reply_is_lost_happens_once(proxy: Proxy, etcd: EtcdCluster) -> None:
    key = f"{ROOT}/a"
    with (
        opened(etcd.access(endpoints=(proxy.endpoint,)), call_timeout_s=60) as far,
        opened(etcd.access()) as near,
        near.watch(ROOT) as watch,
    ):
        added = with_reply_lost(proxy, lambda: far.add(key, b"1"))
        assert (near.get(key).revision, near.get(key).version) == (added, 1)
        with pytest.raises(KeyExists):
            far.add(key, b"1")  # the same value, and not ours
        replaced = with_reply_lost(proxy, lambda: far.add(key, b"2", replace=True))
        assert (near.get(key).revision, near.get(key).version) == (replaced, 2)
        seen = [Compare.at_revision(key, replaced)]
        assert with_reply_lost(proxy, lambda: far.transaction(seen, puts=[Put(key, b"3")]))
        assert near.get(key).version == 3
        assert not with_reply_lost(proxy, lambda: far.transaction(seen, puts=[Put(key, b"4")]))
        with_reply_lost(proxy, lambda: far.delete(key))
        lease = with_reply_lost(proxy, lambda: far.grant(ttl_s=60))
        with_reply_lost(proxy, lambda: far.add(key, b"5", lease=lease))
        with_reply_lost(proxy, lease.keep_alive)
        with_reply_lost(proxy, lease.revoke)
        for name in ("b", "c"):
            near.add(f"{ROOT}/{name}", b"6")
        assert with_reply_lost(proxy, lambda: far.clear_subtree(ROOT)) == 2
        events = collect(watch, 10)
        assert watch.poll(0.2) == []
    assert [(e.kind, e.value) for e in events] == [
        *((PUT, b"1"), (PUT, b"2"), (PUT, b"3"), (DELETE, b"3")),
        *((PUT, b"5"), (DELETE, b"5"), (PUT, b"6"), (PUT, b"6"), (DELETE, b"6"), (DELETE, b"6")),
    ]


def test_a_write_that_nobody_can_vouch_for_is_called_unknown(far: EtcdStore, proxy: Proxy) -> None:
    proxy.black_hole(Way.TO_CLIENT)
    with pytest.raises(StoreUnavailable, match="unknown"):
        far.add(f"{ROOT}/a", b"x")
    proxy.heal()
    again_soon(lambda: far.clear_subtree(ROOT))


# --- logins and certificates --------------------------------------------------------------------


def test_a_login_that_runs_out_is_renewed(start_etcd: StartEtcd) -> None:
    with start_etcd(token_ttl_s=1) as etcd, Proxy(etcd.members[0].endpoint) as proxy:
        etcd.add_users(anna="secret")
        access = etcd.access("anna", "secret", endpoints=(proxy.endpoint,))
        with opened(access) as store, store.watch(ROOT) as watch:
            lease = store.grant(ttl_s=30)
            store.add(f"{ROOT}/a", b"0", lease=lease)
            assert len(collect(watch, 1)) == 1
            time.sleep(2.5)
            proxy.reset_once()  # the watch is begun anew, with a token that has run out
            with opened(etcd.access(*etcd.user)) as root:
                root.add(f"{ROOT}/b", b"1")
            assert [e.value for e in collect(watch, 1)] == [b"1"]
            time.sleep(2.5)
            store.add(f"{ROOT}/c", b"2")
            lease.keep_alive()
            time.sleep(2.5)
            with store.watch(ROOT) as late:
                time.sleep(2.5)
                lease.revoke()
                assert [e.kind for e in collect(late, 1)] == [DELETE]
            etcd.kill()  # a member forgets its logins
            etcd.restart()
            again_soon(lambda: store.get(f"{ROOT}/b"))


def test_who_may_not_enter_is_told_why(start_etcd: StartEtcd) -> None:
    with start_etcd() as etcd:
        with pytest.raises(StoreError, match=r"password.*'anna'"):
            EtcdStore.open(etcd.access("anna", "secret"))
        etcd.add_users(anna="secret")
        prefix = "/realsys/v1/site/bob/"
        etcd.etcdctl("role", "add", "bob")
        etcd.etcdctl("role", "grant-permission", "--prefix=true", "bob", "readwrite", prefix)
        etcd.etcdctl("user", "add", "bob:bob")
        etcd.etcdctl("user", "grant-role", "bob", "bob")
        with pytest.raises(StoreError, match="'anna'"):
            EtcdStore.open(etcd.access("anna", "wrong"))
        with opened(etcd.access()) as store, pytest.raises(StoreError, match="given"):
            store.get(f"{ROOT}/a")
        with opened(etcd.access("bob", "bob")) as store:
            own = "realsys/v1/site/bob/ppo/run1"
            before = store.revision()
            with store.watch(f"{own}/a") as watch:
                store.add(f"{own}/a", b"x")
                store.delete(f"{own}/a")
                assert len(collect(watch, 2)) == 2
            assert store.revision() > before
            calls = (
                lambda: store.add(f"{ROOT}/a", b"x"),
                lambda: store.get_subtree(ROOT),
                lambda: store.watch(ROOT),
            )
            for call in calls:
                with pytest.raises(StoreError, match="'bob'") as caught:
                    call()
                assert "realsys etcd roles" in caught.value.fix
            with store.watch(own) as watch:
                etcd.etcdctl("user", "revoke-role", "bob", "bob")
                watch._stream.cancel()
                assert watch.poll(2) == [], "it was allowed, and will be again: no error"
                assert not watch.is_connected
                etcd.etcdctl("user", "grant-role", "bob", "bob")
                store.add(f"{own}/b", b"y")
                assert [event.value for event in collect(watch, 1)] == [b"y"]


def test_tls_protects_and_its_problems_are_named(start_etcd: StartEtcd, tmp_path: Path) -> None:
    stranger = Tls.make(tmp_path / "other")
    with start_etcd(tls=True) as etcd:
        with opened(etcd.access()) as store, store.watch(ROOT) as watch:
            store.add(f"{ROOT}/a", b"x")
            assert len(collect(watch, 1)) == 1
        pair = {"cert_pem": stranger.client.cert_pem, "key_pem": stranger.client.key_pem}
        wrong = {
            "authority": etcd.access(ca_pem=stranger.ca_pem),
            "name": etcd.access(server_name="elsewhere.example"),
            "our certificate": etcd.access(**pair),
            "no certificate": etcd.access(cert_pem=None, key_pem=None),
            "no TLS": EtcdAccess(endpoints=etcd.endpoints),
        }
        for what, access in wrong.items():
            began_s = time.monotonic()
            # A server that wants TLS and gets none just hangs up, so that one is tried until the end.
            with pytest.raises(StoreUnavailable) as caught:
                EtcdStore.open(access, call_timeout_s=600 if access.is_encrypted else 2)
            assert time.monotonic() - began_s < 100, what
            assert "certificate" in caught.value.fix, (what, caught.value.what)


# --- no room ------------------------------------------------------------------------------------


def test_a_full_etcd_says_so_and_recovers(start_etcd: StartEtcd) -> None:
    with start_etcd(quota_bytes=2 << 20) as etcd, opened(etcd.access()) as store:
        lease = store.grant(ttl_s=60)
        store.add(f"{ROOT}/worker", b"x", lease=lease)
        write_until_refused(store, b"%d", times=25_000)
        with pytest.raises(StoreUnavailable, match="NOSPACE") as caught:
            store.add(f"{ROOT}/more", b"x" * 100_000)
        assert "etcdctl alarm disarm" in caught.value.fix
        lease.keep_alive()
        assert store.get(f"{ROOT}/worker").value == b"x"
        etcd.etcdctl("compact", str(store.revision()))
        etcd.etcdctl("defrag")
        etcd.etcdctl("alarm", "disarm")
        store.add(f"{ROOT}/after", b"x")
        assert store.clear_subtree(ROOT) == 3


def test_a_full_disk_ends_a_member_and_not_the_store(
    start_etcd: StartEtcd, etcd_folder: Path
) -> None:
    with (
        small_disk(etcd_folder / "full disk", size_mib=160) as disk,
        start_etcd(data=disk) as etcd,
        opened(etcd.access(), call_timeout_s=2) as store,
    ):
        store.add(f"{ROOT}/a", b"before")
        fill(disk / "filler")
        written = write_until_refused(store, b"%04d", times=8_000)
        (disk / "filler").unlink()
        etcd.kill()
        etcd.restart()
        again_soon(lambda: store.add(f"{ROOT}/c", b"after"))
        assert store.get(f"{ROOT}/a").value == b"before"
        if written:  # what was acknowledged is there
            assert int(store.get(f"{ROOT}/big").value[:4]) >= len(written) - 1


# --- processes and numbers ----------------------------------------------------------------------


def test_a_forked_child_is_refused_and_its_parent_lives_on(etcd: EtcdCluster) -> None:
    with opened(etcd.access()) as store:
        store.clear_subtree(ROOT)
        read_fd, write_fd = os.pipe()
        pid = os.fork()
        if pid == 0:  # the child: nothing of pytest may run here
            try:
                store.get(f"{ROOT}/a")
            except StoreError as error:
                os.write(write_fd, error.what.encode())
            finally:
                os._exit(0)
        os.close(write_fd)
        with os.fdopen(read_fd, "rb") as pipe:
            assert b"forked child" in pipe.read()
        os.waitpid(pid, 0)
        store.add(f"{ROOT}/a", b"x")
        assert store.clear_subtree(ROOT) == 1


def test_two_thousand_leases_share_one_client(etcd: EtcdCluster) -> None:
    with opened(etcd.access()) as store:
        began_s = time.monotonic()
        leases = [store.grant(ttl_s=600) for _ in range(2000)]
        for i, lease in enumerate(leases):
            store.add(f"{ROOT}/worker/{i}", b"x" * 100, lease=lease)
        registered_s = time.monotonic()
        for lease in leases:
            lease.keep_alive()
        renewed_s = time.monotonic()
        assert registered_s - began_s < 120  # 2.5 s on two cores that do nothing else
        assert renewed_s - registered_s < 60  # 1 s there
        assert store.clear_subtree(ROOT) == 2000


def test_three_hundred_deaths_are_told_as_such(etcd: EtcdCluster) -> None:
    with opened(etcd.access()) as store, store.watch(ROOT) as watch:
        shared = store.grant(ttl_s=4)
        of_one = [Put(f"{ROOT}/worker/{i}", b"x", shared) for i in range(0, 300, 10)]
        assert store.transaction([], puts=of_one)
        for i in set(range(300)) - set(range(0, 300, 10)):  # at once: it lives for seconds
            store.add(f"{ROOT}/worker/{i}", b"x", lease=store.grant(ttl_s=4))
        events = collect(watch, 600, timeout_s=100)
        assert [e.kind for e in events].count(EXPIRE) == 300
        assert {e.kind for e in events} == {PUT, EXPIRE}
        with pytest.raises(LeaseLost):
            shared.keep_alive()


def write_until_refused(store: EtcdStore, text: bytes, *, times: int) -> list[bytes]:
    """Writes long values until the store takes no more; returns those that it took."""
    taken: list[bytes] = []
    for number in range(3000):
        value = text % number * times
        try:
            store.add(f"{ROOT}/big", value, replace=True)
        except StoreUnavailable:
            return taken
        taken.append(value[:10])
    raise AssertionError("there is room for everything")


def fill(path: Path) -> None:
    """Writes until the disk is full."""
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError:
            pass


def is_listening(etcd: EtcdCluster) -> bool:
    return etcd._answers(etcd.members[0])


def again_soon(call: Callable[[], T], *, timeout_s: float = 240) -> T:
    """The call's result, as soon as the store answers again."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            return call()
        except StoreUnavailable:
            if time.monotonic() > deadline_s:
                raise
