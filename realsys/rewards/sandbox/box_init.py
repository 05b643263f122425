"""The first process of a box, pid 1 of its namespaces: sets it up, watches the program, reports.

It is ours, and the program can't touch it: pid 1 ignores signals from inside, its memory and
descriptors are closed to others (not dumpable), and the program holds no descriptor of it. When it
ends, the kernel kills everything in the box.
"""

from __future__ import annotations

import errno
import os
import resource
import select
import signal
import socket
import stat
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from realsys.api.errors import ClusterError
from realsys.rewards.sandbox import box_root, landlock_rules, seccomp_filter
from realsys.rewards.sandbox import kernel_calls as kernel
from realsys.rewards.sandbox.box_archive import PACK_S, most_archive_bytes, pack_argv
from realsys.rewards.sandbox.box_limits import BoxLimits, Ended
from realsys.rewards.sandbox.box_messages import (
    LISTENING,
    BoxReply,
    BoxRequest,
    ProgramReply,
    receive,
    send,
)
from realsys.rewards.sandbox.box_program import environment, run_program
from realsys.rewards.sandbox.box_usage import BoxMeter, oom_kills, socket_bytes
from realsys.runtime.linux import pidfd_open

_REQUEST_WITHIN_S, _REPLY_WITHIN_S = 60.0, 60.0
_MOST_REQUEST_BYTES = 1 << 32
# How often usage is read: at first, of several processes or with a quarter of the memory, with half of it.
_CHECK_S, _CHECK_OFTEN_S, _CHECK_NEAR_S = 0.05, 0.02, 0.005
LISTENS_PORT = 4891  # of what a box is given to reach, in a network of its own
_PIECE_BYTES, _PAGE_BYTES = 1 << 16, os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, kw_only=True, slots=True)
class BoxFeatures:
    """What the boxes of a fork server have in common."""

    read_only: list[str]  # folders shown besides the system's
    without: list[str]  # features that this node lacks, by allowance
    landlock_abi: int  # 0: none
    outside_ids: tuple[int, int]  # uid and gid as the fork server's user namespace has them
    oom_counter: int | None  # descriptor of its cgroup's count of kills for want of memory


