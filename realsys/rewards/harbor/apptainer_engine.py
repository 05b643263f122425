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
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress

from realsys.api.errors import ClusterError, SandboxFailure
from realsys.data.harbor.task_directory import TaskDirectory
from realsys.rewards.harbor.task_box import kept_folders
from realsys.rewards.sandbox.box_archive import PACK_S, most_archive_bytes
from realsys.rewards.sandbox.box_limits import BoxLimits, BoxOutcome, Ended

PROGRAM = "apptainer"
_OPTIONS = [
    *("--containall", "--cleanenv", "--no-home", "--fakeroot", "--writable-tmpfs"),
    *("--net", "--network", "none", "--pwd", "/"),
]
_INHERITED = ("PATH", "HOME", "TMPDIR", "XDG_RUNTIME_DIR", "LANG")
_STARTED, _START_S = b"started\n", 60.0
# In the container. Standard output: that it runs, the program's status, an archive. Of the archive of the
# last command, which that could have made up, no file but of its own folders is taken.
_DRIVER = """
echo started
bytes=$1 kept=$2 folders=$3 packed=$4 wall_s=$5 data_kib=$6; shift 6; cd /
(mkdir -p $folders; head -c "$bytes" | tar -x -p -i -f - $kept; tar -x -p -i -f -) 2>/dev/null
(ulimit -d "$data_kib"; exec timeout -s KILL "$wall_s" "$@") >&2 </dev/null
echo $?
exec tar -c -S --ignore-failed-read -f - $packed
"""


class ApptainerEngine:
    """Boxes of images that are files on this node."""

    def prepared(self, task: TaskDirectory, limits: BoxLimits) -> bytes:
        """As ``BoxEngine``: nothing, the image has what the task begins with.

        Raises:
            ClusterError: this node has no Apptainer, or no such file.
        """
        what = "" if os.path.isfile(task.sif) else f"there is no file {task.sif}"
        what = what if shutil.which(PROGRAM) else f"{PROGRAM} is not on PATH"
        if what:
            raise ClusterError(
                f"{what}, and task {task.name} is to run in that image",
                where=platform.node(),
                fix="use nodes that have both, or correct task.reward_args.harbor.images",
            )
        return b""

    def run(
        self, task: TaskDirectory, argv: Sequence[str], kept: bytes, more: bytes, limits: BoxLimits,
        *, folders: Sequence[str], archive: Sequence[str],
    ) -> BoxOutcome:  # fmt: skip
        """As ``BoxEngine``; both streams of the program are ``stderr``."""
        most = most_archive_bytes(limits)
        command = ["/bin/bash", "-c", f'ulimit -f {most >> 10}; exec "$@"', "bash"]
        command += [PROGRAM, "exec", *_OPTIONS, task.sif, "/bin/bash", "-c", _DRIVER, "bash"]
        names = [" ".join(f[1:] for f in of) for of in (kept_folders(task), folders, archive)]
        command += [str(len(kept)), *names, f"{limits.wall_s:g}", str(limits.memory_bytes >> 10)]
        begin_s = time.monotonic()
        stdout, stderr = _streams([*command, *argv], kept + more, limits.wall_s)
        if not stdout.startswith(_STARTED):
            raise SandboxFailure(
                f"{PROGRAM} did not start a container: {stderr[-500:].decode(errors='replace')}",
                where=platform.node(),
                fix="run it again, here or on another node; never count it as wrong",
            )
        return outcome_of(stdout, stderr, time.monotonic() - begin_s, limits)


def outcome_of(stdout: bytes, stderr: bytes, wall_s: float, limits: BoxLimits) -> BoxOutcome:
    """Reads what the driver wrote; a program that has ended the driver too was killed."""
    status, _, archive = stdout.removeprefix(_STARTED).partition(b"\n")
    code = int(status) if status.isdigit() else None
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


def _streams(command: Sequence[str], given: bytes, wall_s: float) -> tuple[bytes, bytes]:
    """Runs a command to its end, or kills it late; its streams are files, whose size is limited."""
    env = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    files = [tempfile.TemporaryFile() for _ in range(3)]  # noqa: SIM115  # closed below
    try:
        files[0].write(given)
        files[0].seek(0)
        with subprocess.Popen(
            command, stdin=files[0], stdout=files[1], stderr=files[2], env=env,
            start_new_session=True,
        ) as process:  # fmt: skip
            try:
                process.wait(wall_s + PACK_S + _START_S)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        for file in files[1:]:
            file.seek(0)
        return files[1].read(), files[2].read()
    except subprocess.TimeoutExpired:
        return files[1].read(), b""
    finally:
        for file in files:
            file.close()
