"""Weights from trainers that go on training to receivers that come and go: real processes and sockets.

Number i of the model is, in version v, a function of i and v that no other version shares; between two
versions trainers write rubbish into their weights. So a mixture of versions shows, and so does one with
what came after. This file is also the program of trainers and receivers.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import forked
import pytest
import torch

from realsys.api.errors import RemoteError, WaitTimeout
from realsys.api.model import ProcessTopology
from realsys.data.transfer.tensor_client import TensorClient
from realsys.data.transfer.tensor_server import TensorServer
from realsys.data.transfer.tensor_store import TensorStore
from realsys.models.shape import Weight
from realsys.transport.codec import ProtocolError
from realsys.transport.curve_keys import TrialKeypairs
from realsys.transport.generation_messages import WeightPart, WeightSource
from realsys.weights.layouts.holdings import fsdp_layout
from realsys.weights.sync import host_share
from realsys.weights.sync.host_share import HostShare, PartSource, VersionSource
from realsys.weights.sync.manifest import KEY
from realsys.weights.sync.plan_publish import plan_publish, wire_dtypes
from realsys.weights.sync.publisher import WeightPublisher
from realsys.weights.sync.receiver import WeightReceiver

pytestmark = pytest.mark.process
MIB = 1 << 20
TOPOLOGY = ProcessTopology(data=2)
WEIGHTS = (Weight("a", (600, 512)), Weight("b", (100,)), Weight("c", (800, 512)))  # 2.7 MiB
BUCKET_BYTES = 256 << 10
WAIT_S = 240.0


def whole(version, *, stride=7):
    """The model in a version: exact in float32."""
    end, found = 0, {}
    for w in WEIGHTS:
        x = torch.arange(end, end + w.numel) * stride + version * 1009
        found[w.name] = (x % 65521).float().view(w.shape)
        end += w.numel
    return found


class Engine:
    """A rank's rows of all weights."""

    def __init__(self, holding):
        self.views = {
            name: [(box, torch.zeros(box.shape)) for box in boxes]
            for name, boxes in holding.items()
        }

    def held_weights(self):
        return self.views

    def become(self, version):
        values = whole(version)
        for name, parts in self.views.items():
            for box, x in parts:
                x.copy_(values[name][tuple(map(slice, box.start, box.stop))])

    def rubbish(self, number):
        for parts in self.views.values():
            for _, x in parts:
                x.mul_(-0.5).add_(float(number))


def who(keys):
    return {"trial": "t/1", "attempt": 1, "keypairs": TrialKeypairs.load(Path(keys))}


def say(**facts):
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


class Trainer:
    """A store behind a tensor server, and a publisher."""

    def __init__(self, rank, keypairs, **options):
        layout = fsdp_layout(WEIGHTS, TOPOLOGY)
        giving = plan_publish(layout, [0, 1], dtypes=wire_dtypes(WEIGHTS, dtype="float32"))
        self.store = TensorStore()
        self.engine = Engine(layout[rank])
        self.publisher = WeightPublisher(
            self.store,
            giving,
            model="actor@0",
            worker=rank,
            bucket_bytes=BUCKET_BYTES,
            **options,
        )
        self.server = TensorServer(
            TensorStore(),
            name=f"model_worker/{rank}",
            published={KEY: self.store},
            trial="t/1",
            attempt=1,
            keypairs=keypairs,
        ).start()

    def publish(self, version):
        self.engine.become(version)
        said = self.publisher.publish(self.engine, version)
        return WeightPart(endpoint=self.server.endpoint, name=said.name)


def train(keys, rank):
    """Publishes what it is told on standard input; writes rubbish all the while."""
    trainer = Trainer(int(rank), who(keys)["keypairs"])
    orders: queue.SimpleQueue = queue.SimpleQueue()
    listener = threading.Thread(target=lambda: [*map(orders.put, sys.stdin), orders.put("")])
    listener.start()
    say(ready=trainer.server.endpoint)
    number = 0
    while True:
        number += 1
        trainer.engine.rubbish(number)
        try:
            order = orders.get_nowait()
        except queue.Empty:
            time.sleep(0.002)  # a step's other work
            continue
        if not order:
            break
        part = trainer.publish(int(order))
        say(version=int(order), endpoint=part.endpoint, name=part.name, rubbish=number)
    trainer.server.stop()


