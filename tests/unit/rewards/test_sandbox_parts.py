"""What a sandbox decides without starting anything; and that its page lists every attempt."""

from __future__ import annotations

import errno
import os
import re
import resource
import signal
import struct
from contextlib import nullcontext
from pathlib import Path

import golden
import pytest
from sandbox_attacks import ATTACKS

from realsys.api.errors import ConfigError, SandboxFailure
from realsys.rewards.guard import rule_filter
from realsys.rewards.sandbox import landlock_rules, seccomp_filter
from realsys.rewards.sandbox.box_archive import pack_argv
from realsys.rewards.sandbox.box_init import ended_by
from realsys.rewards.sandbox.box_limits import BoxLimits
from realsys.rewards.sandbox.box_messages import BoxReply
from realsys.rewards.sandbox.box_program import environment, resource_limits
from realsys.rewards.sandbox.box_root import hidden_by_writable, outermost, refused_folders
from realsys.rewards.sandbox.box_usage import oom_files, oom_kills, parse_stat, parse_status
from realsys.rewards.sandbox.fork_server import namespace_flags
from realsys.rewards.sandbox.kernel_calls import mounts_below
from realsys.rewards.sandbox.node_support import NodeSupport
from realsys.rewards.sandbox.sandbox import Sandbox

ROOT = Path(__file__).parents[3]
X86, ARM = 0xC000003E, 0xC00000B7
ALLOW, KILL = 0x7FFF0000, 0x80000000


def filtered(machine: str, architecture: int, number: int, *arguments: int) -> int:
    """What the kernel would do with a system call: runs the filter as bpf(2) describes it."""
    code = seccomp_filter.assemble(machine)
    program = list(struct.iter_unpack("=HBBI", code))
    data = struct.pack("=iIQ6Q", number, architecture, 0, *arguments, *[0] * (6 - len(arguments)))
    at = accumulator = 0
    while True:
        operation, if_true, if_false, value = program[at]
        at += 1
        match operation:
            case 0x20:
                (accumulator,) = struct.unpack_from("=I", data, value)
            case 0x06:
                return int(value)
            case 0x15:
                at += if_true if accumulator == value else if_false
            case 0x35:
                at += if_true if accumulator >= value else if_false
            case 0x45:
                at += if_true if accumulator & value else if_false
            case _:
                raise AssertionError(operation)


def refused(code: int) -> int:
    return 0x00050000 | code


@pytest.mark.parametrize(("machine", "architecture"), [("x86_64", X86), ("aarch64", ARM)])
def test_the_filter_refuses_what_it_names_and_nothing_else(machine: str, architecture: int) -> None:
    column = ("x86_64", "aarch64").index(machine)
    denied = {n[column] for n in seccomp_filter.DENIED.values() if n[column] is not None}
    special = {
        n[column] for n in ((56, 220), (435, 435), (41, 198), (16, 29), (54, 208), (72, 25))
    }  # clone, clone3, socket, ioctl, setsockopt, fcntl
    for number in range(500):
        if number not in special:
            expected = refused(errno.EPERM) if number in denied else ALLOW
            assert filtered(machine, architecture, number) == expected, number


