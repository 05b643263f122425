"""Measures how long it takes to detect a lost worker: killed, disconnected, or stalled.

    python benchmarks/bench_detection.py crash --store etcd|file [--kills 200] [--seed 0]
    python benchmarks/bench_detection.py cut-off [--cuts 40] [--at-once 3]      # root: network namespaces
    python benchmarks/bench_detection.py hung [--runs 10]                       # real trials

``crash``: workers that only register, each with its real heartbeat process, are killed at random times,
several at once; measures the master's PeerWatch and the supervisor's two detectors. ``cut-off``: each
node is a network namespace that is disconnected at the other end of its link; measures the supervisor's
detection, and when the workers there stop their side effects. ``hung``: one of two model workers of a
real trial gets SIGSTOP in the middle of a step. Goals: p99 2 s; p99 25 s; 3 steps.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "etcd"))

from etcd_server import ADDRESS, EtcdCluster

from realsys.heartbeat.heartbeat_link import Heartbeat
from realsys.heartbeat.heartbeat_messages import Init
from realsys.master.graph.peer_watch import PeerWatch
from realsys.name_resolve.key_table import TrialKeys
from realsys.name_resolve.lease_validity import TTL_S, LeaseStatus
from realsys.name_resolve.open import open_store
from realsys.name_resolve.store import EventKind
from realsys.observability.worker_logs import configure_logging
from realsys.supervisor.health.worker_leases import WorkerLeases
from realsys.trial.records import AttemptRecord, WorkerRecord, WorkerStatus, dumps, loads

KEYS = TrialKeys(cluster="here", user="anna", experiment="bench", trial="detection")
ATTEMPT = AttemptRecord(
    number=1, token="ours", host="here", supervisor_pid=1, supervisor_start=1, started_at=0.0
)
TYPE = "model_worker"
CREW = 20  # workers that are up at a time, for ``crash``
NODES, PER_NODE = 8, 2
APART_S = (
    4.0,
    6.0,
)  # between two cuts: leases of several hosts that end within a second freeze decisions
POLL_S = 0.02
DEADLINE_S = 120.0


# ---- a worker ---------------------------------------------------------------------------------


def play_worker(store: str, folder: str, index: int, host: str) -> None:
    """Registers, then says each change of its standing and when it was."""
    configure_logging(f"{TYPE}/{index}")
    link = Heartbeat(
        Init(
            worker_type=TYPE,
            index=index,
            pid=os.getpid(),
            attempt=1,
            token=ATTEMPT.token,
            store_url=store,
            attempt_dir=folder,
            keys=KEYS,
        ),
        on_stop=lambda request: None,
        on_command=lambda value: None,
        on_terminate=lambda over: None,
    ).start()
    record = WorkerRecord(
        worker=f"{TYPE}/{index}",
        host=host,
        pid=os.getpid(),
        start=1,
        attempt=1,
        token=ATTEMPT.token,
    )
    status = WorkerStatus(state="ready", attempt=1, token=ATTEMPT.token)
    link.register(record, status, ttl_s=TTL_S, timeout_s=60.0)
    lease_status = None
    while True:
        if link.lease_status is not lease_status:
            lease_status = link.lease_status
            print(f"{lease_status.value} {time.monotonic()}", flush=True)  # noqa: T201
        time.sleep(POLL_S)


@dataclass
class Worker:
    """A process of ``play_worker``; a Task to the supervisor's code, that never says how it ended."""

    process: subprocess.Popen[str]
    index: int
    host: str
    pid: int = 0
    ended_at: float | None = None
    hint: str = ""
    is_over: bool = False
    changes: dict[str, float] = field(default_factory=dict)  # standing → when it became that last

    def __post_init__(self) -> None:
        self.pid = self.process.pid
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def worker(self) -> str:
        return f"{TYPE}/{self.index}"

    def poll(self) -> int | None:
        return -signal.SIGKILL if self.is_over else None

    def kill(self) -> None:
        self.process.kill()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            lease_status, _, at = line.partition(" ")
            self.changes[lease_status] = float(at)


