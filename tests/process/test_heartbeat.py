"""A worker and its heartbeat process, with real processes, signals and a store in a folder."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from realsys.api.errors import KeyNotFound
from realsys.name_resolve.file.file_store import FileStore
from realsys.name_resolve.key_table import TrialKeys
from realsys.runtime import worker_exit_codes
from realsys.runtime.worker_commands import Command, Verb
from realsys.trial.records import (
    AttemptFiles,
    AttemptRecord,
    Failure,
    StopRequest,
    WorkerRecord,
    WorkerStatus,
    dumps,
    loads,
    read_record,
)

HERE = Path(__file__).parent
KEYS = TrialKeys(cluster="here", user="anna", experiment="ppo", trial="run")
WORKER, STATUS = KEYS.worker("model_worker", 0), KEYS.worker_status("model_worker", 0)
ORDER = KEYS.command("model_worker", 0)


def attempt(number: int, token: str, *, ended_at: float | None = None) -> bytes:
    return dumps(
        AttemptRecord(
            number=number,
            token=token,
            host="node1",
            supervisor_pid=1,
            supervisor_start=1,
            started_at=0.0,
            ended_at=ended_at,
        )
    )


def until(condition: Callable[[], Any]) -> Any:
    deadline_s = time.monotonic() + 240
    while not (found := condition()):
        assert time.monotonic() < deadline_s, "did not come true in time"
        time.sleep(0.01)
    return found


def patient_heartbeat(away: Path) -> list[str]:
    """How it is started."""
    return [sys.executable, str(HERE / "flaky_heartbeat.py"), str(away)]


@dataclass
class Worker:
    """The worker of heartbeat_worker.py, and what it says."""

    process: subprocess.Popen[str]
    said: list[str] = field(default_factory=list)
    lines: queue.Queue[str] = field(default_factory=queue.Queue)

    def __post_init__(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line.strip())

    def hears(self, start: str) -> str:
        """The next line that begins so."""
        deadline_s = time.monotonic() + 240
        while True:
            try:
                line = self.lines.get(timeout=max(0.01, deadline_s - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"{start!r} was not said: {self.said}") from None
            self.said.append(line)
            if line.startswith(start):
                return line.removeprefix(start).strip()

    def goes_on(self) -> None:
        """Ends its wait for the test, or its whole life."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    @property
    def heartbeat_pid(self) -> int:
        (line,) = [line for line in self.said if line.startswith("heartbeat ")]
        return int(line.split()[1])


