"""Boxes of a task's own image, by ``apptainer exec``, where a node has Apptainer and a file of the image.

Contained by Apptainer: no network, no folder of the node, processes of its own, a writable layer in memory
that ends with the command (of the size that the site's apptainer.conf has). Memory is limited for each
process only. Nothing of the image's Dockerfile is run: the image has it.
"""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from tempfile import TemporaryFile

from realsys.api.errors import ClusterError, ConfigError, SandboxFailure
from realsys.data.harbor.task_directory import TaskDirectory
from realsys.rewards.harbor.task_box import BoxCommand, command_argv, kept_folders
from realsys.rewards.sandbox.box_archive import PACK_S, most_archive_bytes
from realsys.rewards.sandbox.box_limits import BoxLimits, BoxOutcome, Ended

PROGRAM = "apptainer"
_OPTIONS = [
    *("--containall", "--cleanenv", "--no-home", "--fakeroot", "--writable-tmpfs"),
    *("--net", "--network", "none", "--pwd", "/"),
]
_INHERITED = ("PATH", "HOME", "TMPDIR", "XDG_RUNTIME_DIR", "LANG")
_STARTED, _START_S = b"started\n", 60.0
_PACKED = (0, 1)  # statuses of tar: 1 if a file has changed meanwhile
# In the container. Standard output: that it runs, the command's status, an archive. Of the archive of the
# last command, which that could have made up, no file but of its own folders is taken.
_DRIVER = """
echo started
bytes=$1 kept=$2 folders=$3 packed=$4 wall_s=$5 data_kib=$6; shift 6; cd /
(mkdir -p $folders $kept; head -c "$bytes" | tar -x -p -i -f - $kept; tar -x -p -i -f -) 2>/dev/null
(ulimit -d "$data_kib"; exec timeout -s KILL "$wall_s" "$@") >&2 </dev/null
echo $?
exec tar -c -S --ignore-failed-read -f - $packed
"""


class ApptainerEngine:
    """Boxes of images that are files on this node."""

    def prepared(self, task: TaskDirectory, limits: BoxLimits) -> bytes:
        """As ``BoxEngine``: nothing, the image has what the task begins with."""
        check_image(task)
        return b""

    def run(self, command: BoxCommand) -> BoxOutcome:
        """As ``BoxEngine``; both streams of the command are ``stderr``.

        Raises:
            ConfigError: the command is to reach something: a container of Apptainer has no way out.
        """
        if command.on_listening is not None:
            raise ConfigError(
                f"task {command.task.name} runs in an image, where an agent can't reach the policy",
                where="task.reward_args.harbor.images",
                fix="leave the image out, or use task.agent=harbor",
            )
        task, limits = command.task, command.limits
        named = [kept_folders(task), command.folders, command.archive]
        words = [str(len(command.kept)), *(" ".join(f[1:] for f in of) for of in named)]
        words += [f"{limits.wall_s:g}", str(limits.memory_bytes >> 10), *command_argv(command)]
        exec_ = [PROGRAM, "exec", *_OPTIONS, task.sif, "/bin/bash", "-c", _DRIVER, "bash", *words]
        limited = f'ulimit -f {most_archive_bytes(limits) >> 10}; exec "$@"'
        begin_s = time.monotonic()
        status, stdout, stderr = _streams(
            ["/bin/bash", "-c", limited, "bash", *exec_],
            command.kept + command.more,
            limits.wall_s + PACK_S + _START_S,
        )
        if not stdout.startswith(_STARTED):
            raise SandboxFailure(
                f"{PROGRAM} did not start a container: {stderr[-500:].decode(errors='replace')}",
                where=platform.node(),
                fix="run it again, here or on another node; never count it as wrong",
            )
        outcome = outcome_of(stdout, stderr, time.monotonic() - begin_s, limits)
        return outcome if status in _PACKED else replace(outcome, archive=None)


def check_image(task: TaskDirectory) -> None:
    """Raises ClusterError: this node has no Apptainer, or no file of the task's image."""
    what = "" if os.path.isfile(task.sif) else f"there is no file {task.sif}"
    what = what if shutil.which(PROGRAM) else f"{PROGRAM} is not on PATH"
    if what:
        raise ClusterError(
            f"{what}, and task {task.name} is to run in that image",
            where=platform.node(),
            fix="use nodes that have both, or correct task.reward_args.harbor.images",
        )


def outcome_of(stdout: bytes, stderr: bytes, wall_s: float, limits: BoxLimits) -> BoxOutcome:
    """Reads what the driver wrote. Where it has no status, the command has killed it, or took too long."""
    line, _, archive = stdout.removeprefix(_STARTED).partition(b"\n")
    code = int(line) if line.isdigit() else None
    is_late = wall_s >= limits.wall_s and code in (None, 128 + signal.SIGKILL)
    ended: Ended = "wall_time" if is_late else "signal" if code is None else "exit"
    return BoxOutcome(
        ended=ended,
        exit_code=code if ended == "exit" else None,
        signal=int(signal.SIGKILL) if ended == "signal" else None,
        stdout=b"",
        stderr=stderr[: limits.output_bytes],
        wall_s=wall_s,
        cpu_s=0.0,
        archive=archive or None,
    )


def _streams(command: Sequence[str], given: bytes, within_s: float) -> tuple[int, bytes, bytes]:
    """Runs a command to its end, or kills it late; returns its status and what it wrote, into files whose
    size is limited.
    """
    env = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    with TemporaryFile() as stdin, TemporaryFile() as out, TemporaryFile() as err:
        stdin.write(given)
        stdin.seek(0)
        with subprocess.Popen(
            command, stdin=stdin, stdout=out, stderr=err, env=env, start_new_session=True
        ) as process:
            try:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(within_s)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        out.seek(0)
        err.seek(0)
        return process.returncode, out.read(), err.read()