class Trial:
    """The store's keys of a trial, its workers, and those who watch over them."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder, self.store = url, folder, open_store(url)
        self.workers: dict[str, Worker] = {}
        self.seen_s: dict[str, dict[str, float]] = {}  # who saw it → worker → when
        self._numbers = itertools.count()
        self._ended = threading.Event()
        self.store.add(KEYS.attempt, dumps(ATTEMPT), replace=True)
        self.log = (folder / "workers.log").open("ab")
        self.leases = WorkerLeases(
            self.store, KEYS, ATTEMPT, judges_leases=True, has_left=lambda task: False
        )

    def start(self, host: str, *, url: str = "", prefix: Sequence[str] = ()) -> Worker:
        index = next(self._numbers)
        words = ["worker", url or self.url, str(self.folder), str(index), host]
        process = subprocess.Popen(
            [*prefix, sys.executable, __file__, *words],
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )
        worker = Worker(process, index, host)
        self.workers[worker.worker] = worker
        return worker

    def wait_held(self, workers: Sequence[Worker]) -> None:
        """Until they have registered."""
        until(
            lambda: all(w.changes.get(LeaseStatus.VALID) for w in workers),
            "workers did not register",
        )
        # Whom the supervisor has never seen it can't miss.
        names = {w.worker for w in workers}
        until(lambda: names <= self.leases.registered.keys(), "the supervisor did not see them")

    def saw(self, who: str, worker: str) -> None:
        self.seen_s.setdefault(who, {}).setdefault(worker, time.monotonic())

    def supervise(self) -> None:
        """The supervisor's loop: looks at the leases. Of its children's ends it hears by ``reap``."""
        self.leases.begin_phase(1)
        while not self._ended.wait(POLL_S):
            for task in self.leases.lost(list(self.workers.values())):
                self.saw("leases", task.worker)
        self.leases.end_phase()

    def reap(self, every_s: float = 0.05) -> None:
        """The supervisor's other way: a child has ended."""
        while not self._ended.wait(every_s):
            for worker in list(self.workers.values()):
                if worker.process.poll() is not None:
                    self.saw("child", worker.worker)

    def watch_keys(self) -> None:
        """When keys end by themselves."""
        with self.store.watch(KEYS.workers) as watch:
            while not self._ended.is_set():
                for event in watch.poll(0.5):
                    if event.kind is EventKind.EXPIRE:
                        self.saw("expiry", event.key.removeprefix(KEYS.workers + "/"))

    @contextmanager
    def watched(self) -> Iterator[None]:
        loops = (self.supervise, self.reap, self.watch_keys)
        threads = [threading.Thread(target=loop, name=loop.__name__) for loop in loops]
        peers = PeerWatch(
            self.store,
            KEYS,
            token=ATTEMPT.token,
            from_revision=self.store.revision() + 1,
            on_ended=lambda worker, reason: self.saw("master", worker),
        )
        for thread in threads:
            thread.start()
        try:
            with peers:
                yield
        finally:
            for worker in self.workers.values():
                worker.kill()
                worker.process.wait()
            self._ended.set()
            for thread in threads:
                thread.join()
            self.store.close()


# ---- crash ------------------------------------------------------------------------------------


