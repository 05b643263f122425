"""What a Harbor task's tests came to, by the archive of their box; and what a container's driver wrote."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path

import golden
import pytest
from harbor_tasks import write_task

from realsys.data.harbor.task_directory import read_task
from realsys.rewards.harbor import try_tasks
from realsys.rewards.harbor.apptainer_engine import outcome_of
from realsys.rewards.harbor.task_box import TaskLimits, shell_argv
from realsys.rewards.harbor.verifier_rewards import verdict_of
from realsys.rewards.sandbox.box_limits import BoxLimits, BoxOutcome, Ended
from realsys.rewards.sandbox.box_program import environment


def archive(**files: str) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as opened:
        for name, text in files.items():
            member = tarfile.TarInfo("logs/verifier/" + name.replace("__", "."))
            member.size = len(text.encode())
            opened.addfile(member, io.BytesIO(text.encode()))
    return made.getvalue()


def outcome(
    packed: bytes | None, ended: Ended = "exit", code: int | None = 0, signal: int | None = None
) -> BoxOutcome:
    return BoxOutcome(
        ended=ended, exit_code=code, signal=signal, stdout=b"", stderr=b"", wall_s=1, cpu_s=1,
        archive=packed,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("files", "rewards", "reward"),
    [
        ({"reward__txt": "1\n"}, {"reward": 1.0}, 1.0),
        ({"reward__txt": " -0.5 "}, {"reward": -0.5}, -0.5),
        ({"reward__json": "0.25", "reward__txt": "1"}, {"reward": 0.25}, 0.25),
        ({"reward__json": '{"a": 1, "b": 0, "c": 0.5}'}, {"a": 1.0, "b": 0.0, "c": 0.5}, 0.5),
        ({"reward__json": '{"a": 1, "reward": 0.1}'}, {"a": 1.0, "reward": 0.1}, 0.1),
        ({"reward__json": '{"ok": true}'}, {"ok": 1.0}, 1.0),
    ],
)
def test_rewards_are_read_as_harbor_reads_them(
    files: dict[str, str], rewards: dict[str, float], reward: float
) -> None:
    verdict = verdict_of(outcome(archive(**files), code=1))  # whatever the status
    assert (verdict.rewards, verdict.reward, verdict.why) == (rewards, reward, "")


@pytest.mark.parametrize(
    ("tests", "files", "reward", "why"),
    [
        (b"echo 0 > reward.txt", {"reward__json": "1", "reward__txt": "0"}, 0.0, ""),
        (b"echo 0 > reward.txt", {"reward__json": "1"}, 0.0, "there is no reward.txt"),
        (b"echo 0 > reward.json", {"reward__json": "0", "reward__txt": "1"}, 0.0, ""),
        (b"echo 0 > reward.json", {"reward__txt": "1"}, 0.0, "there is no reward.json"),
        (b"reward.json or reward.txt", {"reward__json": "1", "reward__txt": "0"}, 0.0, "differ"),
        (b"reward.json or reward.txt", {"reward__json": "0.5", "reward__txt": "0.5"}, 0.5, ""),
        (b"reward.json or reward.txt", {"reward__txt": "1"}, 1.0, ""),
        (b"a program of theirs", {"reward__json": "1"}, 1.0, ""),
    ],
)
def test_a_file_of_a_name_that_the_tests_do_not_write_is_the_solutions(
    tests: bytes, files: dict[str, str], reward: float, why: str
) -> None:
    verdict = verdict_of(outcome(archive(**files)), tests)
    assert verdict.reward == reward
    assert why in verdict.why
    assert bool(verdict.why) == bool(why)


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({}, "there is no reward.json and no reward.txt; the tests ended with exit 0"),
        ({"reward__txt": ""}, "could not convert string to float"),
        ({"reward__txt": "nan"}, "reward 'reward' is nan, no finite number"),
        ({"reward__txt": "passed"}, "could not convert string to float"),
        ({"reward__json": "{}", "reward__txt": "1"}, "reward.json names no reward"),
        ({"reward__json": '{"a": "1"}'}, "reward 'a' is '1', no finite number"),
        ({"reward__json": '{"a": NaN}'}, "NaN is no finite number"),
        ({"reward__json": '{"a": 1e999}'}, "1e999 is no finite number"),
        ({"reward__json": '{"a": 1' + "0" * 400 + "}"}, "int too large"),
        ({"reward__json": "[" * 9999}, ""),
        ({"reward__json": "[1]"}, "reward 'reward' is [1], no finite number"),
    ],
)
def test_what_is_no_reward_counts_0_and_says_why(files: dict[str, str], why: str) -> None:
    verdict = verdict_of(outcome(archive(**files, **{"test-stdout__txt": "3 failed"})))
    assert (verdict.rewards, verdict.reward, verdict.output) == ({}, 0.0, "3 failed")
    assert why in verdict.why
    assert verdict.why


def test_tests_that_a_limit_ended_have_no_verdict() -> None:
    packed = archive(reward__txt="1")
    for ended in ("wall_time", "cpu_time", "memory", "output", "processes"):
        verdict = verdict_of(outcome(packed, ended, None))  # type: ignore[arg-type]
        assert (verdict.reward, verdict.rewards) == (0.0, {})
        golden.check(verdict.why)
    assert verdict_of(outcome(packed, "signal", None, 15)).reward == 1.0


@pytest.mark.parametrize(
    "packed", [None, b"", b"x" * 2000, gzip.compress(archive(reward__txt="1"))]
)
def test_what_is_no_plain_archive_has_no_verdict(packed: bytes | None) -> None:
    assert verdict_of(outcome(packed)).rewards == {}


def test_of_a_flood_the_last_lines_are_shown() -> None:
    assert try_tasks._end_of("y\n" * 5000 + "end\n").splitlines() == ["y"] * 19 + ["end"]
    assert len(try_tasks._end_of("y" * 5000)) == 2000


def test_links_and_folders_are_no_rewards() -> None:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as opened:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE):
            member = tarfile.TarInfo("logs/verifier/reward.txt")
            member.type, member.linkname = kind, "/etc/passwd"
            opened.addfile(member)
        member = tarfile.TarInfo("logs/verifier/sub/reward.txt")
        member.size = 1
        opened.addfile(member, io.BytesIO(b"1"))
    assert "no reward.txt" in verdict_of(outcome(made.getvalue())).why


def test_path_is_written_out_in_a_tasks_variables_alone() -> None:
    """An instruction may speak of it."""
    argv = shell_argv("true", "/app", {"PATH": "/opt:$PATH"}, {"TOLD": "$PATH"})
    assert argv[2] == f"PATH=/opt:{environment({})['PATH']}"
    assert argv[3] == "TOLD=$PATH"


def test_a_tasks_limits_count_where_they_are_lower(tmp_path: Path) -> None:
    config = (
        "[agent]\ntimeout_sec = 900\n[environment]\ncpus = 2\nmemory_mb = 128\nstorage_mb = 9999\n"
    )
    task = read_task(write_task(tmp_path, **{"task.toml": config}))
    box = BoxLimits(memory_bytes=512 << 20, file_bytes=64 << 20)
    limits = TaskLimits(agent_s=30, verifier_s=60, box=box)
    found = limits.of(task, limits.agent_s, task.agent.timeout_sec)
    assert (found.wall_s, found.cpu_s) == (30, 60)
    assert (found.memory_bytes, found.file_bytes) == (128 << 20, 64 << 20)
    assert limits.of(task, 60.0, 7.5).wall_s == 7.5
    assert limits.of(task, 60.0, None).wall_s == 60.0


@pytest.mark.parametrize(
    ("stdout", "wall_s", "ended", "code", "packed"),
    [
        (b"started\n0\nTAR", 1.0, "exit", 0, b"TAR"),
        (b"started\n7\nTAR\n2\n", 1.0, "exit", 7, b"TAR\n2\n"),
        (b"started\n137\nTAR", 10.5, "wall_time", None, b"TAR"),
        (b"started\n137\nTAR", 1.0, "exit", 137, b"TAR"),
        (b"started\n", 1.0, "signal", None, None),
        (b"started\n", 99.0, "wall_time", None, None),
        (b"started\njunk\nTAR", 1.0, "signal", None, b"TAR"),
    ],
)
def test_what_the_driver_in_a_container_wrote(
    stdout: bytes, wall_s: float, ended: str, code: int | None, packed: bytes | None
) -> None:
    found = outcome_of(stdout, b"both streams", wall_s, BoxLimits(wall_s=10, output_bytes=4))
    assert (found.ended, found.exit_code, found.archive) == (ended, code, packed)
    assert found.stderr == b"both"