class _OutOfMemory(Exception):
    """A program was killed while processes were killed for want of memory: it may be one of these."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Surroundings:
    """What the programs of a box are watched with."""

    channel: socket.socket
    meter: BoxMeter
    oom_counter: int | None


def run_box(channel: socket.socket, features: BoxFeatures) -> NoReturn:
    """Lives the life of a box: receives a request on ``channel``, and sends what became of it."""
    try:
        channel.settimeout(_REQUEST_WITHIN_S)
        kernel.map_own_ids(box_root.BOX_ID, box_root.BOX_ID, *features.outside_ids)
        request: BoxRequest = receive(channel, BoxRequest, _MOST_REQUEST_BYTES)
        limits = BoxLimits(**request.limits)  # type: ignore[arg-type]
        inputs = _set_up(request, limits, features, channel)
        counted_bytes = 0 if "net" in features.without else socket_bytes()
        around = _Surroundings(
            channel=channel,
            meter=BoxMeter(socket_bytes=counted_bytes),
            oom_counter=features.oom_counter,
        )
        outcomes: list[ProgramReply] = []
        for program, stdin in zip(request.programs, inputs, strict=True):
            if request.anew and outcomes:
                _empty_folders([*box_root.WRITABLE, *request.folders])
                _write_files(request.files)
            outcomes.append(_watched_program(program.argv, stdin, request.env, limits, around))
            if outcomes[-1].ended in request.stop_after:
                break
        archive = _packed(request.archive, features.read_only, limits, around)
        files = _collected(request.collect, limits)
        reply = BoxReply(outcomes=outcomes, files=files, archive=archive)
    except _OutOfMemory:
        failure = (
            "the node ran out of memory and killed a process; give the job more, or run fewer boxes"
        )
        reply = BoxReply(failure=failure, is_doubtful=True)
    except Exception as error:  # a failure of the box, not of the program
        reply = BoxReply(failure=f"{type(error).__name__}: {error}")
    try:
        channel.settimeout(_REPLY_WITHIN_S)
        send(channel, reply)
    finally:
        os._exit(0)


def _set_up(
    request: BoxRequest, limits: BoxLimits, features: BoxFeatures, channel: socket.socket
) -> list[int]:
    """Builds the box around this process and gives up all power; returns the standard inputs."""
    Path("/proc/self/oom_score_adj").write_text("1000")  # rather a box than the worker
    given = [*(program.stdin for program in request.programs), *request.files.values()]
    given_bytes = sum(-(-len(content) // _PAGE_BYTES) * _PAGE_BYTES for content in given)
    box_root.add_writable(limits, given_bytes, features.read_only, request.folders)
    if "uts" not in features.without:
        socket.sethostname("box")
    if request.listens:
        _listen(channel, features)
    _write_files(request.files)
    inputs = [_unnamed_file(program.stdin) for program in request.programs]
    kernel.drop_capabilities()
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    if features.landlock_abi:
        writable = [*box_root.WRITABLE, *request.folders]
        port = LISTENS_PORT if request.listens else None
        landlock_rules.restrict(features.landlock_abi, writable, connect_to=port)
    if "seccomp" not in features.without:
        seccomp_filter.install()
    return inputs


def _listen(channel: socket.socket, features: BoxFeatures) -> None:
    """Sends a socket that listens in the box's own network, which nothing else can reach or leave."""
    if "net" in features.without:
        raise OSError(errno.ENOTSUP, "a box can't listen without a network namespace of its own")
    kernel.bring_up_loopback()
    with socket.create_server(("127.0.0.1", LISTENS_PORT), backlog=128) as listener:
        socket.send_fds(channel, [LISTENING], [listener.fileno()])


def _write_files(files: dict[str, bytes]) -> None:
    """Writes files into the work folder, which becomes this process's own."""
    os.chdir(box_root.WORK)
    for name, content in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(content)
        os.chmod(name, 0o755)


def _empty_folders(folders: list[str]) -> None:
    """Deletes what a program left, whatever it did to it; nothing else runs in the box now.

    Folders may be as deep as there are files, too deep for a path or for recursion. What is mounted, which
    a box can't write, stays.
    """
    for top in folders:
        device = os.lstat(top).st_dev
        os.chmod(top, 0o755)
        os.chdir(top)
        levels = [_delete_files(device)]
        names: list[str] = []
        while levels:
            if levels[-1]:
                names.append(levels[-1].pop())
                os.chdir(names[-1])
                levels.append(_delete_files(device))
                continue
            levels.pop()
            if names:
                os.chdir("..")
                with suppress(OSError):  # something is mounted in it
                    os.rmdir(names.pop())


def _delete_files(device: int) -> list[str]:
    """Deletes all in the current folder but folders, which it returns: those of this file system."""
    found: list[str] = []
    with os.scandir(".") as entries:
        listed = [(e.name, e.stat(follow_symlinks=False)) for e in entries]
    for name, about in listed:
        if not stat.S_ISDIR(about.st_mode):
            os.unlink(name)
        elif about.st_dev == device:
            os.chmod(name, 0o700)
            found.append(name)
    return found


def _unnamed_file(content: bytes) -> int:
    """Returns a descriptor to read ``content`` from, of a file that the program can't find."""
    Path(".stdin").write_bytes(content)
    descriptor = os.open(".stdin", os.O_RDONLY | os.O_CLOEXEC)
    os.unlink(".stdin")
    return descriptor