def bench_crash(store: str, num_kills: int, rng: random.Random) -> None:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = f"file://{folder}/store"
        if store == "etcd":
            url = stack.enter_context(EtcdCluster(folder / "etcd")).url
        trial = Trial(url, folder)
        stack.enter_context(trial.watched())
        killed_s: dict[str, float] = {}
        while len(killed_s) < num_kills:
            crew = [trial.start("here") for _ in range(min(CREW, num_kills - len(killed_s)))]
            trial.wait_held(crew)
            while crew:
                time.sleep(rng.uniform(0.1, 1.0))
                for _ in range(min(len(crew), rng.choice((1, 1, 2, 4)))):
                    worker = crew.pop(rng.randrange(len(crew)))
                    worker.kill()
                    killed_s[worker.worker] = time.monotonic()
            for who in ("child", "master", "leases"):
                until(lambda who=who: killed_s.keys() <= trial.seen_s.get(who, {}).keys(), who)
            for worker in trial.workers.values():
                worker.is_over = True
        say(f"{num_kills} workers killed, store {store}, seconds:")
        for who, text in (
            ("master", "the master's PeerWatch"),
            ("child", "the supervisor, of its child"),
            ("leases", "the supervisor, by the store alone"),
        ):
            spread(text, [trial.seen_s[who][w] - at_s for w, at_s in killed_s.items()])


# ---- cut off ----------------------------------------------------------------------------------


@dataclass
class Node:
    """A network namespace and its cable to this machine; removed by leaving the context."""

    number: int

    @property
    def name(self) -> str:
        return f"bd{os.getpid()}n{self.number}"  # an interface's name has 15 letters at most

    @property
    def address(self) -> str:
        """Of the cable's end on our side."""
        return f"10.213.{self.number}.1"

    @property
    def inside(self) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.name)

    def __enter__(self) -> Node:
        name, far = self.name, f"{self.name}x"
        ip("netns", "add", name)
        ip("link", "add", name, "type", "veth", "peer", "name", far, "netns", name)
        ip("addr", "add", f"{self.address}/30", "dev", name)
        ip("link", "set", name, "up")
        far_address = f"10.213.{self.number}.2/30"
        for words in (["addr", "add", far_address, "dev", far], ["link", "set", far, "up"]):
            ip("-n", name, *words)
        return self

    def __exit__(self, *exc_info: object) -> None:
        ip("link", "del", self.name)
        ip("netns", "del", self.name)

    def cut(self) -> None:
        ip("link", "set", self.name, "down")

    def heal(self) -> None:
        ip("link", "set", self.name, "up")


def bench_cut_off(num_cuts: int, at_once: int, rng: random.Random) -> None:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        nodes = [stack.enter_context(Node(number)) for number in range(NODES)]
        etcd = EtcdCluster(folder / "etcd", election_ms=1000)
        port = etcd.members[0].port
        hosts = (ADDRESS, *(node.address for node in nodes))
        listen = ",".join(f"http://{host}:{port}" for host in hosts)
        etcd.members[0]._flags.append(f"--listen-client-urls={listen}")
        stack.enter_context(etcd)
        trial = Trial(etcd.url, folder)
        stack.enter_context(trial.watched())
        cutter = Cutter(trial, port)
        for node in nodes:
            cutter.staff(node)
        cutter.one_by_one(nodes, num_cuts, rng)
        say(f"{num_cuts} nodes cut off one by one, {PER_NODE} workers each, ttl {TTL_S:g} s:")
        cutter.table()
        if at_once > 1:
            cutter.clear()
            cutter.cut(nodes[:at_once])
            say(f"{at_once} nodes of {NODES} cut off at one moment:")
            cutter.table()