def receive(keys, way):
    """Fetches each source that stands on standard input; says what it found."""
    receiver = WeightReceiver(
        lambda endpoints: TensorClient(endpoints, may_share=way == "memory", **who(keys))
    )
    say(ready=True)
    for line in sys.stdin:
        order = json.loads(line)
        source = WeightSource(
            version=order["version"], parts=tuple(WeightPart(**p) for p in order["parts"])
        )
        try:
            found = receiver.fetch(source, timeout_s=WAIT_S)
        except RemoteError as error:  # it is two versions behind
            say(version=source.version, gone=str(error))
            continue
        expected = whole(source.version)
        same = found.keys() == expected.keys() and all(
            torch.equal(found[name], x) for name, x in expected.items()
        )
        say(version=source.version, same=same)
    receiver.close()


class Process:
    """A trainer or receiver, and the lines that it says."""

    def __init__(self, role, *words, fork=True):
        here, support = Path(__file__), Path(forked.__file__).parent
        paths = (forked.environment().get("PYTHONPATH"), str(here.parent), str(support))
        paths = paths if fork else paths[1:]  # a signal to a stand-in does not reach the forked one
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join(filter(None, paths))}
        self._popen = subprocess.Popen(
            [sys.executable, "-m", here.stem, role, *map(str, words)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env=env,
        )
        self._lines: queue.SimpleQueue = queue.SimpleQueue()
        self._reader = threading.Thread(
            target=lambda: [self._lines.put(json.loads(x)) for x in self._popen.stdout]
        )
        self._reader.start()

    def tell(self, text):
        self._popen.stdin.write(f"{text}\n")

    def hear(self):
        return self._lines.get(timeout=WAIT_S)

    def kill(self):
        self._popen.kill()
        self._popen.wait(60)

    def close(self):
        self.kill()
        self._reader.join(60)
        self._popen.stdin.close()
        self._popen.stdout.close()


@pytest.fixture
def start(tmp_path):
    """Starts processes that share one trial's keys; all end with the test."""
    keys = tmp_path / "keys"
    TrialKeypairs.create(keys)
    with ExitStack() as stack:

        def start_one(role, *words, **how):
            process = Process(role, keys, *words, **how)
            stack.callback(process.close)
            return process

        yield start_one


def source_of(parts):
    return json.dumps(
        {
            "version": parts[0]["version"],
            "parts": [{"endpoint": p["endpoint"], "name": p["name"]} for p in parts],
        }
    )


@pytest.mark.parametrize("way", ["memory", "socket"])
def test_two_trainers_feed_two_receivers_while_they_train(start, way):
    """Every version that came is that version's bits; publishing did not wait for who fetches."""
    trainers = [start("train", rank) for rank in (0, 1)]
    receivers = [start("receive", way) for _ in (0, 1)]
    for process in (*trainers, *receivers):
        assert "ready" in process.hear()
    versions, rubbish = 12, []
    for version in range(versions):
        for trainer in trainers:
            trainer.tell(version)
        parts = [trainer.hear() for trainer in trainers]
        rubbish.append([part["rubbish"] for part in parts])
        receivers[version % 2].tell(source_of(parts))
        if version % 3 == 2:  # the other one, too: at the same time, or a version behind
            receivers[1 - version % 2].tell(source_of(parts))
    for receiver in receivers:
        receiver.tell(source_of(parts))  # the newest can't be gone
    told = [[r.hear() for _ in range(versions // 2 + versions // 6 + 1)] for r in receivers]
    for said in told:
        assert said[-1] == {"version": versions - 1, "same": True}
        assert all(one["same"] for one in said if "gone" not in one)
        assert all("on this worker" in one["gone"] for one in said if "gone" in one)
    assert rubbish == sorted(rubbish)  # they trained between two versions
    assert rubbish[-1][0] > rubbish[0][0] + versions


# ---- in one process: two trainers are two servers, with threads of their own --------------------------


@contextmanager
def trainers_here(**options):
    keypairs = TrialKeypairs.generate()
    torch.set_num_threads(1)
    trainers = [Trainer(rank, keypairs, **options) for rank in (0, 1)]
    made = []

    def receiver(**changes):
        made.append(
            WeightReceiver(
                lambda endpoints: TensorClient(
                    endpoints, trial="t/1", attempt=1, keypairs=keypairs
                ),
                **changes,
            )
        )
        return made[-1]

    try:
        yield trainers, receiver
    finally:
        for one in made:
            one.close()
        for trainer in trainers:
            trainer.server.stop()


def publish(trainers, version):
    return WeightSource(version=version, parts=tuple(t.publish(version) for t in trainers))


def same(found, version):
    return all(torch.equal(found[name], x) for name, x in whole(version).items())


def test_a_byte_that_is_damaged_on_the_way_is_noticed_and_the_next_fetch_is_right():
    with trainers_here() as (trainers, receiver):
        source = publish(trainers, 3)
        (x,) = trainers[1].store.rows(KEY, ["actor@0/3/1/2"])
        x[1000] ^= 64
        one = receiver()
        with pytest.raises(ProtocolError, match="model_worker/1"):
            one.fetch(source, timeout_s=WAIT_S)
        x[1000] ^= 64
        assert same(one.fetch(source, timeout_s=WAIT_S), 3)


def test_only_what_changed_crosses_the_wire():
    with trainers_here(delta=True) as (trainers, receiver):
        one = receiver()
        assert same(one.fetch(publish(trainers, 1), timeout_s=WAIT_S), 1)
        before = one.num_bytes
        for trainer in trainers:
            for parts in trainer.engine.views.values():
                parts[0][1].view(-1)[5] += 1
        parts = []
        for trainer in trainers:
            name = trainer.publisher.publish(trainer.engine, 2).name
            parts.append(WeightPart(endpoint=trainer.server.endpoint, name=name))
        found = one.fetch(WeightSource(version=2, parts=tuple(parts)), timeout_s=WAIT_S)
        assert one.num_bytes - before < before // 100
        changed = {n: int((found[n] != x).sum()) for n, x in whole(1).items()}
        assert changed == {"a": 2, "b": 2, "c": 2}


def test_strangers_put_nothing_among_published_weights():
    from realsys.data.sequence_sample import SequenceSample

    with trainers_here() as (trainers, receiver):
        source = publish(trainers, 1)
        name = source.parts[0].name
        sample = SequenceSample.from_tensors(
            [name], {KEY: [[4]]}, {KEY: torch.zeros(4, dtype=torch.uint8)}
        )
        keypairs = trainers[0].server._keypairs
        client = TensorClient([source.parts[0].endpoint], trial="t/1", attempt=1, keypairs=keypairs)
        client.put(0, sample, timeout_s=WAIT_S)
        client.close()
        assert same(receiver().fetch(source, timeout_s=WAIT_S), 1)


def test_a_trainer_that_was_killed_is_named_in_time(start):
    trainers = [start("train", rank) for rank in (0, 1)]
    for trainer in trainers:
        trainer.hear()
        trainer.tell(6)
    parts = [trainer.hear() for trainer in trainers]
    source = WeightSource(
        version=6, parts=tuple(WeightPart(endpoint=p["endpoint"], name=p["name"]) for p in parts)
    )
    trainers[1].kill()
    keys = Path(trainers[0]._popen.args[4])
    receiver = WeightReceiver(lambda e: TensorClient(e, **who(keys)), silence_s=0.5)
    named = parts[0]["endpoint"]
    until_s = time.monotonic() + WAIT_S
    while parts[0]["endpoint"] in named:  # on a busy machine the other one may be silent as long
        assert time.monotonic() < until_s
        with pytest.raises(WaitTimeout, match="version 6") as caught:
            receiver.fetch(source, timeout_s=100 * WAIT_S)  # its silence ends it, not the deadline
        named = caught.value.where
    assert parts[1]["endpoint"] in named
    receiver.close()


def test_a_receiver_that_is_closed_waits_for_nobody():
    with trainers_here() as (trainers, receiver):
        source = publish(trainers, 2)
        waits, gate, errors = threading.Event(), threading.Event(), []

        def silent(body):
            waits.set()
            gate.wait(WAIT_S)
            return b"", []

        trainers[1].server._answer = silent
        one = receiver(silence_s=10 * WAIT_S)

        def fetch():
            try:
                one.fetch(source, timeout_s=10 * WAIT_S)
            except WaitTimeout as error:
                errors.append(error.what)

        thread = threading.Thread(target=fetch)
        thread.start()
        assert waits.wait(WAIT_S)
        one.close()
        thread.join(WAIT_S)
        gate.set()
        assert not thread.is_alive()
        assert "model_worker/1 did not" in errors[0]


def test_a_trainer_that_is_silent_does_not_hold_up_what_another_gives():
    """One trainer answers nothing for a while; all that the other has comes meanwhile."""
    with trainers_here() as (trainers, receiver):
        source = publish(trainers, 2)
        gate, answer = threading.Event(), trainers[1].server._answer
        came, answered = [], []
        mine = receiver(silence_s=2 * WAIT_S)

        def slow(body):
            if answered:  # its list is out: hold the buckets back
                gate.wait(WAIT_S)
            answered.append(1)
            return answer(body)

        rows = mine._rows

        def counted(*args):
            for where, x in rows(*args):
                came.append(where)
                if sum(w[0] == 0 for w in came) == 1 + len(trainers[0].publisher._buckets):
                    gate.set()  # everything of the first trainer is here
                yield where, x

        trainers[1].server._answer = slow
        mine._rows = counted
        assert same(mine.fetch(source, timeout_s=WAIT_S), 2)
        assert gate.is_set()


def test_a_receiver_that_does_not_read_does_not_hold_up_another(monkeypatch):
    """Frames, not memory: whatever the slow one leaves lying is not in the other one's way."""
    with trainers_here() as (trainers, receiver):
        source = publish(trainers, 2)
        slow, quick = receiver(in_flight=100), receiver()
        begun, gate, found = threading.Event(), threading.Event(), []
        rows = slow._rows

        def held_up(*args):
            for number, one in enumerate(rows(*args)):
                if number == 3:
                    begun.set()
                    gate.wait(WAIT_S)
                yield one

        slow._rows = held_up
        thread = threading.Thread(
            target=lambda: found.append(slow.fetch(source, timeout_s=2 * WAIT_S))
        )
        thread.start()
        assert begun.wait(WAIT_S)
        for version in (3, 4):  # training goes on, too
            newer = publish(trainers, version)
            assert same(quick.fetch(newer, timeout_s=WAIT_S), version)
        gate.set()
        thread.join(WAIT_S)
        assert same(found[0], 2)  # all of it was asked for before it was forgotten


# ---- several servers of one host ----------------------------------------------------------------------


def shared(keypairs, **options):
    return lambda fetch: HostShare(keypairs, attempt="t/1 1", fetch=fetch, **options)


def neighbour(keys, silence_s):
    """As ``receive``, one of several on a host; says what came over the network, and keeps what it got."""
    receiver = WeightReceiver(
        lambda endpoints: TensorClient(endpoints, may_share=False, **who(keys)),
        share=shared(who(keys)["keypairs"], silence_s=float(silence_s)),
    )
    say(ready=True)
    kept, counted = {}, 0
    for line in sys.stdin:
        order = json.loads(line)
        source = WeightSource(
            version=order["version"], parts=tuple(WeightPart(**p) for p in order["parts"])
        )
        found = receiver.fetch(source, timeout_s=WAIT_S)
        kept = {source.version: found, **dict(list(kept.items())[:1])}
        right = [same(x, version) for version, x in kept.items()]
        # Since the last order, not this one: it may have fetched for a neighbour that came first.
        say(version=source.version, right=right, num_bytes=receiver.num_bytes - counted)
        counted = receiver.num_bytes
        del found
    receiver.close()


def two_trainers(start, **how):
    trainers = [start("train", rank, **how) for rank in (0, 1)]
    for trainer in trainers:
        trainer.hear()

    def published(version):
        for trainer in trainers:
            trainer.tell(version)
        return source_of([trainer.hear() for trainer in trainers])

    return trainers, published


MODEL_BYTES = sum(4 * w.numel for w in WEIGHTS)


def test_servers_of_one_host_fetch_each_version_once(start):
    """Whoever comes first; what each keeps of the version before stays what it was."""
    _, published = two_trainers(start)
    servers = [start("neighbour", WAIT_S) for _ in range(2)]
    for server in servers:
        server.hear()
    for version in range(6):
        source = published(version)
        for server in servers[:: -1 if version % 2 else 1]:
            server.tell(source)
        told = [server.hear() for server in servers]
        assert [said["version"] for said in told] == [version] * 2
        assert all(said["right"] == [True] * min(version + 1, 2) for said in told)
        came = sum(said["num_bytes"] for said in told)
        assert MODEL_BYTES <= came < 1.05 * MODEL_BYTES  # and not twice


def until_stopped(pid: int) -> None:
    """The kernel stops threads one by one: all of them."""
    deadline_s = time.monotonic() + 240
    while True:
        states = {
            stat.read_text().rpartition(") ")[2][0]
            for stat in Path(f"/proc/{pid}/task").glob("*/stat")
        }
        if states == {"T"}:
            return
        assert time.monotonic() < deadline_s, states
        time.sleep(0.01)


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_dies_or_hangs_while_it_fetches_for_others_is_replaced(start, kind):
    trainers, published = two_trainers(start, fork=False)
    # Of a killed one they hear at once: only one that hangs is found by its silence.
    silence_s = 2.0 if kind == signal.SIGSTOP else WAIT_S
    servers = [start("neighbour", silence_s, fork=False) for _ in range(3)]
    for server in servers:
        server.hear()
    source = published(0)
    servers[0].tell(source)
    assert servers[0].hear()["num_bytes"] >= MODEL_BYTES  # the others will ask it
    source = published(1)
    os.kill(trainers[1]._popen.pid, signal.SIGSTOP)  # a fetch stays in its middle
    until_stopped(trainers[1]._popen.pid)
    for server in servers:
        server.tell(source)
    with pytest.raises(queue.Empty):
        servers[0]._lines.get(timeout=0.5)
    os.kill(servers[0]._popen.pid, kind)
    os.kill(trainers[1]._popen.pid, signal.SIGCONT)
    told = [server.hear() for server in servers[1:]]
    assert all(said["version"] == 1 and said["right"] == [True] for said in told)
    if kind == signal.SIGKILL:  # another one fetched for both
        assert sum(said["num_bytes"] for said in told) < 1.05 * MODEL_BYTES
    source = published(2)
    for server in servers[1:]:
        server.tell(source)
    assert all(server.hear()["right"] == [True, True] for server in servers[1:])


@contextmanager
def neighbours_here(count=2, **options):
    """Receivers of one host, here in one process, of trainers here."""
    with trainers_here(**options) as (trainers, _):
        keypairs = trainers[0].server._keypairs
        made = [
            WeightReceiver(
                lambda e: TensorClient(
                    e, trial="t/1", attempt=1, keypairs=keypairs, may_share=False
                ),
                share=shared(keypairs),
            )
            for _ in range(count)
        ]
        try:
            yield trainers, made
        finally:
            for one in made:
                one.close()
            assert not [t for t in threading.enumerate() if t.name == "weights of this host"]


def test_a_version_is_used_by_others_when_who_fetched_it_has_gone_on():
    with neighbours_here() as (trainers, (first, second)):
        source = publish(trainers, 1)
        mine, kept = first.fetch(source, timeout_s=WAIT_S), second.fetch(source, timeout_s=WAIT_S)
        assert second.num_bytes == 0
        arenas = first._share.arenas._arenas
        assert mine["a"].data_ptr() != kept["a"].data_ptr()  # mapped twice
        mine["a"][0] += 1
        assert torch.equal(kept["a"], mine["a"])  # and the same memory
        mine["a"][0] -= 1
        del mine
        for version in (2, 3, 4):
            assert same(first.fetch(publish(trainers, version), timeout_s=WAIT_S), version)
            assert same(kept, 1)
            assert len(arenas) == 2  # one that is kept, one that is used again and again
        del kept
        assert same(second.fetch(publish(trainers, 5), timeout_s=WAIT_S), 5)
        assert len(arenas) == 1
        assert second.num_bytes == 0


def test_who_is_asked_for_what_it_has_no_more_says_so_and_the_other_fetches_it():
    with neighbours_here() as (trainers, (first, second)):
        older, newer = publish(trainers, 1), publish(trainers, 2)
        assert same(first.fetch(newer, timeout_s=WAIT_S), 2)
        assert same(second.fetch(older, timeout_s=WAIT_S), 1)
        assert second.num_bytes >= MODEL_BYTES
        assert same(second.fetch(newer, timeout_s=WAIT_S), 2)
        assert second.num_bytes < 1.05 * MODEL_BYTES


def test_one_fetches_for_a_neighbour_what_nobody_has_told_it_of():
    with neighbours_here() as (trainers, (first, second)):
        assert same(first.fetch(publish(trainers, 1), timeout_s=WAIT_S), 1)
        before = first.num_bytes
        source = publish(trainers, 2)
        assert same(second.fetch(source, timeout_s=WAIT_S), 2)
        assert (second.num_bytes, first.num_bytes > before) == (0, True)
        came = first.num_bytes
        assert same(first.fetch(source, timeout_s=WAIT_S), 2)
        assert first.num_bytes == came


def test_what_changed_is_shared_too_and_comes_whole_after_who_fetched_has_ended():
    with neighbours_here(delta=True) as (trainers, (first, second)):
        source = publish(trainers, 1)
        for one in (first, second):
            assert same(one.fetch(source, timeout_s=WAIT_S), 1)
        before = first.num_bytes
        parts = []
        for trainer in trainers:
            for views in trainer.engine.views.values():
                views[0][1].view(-1)[5] += 1
            name = trainer.publisher.publish(trainer.engine, 2).name
            parts.append(WeightPart(endpoint=trainer.server.endpoint, name=name))
        source = WeightSource(version=2, parts=tuple(parts))
        found = [one.fetch(source, timeout_s=WAIT_S) for one in (first, second)]
        assert first.num_bytes - before < before // 100
        assert second.num_bytes == 0
        for weights in found:
            changed = {n: int((weights[n] != x).sum()) for n, x in whole(1).items()}
            assert changed == {"a": 2, "b": 2, "c": 2}
        first.close()
        assert same(second.fetch(publish(trainers, 3), timeout_s=WAIT_S), 3)
        assert second.num_bytes >= MODEL_BYTES


def test_a_name_that_another_user_has_is_left_alone(monkeypatch):
    with neighbours_here() as (trainers, (first, second)):
        source = publish(trainers, 1)
        first.fetch(source, timeout_s=WAIT_S)
        monkeypatch.setattr(host_share, "_is_mine", lambda connection: False)
        assert same(second.fetch(source, timeout_s=WAIT_S), 1)
        assert second.num_bytes >= MODEL_BYTES


def test_servers_of_other_trainers_or_another_attempt_do_not_meet():
    keypairs = TrialKeypairs.generate()
    parts = tuple(PartSource(f"tcp://h{n}:1", f"actor@0/3/{n}") for n in (0, 1))

    def name(attempt="1", version=3, parts=parts, keypairs=keypairs):
        share = HostShare(keypairs, attempt=attempt, fetch=lambda *_: None)
        return share._name_of(VersionSource(version, parts))

    later = tuple(PartSource(p.endpoint, p.name.replace("/3/", "/4/")) for p in parts)
    assert name() == name(version=4, parts=later) == name(parts=parts[::-1])
    others = [name(attempt="2"), name(parts=parts[:1]), name(keypairs=TrialKeypairs.generate())]
    assert len({name(), *others}) == 4


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"train": train, "receive": receive, "neighbour": neighbour}[sys.argv[1]](*sys.argv[2:])
