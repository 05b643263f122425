"""The sandbox as its callers see it: outcomes of programs, and failures that are never outcomes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from realsys.api.errors import ClusterError, ConfigError, SandboxFailure
from realsys.rewards.sandbox import node_support as support
from realsys.rewards.sandbox import sandbox as door
from realsys.rewards.sandbox.box_archive import UNPACK
from realsys.rewards.sandbox.box_limits import BoxLimits, BoxOutcome
from realsys.rewards.sandbox.sandbox import Sandbox, python_argv, python_file_argv

LIMITS = BoxLimits(wall_s=60, cpu_s=30, memory_bytes=256 << 20)


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(LIMITS) as made:
        yield made


@pytest.fixture
def own() -> Iterator[Sandbox]:
    """A sandbox for tests that break it."""
    with Sandbox(LIMITS) as made:
        yield made


def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]


def fork_server(sandbox: Any) -> int:
    (server,) = children(sandbox._server._process.pid)
    return server


def eventually(condition: Callable[[], object], within_s: float = 240.0) -> None:
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def in_the_background(sandbox: Sandbox, argv: list[str]) -> Callable[[], BoxOutcome]:
    """Runs a program in a thread; the result returns its outcome, or raises."""
    executor = ThreadPoolExecutor(1)
    future = executor.submit(sandbox.run, argv)
    executor.shutdown(wait=False)
    return lambda: future.result(timeout=60)


def test_a_programs_streams_status_and_times(sandbox: Sandbox) -> None:
    script = "read line; echo out $line; echo err >&2; exit 3"
    outcome = sandbox.run(["/bin/sh", "-c", script], stdin=b"in\n")
    assert (outcome.ended, outcome.exit_code, outcome.signal) == ("exit", 3, None)
    assert (outcome.stdout, outcome.stderr) == (b"out in\n", b"err\n")
    assert not outcome.succeeded
    assert 0 < outcome.wall_s < 60
    assert 0 < outcome.cpu_s < 30


def test_a_signal_is_no_exit_status(sandbox: Sandbox) -> None:
    outcome = sandbox.run(["/bin/sh", "-c", "kill -9 $$"])
    assert (outcome.ended, outcome.exit_code, outcome.signal) == ("signal", None, 9)


def test_a_program_that_is_not_there(sandbox: Sandbox) -> None:
    missing = sandbox.run(["no-such-compiler", "x.c"])
    assert (missing.exit_code, missing.stderr) == (
        127,
        b"no-such-compiler: No such file or directory\n",
    )
    folder = sandbox.run(["/usr"])
    assert (folder.exit_code, folder.stderr) == (126, b"/usr: Permission denied\n")


def test_reserved_address_space_is_no_memory(sandbox: Sandbox) -> None:
    """Node.js reserves 10 GiB for each of its WebAssembly memories."""
    code = (
        "import mmap; private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS; "
        "print(len([mmap.mmap(-1, 10 << 30, flags=private, prot=0) for _ in range(8)]))"
    )
    assert sandbox.run(python_argv(code)).stdout == b"8\n"


def test_files_go_in_and_come_back(sandbox: Sandbox) -> None:
    outcome = sandbox.run(
        python_file_argv("src/main.py", "7"),
        files={
            "src/main.py": "import sys, helper\nhelper.write(sys.argv[1])",
            "src/helper.py": HELPER,
        },
        collect=["made/result", "not_made"],
    )
    assert outcome.succeeded, outcome.stderr
    assert outcome.files == {"made/result": b"\x007"}


HELPER = """
import os
def write(text):
    os.mkdir("made")
    open("made/result", "wb").write(bytes(1) + text.encode())
