"""The parts of a worker's heartbeat that need no second process."""

import os
import subprocess
import sys
import textwrap

import pytest
from stand_in_slurm import wait_until

from realsys.heartbeat import heartbeat_link, stack_dumps
from realsys.heartbeat.heartbeat_link import STILL_S, Heartbeat
from realsys.heartbeat.heartbeat_messages import (
    Deregistered,
    HeartbeatMemory,
    Init,
    PacketSocket,
    StatusUpdate,
)
from realsys.heartbeat.stack_dumps import StackDumps, innermost, state_letter
from realsys.name_resolve.lease_validity import GIVE_UP_S, TTL_S, LeaseStatus, ProcessPauses
from realsys.runtime import progress
from realsys.trial.records import WorkerStatus

DUMP = """\
Thread 0x00007f11 (most recent call first):
  File "/lib/python3.11/selectors.py", line 468 in select
  File "/home/anna/realsys/control.py", line 80 in _main

Current thread 0x00007f22 (most recent call first):
  File "/home/anna/realsys/data_plane/transfer.py", line 190 in _receive
  File "/home/anna/realsys/data_plane/transfer.py", line 170 in fetch
  File "/home/anna/realsys/model_worker/model_worker.py", line 164 in _fetch_from_peers
  File "/home/anna/realsys/model_worker/model_worker.py", line 148 in _run_call
"""


def test_the_innermost_frames_are_the_main_threads():
    assert innermost(DUMP) == (
        "_receive (transfer.py:190) < fetch (transfer.py:170)"
        " < _fetch_from_peers (model_worker.py:164)"
    )
    assert innermost("") == ""


def test_stacks_come_without_the_interpreters_help(tmp_path, monkeypatch):
    monkeypatch.setattr(stack_dumps, "WRITTEN_IN_S", 60.0)
    code = """
        import os, sys, time
        from realsys.heartbeat.stack_dumps import arm
        fd = arm()
        sys.stdout.write(f"/proc/{os.getpid()}/fd/{fd}" + chr(10))
        sys.stdout.flush()
        time.sleep(600)
    """
    argv = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        fd = os.open(worker.stdout.readline().strip(), os.O_RDONLY)
        dumps = StackDumps(fd, tmp_path / "stacks" / "w-0.txt")
        assert not dumps.has_new
        assert "in <module>" in dumps.ask(worker.pid, "a test")
        assert not dumps.has_new
        os.kill(worker.pid, stack_dumps.DUMP_SIGNAL)  # by hand
        wait_until(lambda: dumps.has_new)
        wait_until(lambda: state_letter(worker.pid) == "S")  # it goes on with what it did
        worker.kill()
    dumps.collect()
    text = dumps.path.read_text()
    assert text.count("====") == 2
    assert "a test" in text
    assert "SIGUSR1 from outside" in text
    os.close(fd)


def test_a_worker_stands_by_what_its_heartbeat_process_noted():
    before = progress._memory
    try:
        here = HeartbeatMemory.make()
        there = HeartbeatMemory(here.fd)
        assert here.lease_status(100.0) is LeaseStatus.UNCERTAIN, "not registered yet"
        there.renewed(100.0, 10.0)
        assert here.lease_status(107.9) is LeaseStatus.VALID
        assert here.lease_status(108.1) is LeaseStatus.UNCERTAIN
        assert here.lease_status(100.1 + GIVE_UP_S) is LeaseStatus.EXPIRED
        assert there.ticks == 0
        progress.tick()
        assert there.ticks == 1
        os.close(here.fd)
    finally:
        progress.count_in(before)