@pytest.mark.parametrize(
    ("number", "arguments", "expected"),
    [
        (56, (17,), ALLOW),  # fork
        (56, (0x3D0F00,), ALLOW),  # a thread
        (56, (0x10000000 | 17,), refused(errno.EPERM)),
        (56, (0x20000 | 17,), refused(errno.EPERM)),
        (56, (0x2000000,), refused(errno.EPERM)),
        (435, (0,), refused(errno.ENOSYS)),
        (41, (1, 1), ALLOW),
        (41, (2, 1), ALLOW),
        (41, (10, 1), ALLOW),
        (41, (16, 3), refused(errno.EAFNOSUPPORT)),
        (41, (40, 1), refused(errno.EAFNOSUPPORT)),
        (41, (0, 1), refused(errno.EAFNOSUPPORT)),
        (16, (0, 0x5401), ALLOW),
        (16, (0, 0x5412), refused(errno.EPERM)),
        (16, (0, 0x541C), refused(errno.EPERM)),
        (16, (0, 0x1_0000_5412), refused(errno.EPERM)),  # the kernel reads the low half
        (54, (3, 1, 7), refused(errno.EPERM)),  # SO_SNDBUF
        (54, (3, 1, 8), refused(errno.EPERM)),
        (54, (3, 1, 32), refused(errno.EPERM)),
        (54, (3, 1, 33), refused(errno.EPERM)),
        (54, (3, 1, 0x1_0000_0007), refused(errno.EPERM)),
        (54, (3, 1, 2), ALLOW),  # SO_REUSEADDR
        (54, (3, 6, 7), ALLOW),  # of TCP
        (72, (3, 1031, 1 << 16), ALLOW),  # F_SETPIPE_SZ
        (72, (3, 1031, (1 << 16) + 1), refused(errno.EPERM)),
        (72, (3, 2, 1 << 20), ALLOW),  # F_SETFD
        (253, (), refused(errno.EPERM)),  # inotify_init
        (0x40000000 | 165, (), refused(errno.ENOSYS)),
    ],
)
def test_the_filter_looks_at_arguments(
    number: int, arguments: tuple[int, ...], expected: int
) -> None:
    assert filtered("x86_64", X86, number, *arguments) == expected


def test_calls_of_another_processor_kill() -> None:
    assert filtered("x86_64", 0x40000003, 20) == KILL  # i386
    assert filtered("aarch64", 0x40000028, 20) == KILL  # arm


def test_landlock_refuses_what_each_abi_knows() -> None:
    sizes = {abi: 8 * len(landlock_rules.handled_rights(abi)) for abi in (1, 2, 3, 4, 5, 6, 7, 99)}
    assert sizes == {1: 8, 2: 8, 3: 8, 4: 16, 5: 16, 6: 24, 7: 24, 99: 24}
    assert landlock_rules.handled_rights(1) == [0x1FFF]
    assert landlock_rules.handled_rights(7) == [0xFFFF, 3, 3]
    assert landlock_rules.handled_rights(7, refuse_tcp=False) == [0xFFFF, 0, 3]
    assert landlock_rules.handled_rights(3, refuse_tcp=False) == [0x7FFF]