"""


def test_the_environment_is_fixed_but_for_what_is_given(sandbox: Sandbox) -> None:
    os.environ["HF_TOKEN"] = "hush"
    outcome = sandbox.run(["env"], env={"CASE": "7"})
    names = {line.partition("=")[0] for line in outcome.stdout.decode().splitlines()}
    assert names - {"PWD", "SHLVL", "_"} == {"PATH", "HOME", "TMPDIR", "LANG", "USER", "CASE"}


@pytest.mark.parametrize(
    ("code", "status", "out", "error"),
    [
        ("pass", 0, "", ""),
        ("print('no newline', end='')", 0, "no newline", ""),
        ("import sys; sys.exit()", 0, "", ""),
        ("import sys; sys.exit(300)", 44, "", ""),
        ("import sys; sys.exit('words')", 1, "", "words\n"),
        ("raise SystemExit(True)", 1, "", ""),
        ("1 / 0", 1, "", "ZeroDivisionError: division by zero"),
        ("def f(:", 1, "", "SyntaxError"),
        ("import os; os._exit(5)", 5, "", ""),
        ("import atexit; atexit.register(print, 'last')", 0, "last\n", ""),
        (
            "import threading, time\n"
            "threading.Thread(target=lambda: (time.sleep(0.2), print('late'))).start()",
            0,
            "late\n",
            "",
        ),
        ("print(__name__, __import__('sys').argv)", 0, "__main__ ['-c', 'a b']\n", ""),
        ("class A: pass\nprint(A.__module__, A)", 0, "__main__ <class '__main__.A'>\n", ""),
        ("print(open('/dev/stdin').read() or 'empty')", 0, "empty\n", ""),
        ("import subprocess; print(subprocess.check_output(['echo', 'x']))", 0, "b'x\\n'\n", ""),
        ("import asyncio; print(asyncio.run(asyncio.sleep(0, 'slept')))", 0, "slept\n", ""),
        (
            "import multiprocessing as m\n"
            "with m.get_context('fork').Pool(2) as p: print(p.map(abs, [-1, -2]))",
            0,
            "[1, 2]\n",
            "",
        ),
    ],
)
def test_warm_python_is_as_python(
    sandbox: Sandbox, code: str, status: int, out: str, error: str
) -> None:
    warm = sandbox.run(python_argv(code, "a b"))
    cold = sandbox.run(["python", "-c", code, "a b"])
    for outcome in (warm, cold):
        assert (outcome.ended, outcome.exit_code) == ("exit", status), outcome.stderr
        assert outcome.stdout.decode() == out
        assert error in outcome.stderr.decode()
    assert warm.stderr == cold.stderr


def test_boxes_draw_their_own_random_numbers(sandbox: Sandbox) -> None:
    drawn = {
        sandbox.run(python_argv("import random; print(random.random())")).stdout for _ in range(4)
    }
    assert len(drawn) == 4


def test_what_is_preloaded_and_shown_is_there(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)  # of root, a box sees what everybody may
    (tmp_path / "data").write_text("7")
    look = f"import sys; print('fractions' in sys.modules, open({str(tmp_path / 'data')!r}).read())"
    with Sandbox(LIMITS, preload=["fractions"], read_only=[str(tmp_path)]) as made:
        assert made.run(python_argv(look)).stdout == b"True 7\n"
        write = made.run(python_argv(f"open({str(tmp_path / 'more')!r}, 'w')"))
        assert b"Read-only file system" in write.stderr


def test_hundreds_of_boxes_one_after_another(sandbox: Sandbox) -> None:
    sandbox.run(python_argv("pass"))
    own = len(os.listdir("/proc/self/fd"))
    for number in range(300):
        outcome = sandbox.run(python_argv(f"print({number})"))
        assert outcome.stdout == f"{number}\n".encode(), outcome
    eventually(lambda: not children(fork_server(sandbox)))
    assert len(os.listdir("/proc/self/fd")) <= own + 2
    assert len(os.listdir(f"/proc/{sandbox._server._process.pid}/fd")) < 16  # type: ignore[union-attr]


def test_32_boxes_at_once(tmp_path: Path) -> None:
    """Each waits until all are there: they really are at once."""
    tmp_path.chmod(0o755)
    wait = (
        f"import os, time\nwhile not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.05)\n"
    )
    with Sandbox(LIMITS, read_only=[str(tmp_path)]) as made, ThreadPoolExecutor(32) as pool:

        def one(number: int) -> bytes:
            return made.run(python_argv(f"{wait}print({number})")).stdout

        made.start()
        results = [pool.submit(one, number) for number in range(32)]
        try:
            eventually(lambda: len(children(fork_server(made))) == 32)
        finally:
            (tmp_path / "go").touch()
        found = [result.result() for result in results]
    assert found == [f"{n}\n".encode() for n in range(32)]


def test_no_more_boxes_at_once_than_allowed() -> None:
    code = "import time; start = time.monotonic(); time.sleep(0.3); print(start, time.monotonic())"
    with Sandbox(LIMITS, boxes_at_once=2) as made, ThreadPoolExecutor(6) as pool:
        outcomes = list(pool.map(lambda _: made.run(python_argv(code)), range(6)))
    assert all(outcome.succeeded for outcome in outcomes)
    # Programs' own clock (one for the machine): a box that ended may linger while it is reaped.
    spans = [tuple(map(float, outcome.stdout.split())) for outcome in outcomes]
    at_once = [sum(start <= moment < end for start, end in spans) for moment, _ in spans]
    assert max(at_once) <= 2


# ---- failures of the box: never an outcome -----------------------------------------------------


def test_a_killed_box_is_a_failure_and_no_outcome(own: Sandbox) -> None:
    failures = 0
    for _ in range(20):
        result = in_the_background(own, python_argv("import time; time.sleep(60)"))
        eventually(lambda: children(fork_server(own)))
        os.kill(children(fork_server(own))[0], signal.SIGKILL)
        with pytest.raises(SandboxFailure, match="judged"):
            result()
        failures += 1
        eventually(lambda: not children(fork_server(own)))
    assert failures == 20
    assert own.run(python_argv("print(1)")).stdout == b"1\n"


@pytest.mark.parametrize("victim", ["keeper", "fork server"])
def test_a_killed_fork_server_fails_its_boxes_and_is_started_again(own: Any, victim: str) -> None:
    results = [in_the_background(own, python_argv("import time; time.sleep(60)")) for _ in range(3)]
    server = fork_server(own)
    eventually(lambda: len(children(server)) == 3)
    boxes = children(server)
    os.kill(server if victim == "fork server" else own._server._process.pid, signal.SIGKILL)
    for result in results:
        with pytest.raises(SandboxFailure):
            result()
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in [server, *boxes]))
    eventually(lambda: own._server._process.poll() is not None)
    assert own.run(python_argv("print(1)")).stdout == b"1\n"


def test_close_ends_boxes_as_failures(own: Sandbox) -> None:
    result = in_the_background(own, python_argv("import time; time.sleep(60)"))
    eventually(lambda: children(fork_server(own)))
    own.close()
    with pytest.raises(SandboxFailure):
        result()


def test_nothing_outlives_a_killed_worker(tmp_path: Path) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(
        textwrap.dedent("""
        import threading, time
        from realsys.rewards.sandbox.sandbox import Sandbox, python_argv
        made = Sandbox()
        starts = threading.Thread(target=made.start)  # a thread that ends: the sandbox stays
        starts.start()
        starts.join()
        assert made.run(python_argv("pass")).succeeded
        threading.Thread(target=made.run, args=(python_argv("import time; time.sleep(60)"),)).start()
        time.sleep(0.5)
        print(made._server._process.pid, flush=True)
        time.sleep(60)
        """)
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        [sys.executable, str(worker)], stdout=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None
        keeper = int(process.stdout.readline())
        (server,) = children(keeper)
        eventually(lambda: children(server) and children(children(server)[0]))
        (box,) = children(server)
        everything = [keeper, server, box, *children(box)]
        assert len(everything) == 4
        process.kill()
    eventually(lambda: not any(running(pid) for pid in everything))


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_box_that_does_not_answer_is_given_up(
    own: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "_GRACE_S", 5.0 - door.PACK_S - 600)  # long before the box's own end
    limits = BoxLimits(wall_s=600)
    stopped = ThreadPoolExecutor(1).submit(own.run, ["sleep", "60"], limits=limits)
    eventually(lambda: children(fork_server(own)))
    (box,) = children(fork_server(own))
    os.kill(box, signal.SIGSTOP)
    with pytest.raises(SandboxFailure, match="TimeoutError"):
        stopped.result(timeout=60)
    eventually(lambda: not children(fork_server(own)))


# ---- refusals ---------------------------------------------------------------------------------


def test_a_node_that_lacks_something_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(**missing: str) -> None:
        found = support.NodeSupport(missing=missing, landlock_abi=0, kernel="4.18")
        monkeypatch.setattr(door, "node_support", lambda: found)

    without(user="unshare: Operation not permitted", net="no")
    with pytest.raises(ClusterError, match=r"missing: user \(unshare") as refused:
        Sandbox().start()
    assert "user.max_user_namespaces" in refused.value.fix
    with pytest.raises(ClusterError, match="missing: user"):
        Sandbox(allow_missing=["net"]).start()
    without(net="unshare: Invalid argument", uts="no")
    with pytest.raises(ClusterError, match="missing: net") as refused:
        Sandbox().start()
    assert "allow_missing=['net', 'uts']" in refused.value.fix
    with Sandbox(LIMITS, allow_missing=["net", "uts"]) as made:
        assert made.run(python_argv("print(1)")).stdout == b"1\n"
    with pytest.raises(ConfigError, match="user"):
        Sandbox(allow_missing=["user"]).start()


def test_a_module_that_can_not_be_preloaded_is_named() -> None:
    with pytest.raises(ClusterError, match="'no_such_module'"):
        Sandbox(preload=["no_such_module"]).start()


@pytest.mark.parametrize("name", ["../x", "/x", "a/../b", "", ".stdin", "a//b", "a\0b", "."])
def test_names_that_lead_out_are_refused(sandbox: Sandbox, name: str) -> None:
    with pytest.raises(ConfigError, match="files"):
        sandbox.run(["true"], files={name: ""})
    with pytest.raises(ConfigError, match="files"):
        sandbox.run(["true"], collect=[name])


def test_arguments_with_zero_bytes_are_refused(sandbox: Sandbox) -> None:
    for wrong in ([], ["echo", "a\0b"]):
        with pytest.raises(ConfigError, match="argv"):
            sandbox.run(wrong)


def test_this_node_is_described(sandbox: Sandbox) -> None:
    words = support.node_support().words()
    assert "user: yes" in words
    assert "landlock: " in words


def test_several_programs_in_one_box(sandbox: Sandbox) -> None:
    double = "n = int(input()); open('seen', 'a').write(str(n)); print(2 * n)"
    spin = python_argv("while True: pass")
    programs = [(python_argv(double), b"1"), (["/bin/cat"], b"two"), (python_argv(double), b"x")]
    outcomes = sandbox.run_each(programs, collect=["seen"])
    assert [outcome.stdout for outcome in outcomes] == [b"2\n", b"two", b""]
    assert [outcome.exit_code for outcome in outcomes] == [0, 0, 1]
    assert outcomes[0].files == {"seen": b"1"}
    limits = BoxLimits(cpu_s=0.5, wall_s=60)
    programs = [(python_argv(double), b"1"), (spin, b""), (python_argv(double), b"2")]
    stopped = sandbox.run_each(programs, limits=limits, stop_after=["cpu_time"])
    assert [outcome.ended for outcome in stopped] == ["exit", "cpu_time"]
    whole = sandbox.run_each(programs, limits=limits)
    assert [outcome.ended for outcome in whole] == ["exit", "cpu_time", "exit"]
    assert whole[1].cpu_s >= 0.4
    assert whole[2].cpu_s < 0.4  # its own


def test_a_program_can_not_spoil_the_next_ones_input(sandbox: Sandbox) -> None:
    spoil = """
