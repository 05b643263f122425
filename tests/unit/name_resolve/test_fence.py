"""Fenced writes: what an attempt shows counts only while it is the newest, whatever it thinks itself."""

import logging
from dataclasses import replace
from types import SimpleNamespace

import golden
import pytest

from realsys.api.errors import StaleAttempt, StoreUnavailable
from realsys.name_resolve import retry
from realsys.name_resolve.fence import AttemptFence
from realsys.name_resolve.key_table import TrialKeys
from realsys.name_resolve.open import open_store
from realsys.name_resolve.store import Put
from realsys.supervisor.attempt.attempt import end_attempt
from realsys.trial.records import AttemptRecord, dumps

KEYS = TrialKeys(cluster="local", user="anna", experiment="ppo-math", trial="run1")
OURS = AttemptRecord(
    number=2, token="ours", host="n1", supervisor_pid=7, supervisor_start=9, started_at=1.0
)
NEWER = replace(OURS, number=3, token="theirs", host="n2")
SHOWN = KEYS.checkpoint("main")


class Flaky:
    """A store before which things happen: ``before`` is called ahead of each call, and may raise."""

    def __init__(self, store):
        self._store, self.before, self.calls = store, lambda: None, 0

    def get(self, key):
        self._happen()
        return self._store.get(key)

    def transaction(self, *args, **kwargs):
        self._happen()
        return self._store.transaction(*args, **kwargs)

    def _happen(self):
        self.calls += 1
        self.before()


@pytest.fixture(params=["memory", "file"])
def store(request, tmp_path):
    url = f"memory://{tmp_path}" if request.param == "memory" else f"file://{tmp_path}/store"
    store = open_store(url)
    store.add(KEYS.attempt, dumps(OURS))
    yield store
    store.close()


@pytest.fixture
def flaky(store) -> Flaky:
    return Flaky(store)


@pytest.fixture
def fence(flaky) -> AttemptFence:
    return AttemptFence(flaky, KEYS, OURS)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(retry, "RETRY_S", 0.01)


def shown(store) -> list[str]:
    return [key for key in (SHOWN, KEYS.done) if store.find_subtree(key)]


# ---- ours -----------------------------------------------------------------------------------------


def test_the_newest_attempt_writes_and_deletes_at_once(store, fence):
    store.add(KEYS.done, b"old")
    before = store.revision()
    fence.write([Put(SHOWN, b"10")], deletes=[KEYS.done])
    assert store.get(SHOWN).value == b"10"
    assert shown(store) == [SHOWN]
    assert store.revision() == before + 1


def test_a_second_write_asks_nothing_first(flaky, fence):
    fence.write([Put(SHOWN, b"10")])
    calls = flaky.calls
    fence.write([Put(SHOWN, b"20")])
    assert flaky.calls == calls + 1


def test_the_same_record_written_again_is_still_ours(store, fence):
    """Its supervisor may repeat itself after a reply that was lost."""
    fence.write([Put(SHOWN, b"10")])
    store.add(KEYS.attempt, dumps(OURS), replace=True)
    fence.write([Put(SHOWN, b"20")])
    assert store.get(SHOWN).value == b"20"


# ---- not ours -------------------------------------------------------------------------------------


def take_over(store):
    store.add(KEYS.attempt, dumps(NEWER), replace=True)


def take_over_under_our_number(store):
    """Where each thought the other was gone: only the tokens differ."""
    store.add(KEYS.attempt, dumps(replace(NEWER, number=2)), replace=True)


def end(store):
    end_attempt(store, KEYS, OURS)


def clear(store):
    store.delete(KEYS.attempt)


ENDS = (take_over, take_over_under_our_number, end, clear)
each_end = pytest.mark.parametrize("happens", ENDS, ids=[f.__name__ for f in ENDS])


