"""Which worker failed first, and what its end, its words and its log say."""

import logging
import signal
from dataclasses import replace

import golden
import pytest

from realsys.api.errors import DataError, WaitTimeout
from realsys.runtime import worker_exit_codes
from realsys.supervisor.health.first_failure import (
    TAIL_BYTES,
    TAIL_LINES,
    describe_exit,
    log_tail,
    order_failures,
    watchdog_words,
)
from realsys.supervisor.health.peer_failures import SECONDARY_KINDS, is_secondary
from realsys.transport.messages import error_to_info, info_to_error
from realsys.trial.records import Failure, TrialFiles, read_record
from realsys.worker.main import _write_failure_record


def failure(worker, at, kind="", why="exited with code 1", *, secondary=False):
    return Failure(worker=worker, host="n1", pid=1, why=why, at=at, kind=kind, secondary=secondary)


def marked(failure):
    return replace(failure, secondary=True)


# ---- an end as a sentence -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("returncode", "text"),
    [
        (
            -signal.SIGKILL,
            "killed by SIGKILL (signal 9): by hand, or by the kernel when memory ran out (see dmesg)",
        ),
        (-signal.SIGSEGV, "killed by SIGSEGV (signal 11): a crash in native code"),
        (-signal.SIGBUS, "killed by SIGBUS (signal 7): shared memory or a mapped file ran out"),
        (-signal.SIGABRT, "killed by SIGABRT (signal 6): a native library gave up"),
        (-signal.SIGTERM, "killed by SIGTERM (signal 15)"),
        (1, "exited with code 1"),
        (3, "exited with code 3"),
        (
            worker_exit_codes.FENCED,
            "exited with code 77: its lease could not be renewed in time, so it stopped itself",
        ),
        (worker_exit_codes.ORPHANED, "exited with code 78: the workers it depends on were gone"),
    ],
)
def test_an_end_is_told_as_a_sentence(returncode, text):
    assert describe_exit(returncode) == text


def test_a_signal_without_a_name_is_told_once_by_its_number():
    golden.check(describe_exit(-99))
    assert describe_exit(0) == "exited with code 0"


# ---- order ----------------------------------------------------------------------------------------


def test_the_earliest_primary_failure_is_the_first():
    lost = failure("master_worker/0", 1.0, "WorkerLost")
    late = failure("model_worker/1", 3.0, "DataError")
    cause = failure("model_worker/0", 2.0)
    assert order_failures([late, lost, cause]) == (cause, (marked(lost), late))


@pytest.mark.parametrize("kind", sorted(SECONDARY_KINDS))
def test_who_only_misses_another_is_secondary(kind):
    missed, cause = failure("master_worker/0", 1.0, kind), failure("model_worker/0", 9.0, "OSError")
    assert is_secondary(missed)
    assert order_failures([missed, cause]) == (cause, (marked(missed),))


@pytest.mark.parametrize(
    "words",
    [
        "[…/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:47013: Connection "
        "reset by peer. This is typically caused by a remote worker hanging",
        "NCCL error in: ProcessGroupNCCL.cpp:3690, remote process exited or there was a network error",
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting",
    ],
)
def test_a_peer_lost_in_a_collective_is_secondary(words):
    missed = failure("model_worker/0", 1.0, "RuntimeError", f"RuntimeError: {words}")
    killed = failure("model_worker/1", 1.1, why="killed by SIGKILL (signal 9)")
    assert is_secondary(missed)
    assert order_failures([missed, killed])[0] == killed


def test_an_orphan_is_secondary():
    orphan = failure("model_worker/0", 1.0, why=describe_exit(worker_exit_codes.ORPHANED))
    killed = failure("master_worker/0", 2.0, why=describe_exit(-9))
    assert order_failures([orphan, killed]) == (killed, (marked(orphan),))


@pytest.mark.parametrize("kind", ["", "DataError", "ConfigError", "OSError", "LeaseLost"])
def test_a_reason_of_ones_own_is_primary(kind):
    assert not is_secondary(failure("w/0", 1.0, kind))


def test_with_secondary_failures_only_the_earliest_is_the_first():
    a, b = failure("a/0", 2.0, "WaitTimeout"), failure("b/0", 1.0, "RemoteError")
    assert order_failures([a, b]) == (marked(b), (marked(a),))


def test_of_none_there_is_no_first():
    assert order_failures([]) == (None, ())


