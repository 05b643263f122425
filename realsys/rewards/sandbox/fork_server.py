"""The warm process that boxes are cloned from: `python -m realsys.rewards.sandbox.fork_server FD`.

    sandbox.py ── starts ──▶ keeper ── forks ──▶ fork server, pid 1 of its own namespaces
                             (waits)              in the boxes' root folder, without privileges

The keeper kills the fork server when the worker ends; with the fork server, the kernel kills all
boxes, which are in namespaces below its own. Neither reads what boxes are given.
"""

from __future__ import annotations

import gc
import importlib
import os
import platform
import select
import signal
import socket
import sys
from typing import NoReturn

import msgspec

from realsys.rewards.sandbox import box_root, landlock_rules, seccomp_filter
from realsys.rewards.sandbox import kernel_calls as kernel
from realsys.rewards.sandbox.box_init import BoxFeatures, run_box
from realsys.rewards.sandbox.box_messages import (
    KILL,
    NUMBER,
    RUN,
    BoxReply,
    ServerReady,
    ServerStart,
    prepare_codec,
    send,
)
from realsys.rewards.sandbox.box_usage import open_oom_counter
from realsys.runtime.child_processes.parent_death import PR_SET_PDEATHSIG
from realsys.runtime.linux import pidfd_open

NAMESPACES = {"net": kernel.CLONE_NEWNET, "ipc": kernel.CLONE_NEWIPC, "uts": kernel.CLONE_NEWUTS}
_ALWAYS = kernel.CLONE_NEWNS | kernel.CLONE_NEWPID
_NOBODY = 65534  # what boxes are outside when root starts them
_REAP_S = 0.2


def main() -> int:
    """Receives the first message, enters new namespaces and waits for the fork server's end."""
    control = socket.socket(fileno=int(sys.argv[1]))
    start = msgspec.msgpack.decode(control.recv(1 << 20), type=ServerStart)
    worker = pidfd_open(start.worker_pid)
    if os.getppid() != start.worker_pid:  # it ended before it could be watched
        return 0
    try:
        privileged = kernel.can_administer()
        if not privileged:
            _enter_user_namespace()
        kernel.unshare(_ALWAYS | namespace_flags(start.without))
        server = os.fork()
    except OSError as error:
        control.send(msgspec.msgpack.encode(ServerReady(failure=str(error))))
        return 1
    if server == 0:
        _serve(control, start, privileged)
    control.close()
    ended = pidfd_open(server)
    poll = select.poll()
    for descriptor in (worker, ended):
        poll.register(descriptor, select.POLLIN)
    poll.poll()  # without a deadline: as long as both live
    os.kill(server, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(server, 0)[1]) and 1


def namespace_flags(without: list[str]) -> int:
    """Returns the clone flags of the namespaces that may be missing, and are not."""
    return sum(flag for name, flag in NAMESPACES.items() if name not in without)


def _enter_user_namespace() -> None:
    uid, gid = os.getuid(), os.getgid()
    kernel.unshare(kernel.CLONE_NEWUSER)
    kernel.map_own_ids(uid, gid, uid, gid)


def _serve(control: socket.socket, start: ServerStart, privileged: bool) -> NoReturn:
    try:
        features = _prepare(start, privileged)
        control.send(msgspec.msgpack.encode(ServerReady()))
    except BaseException as error:  # the other end reports it
        failure = f"{type(error).__name__}: {error}"
        control.send(msgspec.msgpack.encode(ServerReady(failure=failure)))
        os._exit(1)
    try:
        _clone_boxes(control, features)
    finally:  # the worker sees the end of the connection
        os._exit(1)


def _prepare(start: ServerStart, privileged: bool) -> BoxFeatures:
    """Moves into the boxes' root and gives up root; imports what warm Python is to have."""
    oom_counter = open_oom_counter()  # in a folder that the boxes' root does not show
    box_root.build_root(start.read_only)
    if privileged:
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # or /proc/self belongs to root
        _enter_user_namespace()
    kernel.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))  # last: a change of user clears it
    for name in start.preload:
        importlib.import_module(name)
    prepare_codec()
    seccomp_filter.assemble(platform.machine())
    gc.freeze()  # a collection in a box would copy the pages of all that is here
    return BoxFeatures(
        read_only=start.read_only,
        without=start.without,
        landlock_abi=landlock_rules.abi_version(),
        outside_ids=(os.getuid(), os.getgid()),
        oom_counter=oom_counter,
    )


def _clone_boxes(control: socket.socket, features: BoxFeatures) -> None:
    """Clones a box for each request and reaps those that have ended, until the worker is gone."""
    boxes: dict[int, int] = {}  # number of the box: pid
    poll = select.poll()
    poll.register(control, select.POLLIN)
    while True:
        ready = poll.poll(_REAP_S * 1000 if boxes else None)
        _reap(boxes)
        if not ready:
            continue
        message, descriptors, _, _ = socket.recv_fds(control, 64, 1)
        if not message:
            return
        (number,) = NUMBER.unpack(message[1:])
        if message[:1] == KILL and number in boxes:
            os.kill(boxes[number], signal.SIGKILL)
        elif message[:1] == RUN:
            with socket.socket(fileno=descriptors[0]) as channel:
                _clone_box(channel, control, features, boxes, number)


def _clone_box(
    channel: socket.socket,
    control: socket.socket,
    features: BoxFeatures,
    boxes: dict[int, int],
    number: int,
) -> None:
    try:
        flags = _ALWAYS | kernel.CLONE_NEWUSER | namespace_flags(features.without)
        pid = kernel.clone_process(flags)
    except OSError as error:
        send(channel, BoxReply(failure=f"no box can be cloned: {error}"))
        return
    if pid == 0:
        control.close()
        run_box(channel, features)
    boxes[number] = pid


def _reap(boxes: dict[int, int]) -> None:
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            boxes.clear()
            return
        if pid == 0:
            return
        for number in [n for n, p in boxes.items() if p == pid]:
            del boxes[number]


if __name__ == "__main__":
    sys.exit(main())