@pytest.mark.parametrize(("listens", "tries"), [(False, 2), (True, 1)])
def test_a_box_in_doubt_is_tried_again_unless_another_has_seen_the_first_try(
    listens: bool, tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one conversation with the policy would hold the answers of both tries."""
    replies: list[BoxReply] = []

    def doubtful(*_: object) -> BoxReply:
        replies.append(BoxReply(failure="out of memory", is_doubtful=True))
        return replies[-1]

    monkeypatch.setattr(Sandbox, "_reply", doubtful)
    monkeypatch.setattr(Sandbox, "start", lambda self: None)
    on_listening = (lambda listener, end: None) if listens else None
    with pytest.raises(SandboxFailure):
        Sandbox().run_each([(["true"], b"")], on_listening=on_listening)
    assert len(replies) == tries


def test_a_box_can_not_listen_without_a_network_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sandbox, "start", lambda self: setattr(self, "_without", ["net"]))
    with pytest.raises(ConfigError) as caught:
        Sandbox(allow_missing=["net"]).run_each(
            [(["true"], b"")], on_listening=lambda listener, end: None
        )
    assert caught.value.where == "allow_missing"


def test_a_call_that_every_filter_denies_has_its_number_in_one_place() -> None:
    assert rule_filter._ALWAYS.keys() & seccomp_filter.DENIED.keys() == set()


MOUNTINFO = r"""22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:25 / /usr ro,nosuid,nodev,relatime - nfs server:/usr rw
31 30 0:26 / /usr/local rw,noexec,noatime - ext4 /dev/sdb rw
32 22 0:27 / /usr2 rw - ext4 /dev/sdc rw
33 22 0:28 / /opt/a\040b rw,nosuid - ext4 /dev/sdd rw
"""


def test_mounts_below_a_folder_keep_their_flags() -> None:
    assert mounts_below("/usr", MOUNTINFO) == [
        ("/usr", 0x1 | 0x2 | 0x4 | 0x200000),
        ("/usr/local", 0x8 | 0x400),
    ]
    assert mounts_below("/opt/a b", MOUNTINFO) == [("/opt/a b", 0x2)]
    assert len(mounts_below("/", MOUNTINFO)) == 5


def test_usage_is_summed_over_processes() -> None:
    ticks, page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    one = b"7 (a) b) S 1 7 7 0 -1 0 0 0 0 0 10 20 30 40 20 0 3 0 99 1000000 50 0"
    two = b"8 () R 1 8 8 0 -1 0 0 0 0 0 1 2 3 4 20 0 1 0 99 1000000 5 0"
    usage = parse_stat([one, two])
    assert usage.cpu_s == 110 / ticks
    assert (usage.processes, usage.memory_bytes) == (4, 55 * page)


STATUS = b"""Name:\ta: b
State:\tS (sleeping)
FDSize:\t128
VmRSS:\t    9000 kB
RssAnon:\t    1000 kB
RssFile:\t    7000 kB
RssShmem:\t    1000 kB
VmPTE:\t      76 kB
VmSwap:\t      12 kB
"""


def test_memory_beside_what_is_resident() -> None:
    found = parse_status(STATUS)
    assert (found.private, found.swapped) == (2000 << 10, 12 << 10)
    assert (found.page_tables, found.descriptors) == (76 << 10, 128)
    assert parse_status(b"Name:\tx\nState:\tZ (zombie)\n").page_tables == 0


def test_kills_are_counted_by_the_own_cgroup_where_it_counts(tmp_path: Path) -> None:
    found = oom_files("4:memory:/slurm/uid_1/job_7\n1:cpu,cpuacct:/x\n0::/\n")
    assert found == [Path("/sys/fs/cgroup/memory/slurm/uid_1/job_7/memory.oom_control")]
    assert oom_files("0::/system.slice/job_7/step_0\n")[0] == Path(
        "/sys/fs/cgroup/system.slice/job_7/step_0/memory.events"
    )
    counts = {
        b"low 0\nhigh 0\nmax 9\noom 5\noom_kill 3\noom_group_kill 7\n": 3,
        b"oom_kill_disable 0\nunder_oom 0\noom_kill 4\n": 4,
        b"oom_kill_disable 1\nunder_oom 0\n": 0,
    }
    for text, count in counts.items():
        (tmp_path / "events").write_bytes(text)
        with (tmp_path / "events").open("rb") as file:
            assert oom_kills(file.fileno()) == count


@pytest.mark.parametrize(
    "second", [BoxReply(outcomes=[]), BoxReply(failure="no", is_doubtful=True)]
)
def test_a_kill_that_another_program_may_have_met_is_a_failure_the_second_time(
    monkeypatch: pytest.MonkeyPatch, second: BoxReply
) -> None:
    replies = [BoxReply(failure="no memory", is_doubtful=True), second]
    monkeypatch.setattr(Sandbox, "_reply", lambda *_: replies.pop(0))
    with pytest.raises(SandboxFailure) if second.failure else nullcontext():
        assert Sandbox().run_each([(["true"], b"")]) == []
    assert replies == []


def test_folders_inside_of_shown_ones_are_not_shown_twice() -> None:
    paths = ["/opt/conda", "/usr/lib/python3", "/opt/conda/envs/a", "/opt/conda2", "/opt/conda"]
    assert outermost(paths) == ["/opt/conda", "/opt/conda2"]


def test_folders_that_writable_ones_would_hide_are_kept_elsewhere() -> None:
    shown = ["/opt/a", "/tmp/venv", "/tmpfs", "/box/x"]
    hidden = {"/tmp/venv": "/.read_only/1", "/box/x": "/.read_only/3"}
    assert hidden_by_writable(shown, ["/app", "/op"]) == hidden
    assert hidden_by_writable(shown, ["/opt"]) == {"/opt/a": "/.read_only/0", **hidden}


def test_folders_that_a_box_can_not_make_writable() -> None:
    good = ["/app", "/logs/agent", "/logs/verifier", "/home", "/opt", "/usrs", "/a b"]
    assert refused_folders(good, ["/opt/conda", "/home/u/venv"]) == []
    wrong = [
        *("app", "", "/", "//app", "/app/", "/a/../usr", "/a/./b", "/a\0b"),
        *(
            "/usr",
            "/usr/local",
            "/bin",
            "/lib64/x",
            "/etc",
            "/etc/x",
            "/dev",
            "/dev/shm",
            "/proc/1",
        ),
        *("/sys", "/mnt", "/.read_only", "/box", "/box/x", "/tmp/x"),
    ]
    assert refused_folders(wrong, []) == wrong
    assert refused_folders(["/opt/conda/x", "/opt/conda"], ["/opt/conda"]) == [
        "/opt/conda/x",
        "/opt/conda",
    ]
    assert refused_folders(["/app", "/app/x", "/logs/a", "/logs"], []) == ["/app/x", "/logs"]
    assert refused_folders(["/app", "/app"], []) == ["/app"]


def test_what_is_shown_in_a_folder_is_not_packed() -> None:
    assert pack_argv(["/app", "/tmp"], ["/tmp/venv"])[-5:] == [
        *("--no-wildcards", "--exclude=tmp/venv", "--", "app", "tmp"),
    ]


@pytest.mark.parametrize(
    ("code", "cpu_s", "ended"),
    [
        (0, 0.1, "exit"),
        (137, 0.1, "exit"),
        (-signal.SIGSEGV, 0.1, "signal"),
        (-signal.SIGKILL, 0.1, "signal"),
        (-signal.SIGKILL, 10.5, "cpu_time"),
        (-signal.SIGXCPU, 0.1, "cpu_time"),
    ],
)
def test_why_a_program_ended(code: int, cpu_s: float, ended: str) -> None:
    assert ended_by(code, cpu_s, BoxLimits(cpu_s=10)) == ended


def test_limits_of_each_process(monkeypatch: pytest.MonkeyPatch) -> None:
    found = resource_limits(BoxLimits(cpu_s=1.5, memory_bytes=1 << 20, processes=4))
    assert found[resource.RLIMIT_CPU] == 3
    assert found[resource.RLIMIT_DATA] == 1 << 20
    assert found[resource.RLIMIT_NPROC] == 5
    assert found[resource.RLIMIT_CORE] == 0
    monkeypatch.setattr("platform.release", lambda: "4.18.0-553.el8.x86_64")
    assert resource.RLIMIT_NPROC not in resource_limits(BoxLimits())  # it would count the user's


def test_limits_are_above_zero() -> None:
    with golden.raises(ConfigError):
        BoxLimits(cpu_s=0)


def test_the_environment_is_not_this_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hush")
    made = environment({"CASE": "1", "HOME": "/tmp"})
    assert sorted(made) == ["CASE", "HOME", "LANG", "PATH", "TMPDIR", "USER"]
    assert made["HOME"] == "/tmp"


def test_namespaces_that_may_be_missing() -> None:
    assert namespace_flags([]) == 0x40000000 | 0x8000000 | 0x4000000
    assert namespace_flags(["net", "uts", "seccomp"]) == 0x8000000


def test_a_node_in_words() -> None:
    words = NodeSupport(missing={"user": "not permitted"}, landlock_abi=0, kernel="4.18").words()
    assert "user: not permitted" in words
    golden.check(words)


def test_the_page_lists_every_attempt() -> None:
    page = (ROOT / "docs/sandbox.md").read_text(encoding="utf-8")
    listed = page.partition("## Attempts contained")[2].partition("\n## ")[0]
    assert re.findall(r"^\d+\. (.+)$", listed, re.M) == [attack.name for attack in ATTACKS]
    assert len(ATTACKS) >= 40