def test_the_others_are_in_the_order_of_time():
    found = [failure(f"w/{i}", at) for i, at in enumerate([5.0, 1.0, 4.0, 2.0])]
    first, others = order_failures(found)
    assert first.at == 1.0
    assert [f.at for f in others] == [2.0, 4.0, 5.0]


def test_an_error_that_came_from_another_worker_is_secondary(tmp_path, caplog):
    """It keeps its class on the way (DataError), and must not stand beside the worker it came from."""
    here = DataError("a bad record", where="file:3", fix="repair it")
    arrived = info_to_error(error_to_info(here), "model_worker/0")
    assert isinstance(arrived, DataError)
    files = TrialFiles(tmp_path)
    with caplog.at_level(logging.CRITICAL):
        _write_failure_record(files, 1, "model_worker/0", here)
        _write_failure_record(files, 1, "master_worker/0", arrived)
    worker = read_record(Failure, files.attempt(1).failure_record("model_worker/0"))
    master = read_record(Failure, files.attempt(1).failure_record("master_worker/0"))
    assert (worker.kind, worker.why, worker.fix) == ("DataError", "a bad record", "repair it")
    first, _ = order_failures([replace(master, at=1.0), replace(worker, at=1.1)])
    assert first.worker == "model_worker/0"


def test_last_words_of_a_plain_error_carry_its_kind_and_text(tmp_path, caplog):
    with caplog.at_level(logging.CRITICAL):
        _write_failure_record(
            TrialFiles(tmp_path), 1, "model_worker/0", ZeroDivisionError("by zero")
        )
    words = read_record(Failure, TrialFiles(tmp_path).attempt(1).failure_record("model_worker/0"))
    assert (words.kind, words.why) == ("ZeroDivisionError", "ZeroDivisionError: by zero")


def test_an_own_timeout_is_told_with_whom_it_waited_for(tmp_path, caplog):
    late = WaitTimeout(
        "model_worker/1 did not answer in 3 s", where="gen step 2", fix="see its log"
    )
    with caplog.at_level(logging.CRITICAL):
        _write_failure_record(TrialFiles(tmp_path), 1, "master_worker/0", late)
    words = read_record(Failure, TrialFiles(tmp_path).attempt(1).failure_record("master_worker/0"))
    assert is_secondary(words)
    assert "model_worker/1" in words.why


# ---- log tails ------------------------------------------------------------------------------------


def test_words_of_the_watchdog_begin_with_the_first_that_is_known():
    line = "[rank 1] ncclRemoteError: remote process exited "
    assert watchdog_words(["all is well", line]) == line.strip().removeprefix("[rank 1] ")
    assert watchdog_words(["all is well", "Connection reset by peer"]) == ""


def test_the_last_lines_of_a_log(tmp_path):
    path = tmp_path / "w.log"
    path.write_text("".join(f"line {i}\n" for i in range(100)))
    assert log_tail(path) == tuple(f"line {i}" for i in range(100 - TAIL_LINES, 100))
    assert log_tail(path, lines=2) == ("line 98", "line 99")


def test_a_short_log_is_whole_and_an_unfinished_line_is_kept(tmp_path):
    path = tmp_path / "w.log"
    path.write_text("a\nb")
    assert log_tail(path) == ("a", "b")


@pytest.mark.parametrize("make", [lambda p: None, lambda p: p.mkdir(), lambda p: p.touch()])
def test_no_log_a_folder_and_an_empty_log_have_no_tail(tmp_path, make):
    path = tmp_path / "w.log"
    make(path)
    assert log_tail(path) == ()


def test_only_the_end_of_a_huge_log_is_read(tmp_path):
    path = tmp_path / "w.log"
    with path.open("wb") as file:
        file.truncate(1 << 32)  # 4 GiB with a hole: reading all of it would be seen
        file.seek(0, 2)
        file.write(b"\n" + b"".join(b"last %d\n" % i for i in range(20)))
    assert log_tail(path) == tuple(f"last {i}" for i in range(5, 20))


def test_one_endless_line_is_cut(tmp_path):
    path = tmp_path / "w.log"
    path.write_bytes(b"x" * (3 * TAIL_BYTES))
    (line,) = log_tail(path)
    assert len(line) <= TAIL_BYTES


def test_a_binary_log_is_told_as_text(tmp_path):
    path = tmp_path / "w.log"
    path.write_bytes(bytes(range(128, 256)) + b"\nend \xc3\xbc\n")
    assert log_tail(path)[-1] == "end ü"
    assert all(isinstance(line.encode(), bytes) for line in log_tail(path))
