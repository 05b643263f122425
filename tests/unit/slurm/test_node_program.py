"""What the preflight's program says of a node: with clock, driver, network and torch written down here."""

from __future__ import annotations

import fcntl
import io
import itertools
import json
import os
import queue
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from realsys.slurm.preflight import node_program as program
from realsys.slurm.preflight.node_records import records

Said = Callable[[], list[dict[str, Any]]]


class Clock:
    """The module's ``time``: it moves by what is slept and computed, and by ``tick_s`` at each look."""

    def __init__(self) -> None:
        self.now_s, self.tick_s, self.slept_s = 100.0, 0.0, list[float]()

    def time(self) -> float:
        self.now_s += self.tick_s
        return self.now_s

    monotonic = perf_counter = time

    def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    monkeypatch.setattr(program, "time", found := Clock())
    return found


@pytest.fixture
def said(clock: Clock, capsys: pytest.CaptureFixture[str]) -> Said:
    """The records so far, without node and time."""

    def found() -> list[dict[str, Any]]:
        told = records((0.0, line) for line in capsys.readouterr().out.splitlines())
        assert all((r.pop("node"), r.pop("heard")) == ("n1", 0.0) and r.pop("at") for r in told)
        return told

    return found


def swap(monkeypatch: pytest.MonkeyPatch, **functions: Any) -> None:
    for name, function in functions.items():
        monkeypatch.setattr(program, name, function)


def test_a_record_is_cut_into_numbered_lines(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    swap(monkeypatch, _serial=[0], _program="ab")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written := io.BytesIO()))
    program.tell("long", text="x" * 1300)
    program.tell("short")
    *lines, last = written.getvalue().decode().splitlines()
    text = '{"node": "n1", "what": "long", "at": 100.0, "text": "' + "x" * 1300 + '"}'
    pieces = text[:600], text[600:1200], text[1200:]
    assert lines == [f"{program.MARK}n1.ab.1 {i}/3 {p}" for i, p in enumerate(pieces, 1)]
    assert last == program.MARK + 'n1.ab.2 1/1 {"node": "n1", "what": "short", "at": 100.0}'
    monkeypatch.delenv("SLURMD_NODENAME")
    monkeypatch.setattr(socket, "gethostname", lambda: "here.lab.org")
    assert program.node_name() == "here"


def test_a_lock_is_held_until_the_end_and_seen_by_others(
    tmp_path: Path, said: Said, clock: Clock
) -> None:
    path, before = str(tmp_path / "lock"), len(os.listdir("/proc/self/fd"))
    program.hold({"lock": path, "limit_s": 7.5})
    assert (said(), clock.slept_s) == ([{"what": "held", "error": ""}], [7.5])
    other = os.open(path, os.O_RDWR)
    assert os.fstat(other).st_mode & 0o777 == 0o600
    fcntl.flock(other, fcntl.LOCK_EX)  # of another open file: as another process's
    program.hold({"lock": path, "limit_s": 7.5})
    os.close(other)
    program.hold({"lock": str(tmp_path / "none" / "lock"), "limit_s": 7.5})
    held, missing = said()
    assert held["error"] == "held"
    assert "none/lock" in missing["error"]
    assert (len(clock.slept_s), len(os.listdir("/proc/self/fd"))) == (1, before)