class _Output:
    """Reads one stream of the program up to a limit."""

    def __init__(self, descriptor: int, most_bytes: int) -> None:
        self.descriptor, self.most_bytes = descriptor, most_bytes
        self.received = bytearray()
        os.set_blocking(descriptor, False)

    def read(self) -> bool:
        """Reads what is there; returns whether there may be more, now or later."""
        try:
            piece = os.read(self.descriptor, _PIECE_BYTES)
        except BlockingIOError:
            return False
        self.received += piece
        return bool(piece)

    @property
    def flooded(self) -> bool:
        return len(self.received) > self.most_bytes

    def kept(self) -> bytes:
        return bytes(self.received[: self.most_bytes])


def _watched_program(
    argv: list[str],
    stdin: int,
    env: dict[str, str],
    limits: BoxLimits,
    around: _Surroundings,
) -> ProgramReply:
    """Runs one program to its end or to a limit, then kills what is left of it."""
    env = environment(env)
    pipes = [os.pipe(), os.pipe()]
    kills_before, cpu_before_s = oom_kills(around.oom_counter), _cpu_of_ended_s()
    started_s = time.monotonic()
    if (program := os.fork()) == 0:
        run_program(argv, env, limits, [stdin, *(write for _, write in pipes)])
    outputs = [_Output(read, limits.output_bytes) for read, _ in pipes]
    for descriptor in [stdin, *(write for _, write in pipes)]:
        os.close(descriptor)
    watch = _Watch(program, outputs, limits, around)
    limit = watch.until_ended(started_s + limits.wall_s)
    wall_s = time.monotonic() - started_s
    watch.kill_all()
    for output in outputs:
        while not output.flooded and output.read():
            pass
    cpu_s = _cpu_of_ended_s() - cpu_before_s
    watch.close()
    code = os.waitstatus_to_exitcode(watch.status)
    if not limit and code == -signal.SIGKILL and oom_kills(around.oom_counter) > kills_before:
        raise _OutOfMemory
    if not limit and any(output.flooded for output in outputs):
        limit = "output"
    ended = limit or ended_by(code, cpu_s, limits)
    return ProgramReply(
        ended=ended,
        exit_code=code if ended == "exit" else None,
        signal=-code if ended == "signal" else None,
        stdout=outputs[0].kept(),
        stderr=outputs[1].kept(),
        wall_s=wall_s,
        cpu_s=cpu_s,
    )


