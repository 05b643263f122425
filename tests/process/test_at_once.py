"""`pytest --at-once`: each test runs once, its failures are told, and a process that dies is no success."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


def run(folder: Path, *words: str, **files: str) -> subprocess.CompletedProcess[str]:
    """pytest with two processes over these files of tests."""
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    marker = "-o", "markers=together(name): of one process"
    command = [sys.executable, "-m", "pytest", "-p", "at_once", "--at-once", "2", *marker]
    return subprocess.run(
        [*command, *without_traces(folder), *words, "."],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
    )


def without_traces(folder: Path) -> list[str]:
    """Options: no cache, and no looking after folders of other runs, which may be large."""
    return ["-p", "no:cacheprovider", "--basetemp", f"{folder}-temporary"]


def environment() -> dict[str, str]:
    own = {"PYTHONPATH": str(TESTS / "support"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return {**os.environ, **own}


NOTE = """
import os, pathlib, pytest, time
@pytest.fixture(scope="session")
def made():
    with open("made", "a") as file:
        file.write(f"{os.getpid()}\\n")
    until = time.monotonic() + 240
    while len(open("made").readlines()) < 2 and time.monotonic() < until:
        time.sleep(0.02)  # for the other process
def note(name):
    with open("ran", "a") as file:
        file.write(f"{name} {os.getpid()}\\n")
"""


def test_each_test_runs_once_and_a_session_fixture_once_in_each_process(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(NOTE)
    text = """
from conftest import note
import pytest
@pytest.mark.parametrize("i", range(5))
def test_it(i, made):
    note(f"{__name__}-{i}")
"""
    done = run(tmp_path, one=text, two=text, three=text, four=text)
    assert done.returncode == 0, done.stdout
    assert "20 passed" in done.stdout
    ran = [line.split() for line in (tmp_path / "ran").read_text().splitlines()]
    assert len({name for name, _ in ran}) == len(ran) == 20
    processes = {pid for _, pid in ran}
    assert len(processes) == 2
    assert sorted((tmp_path / "made").read_text().split()) == sorted(processes)
    by_file = {(name.partition("-")[0], pid) for name, pid in ran}
    assert len(by_file) == 4, "a file is one process's"


def test_files_that_go_together_are_run_by_one_process(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(NOTE)
    text = """
from conftest import note
import pytest, time
pytestmark = pytest.mark.together("both")
def test_it():
    note(__name__)
    time.sleep(0.3)
"""
    assert run(tmp_path, one=text, two=text).returncode == 0
    assert len({line.split()[1] for line in (tmp_path / "ran").read_text().splitlines()}) == 1


def test_failures_skips_and_errors_are_told_as_ever(tmp_path: Path) -> None:
    text = """
import pytest
def test_good(): pass
def test_bad(): assert 1 + 1 == 3
@pytest.fixture
def broken(): raise OSError("no disk")
def test_error(broken): pass
def test_skipped(): pytest.skip("no GPU")
"""
    done = run(tmp_path, "-rs", one=text, two="def test_fine(): pass")
    assert done.returncode == 1
    assert "assert (1 + 1) == 3" in done.stdout
    assert "OSError: no disk" in done.stdout
    assert "1 failed, 2 passed, 1 skipped, 1 error" in done.stdout
    assert "no GPU" in done.stdout


@pytest.mark.parametrize("how", ["os._exit(0)", "os.kill(os.getpid(), 9)"])
def test_what_a_process_that_ended_had_to_do_has_failed(tmp_path: Path, how: str) -> None:
    text = f"import os\ndef test_a(): pass\ndef test_ends(): {how}\ndef test_after(): pass"
    done = run(tmp_path, one=text, two="def test_fine(): pass")
    assert done.returncode == 1
    assert "2 failed, 2 passed" in done.stdout
    failed = re.findall(r"^FAILED (\S+)", done.stdout, re.M)
    assert failed == ["test_one.py::test_ends", "test_one.py::test_after"]
    assert "that runs test_one.py::test_ends" in done.stdout


def test_the_first_failure_ends_all_when_asked_to(tmp_path: Path) -> None:
    slow = "import time\ndef test_slow(): time.sleep(50)"
    done = run(tmp_path, "-x", one="def test_bad(): assert False", two=slow)
    assert done.returncode == 1
    assert "stopping after 1 failures" in done.stdout


def test_one_process_begins_with_what_waits_and_the_other_with_what_computes(
    tmp_path: Path,
) -> None:
    (tmp_path / "conftest.py").write_text(NOTE)
    text = """