import os
os.symlink("/etc/passwd", ".stdin")
os.kill(-1, 9) if os.fork() else None
"""
    fill = "open('fill', 'wb').write(bytes(1 << 30))"
    programs = [(python_argv(spoil), b""), (python_argv(fill), b""), (["/bin/cat"], b"mine" * 5000)]
    assert sandbox.run_each(programs)[2].stdout == b"mine" * 5000


def test_too_many_programs_are_refused(sandbox: Sandbox) -> None:
    for count in (0, 257):
        with pytest.raises(ConfigError, match=f"{count} programs"):
            sandbox.run_each([(["true"], b"")] * count)
    assert len(sandbox.run_each([(["true"], b"")] * 256)) == 256


# ---- further folders, and archives of them ----------------------------------------------------


def in_folders(sandbox: Sandbox, script: str, archive: bytes = b"", **given: Any) -> BoxOutcome:
    """Runs a script of bash with /app and /logs/agent, on the files of an archive; packs /app and /tmp."""
    programs = [(UNPACK, archive), (["/bin/bash", "-c", script], b"")]
    folders, packed = ["/app", "/logs/agent"], ["/app", "/tmp"]
    return sandbox.run_each(programs, folders=folders, archive=packed, **given)[-1]


def test_files_of_folders_go_from_box_to_box(sandbox: Sandbox) -> None:
    make = """
        cd /app && mkdir -p deep/er && echo text > deep/er/file && ln deep/er/file same
        ln -s /etc/passwd link && ln -s nowhere dangling && mkfifo fifo && chmod 640 same
        echo secret > none && chmod 0 none && truncate -s 60M holes && chmod 555 deep/er
        echo kept > /tmp/kept && echo gone > /box/gone && echo gone > /logs/agent/gone
        sleep 600 & echo $!
    """
    first = in_folders(sandbox, make)
    assert first.exit_code == 0, first.stderr
    assert first.archive is not None
    assert len(first.archive) < 1 << 20  # of a file with holes only the rest
    look = """
        cd /app && cat deep/er/file /tmp/kept && readlink link dangling && stat -c %a same deep/er
        test deep/er/file -ef same && test -p fifo && ! test -e none && stat -c %s holes
        ls /box /logs/agent && pgrep sleep || echo alone
    """
    second = in_folders(sandbox, look, first.archive)
    words = "text kept /etc/passwd nowhere 640 555 62914560 /box: /logs/agent: alone"
    assert second.stdout.decode().split() == words.split(), second.stderr
    assert second.archive is not None


def test_a_program_can_not_make_a_box_fail_by_what_is_packed(sandbox: Sandbox) -> None:
    limits = BoxLimits(wall_s=60, cpu_s=30, file_bytes=8 << 20, files=5000, output_bytes=1000)
    nest = "import os; os.chdir('/app'); [(os.mkdir('d'), os.chdir('d')) for _ in range(1000)]"
    deep = f'python -c "{nest}"'
    many = "cd /app; for i in {1..6000}; do : > $i; done 2>/dev/null; true"
    for script in (deep, many, "chmod 0 /app", "rm -rf /app; ln -s / /app; mkfifo '/app/-rf /'"):
        outcome = in_folders(sandbox, script, limits=limits)
        assert outcome.ended == "exit"
        again = in_folders(sandbox, "echo alive", outcome.archive or b"", limits=limits)
        assert again.stdout == b"alive\n"
    larger = in_folders(sandbox, "head -c 7M /dev/urandom > /app/x", limits=limits)
    assert larger.archive is not None
    fill = "cp /app/x /app/y; head -c 7M /dev/urandom > /tmp/z; head -c 7M /dev/urandom > /app/z"
    # The box has room for what it was given too, but no more is packed than of a full box.
    full = in_folders(sandbox, fill, larger.archive + bytes(16 << 20), limits=limits)
    assert full.archive is None
    assert full.ended == "exit"


@pytest.mark.parametrize("folder", ["app", "/usr", "/etc/x", "/app/..", "/box", "/proc"])
def test_folders_that_shadow_the_system_are_refused(sandbox: Sandbox, folder: str) -> None:
    with pytest.raises(ConfigError, match="writable"):
        sandbox.run_each([(["true"], b"")], folders=[folder])
    with pytest.raises(ConfigError, match="packed"):
        sandbox.run_each([(["true"], b"")], archive=["/app"])


def test_the_interpreter_is_seen_in_a_further_folder(sandbox: Sandbox) -> None:
    """Also where a folder with it, in a home say, is made writable."""
    top = "/" + sys.base_prefix.split("/")[1]
    folders = ["/app"] if top in ("/usr", "/tmp") else [top]
    script = f"touch {folders[0]}/mine && python -c 'import sys, msgspec; print(sys.prefix)'"
    outcome = sandbox.run_each([(["/bin/bash", "-c", script], b"")], folders=folders)[0]
    assert outcome.stdout.decode().strip() == sys.prefix, outcome.stderr