def _cpu_of_ended_s() -> float:
    """Returns the CPU time of all processes that this one has waited for, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def ended_by(code: int, cpu_s: float, limits: BoxLimits) -> Ended:
    """Returns why a program ended that the init did not kill; ``code`` is below 0 for a signal."""
    if code == -signal.SIGXCPU or (code == -signal.SIGKILL and cpu_s >= limits.cpu_s):
        return "cpu_time"  # the kernel's own limit
    return "signal" if code < 0 else "exit"


class _Watch:
    """Watches the program's streams, end and usage."""

    def __init__(
        self, program: int, outputs: list[_Output], limits: BoxLimits, around: _Surroundings
    ) -> None:
        self._meter, self._channel = around.meter, around.channel
        self._program, self._outputs, self._limits = program, outputs, limits
        self._cpu_before_s = _cpu_of_ended_s()
        self.status = -1  # as waitpid gives it
        self._ended = False
        self._by_descriptor = {output.descriptor: output for output in outputs}
        self._poll = select.poll()
        for descriptor in self._by_descriptor:
            self._poll.register(descriptor, select.POLLIN)
        self._poll.register(self._channel, select.POLLRDHUP if hasattr(select, "POLLRDHUP") else 0)
        self._pidfd: int | None = None
        try:
            self._pidfd = pidfd_open(program)
            self._poll.register(self._pidfd, select.POLLIN)
        except ClusterError:  # an old kernel: the end is noticed at the next check
            pass

    def until_ended(self, deadline_s: float) -> Ended | None:
        """Waits for the program's end; returns the limit that it exceeded first, if any."""
        check_s = time.monotonic()
        while True:
            now_s = time.monotonic()
            if now_s >= check_s:
                limit, pause_s = self._over_limit()
                check_s = time.monotonic() + pause_s
                if limit:
                    return limit
            if now_s >= deadline_s:
                return "wall_time"
            self._take(min(check_s, deadline_s) - now_s)
            self._reap(os.WNOHANG)
            if self._ended:
                return None
            if any(output.flooded for output in self._outputs):
                return "output"

    def _take(self, timeout_s: float) -> None:
        """Waits for something to happen, and reads the streams."""
        for descriptor, _ in self._poll.poll(max(timeout_s, 0) * 1000 + 1):
            if descriptor == self._channel.fileno():
                os._exit(0)  # nobody waits for the outcome any more
            output = self._by_descriptor.get(descriptor)
            if output and not output.read():
                self._poll.unregister(descriptor)  # closed by all that had it

    def _over_limit(self) -> tuple[Ended | None, float]:
        """Returns the limit that is exceeded now, and the time until the next check."""
        limits, usage = self._limits, self._meter.usage()
        if usage.cpu_s + _cpu_of_ended_s() - self._cpu_before_s >= limits.cpu_s:
            return "cpu_time", 0.0
        if usage.processes > limits.processes:
            return "processes", 0.0
        memory_bytes = usage.memory_bytes
        if memory_bytes + usage.pipe_bytes_at_most > limits.memory_bytes:
            memory_bytes += self._meter.pipe_bytes()
        if memory_bytes > limits.memory_bytes and (
            self._meter.exact_memory_bytes() > limits.memory_bytes
        ):
            return "memory", 0.0
        if memory_bytes > limits.memory_bytes // 2:
            return None, _CHECK_NEAR_S
        busy = usage.processes > 1 or memory_bytes > limits.memory_bytes // 4
        return None, _CHECK_OFTEN_S if busy else _CHECK_S

    def kill_all(self) -> None:
        """Kills every process of the box but this one, and waits until none is left."""
        try:
            os.kill(-1, signal.SIGKILL)
        except ProcessLookupError:  # none is left
            pass
        self._reap(0)

    def close(self) -> None:
        """Closes the descriptors of this program."""
        for descriptor in [*self._by_descriptor, self._pidfd]:
            if descriptor is not None:
                os.close(descriptor)

    def _reap(self, options: int) -> None:
        """Collects processes that have ended; waits for all of them unless WNOHANG."""
        while True:
            try:
                pid, status = os.waitpid(-1, options)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._program:
                self.status, self._ended = status, True


def _packed(
    folders: list[str], read_only: list[str], limits: BoxLimits, around: _Surroundings
) -> bytes | None:
    """Packs folders; None: none were asked for, or the files in them can't be packed."""
    if not folders:
        return None
    limits = replace(limits, output_bytes=most_archive_bytes(limits), wall_s=PACK_S, cpu_s=PACK_S)
    empty = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    packed = _watched_program(pack_argv(folders, read_only), empty, {}, limits, around)
    return packed.stdout if packed.exit_code == 0 else None


def _collected(names: list[str], limits: BoxLimits) -> dict[str, bytes]:
    """Reads the files asked for, up to ``file_bytes`` together. Nothing else runs in the box now."""
    found: dict[str, bytes] = {}
    left_bytes = limits.file_bytes
    for name in names:
        content = _regular_file(name, left_bytes)
        if content is not None:
            found[name] = content
            left_bytes -= len(content)
    return found


def _regular_file(name: str, most_bytes: int) -> bytes | None:
    """Returns a file's content; None if it is too long, no regular file or behind a link."""
    folder = os.open(box_root.WORK, os.O_PATH | os.O_DIRECTORY)
    try:
        *parents, last = name.split("/")
        for parent in parents:
            flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW
            inner = os.open(parent, flags, dir_fd=folder)
            os.close(folder)
            folder = inner
        file = os.open(last, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise  # ours, not the program's
        return None
    finally:
        os.close(folder)
    about = os.fstat(file)
    if not stat.S_ISREG(about.st_mode) or about.st_size > most_bytes:
        os.close(file)
        return None
    with open(file, "rb") as opened:
        return opened.read(most_bytes)