class Cutter:
    """Cuts nodes off, waits for the verdict on their workers, and staffs them anew."""

    def __init__(self, trial: Trial, port: int) -> None:
        self._trial, self._port = trial, port
        self._crews: dict[str, list[Worker]] = {}
        self.clear()

    def clear(self) -> None:
        self.suspended_s: list[float] = []
        self.expired_s: list[float] = []
        self.verdict_s: list[float] = []  # until the first worker of a node is lost, from the cut
        self.margin_s: list[float] = []  # from a worker's suspension until it was declared lost
        self.expiry_margin_s: list[float] = []

    def staff(self, node: Node) -> None:
        url = f"etcd://{node.address}:{self._port}"
        crew = [self._trial.start(node.name, url=url, prefix=node.inside) for _ in range(PER_NODE)]
        self._trial.wait_held(crew)
        self._crews[node.name] = crew

    def one_by_one(self, nodes: Sequence[Node], num_cuts: int, rng: random.Random) -> None:
        threads: list[threading.Thread] = []
        for number in range(num_cuts):
            if number >= len(nodes):
                threads[number - len(nodes)].join()  # this node has been staffed again
            time.sleep(rng.uniform(*APART_S))
            thread = threading.Thread(target=self.cut, args=([nodes[number % len(nodes)]],))
            thread.start()
            threads.append(thread)
        for thread in threads:
            thread.join()

    def cut(self, nodes: Sequence[Node]) -> None:
        """Cuts them at once; returns when all are lost, healed and staffed again."""
        trial = self._trial
        cut_s = {}
        for node in nodes:
            node.cut()
            cut_s[node.name] = time.monotonic()
        crews = {node.name: self._crews[node.name] for node in nodes}
        names = {worker.worker for crew in crews.values() for worker in crew}
        until(lambda: names <= trial.seen_s.get("leases", {}).keys(), f"{names} are not lost")
        for name, crew in crews.items():
            for worker in crew:
                self._note(worker, cut_s[name])
        for node in nodes:
            for worker in crews[node.name]:
                worker.kill()
                worker.is_over = True
            node.heal()
            self.staff(node)

    def _note(self, worker: Worker, cut_s: float) -> None:
        suspended_s = worker.changes[LeaseStatus.UNCERTAIN]
        lost_s = self._trial.seen_s["leases"][worker.worker]
        expired_s = self._trial.seen_s["expiry"][worker.worker]
        self.suspended_s.append(suspended_s - cut_s)
        self.expired_s.append(expired_s - cut_s)
        self.verdict_s.append(lost_s - cut_s)
        self.margin_s.append(lost_s - suspended_s)
        self.expiry_margin_s.append(expired_s - suspended_s)

    def table(self) -> None:
        spread("the worker suspends itself", self.suspended_s)
        spread("its lease ends in the store", self.expired_s)
        spread("the supervisor declares it lost", self.verdict_s)
        spread("from its suspension to the end of its lease", self.expiry_margin_s)
        spread("from its suspension to the verdict", self.margin_s)


# ---- hung -------------------------------------------------------------------------------------

BOTH = "actor.parallel=d2t1p1"
LONG_STEPS = {  # seconds, with two processes on a core each
    "task.train_size": "1024",
    "train_bs_n_seqs": "64",
    "group_size": "4",
    "gen.max_new_tokens": "96",
    "exp_ctrl.eval_freq_steps": "none",
}
STALL_FLOOR_S = 3.0  # so that the steps decide
STEPS_FIRST = 5
UNNOTICED_S = 40.0


def bench_hung(num_runs: int, rng: random.Random) -> None:
    from real_trials import LONG_PPO, Trials

    from realsys.data.sources.arithmetic_problems import arithmetic_word_problems
    from realsys.models.from_scratch.tiny_llama import build_tiny_llama

    os.environ["REALSYS_STALL_FLOOR_S"] = f"{STALL_FLOOR_S:g}"
    settings = {**dict(word.split("=") for word in LONG_PPO), **LONG_STEPS}
    runs = []
    with tempfile.TemporaryDirectory() as root:
        problems = arithmetic_word_problems(num_problems=500, seed=0, split="train")
        build_tiny_llama(
            Path(root) / "policy",
            seed=0,
            hidden_size=32,
            num_layers=2,
            num_heads=2,
            num_kv_heads=1,
            corpus=[p["prompt"] + p["answer"] for p in problems],
        )
        words = [f"actor.path={root}/policy", BOTH, *(f"{k}={v}" for k, v in settings.items())]
        trials = Trials(Path(root))
        try:
            for number in range(num_runs):
                runs.append(Hung.measure(trials, f"run{number}", words, rng))
                say(f"  {runs[-1]}")
        finally:
            trials.end_all()
    say(f"{num_runs} trials, one of two model workers stopped by SIGSTOP:")
    spread("median step, seconds", [run.step_s for run in runs])
    spread("from SIGSTOP to the supervisor's decision, seconds", [run.decided_s for run in runs])
    spread("the same in steps", [run.decided_s / run.step_s for run in runs])
    spread("to the end of the attempt, seconds", [run.ended_s for run in runs])
    say(f"  the stopped worker was named {sum(run.named == run.worker for run in runs)} times")


