"""Stand-ins for Slurm's programs on PATH: srun starts a step's tasks here, scancel notes what it was told,
squeue knows every job, submitted now.

``install`` puts them into a folder. A task runs the step's own command, unless ``tasks/<job name>`` in
that folder is a program: then that one, with the same variables, and how it ended is written down as
realsys/worker/srun_task.py does. Like srun it takes its hosts from SLURM_HOSTFILE, names failed tasks on
standard error at once, and on SIGTERM kills all tasks.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

# Rows as realsys/supervisor/own_jobs.py asks for them
SQUEUE = r"""for word; do case "$word" in --jobs=*) ids=${word#--jobs=};; esac; done
for id in $(echo "$ids" | tr , ' '); do
  printf '%s\037%s\037%s\0370\037(null)\036\n' "$id" "$id" "$(date +%s)"
done"""


def install(folder: Path) -> Path:
    """Writes the programs into ``folder``, to be put on PATH, and returns it."""
    (folder / "tasks").mkdir(parents=True, exist_ok=True)
    _program(folder / "srun", f'exec "{sys.executable}" -S "{__file__}" "{folder}" "$@"')
    _program(folder / "scancel", f'echo "$@" >> "{folder}/cancelled"')
    _program(folder / "squeue", SQUEUE)
    return folder


def task_program(folder: Path, job_name: str, shell: str) -> None:
    """What every task of that step does from now on."""
    _program(folder / "tasks" / job_name, shell)


def cancelled(folder: Path) -> list[str]:
    """Job ids that scancel got, in order."""
    path = folder / "cancelled"
    return path.read_text().split() if path.exists() else []


def _program(path: Path, shell: str) -> None:
    path.write_text(f"#!/bin/sh\n{shell}\n")
    path.chmod(0o755)


def main(folder: Path, argv: list[str]) -> int:
    """One step; returns the highest exit code, as srun does."""
    options = {}
    while argv and argv[0].startswith("-"):
        name, _, value = argv.pop(0).removeprefix("--").partition("=")
        options[name] = value
    kind = options["job-name"]
    replaced = (folder / "tasks" / kind).is_file()
    command = [str(folder / "tasks" / kind)] if replaced else argv
    hosts = Path(os.environ["SLURM_HOSTFILE"]).read_text().split()
    assert len(hosts) == int(options["ntasks"]), (hosts, options)
    tasks: list[subprocess.Popen[bytes]] = []
    killed = False

    def kill_all(number: int, frame: object) -> None:
        nonlocal killed
        killed = True
        for task in tasks:
            if task.poll() is None:
                os.killpg(task.pid, signal.SIGKILL)

    signal.signal(signal.SIGTERM, kill_all)  # first: a task that runs can be killed
    for index in range(len(hosts)):
        tasks.append(_start(command, options.get("output"), index, hosts))
    if killed:  # while the last one was started
        kill_all(signal.SIGTERM, None)
    codes: dict[int, int] = {}
    while len(codes) < len(tasks):
        for index, task in enumerate(tasks):
            if index not in codes and (code := task.poll()) is not None:
                codes[index] = code if code >= 0 else 128 - code
                if replaced and not killed:
                    _write_down(argv, f"{kind}/{index}", hosts[index], task.pid, code)
                if codes[index]:
                    how = "Killed" if killed else f"Exited with exit code {codes[index]}"
                    print(f"srun: error: {hosts[index]}: task {index}: {how}", file=sys.stderr)  # noqa: T201
        sys.stderr.flush()
        time.sleep(0.01)
    return max(codes.values())


def _write_down(argv: list[str], worker: str, host: str, pid: int, code: int) -> None:
    told = dict(a.removeprefix("--").split("=", 1) for a in argv if a.startswith("--"))
    exits = Path(told["trial-dir"], "attempts", f"{int(told['attempt']):04d}", "exits")
    record = {"worker": worker, "host": host, "pid": pid, "returncode": code, "at": time.time()}
    path = exits / f"{worker.replace('/', '-')}.json"
    path.with_suffix(".part").write_text(json.dumps(record))
    path.with_suffix(".part").rename(path)


def _start(
    command: list[str], output: str | None, index: int, hosts: list[str]
) -> subprocess.Popen[bytes]:
    host = hosts[index]
    environment = {
        **os.environ,
        "SLURM_PROCID": str(index),
        "SLURM_LOCALID": str(hosts[:index].count(host)),
        "SLURM_NODEID": str(list(dict.fromkeys(hosts)).index(host)),
        "SLURM_NTASKS": str(len(hosts)),
        "SLURMD_NODENAME": host,
    }
    path = (output or os.devnull).replace("%t", str(index)).replace("%%", "%")
    with open(path, "ab") as log:
        return subprocess.Popen(
            command, stdout=log, stderr=log, env=environment, start_new_session=True
        )


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