def test_facts_of_the_host(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    swap(monkeypatch, address=lambda *asked: asked, free_ports=lambda *asked: asked)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    sizes = SimpleNamespace(f_blocks=10, f_bavail=7, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda path: {"/dev/shm": sizes}[path])
    monkeypatch.setattr(os.path, "isdir", lambda path: path == "/dev/infiniband")
    request = {"lock": "", "interface": "ib0", "nodes": ["n1"], "ports": [1, 2]}
    limits = {
        name: list(resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}")))
        for name in ("nofile", "memlock")
    }
    known = {
        **limits, "host": socket.gethostname(), "python": sys.executable, "visible": "2,3",
        "shm": [40960, 28672], "infiniband": True, "lock": None, "address": ("ib0", ["n1"]),
        "ports": ([1, 2], 8),
    }  # fmt: skip
    assert program.host_facts(request) == known

    def none(path: str) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(os, "statvfs", none)
    before = len(os.listdir("/proc/self/fd"))
    for lock, told in (
        (tmp_path / "lock", ""),
        (tmp_path, f"[Errno 21] Is a directory: '{tmp_path}'"),
    ):
        found = program.host_facts({**request, "lock": str(lock)})
        assert found == {**known, "lock": told, "shm": [0, 0]}
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("device", "visible", "found"),
    [
        ("cpu", "4,5", ["", "", ""]),
        ("cuda", None, ["0", "1", "2"]),
        ("cuda", " 4, GPU-a,,", ["4", "GPU-a"]),
        ("cuda", "", []),
    ],
)
def test_a_process_for_each_gpu(
    device: str, visible: str | None, found: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert program.devices({"device": device, "processes": 3}) == found


# ---- nvidia-smi -------------------------------------------------------------------------------


def refused(name: str) -> tuple[int, str]:
    return 2, f'Field "{name}" is not a valid field to query.'


NEW, OLD = "clocks_event_reasons.hw", "clocks_throttle_reasons.hw"


@pytest.mark.parametrize(
    ("answers", "asked", "found"),
    [
        ([(0, "rows")], [f"a,{NEW},b"], ("rows", "")),
        ([refused("a"), (0, "rows")], [f"a,{NEW},b", f"{NEW},b"], ("rows", "")),
        ([refused(NEW), refused(OLD), (0, "rows")], [f"a,{NEW},b", f"a,{OLD},b", "a,b"], ("rows", "")),
        ([refused("a"), refused(NEW), refused(OLD), refused("b")],
         [f"a,{NEW},b", f"{NEW},b", f"{OLD},b", "b"], ("", "it knows none of the fields")),
        ([refused("z")], [f"a,{NEW},b"], ("", refused("z")[1])),
        ([(9, " " + "no " * 200)], [f"a,{NEW},b"], ("", ("no " * 200)[:500])),
        ([(9, " \n")], [f"a,{NEW},b"], ("", "nvidia-smi ended with 9")),
    ],
)  # fmt: skip
def test_fields_that_a_driver_does_not_know_are_asked_by_their_old_name_or_left_out(
    answers: list[tuple[int, str]], asked: list[str], found: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    commands, left = list[list[str]](), iter(answers)
    swap(monkeypatch, answer=lambda argv: commands.append(argv) or next(left))
    assert program.smi("--query=", ["a", NEW, "b"]) == found
    assert commands == [["nvidia-smi", f"--query={one}", "--format=csv,nounits"] for one in asked]


def test_what_the_driver_says_is_a_record(said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    program.tell_smi("before")
    none = {
        "what": "smi",
        "when": "before",
        "error": "no nvidia-smi on PATH",
        "gpus": "",
        "rows": "",
    }
    assert said() == [none]
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    swap(monkeypatch, smi=lambda option, fields: (f"{option}{len(fields)}", ""))
    thread = program.in_background("before")
    thread.join()
    assert thread.daemon
    program.tell_smi("load")
    gpus, rows = "--query-gpu=21", "--query-remapped-rows=5"
    told = {"what": "smi", "error": "", "gpus": gpus}
    assert said() == [
        {**told, "when": "before", "rows": rows}, {**told, "when": "load", "rows": ""}
    ]  # fmt: skip
    swap(monkeypatch, smi=lambda option, fields: ("", "it broke"))
    program.tell_smi("before")
    assert said() == [{**none, "error": "it broke"}]


def test_a_command_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    started = list[subprocess.Popen[bytes]]()

    class Kept(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **more: Any) -> None:
            started.append(self)
            super().__init__(*args, **more)

    script = "echo a; echo b >&2; exit 3"
    assert program.answer(["sh", "-c", script]) == (3, "a\nb\n")
    assert program.answer(["/no/such"])[0] == 1
    monkeypatch.setattr(subprocess, "Popen", Kept)
    swap(monkeypatch, SMI_S=0.01)
    code, why = program.answer(["sleep", "9"])
    assert code == 124
    assert "0.01 s" in why
    (process,) = started
    assert process.wait() == -9
    assert process.stdout is not None
    process.stdout.close()


# ---- processes of the GPUs --------------------------------------------------------------------


REQUEST = {"device": "cuda", "limit_s": 50.0, "processes": 2, "ports": None, "interface": "",
           "nodes": ["n0", "n1"], "environment": {"SITE": "a"}}  # fmt: skip


def test_a_node_looks_at_itself_and_reduces_with_its_group(
    said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, joined, ran = list[str](), list[float](), list[tuple[Any, ...]]()
    thread = SimpleNamespace(join=joined.append)

    def run_ranks(*args: Any, at_load: Callable[[], None] | None = None) -> None:
        ran.append(args)
        if at_load:
            at_load()
            program.time.now_s += 49.5  # type: ignore[attr-defined]

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    swap(monkeypatch, host_facts=lambda request: {"facts": len(request)}, run_ranks=run_ranks,
         in_background=lambda when: asked.append(when) or thread,
         free_ports=lambda wanted, count: [(wanted, count)])  # fmt: skip
    program.look(REQUEST)
    assert said() == [{"what": "node", "facts": 7}, {"what": "end", "of": "look"}]
    assert (asked, joined) == (["before", "load"], [1.0, 1.0])
    jobs = [{**REQUEST, "stage": "rank", "local": i} for i in (0, 1)]
    alone = {"nodes": ["n1"], "address": "127.0.0.1", "port": (None, 1)}
    assert ran.pop() == (jobs, ["0", "1"], alone, 150.0, REQUEST)
    mine, others = {"nodes": ["n0", "n1"]}, {"nodes": ["n2", "n3"]}
    request = {**REQUEST, "groups": [others, mine]}
    program.reduce(request)
    jobs = [{**request, "stage": "rank", "local": i, "groups": []} for i in (0, 1)]
    assert ran.pop() == (jobs, ["0", "1"], mine, 199.5, request)
    program.reduce({**request, "groups": [others]})
    assert (ran, said()) == ([], [{"what": "end", "of": "reduce"}] * 2)


class Rank:
    """A process of a GPU that has been started, with its end."""

    def __init__(self, code: int = 0, words: Sequence[str] = ()) -> None:
        self.code, self.words, self.is_killed = code, words, False

    def wait(self) -> int:
        return self.code

    def kill(self) -> None:
        self.is_killed = True


def test_what_the_processes_of_the_gpus_say_is_passed_on(
    said: Said, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four one ends well, one breaks, one ends badly after all was said, one hangs."""
    ranks = [Rank(), Rank(1, ["first", "why", " "]), Rank(1), Rank()]
    lines = [
        *((i, "@doing CUDA\n") for i in range(4)), (0, "@doing matmul\n"), (2, "@doing matmul\n"),
        (1, ""), (0, '@tell {"what": "matmul", "flops": 2}\n'), (3, "@doing matmul\n"), (0, "noise\n"),
        (0, '@tell {"what": "reduce"}\n'), (3, "@doing  all-reduce \n"), (0, "@doing end\n"), (0, ""),
        (2, "@doing end\n"), (2, ""),
    ]  # fmt: skip
    jobs = list[tuple[Any, str, Any]]()

    def start_rank(job: Any, visible: str, lines_of: Any, request: Any) -> Rank:
        jobs.append((job, visible, request))
        for line in lines if len(jobs) == 4 else ():
            lines_of.put(line)
        return ranks[job["local"]]

    swap(monkeypatch, start_rank=start_rank)
    clock.tick_s = 1.0  # a line, and a record, is a second
    group = {"nodes": ["n0", "n1"]}
    program.run_ranks(
        [{"local": i} for i in range(4)], list("abcd"), group, 121.5, REQUEST,
        at_load=lambda: program.tell("load"),
    )  # fmt: skip
    assert jobs == [
        ({"local": i, "rank": 4 + i, "world": 8, "group": group}, "abcd"[i], REQUEST)
        for i in range(4)
    ]
    of = {"nodes": ["n0", "n1"]}
    assert said() == [
        {"what": "broken", "gpu": 1, "doing": "CUDA", "why": "why", **of},
        {"what": "matmul", "gpu": 0, "flops": 2, **of},
        {"what": "load"},  # all that still run compute
        {"what": "reduce", "gpu": 0, **of},
        {"what": "silent", "gpu": 3, "doing": "all-reduce", **of},
    ]
    assert [rank.is_killed for rank in ranks] == [False, False, False, True]
    clock.tick_s = 0.0
    for code in (0, -9):
        ranks[0] = Rank(code)
        swap(monkeypatch, start_rank=lambda job, visible, out, _: out.put((0, "")) or ranks[0])
        program.run_ranks([{"local": 0}], ["a"], {"nodes": ["n1"]}, 200.0, REQUEST)
    broken = {"what": "broken", "gpu": 0, "nodes": ["n1"], "doing": "start"}
    (told,) = said()
    assert told.pop("why").endswith(" -9")
    assert told == broken
    assert program.last_words(Rank(1, ["y" * 301, "\n"]), 1) == "y" * 300


@pytest.mark.parametrize(
    ("device", "nodes", "name", "expected"),
    [
        ("cuda", 2, "ib0",
         {"CUDA_VISIBLE_DEVICES": "5", "NCCL_SOCKET_IFNAME": "=ib0", "GLOO_SOCKET_IFNAME": "ib0"}),
        ("cpu", 2, "", {}),
        ("cpu", 1, "ib0", {}),
    ],
)  # fmt: skip
def test_a_process_of_a_gpu_is_told_which_and_over_what(
    device: str, nodes: int, name: str, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started = list[tuple[list[str], dict[str, Any]]]()

    def popen(argv: list[str], **more: Any) -> SimpleNamespace:
        started.append((argv, more))
        read = threading.Event()

        def stdout() -> Iterator[str]:
            yield from ("@doing a\n", "b\n")
            read.set()

        def stderr() -> Iterator[str]:  # read to its end before the end is told
            read.wait(60)
            yield from (f"line {i} \n" for i in range(25))

        return SimpleNamespace(stdout=stdout(), stderr=stderr())

    monkeypatch.setattr(os, "environ", {"HOME": "/h"})
    monkeypatch.setattr(subprocess, "Popen", popen)
    swap(monkeypatch, own_text=lambda: "text", interface_of=lambda mine: name,
         address=lambda interface, nodes: "10.0.0.1")  # fmt: skip
    out = queue.Queue[tuple[int, str]]()
    job = {"local": 3, "group": {"nodes": ["n"] * nodes}, "environment": {"a": "b"}}
    process = program.start_rank(job, "5", out, {**REQUEST, "device": device})
    assert [out.get(timeout=60) for _ in range(3)] == [(3, "@doing a\n"), (3, "b\n"), (3, "")]
    assert process.words == [f"line {i}" for i in range(5, 25)]
    ((argv, more),) = started
    assert argv == [sys.executable, "-c", "text", json.dumps({**job, "environment": {}})]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environ = {"HOME": "/h", "SITE": "a", "OMP_NUM_THREADS": "1", **expected}
    text = {"universal_newlines": True, "errors": "replace"}
    assert more == {"env": environ, **pipes, **text}


def test_the_program_finds_its_own_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert program.own_text() == Path(program.__file__).read_text()
    (tmp_path / "cmdline").write_bytes(b"python3\0-c\0the t\xc3\xa9xt\0{}\0")
    places = {"/proc/self/cmdline": tmp_path / "cmdline"}
    monkeypatch.setattr(program, "open", lambda path, mode: places[path].open(mode), raising=False)
    assert program.own_text() == "the téxt"


# ---- the network ------------------------------------------------------------------------------

ADDRESSES = [("lo", "127.0.0.1"), ("ib0", "10.1.0.5"), ("eth0", "192.168.1.4")]
ROUTES = {
    "n2": "192.168.1.4",
    "n3": "127.0.0.1",
    "n1": "10.9.9.9",
    "host": "10.9.9.9",
}  # node → our address towards it


class Socket:
    """Knows the way to a node; a port that is taken can't be bound."""

    taken: tuple[int, ...] = ()
    free = itertools.count(40_000)

    def __init__(self, *kind: int) -> None:
        self.kind, self.mine, self.port = kind, "0.0.0.0", 0

    def __enter__(self) -> Socket:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def connect(self, target: tuple[str, int]) -> None:
        assert self.kind == (socket.AF_INET, socket.SOCK_DGRAM)
        self.mine = ROUTES[target[0]]

    def bind(self, place: tuple[str, int]) -> None:
        if place[1] in self.taken:
            raise OSError("taken")
        self.port = place[1] or next(self.free)

    def getsockname(self) -> tuple[str, int]:
        return self.mine, self.port


def looked_up(node: str, port: int, *kind: int) -> list[tuple[Any, ...]]:
    if node not in ROUTES:
        raise socket.gaierror
    return [(*kind, 17, "", (node, port)), ("another",)]


@pytest.fixture
def network(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patched:
        patched.setattr(socket, "socket", Socket)
        patched.setattr(socket, "getaddrinfo", looked_up)
        patched.setattr(socket, "gethostname", lambda: "host.lab")
        yield


@pytest.mark.parametrize(
    ("interface", "nodes", "mine"),
    [
        ("ib0", ["n1", "n2"], "10.1.0.5"),
        ("192.168.0.7/16", [], "192.168.1.4"),
        ("", ["n1", "host", "n4", "n3", "n2"], "192.168.1.4"),  # ours; unknown; a loop; a way
        ("eth7", ["n2"], "192.168.1.4"),
        ("", ["n1", "n3"], "127.0.0.1"),
        ("", [], "127.0.0.1"),
    ],
)
@pytest.mark.usefixtures("network")
def test_the_address_for_other_nodes(
    interface: str, nodes: list[str], mine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    swap(monkeypatch, addresses=lambda: ADDRESSES)
    assert program.address(interface, nodes) == mine


def test_the_addresses_of_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is not asked: a request with another number may change it."""

    def ioctl(fd: int, code: int, asked: bytes) -> bytes:
        assert (code, len(asked), os.fstat(fd).st_mode & 0o170000) == (0x8915, 256, 0o140000)
        if asked.startswith(b"no"):
            raise OSError
        return bytes(20) + bytes([10, 0, 0, len(asked.rstrip(b"\0"))]) + bytes(232)

    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "no"), (2, "eth0"), (3, "a" * 20)])
    monkeypatch.setattr(fcntl, "ioctl", ioctl)
    # of those that have one; as much of a name as fits
    assert program.addresses() == [("eth0", "10.0.0.4"), ("a" * 20, "10.0.0.15")]
    found = [program.interface_of(mine) for mine in ("10.0.0.4", "10.0.0.15", "1.2.3.4")]
    assert found == ["eth0", "a" * 20, ""]


@pytest.mark.usefixtures("network")
def test_ports_that_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Socket, "taken", (20003,))
    monkeypatch.setattr(os, "getpid", lambda: 3)  # 3 · 7919 % 5 = 2
    assert program.free_ports([20000, 20004], 3) == [20002, 20004, 20000]
    assert program.free_ports([20000, 20004], 9) == [20002, 20004, 20000, 20001]
    assert [port - 40_000 for port in program.free_ports(None, 3)] == [0, 1, 2]


# ---- a process of a GPU -----------------------------------------------------------------------


class Numbers:
    """A tensor whose numbers are all alike."""

    def __init__(self, torch: Torch, value: float, size: int = 1) -> None:
        self.torch, self.value, self.size = torch, value, size

    def __matmul__(self, other: Numbers) -> Numbers:
        self.torch.clock.now_s += next(self.torch.products_s)
        return Numbers(self.torch, self.torch.product)

    def __float__(self) -> float:
        return self.value

    def min(self) -> float:
        return self.value - self.torch.spread[0]

    def max(self) -> float:
        return self.value + self.torch.spread[1]

    def numel(self) -> int:
        return self.size

    def normal_(self) -> None:
        self.torch.calls.append(("normal",))

    def zero_(self) -> None:
        self.torch.calls.append(("zero",))


class Torch:
    """What the program uses of torch, with a log of calls. An all-reduce gives ``total`` first, and the
    slowest rank took ``slowest_s``."""

    __version__ = "2.13"
    version = SimpleNamespace(cuda="13.0")
    bfloat16, float32, float64 = "bfloat16", "float32", "float64"

    def __init__(self, clock: Clock) -> None:
        self.clock, self.calls = clock, list[tuple[Any, ...]]()
        self.product, self.spread, self.total, self.slowest_s = 8192.0, (0.0, 0.0), 6.0, 0.75
        self.products_s: Iterator[float] = itertools.repeat(0.125)
        self.sums_s: Iterator[float] = itertools.repeat(0.5)
        self.cuda = SimpleNamespace(
            is_available=lambda: True, init=lambda: None, device_count=lambda: 1,
            get_device_name=lambda i: f"GPU {i}", get_device_capability=lambda i: (9, i),
            get_arch_list=lambda: ["sm_90"], nccl=SimpleNamespace(version=lambda: (2, 28, 9)),
            set_device=lambda i: self.calls.append(("device", i)),
            synchronize=lambda: self.calls.append(("synchronize",)),
        )  # fmt: skip
        self.distributed = SimpleNamespace(
            is_nccl_available=lambda: True, all_reduce=self.all_reduce,
            barrier=lambda: self.calls.append(("barrier",)), ReduceOp=SimpleNamespace(MAX="max"),
            TCPStore=lambda *args, **more: self.calls.append(("store", *args, more)) or "store",
            init_process_group=lambda *args, **more: self.calls.append(("group", *args, more)),
        )  # fmt: skip

    def all_reduce(self, data: Numbers, op: str = "sum") -> None:
        self.calls.append(("sum",) if op == "sum" else (op, data.value))
        self.clock.now_s += next(self.sums_s) if op == "sum" else 0.0
        data.value = self.total if op == "sum" else self.slowest_s

    def ones(self, *size: int, **more: Any) -> Numbers:
        self.calls.append(("ones", size, more))
        return Numbers(self, 1.0)

    def full(self, size: tuple[int], value: float, **more: Any) -> Numbers:
        self.calls.append(("full", size, value, more))
        return Numbers(self, value, size[0])

    def tensor(self, values: list[float], **more: Any) -> Numbers:
        assert more["dtype"] == "float64"
        return Numbers(self, values[0])

    def device(self, *of: Any) -> tuple[Any, ...]:
        return of


@pytest.fixture
def torch(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Torch:
    found = Torch(clock)
    monkeypatch.setitem(sys.modules, "torch", found)
    return found


def failing(words: str) -> Callable[..., Any]:
    def fail(*_: Any) -> None:
        raise RuntimeError(words)

    return fail


def test_facts_of_torch(torch: Torch) -> None:
    built = {"version": "2.13", "cuda": "13.0"}
    assert program.torch_facts(torch, False) == {**built, "available": False}
    known = {**built, "available": True, "count": 1, "name": "GPU 0", "capability": [9, 0],
             "archs": ["sm_90"]}  # fmt: skip
    assert program.torch_facts(torch, True) == {**known, "nccl": "2.28.9"}
    torch.distributed.is_nccl_available = lambda: False
    assert program.torch_facts(torch, True) == known
    for words, told in (("no\nGPU", "no"), ("", "RuntimeError"), ("z" * 400, "z" * 300)):
        torch.cuda.init = failing(words)
        assert program.torch_facts(torch, True) == {**built, "available": True, "error": told}


def test_a_products_rate_is_the_median_of_the_later_half(torch: Torch, clock: Clock) -> None:
    def measured(seconds: Sequence[float], lasts_s: float, *, cuda: bool) -> tuple[float, float]:
        torch.products_s = iter([7.0, *(s for s in seconds for _ in range(4))])
        return program.matmul_seconds(torch, cuda, lasts_s)

    assert measured([9, 9, 9, 3, 1, 2, 5], 150.0, cuda=True) == (3, 2.0 * 8192**3)
    assert torch.calls[:2] == [
        ("ones", (8192, 8192), {"dtype": "bfloat16", "device": "cuda"}), ("normal",)
    ]  # fmt: skip
    assert torch.calls[2:] == [("synchronize",)] * 14
    torch.product, torch.calls[:] = 256.0, []
    assert measured([9, 9, 4, 1, 2], 0.0, cuda=False) == (2, 2.0 * 256**3)  # five at least
    assert torch.calls == [("ones", (256, 256), {"dtype": "float32", "device": "cpu"}), ("normal",)]
    assert measured([1, 1, 1, 1, 1, 1], 20.0, cuda=False) == (1, 2.0 * 256**3)
    for torch.spread in ((1.0, 0.0), (0.0, 1.0)):
        with pytest.raises(RuntimeError):
            measured([1] * 9, 0.0, cuda=False)


JOB = {"group": {"nodes": ["n0", "n1"], "address": "10.0.0.1", "port": 7}, "world": 3, "rank": 1,
       "bytes": 4096, "limit_s": 50, "reduce_s": 3.0, "matmul_s": 1.0, "matmul": False,
       "device": "cuda"}  # fmt: skip


@pytest.mark.parametrize(
    ("first_s", "rounds"), [(0.5, 6), (0.1, 20), (9.0, 1), (0.0, 20)]
)  # that fit into 3 s, 20 at most
def test_an_all_reduce_takes_the_slowest_ranks_mean(
    first_s: float, rounds: int, torch: Torch
) -> None:
    torch.slowest_s = first_s
    torch.sums_s = itertools.chain([9.0], itertools.repeat(0.25))
    assert program.allreduce_seconds(torch, True, JOB) == (first_s, 4096)
    limit = torch.calls[0][-1]["timeout"]
    assert limit.total_seconds() == 50
    joined = {"store": "store", "rank": 1, "world_size": 3, "timeout": limit}
    around = [("barrier",), ("synchronize",)]
    assert torch.calls == [
        ("store", "10.0.0.1", 7, 3, False, {"timeout": limit}),
        ("group", "nccl", {**joined, "device_id": ("cuda", 0)}),
        ("full", (1024,), 2.0, {"device": "cuda"}), ("sum",), ("zero",),
        *around, ("sum",), ("synchronize",), ("max", 0.25),
        *around, *[("sum",)] * rounds, ("synchronize",), ("max", 0.25),
    ]  # fmt: skip


def test_an_all_reduce_on_cpus_and_a_wrong_sum(torch: Torch) -> None:
    program.allreduce_seconds(torch, False, {**JOB, "rank": 0})
    assert torch.calls[0][4] is True  # the first rank keeps the store
    assert (torch.calls[1][1], "device_id" in torch.calls[1][2]) == ("gloo", False)
    assert torch.calls[2] == ("full", (1024,), 1.0, {"device": "cpu"})
    for torch.spread in ((1.0, 0.0), (0.0, 1.0)):
        with pytest.raises(RuntimeError):
            program.allreduce_seconds(torch, False, JOB)


class Exited(BaseException):
    """Instead of the end of the process."""


@pytest.fixture
def ran(
    torch: Torch, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[dict[str, Any]], list[str]]]:
    """Runs a rank; the lines that it wrote, and its status."""
    reading, writing = os.pipe()
    moved = list[tuple[int, int]]()
    monkeypatch.setattr(os, "dup", lambda fd: {1: writing}[fd])
    monkeypatch.setattr(os, "dup2", lambda *pair: moved.append(pair))
    monkeypatch.setattr(os, "_exit", failing_with_status)

    def run(job: dict[str, Any]) -> list[str]:
        moved.clear()
        try:
            program.rank({**JOB, **job})
            end = "went on"
        except Exited as status:
            end = f"status {status}"
        except RuntimeError as error:
            end = str(error)
        assert moved == [(2, 1)]  # what libraries print is not read
        os.write(writing, b"\n")
        return [*os.read(reading, 65536).decode().splitlines()[:-1], end]

    yield run
    monkeypatch.undo()
    os.close(reading)
    os.close(writing)


def failing_with_status(status: int) -> None:
    raise Exited(status)


def test_a_process_says_what_it_does_and_finds(
    ran: Callable[[dict[str, Any]], list[str]], torch: Torch
) -> None:
    facts = json.dumps({"what": "torch", **program.torch_facts(torch, True)})
    matmul = json.dumps({"what": "matmul", "flops": 2.0 * 8192**3 / 0.125})
    reduce = json.dumps({"what": "reduce", "world": 3, "seconds": 0.75, "bytes": 4096})
    begin, end = "@doing import torch", ["@doing end", "status 0"]
    well = [begin, "@doing CUDA", f"@tell {facts}", "@doing matmul", f"@tell {matmul}"]
    assert ran({"matmul": True, "rank": 0}) == [
        *well, "@doing all-reduce", f"@tell {reduce}", *end
    ]  # fmt: skip
    assert (torch.calls[0], torch.calls[-1]) == (("device", 0), ("barrier",))
    assert ran({}) == [begin, "@doing all-reduce", *end]  # rank 1
    torch.calls.clear()
    assert ran({"world": 1, "device": "cpu"}) == [begin, *end]
    assert torch.calls == []
    torch.total = 3.0
    barriers = iter([None, None])
    torch.distributed.barrier = lambda: next(barriers)  # the third: another rank is gone
    assert ran({"world": 2}) == [begin, "@doing all-reduce", *end]
    with pytest.raises(StopIteration):
        next(barriers)
    torch.cuda.init = failing("CUDA says no")
    facts = json.dumps({"what": "torch", **program.torch_facts(torch, True)})
    assert ran({"matmul": True}) == [begin, "@doing CUDA", f"@tell {facts}", "CUDA says no"]


@pytest.mark.parametrize("stage", ["hold", "look", "reduce", "rank"])
def test_each_stage_is_one_function(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[Any]()
    swap(monkeypatch, **{stage: asked.append})
    monkeypatch.setattr(os, "_exit", failing_with_status)
    monkeypatch.setattr(sys, "argv", ["-c", json.dumps({"stage": stage})])
    with pytest.raises(Exited) as ended:
        program.main()
    assert (asked, ended.value.args) == ([{"stage": stage}], (0,))