@dataclass(frozen=True, kw_only=True)
class Hung:
    """One trial."""

    worker: str  # that was stopped
    named: str  # as the first failure
    doing: str  # its state and call when it was stopped
    step_s: float
    decided_s: float
    ended_s: float

    @classmethod
    def measure(cls, trials: Any, name: str, words: Sequence[str], rng: random.Random) -> Hung:
        from real_trials import kill_everything, wait_until, worker_pid

        from realsys.api.plan import read_plan
        from realsys.trial.trial_state import State

        files = trials.launch("ppo-math", name, *words)
        view = trials.wait_for_step(files, STEPS_FIRST, timeout_s=DEADLINE_S)
        plan = read_plan(files.plan)
        keys = TrialKeys.of(plan)
        worker = f"{TYPE}/{rng.randrange(2)}"
        pid = worker_pid(view, worker)
        log = (files.root / "latest" / "logs" / "master_worker-0.log").read_text()
        step_s = statistics.median(map(float, re.findall(r"step done seconds=([0-9.]+)", log)))
        with (
            closing(open_store(plan.name_resolve_url)) as store,
            store.watch(keys.commands) as watch,
        ):
            time.sleep(rng.uniform(0, step_s))
            status = loads(
                WorkerStatus, store.get(f"{keys.worker_statuses}/{worker}").value, where=worker
            )
            os.kill(pid, signal.SIGSTOP)
            stopped_s = time.monotonic()
            # The first thing that the supervisor does about it is to ask everybody for stacks.
            noticed = bool(watch.poll(UNNOTICED_S))
            decided_s = time.monotonic() - stopped_s if noticed else float("inf")
        if not noticed:
            kill_everything(files)
        view = wait_until(files, lambda v: v.state not in State.live(), timeout_s=DEADLINE_S)
        ended_s = time.monotonic() - stopped_s
        named = view.reason.partition(" ")[0] if noticed else "nobody"
        return cls(
            worker=worker,
            named=named,
            doing=f"{status.state} {status.mfc}",
            step_s=step_s,
            decided_s=decided_s,
            ended_s=ended_s,
        )


# ---- common -----------------------------------------------------------------------------------


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def until(condition: Any, complaint: str) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(complaint)
        time.sleep(POLL_S)


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def spread(name: str, values: Sequence[float]) -> None:
    """One row: how often, least, median, 99th of a hundred, most."""
    ordered = sorted(values)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    say(
        f"  {name:48} n {len(ordered):4}  min {ordered[0]:6.2f}  "
        f"p50 {statistics.median(ordered):6.2f}  p99 {p99:6.2f}  max {ordered[-1]:6.2f}"
    )


def main() -> None:
    if sys.argv[1:2] == ["worker"]:
        store, folder, index, host = sys.argv[2:]
        play_worker(store, folder, int(index), host)
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("crash", "cut-off", "hung"))
    parser.add_argument("--store", choices=("etcd", "file"), default="etcd")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--cuts", type=int, default=40)
    parser.add_argument("--at-once", type=int, default=3)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    if options.what == "crash":
        bench_crash(options.store, options.kills, rng)
    elif options.what == "cut-off":
        bench_cut_off(options.cuts, options.at_once, rng)
    else:
        bench_hung(options.runs, rng)
    say("load average of this machine " + " ".join(f"{load:.1f}" for load in os.getloadavg()))


if __name__ == "__main__":
    main()