@each_end
@pytest.mark.parametrize("written_before", [False, True])
def test_after_it_is_over_nothing_is_written(store, fence, happens, written_before):
    if written_before:
        fence.write([Put(KEYS.done, b"x")])
    happens(store)
    for write in (fence.write, lambda puts: insist(fence, puts)):
        with pytest.raises(StaleAttempt) as refused:
            write([Put(SHOWN, b"10")])
    assert shown(store) == [KEYS.done][:written_before]
    assert refused.value.where == "trial ppo-math/run1"


@each_end
def test_what_happens_between_our_look_and_our_write_refuses_it(store, flaky, fence, happens):
    def before():
        if flaky.calls == 2:  # the look was the first call
            happens(store)

    flaky.before = before
    with pytest.raises(StaleAttempt):
        fence.write([Put(SHOWN, b"10")])
    assert shown(store) == []


@each_end
def test_a_check_alone_tells_it_too(store, fence, happens):
    fence.check()
    happens(store)
    with golden.raises(StaleAttempt):
        fence.check()


# ---- a store that is away -------------------------------------------------------------------------


def insist(fence, puts, *, timeout_s=60.0):
    """As whoever publishes does: tries again while the store is away."""
    retry.retry_while_unavailable(lambda: fence.write(puts), timeout_s=timeout_s, what="publishing")


def away_until(flaky, call):
    def before():
        if flaky.calls < call:
            raise StoreUnavailable("no route to host", where="etcd", fix="start it")

    flaky.before = before


def test_a_write_does_not_wait_for_the_store(store, flaky, fence):
    away_until(flaky, 2)
    with pytest.raises(StoreUnavailable):
        fence.write([Put(SHOWN, b"10")])
    assert shown(store) == []


@pytest.mark.parametrize("seen_before", [False, True])
def test_what_must_not_be_lost_is_tried_until_the_store_is_back(
    store, flaky, fence, seen_before, caplog
):
    if seen_before:
        fence.check()
    away_until(flaky, flaky.calls + 5)
    with caplog.at_level(logging.WARNING):
        insist(fence, [Put(SHOWN, b"10")])
    assert store.get(SHOWN).value == b"10"
    assert len(caplog.messages) == 4
    golden.check(caplog.text)


def test_who_was_overtaken_while_the_store_was_away_is_refused_when_it_is_back(store, flaky, fence):
    fence.check()
    away_until(flaky, flaky.calls + 3)
    take_over(store)
    with golden.raises(StaleAttempt):
        insist(fence, [Put(SHOWN, b"10")])
    assert shown(store) == []


def test_a_reply_that_was_lost_costs_a_second_write_of_the_same(store, flaky, fence):
    """Unknown whether it happened: written twice says the same as once."""
    fence.check()
    transaction = flaky.transaction

    def lost(*args, **kwargs):
        transaction(*args, **kwargs)
        flaky.transaction = transaction
        raise StoreUnavailable("the reply was lost", where="etcd", fix="")

    flaky.transaction = lost
    insist(fence, [Put(SHOWN, b"10")])
    assert store.get(SHOWN).value == b"10"


def test_the_wait_for_the_store_has_an_end(store, flaky, fence, monkeypatch):
    away_until(flaky, 10**9)
    now_s, pauses = [100.0], []

    def sleep(seconds):
        pauses.append(seconds)
        now_s[0] += seconds

    monkeypatch.setattr(retry, "RETRY_S", 0.5)
    monkeypatch.setattr(retry, "time", SimpleNamespace(monotonic=lambda: now_s[0], sleep=sleep))
    with golden.raises(StoreUnavailable):
        insist(fence, [Put(SHOWN, b"10")], timeout_s=1.75)
    assert pauses == [0.5] * 4
    assert flaky.calls == 5
    assert shown(store) == []


def test_words_between_an_attempts_jobs_count_after_its_end_and_not_after_a_newer_one(store):
    last = AttemptFence(store, KEYS, OURS, may_have_ended=True)
    end(store)
    last.write([Put(KEYS.component_order, b"leave")])
    assert store.get(KEYS.component_order).value == b"leave"
    take_over(store)
    with golden.raises(StaleAttempt):
        last.write([Put(KEYS.component_order, b"leave again")])