def test_a_line_keeps_messages_apart_and_never_blocks():
    worker, heartbeat = PacketSocket.pair()
    sent = 0
    while worker.try_send(StatusUpdate(status=WorkerStatus(state="running", step=sent))):
        sent += 1
    assert sent > 10
    for step in range(sent):
        message = heartbeat.receive_from_worker()
        assert isinstance(message, StatusUpdate)
        assert message.status.step == step
    assert worker.try_send(StatusUpdate(status=WorkerStatus(state="done")))
    assert heartbeat.try_send(Deregistered(trouble="none"))
    assert worker.receive_to_worker() == Deregistered(trouble="none")
    worker.close()
    assert isinstance(heartbeat.receive_from_worker(), StatusUpdate)
    assert heartbeat.receive_from_worker() is None
    with pytest.raises(OSError):
        heartbeat.try_send(Deregistered())
    heartbeat.close()


def test_the_heartbeat_process_loads_little():
    code = "import sys, realsys.heartbeat.heartbeat_process; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    loaded = set(done.stdout.split())
    assert "msgspec" in loaded, done.stderr
    assert not loaded & {"torch", "grpc", "numpy", "zmq", "asyncio", "realsys.api.experiment"}


def test_a_worker_that_was_suspended_with_its_heartbeat_process_waits_for_its_renewal():
    before = progress._memory
    try:
        pulse, naps = HeartbeatMemory.make(), ProcessPauses(0.0, every_s=1.0)
        pulse.renewed(10.0, TTL_S)
        for now_s in (5.0, 10.0, 11.0, 3600.0):
            naps.awake(now_s)
        assert (
            pulse.lease_status(3600.0) is LeaseStatus.EXPIRED
        )  # where its heartbeat process alone stood still
        assert pulse.lease_status(3600.0, naps) is LeaseStatus.UNCERTAIN
        pulse.renewed(3600.5, TTL_S)
        assert pulse.lease_status(3601.0, naps) is LeaseStatus.VALID
        never_renewed_s = 3600.5 + GIVE_UP_S + 1.0
        for second in range(3601, int(never_renewed_s)):
            naps.awake(float(second))
        assert (
            pulse.lease_status(never_renewed_s, naps) is LeaseStatus.EXPIRED
        )  # the nap is used up
        os.close(pulse.fd)
    finally:
        progress.count_in(before)


def test_a_worker_is_as_patient_as_its_site_says():
    before = progress._memory
    try:
        pulse = HeartbeatMemory.make(give_up_s=60.0)
        pulse.renewed(100.0, TTL_S)
        assert pulse.lease_status(159.0) is LeaseStatus.UNCERTAIN
        assert pulse.lease_status(161.0) is LeaseStatus.EXPIRED
        os.close(pulse.fd)
    finally:
        progress.count_in(before)


def test_a_heartbeat_process_that_stands_still_is_noticed_in_time_awake(monkeypatch):
    """Sooner than a store that is away: it renews nothing, and is not coming back."""
    now_s, before = [1000.0], progress._memory
    monkeypatch.setattr(heartbeat_link.time, "monotonic", lambda: now_s[0])
    begin = Init(
        worker_type="w",
        index=0,
        pid=1,
        attempt=1,
        token="ours",
        store_url="",
        attempt_dir="",
        keys=None,
    )
    quiet = dict.fromkeys(("on_stop", "on_command", "on_terminate", "on_watched"))
    link = Heartbeat(begin, **quiet)
    try:
        pulse = link._pulse = HeartbeatMemory.make()

        def turn(seconds: float, *, looks: bool) -> bool:
            now_s[0] += seconds
            if looks:
                pulse.note_check()
            return link._is_hung()

        assert not any(turn(1.0, looks=True) for _ in range(300))
        assert not turn(3600.0, looks=False), "both were suspended"
        assert not any(turn(1.0, looks=False) for _ in range(int(STILL_S) - 5))
        assert not turn(1.0, looks=True)
        assert not any(turn(1.0, looks=False) for _ in range(int(STILL_S) - 5))
        assert any(turn(1.0, looks=False) for _ in range(10))
        os.close(pulse.fd)
    finally:
        progress.count_in(before)