class Site:
    """A store, an attempt's folder and the workers in them."""

    def __init__(self, root: Path) -> None:
        self.root, self.store = root, FileStore(root / "store")
        self.files = AttemptFiles(root / "attempts" / "0001")
        self.files.root.mkdir(parents=True)
        self.workers: list[Worker] = []
        self.store.add(KEYS.attempt, attempt(1, "ours"))

    def start(
        self, *, registered: bool = True, env: dict[str, str] | None = None, **plan: Any
    ) -> Worker:
        plan = {"for_s": 600.0, **plan}
        script, store = HERE / "heartbeat_worker.py", f"file://{self.root / 'store'}"
        process = subprocess.Popen(
            [sys.executable, str(script), store, str(self.files.root), json.dumps(plan)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
        )
        self.workers.append(Worker(process))
        if registered:
            self.workers[-1].hears("registered")
        return self.workers[-1]

    def has(self, key: str) -> bool:
        try:
            self.store.get(key)
        except KeyNotFound:
            return False
        return True

    @property
    def status(self) -> WorkerStatus:
        return loads(WorkerStatus, self.store.get(STATUS).value, where=STATUS)

    @property
    def words(self) -> Failure | None:
        return read_record(Failure, self.files.failure_record("model_worker/0"))

    def renewals(self) -> list[tuple[str, str]]:
        """Leases that are there, each with a number that every renewal changes."""
        folder = self.root / "store" / "leases"
        try:
            return sorted((path.name, path.read_text()) for path in folder.iterdir())
        except FileNotFoundError:  # one was lost, as it can be on a busy machine
            return []

    def outlives_a_lease(self) -> None:
        """Waits while as many renewals come as a lease and a third of another has."""
        for _ in range(10):
            before = self.renewals()
            until(lambda before=before: self.renewals() != before)
        until(lambda: self.has(WORKER))

    def order(self, verb: Verb, *, token: str = "ours", **args: str) -> str:
        name = f"{verb}-{token}"
        command = Command(id=name, verb=verb, by="anna", at=0.0, attempt=1, token=token, args=args)
        self.store.add(ORDER, dumps(command), replace=True)
        return name

    def close(self) -> None:
        for worker in self.workers:
            worker.process.kill()
            worker.process.wait()
            assert worker.process.stdout is not None
            with_heartbeat = [line for line in worker.said if line.startswith("heartbeat ")]
            if with_heartbeat:
                until(lambda w=worker: not is_running(w.heartbeat_pid))
            assert worker.process.stdin is not None
            worker.process.stdout.close()
            worker.process.stdin.close()
        self.store.close()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.close()


def test_a_life_from_registration_to_goodbye(site: Site) -> None:
    worker = site.start(until_told=True, steps=2)
    record = loads(WorkerRecord, site.store.get(WORKER).value, where=WORKER)
    assert record.pid == worker.process.pid
    assert site.status.state in ("ready", "running")
    worker.goes_on()
    worker.hears("goodbye")
    assert worker.process.wait(240) == 0
    assert (site.status.state, site.has(WORKER)) == ("done", False)
    assert site.store.get(STATUS).lease_id is None
    until(lambda: not is_running(worker.heartbeat_pid))


def test_kill_9_of_a_worker_is_known_long_before_its_lease_ends(site: Site) -> None:
    worker = site.start(ttl_s=600.0)
    worker.process.kill()
    until(lambda: not site.has(WORKER))
    until(lambda: site.status.state == "lost")
    assert "ended without deregistering" in site.status.reason
    assert site.store.get(STATUS).lease_id is None
    until(lambda: not is_running(worker.heartbeat_pid))


def test_a_stopped_worker_keeps_its_lease(site: Site) -> None:
    worker = site.start(ttl_s=2.0)
    os.kill(worker.process.pid, signal.SIGSTOP)
    site.outlives_a_lease()
    os.kill(worker.process.pid, signal.SIGCONT)
    time.sleep(1)
    assert worker.process.poll() is None
    assert site.words is None


def test_a_worker_that_holds_the_gil_keeps_its_lease_and_can_be_dumped(site: Site) -> None:
    worker = site.start(ttl_s=2.0, hold_gil_s=600.0)
    until(lambda: site.status.mfc == "holds")
    site.outlives_a_lease()
    assert worker.lines.empty(), "it let go too early for this test"
    name = site.order(Verb.DUMP)  # the signal ends usleep(3), so it lets go after that
    until(lambda: site.status.last_command == name)
    text = site.files.stacks_of("model_worker/0").read_text()
    assert "heartbeat_worker.py" in text
    assert "in main" in text
    assert "command of anna" in text
    assert not site.has(ORDER), "a command is taken away"
    worker.hears("let go")
    until(lambda: site.has(WORKER))


def test_a_stall_is_published_with_its_place_and_taken_back(site: Site) -> None:
    worker = site.start(steps=5, step_s=0.2, still=True, env={"REALSYS_STALL_FLOOR_S": "1"})
    stalled = until(lambda: site.status if site.status.stalled_s else None)
    assert "main (heartbeat_worker.py:" in stalled.stalled_where
    assert site.files.stacks_of("model_worker/0").is_file()
    until(lambda: site.status.stalled_s > stalled.stalled_s + 1)
    until(lambda: site.has(WORKER))
    worker.goes_on()
    worker.hears("moved")
    until(lambda: not site.status.stalled_s and not site.status.stalled_where)


def test_a_worker_that_was_stopped_in_a_step_is_stalled_and_says_by_what(site: Site) -> None:
    worker = site.start(steps=3000, step_s=0.2, env={"REALSYS_STALL_FLOOR_S": "1"})
    until(lambda: site.status.step > 5)
    os.kill(worker.process.pid, signal.SIGSTOP)
    until(lambda: site.status.stalled_where == "stopped by SIGSTOP")
    os.kill(worker.process.pid, signal.SIGCONT)
    until(lambda: not site.status.stalled_s)


def test_a_store_that_is_away_for_10_s_suspends_and_ends_nothing(
    site: Site, tmp_path: Path
) -> None:
    away = tmp_path / "away"
    worker = site.start(ttl_s=12.0, argv=patient_heartbeat(away))
    worker.hears("lease_status valid")
    renewals = site.renewals()
    until(lambda: site.renewals() != renewals)  # right after a renewal
    away.touch()
    worker.hears("lease_status uncertain")
    time.sleep(0.3)
    away.unlink()
    worker.hears("lease_status valid")
    until(lambda: site.has(WORKER))
    assert worker.process.poll() is None


def test_a_superseded_worker_fences_itself(site: Site) -> None:
    worker = site.start(argv=patient_heartbeat(site.root / "never away"))
    site.store.add(KEYS.attempt, attempt(2, "theirs"), replace=True)
    site.store.add(WORKER, b"of the new one", replace=True)
    site.store.add(STATUS, b"of the new one", replace=True)
    assert worker.process.wait(240) == worker_exit_codes.FENCED
    worker.hears("over 77 Fenced: attempt 2 on node1 has taken over")
    until(lambda: not is_running(worker.heartbeat_pid))
    assert site.store.get(WORKER).value == site.store.get(STATUS).value == b"of the new one"


def test_a_superseded_worker_that_can_t_hear_is_killed(site: Site) -> None:
    worker = site.start()
    os.kill(worker.process.pid, signal.SIGSTOP)
    site.store.add(KEYS.attempt, attempt(2, "theirs"), replace=True)
    assert worker.process.wait(240) == -signal.SIGKILL
    words = until(lambda: site.words)
    assert (words.kind, words.pid) == ("Fenced", worker.process.pid)
    assert "node1 has taken" in words.why


def test_an_older_attempt_can_t_register(site: Site) -> None:
    site.store.add(KEYS.attempt, attempt(2, "theirs"), replace=True)
    worker = site.start(registered=False)
    assert worker.hears("refused").startswith("StaleAttempt: attempt 2")
    assert not site.has(WORKER)


def test_an_orphan_leaves(site: Site) -> None:
    master = KEYS.worker("master_worker", 0)
    argv = patient_heartbeat(site.root / "never away")
    worker = site.start(watch_keys=[master], argv=argv)
    time.sleep(1)
    assert worker.process.poll() is None, "it was never there: that is no reason"
    site.store.add(master, b"here")
    time.sleep(0.5)
    site.store.delete(master)
    time.sleep(1)
    site.store.add(master, b"here again")  # its lease was lost and taken anew
    time.sleep(8)
    assert worker.process.poll() is None
    site.store.delete(master)
    assert worker.process.wait(240) == worker_exit_codes.ORPHANED
    worker.hears("over 78 WorkerLost: the workers it depends on were gone: master_worker/0")


def test_without_its_heartbeat_process_a_worker_fences_itself(site: Site) -> None:
    worker = site.start(ttl_s=600.0)
    os.kill(worker.heartbeat_pid, signal.SIGKILL)
    assert worker.process.wait(240) == worker_exit_codes.FENCED
    worker.hears("over 77 Fenced: its heartbeat process ended")
    until(lambda: not site.has(WORKER))  # the holder of the lease is known to be dead


def test_a_heartbeat_process_outlives_sigterm(site: Site) -> None:
    worker = site.start(ttl_s=2.0, until_told=True)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(worker.heartbeat_pid, number)
    site.outlives_a_lease()
    worker.goes_on()
    worker.hears("goodbye")
    assert worker.process.wait(240) == 0


def stands_still(worker: Worker, *, meanwhile: Callable[[], object] = lambda: None) -> None:
    """Stops the heartbeat process for longer than the ttl."""
    os.kill(worker.heartbeat_pid, signal.SIGSTOP)
    worker.hears("lease_status uncertain")
    time.sleep(1)
    meanwhile()
    os.kill(worker.heartbeat_pid, signal.SIGCONT)


def test_a_heartbeat_process_that_stands_still_suspends_its_worker_until_it_is_back(
    site: Site,
) -> None:
    worker = site.start(ttl_s=2.0)
    worker.hears("lease_status valid")
    stands_still(worker)
    worker.hears("lease_status valid")  # nobody ended the attempt: the lease is taken anew
    until(lambda: site.has(WORKER))


def test_who_stood_still_while_its_attempt_was_ended_fences_itself(site: Site) -> None:
    worker = site.start(ttl_s=2.0, argv=patient_heartbeat(site.root / "never away"))
    worker.hears("lease_status valid")
    ended = attempt(1, "ours", ended_at=9.0)
    stands_still(worker, meanwhile=lambda: site.store.add(KEYS.attempt, ended, replace=True))
    worker.hears("over 77 Fenced: attempt 1 was ended by its supervisor")
    assert worker.process.wait(240) == worker_exit_codes.FENCED
    until(lambda: not site.has(WORKER))  # its heartbeat process outlives it, a little


def test_telling_never_waits_for_the_heartbeat_process(site: Site) -> None:
    worker = site.start(ttl_s=60.0, tells=20_000)
    os.kill(worker.heartbeat_pid, signal.SIGSTOP)
    worker.goes_on()
    worker.hears("told")
    os.kill(worker.heartbeat_pid, signal.SIGCONT)
    until(lambda: site.status.step == 20_000)


def test_stop_and_commands_come_through(site: Site) -> None:
    site.store.add(KEYS.stop, dumps(StopRequest(grace_seconds=1, by="old", at=0.0, attempt=7)))
    worker = site.start()
    site.order(Verb.PAUSE)
    assert json.loads(worker.hears("command"))["verb"] == "pause"
    until(lambda: not site.has(ORDER))
    stop = StopRequest(grace_seconds=1, by="anna", at=0.0, attempt=1)
    site.store.add(KEYS.stop, dumps(stop), replace=True)
    assert worker.hears("stop") == "anna", "that of attempt 7 is not ours"


def test_another_attempts_command_to_dump_is_refused(site: Site) -> None:
    site.start()
    name = site.order(Verb.DUMP, token="theirs")
    until(lambda: site.status.last_command == name)
    assert "attempt" in site.status.command_refused
    assert not site.files.stacks_of("model_worker/0").exists()


def test_a_heartbeat_process_is_small(site: Site) -> None:
    worker = site.start(registered=False)
    worker.hears("registered")
    rss = Path(f"/proc/{worker.heartbeat_pid}/status").read_text().split("VmRSS:")[1].split()[0]
    assert int(rss) < 60_000, "kB"


def test_a_python_without_memfd_and_pidfd_will_do(site: Site, tmp_path: Path) -> None:
    """As uv's and conda-forge's, whatever the kernel has: registers, is dumped, is killed."""
    lacking = tmp_path / "lacking"
    lacking.mkdir()
    (lacking / "sitecustomize.py").write_text(
        "import os, signal\ndel os.memfd_create, os.pidfd_open, signal.pidfd_send_signal\n"
    )
    path = os.pathsep.join(filter(None, (str(lacking), os.environ.get("PYTHONPATH"))))
    worker = site.start(env={"PYTHONPATH": path})
    site.order(Verb.DUMP)
    stacks = site.files.stacks_of("model_worker/0")
    until(lambda: stacks.exists() and "heartbeat_worker.py" in stacks.read_text())
    os.kill(worker.process.pid, signal.SIGSTOP)
    site.store.add(KEYS.attempt, attempt(2, "theirs"), replace=True)
    assert worker.process.wait(240) == -signal.SIGKILL