from conftest import note
import pytest, time
{mark}
def test_it():
    note(__name__)
    until = time.monotonic() + 240
    while len(open("ran").readlines()) < 2 and time.monotonic() < until:
        time.sleep(0.02)  # for the other process
"""
    waits = "pytestmark = pytest.mark.etcd"
    kinds = {"a": "", "b": "", "y": waits, "z": waits}
    marker = ("-o", "markers=etcd: waits")
    done = run(tmp_path, *marker, **{name: text.format(mark=m) for name, m in kinds.items()})
    assert done.returncode == 0, done.stdout
    ran = [line.split() for line in (tmp_path / "ran").read_text().splitlines()]
    assert {name for name, _ in ran[:2]} == {"test_a", "test_y"}
    assert len({pid for _, pid in ran[:2]}) == 2
    assert {name for name, _ in ran} == {f"test_{name}" for name in kinds}


def test_a_process_keeps_no_file_from_the_others_while_its_last_test_runs(tmp_path: Path) -> None:
    waits = """
import pathlib, time
def test_waits():
    until = time.monotonic() + 100
    while not (pathlib.Path("b").exists() and pathlib.Path("c").exists()):
        assert time.monotonic() < until
        time.sleep(0.02)
"""
    touch = "import pathlib\ndef test_it(): pathlib.Path({!r}).touch()"
    done = run(tmp_path, a=waits, b=touch.format("b"), c=touch.format("c"))
    assert done.returncode == 0, done.stdout


def test_each_test_tells_what_it_took(tmp_path: Path) -> None:
    """Also what its children computed."""
    text = """
import subprocess, sys, time
def test_computes():
    subprocess.run([sys.executable, "-c", "import time\\nwhile time.process_time() < 0.5: pass"])
def test_waits(): time.sleep(0.3)
"""
    spent = tmp_path / "spent"
    done = run(tmp_path, "--spent-to", str(spent), one=text, two="def test_fine(): pass")
    assert done.returncode == 0, done.stdout
    found = {name: times for name, *times in map(json.loads, spent.read_text().splitlines())}
    assert len(found) == 3
    assert found["test_one.py::test_computes"][1] > 0.5
    wall_s, processor_s = found["test_one.py::test_waits"]
    assert wall_s >= 0.3
    assert processor_s < wall_s


def test_an_interrupt_ends_all_processes_and_what_their_fixtures_started(tmp_path: Path) -> None:
    text = """
import os, pathlib, pytest, subprocess, time
@pytest.fixture
def started():
    with subprocess.Popen(["sleep", "600"]) as child:
        pathlib.Path(f"pid-{child.pid}").touch()
        yield
        child.kill()
def test_waits(started): time.sleep(600)
"""
    for name in ("one", "two"):
        (tmp_path / f"test_{name}.py").write_text(text)
    words = ["-p", "at_once", "--at-once", "2", *without_traces(tmp_path), "."]
    with subprocess.Popen(
        [sys.executable, "-m", "pytest", *words],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.DEVNULL,
    ) as session:
        while len(found := list(tmp_path.glob("pid-*"))) < 2:  # the test's own time limit ends this
            assert session.poll() is None
            time.sleep(0.02)
        session.send_signal(signal.SIGINT)
        assert session.wait(timeout=200) == pytest.ExitCode.INTERRUPTED
    assert not [file for file in found if Path("/proc", file.name.partition("-")[2]).exists()]
