"""Runs the preflight's steps on the nodes of an allocation, and collects their records.

Every step has a deadline; records that arrived until then count, so that a hanging node does not hide the
numbers of others. ``python -m realsys.slurm.preflight.drive`` runs it inside an allocation requested by
`realsys doctor`; a job's supervisor calls ``examine``. node_verdicts.py interprets the records.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from realsys.api.cluster import ClusterSpec
from realsys.slurm.containers import wrap
from realsys.slurm.hostlist import compress, expand
from realsys.slurm.preflight.node_records import ProbeRecords, StepSeen, able, other_lines, records
from realsys.slurm.preflight.rounds import (
    HELD_S,
    Wanted,
    hold_request,
    look_request,
    pair_rounds,
    program,
    reduce_request,
)
from realsys.slurm.step_command import step_environment

POLL_S = 0.2
ENDS_S = 10.0  # for a step that is ended; then it is left behind: a task may hang in its driver


@dataclass(frozen=True, kw_only=True)
class ProbeTarget:
    """How the node program is started.

    Attributes:
        by_srun: on the nodes of an allocation; else on this machine.
        options: of srun.
        command: up to Python, including modules, set-up and container.
    """

    by_srun: bool
    options: tuple[str, ...] = ()
    command: tuple[str, ...]

    def argv(self, nodes: Sequence[str], request: Mapping[str, Any]) -> list[str]:
        """Returns the command that runs one task on each of the nodes."""
        command = [*self.command, "-c", program(), json.dumps(request)]
        if not self.by_srun:
            return command
        where = [f"--nodelist={compress(nodes)}", f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}"]
        share = ["--ntasks-per-node=1", "--overlap", "--mem=0", "--cpu-bind=none"]
        ends = ["--kill-on-bad-exit=0", "--wait=0", "--export=ALL", "--input=none"]
        return ["srun", "--job-name=preflight", *where, *share, *ends, *self.options, *command]


def place_of(
    spec: ClusterSpec,
    image: str | None,
    *,
    gpu: bool,
    python: str,
    in_shell: bool,
    options: Sequence[str] = (),
) -> ProbeTarget:
    """Returns how the node program is started at a site (pure).

    Args:
        python: interpreter outside containers.
        in_shell: run modules and set-up first, as the batch script does.
    """
    if spec.scheduler != "slurm":
        return ProbeTarget(by_srun=False, command=(python,))
    has_image = image is not None and spec.container.runtime != "none"
    inner = [spec.container.python] if has_image else [python]
    wrapped = wrap(spec.container, image, inner, file_root=spec.file_root, gpu=gpu)
    command = list(wrapped.command)
    if in_shell and not has_image:
        command = in_site_shell(spec, command)
    extra = [f"--{name}={value}" for name, value in sorted(spec.slurm.extra_srun.items())]
    return ProbeTarget(
        by_srun=True,
        options=(*options, *extra, *wrapped.srun_options),
        command=tuple(command),
    )


def in_site_shell(spec: ClusterSpec, argv: list[str]) -> list[str]:
    """Returns the command with modules and set-up first, as the batch script would start it."""
    lines = ["module load " + shlex.join(spec.modules)] if spec.modules else []
    lines += spec.setup
    if not lines:
        return argv
    shell = ["bash", "-l", "-c"] if spec.modules else ["bash", "-c"]
    return [*shell, "\n".join([*lines, 'exec "$@"']), "realsys-doctor", *argv]


def examine(
    wanted: Wanted,
    place: ProbeTarget,
    environ: Mapping[str, str],
    *,
    goes_on: Callable[[], bool] = lambda: True,
    note: Callable[[list[str]], None] = lambda argv: None,
) -> ProbeRecords:
    """Runs all steps on all nodes; blocks for at most ``wanted.longest_s``.

    Args:
        goes_on: called repeatedly; False ends the steps, and the records so far are returned.
        note: called with each step's command line before it starts.
    """
    runner = _Runner(place, environ, goes_on, note)
    try:
        _examine(runner, wanted)
    finally:
        runner.end_all()
    return ProbeRecords(records=tuple(runner.records), steps=tuple(runner.steps))


def _examine(runner: _Runner, wanted: Wanted) -> None:
    holder = None
    if wanted.lock and len(wanted.nodes) > 1:
        limit_s = HELD_S + wanted.starts_s
        holder = runner.start("hold", wanted.nodes[:1], hold_request(wanted), limit_s)
        runner.wait(holder, until=lambda: any(r["what"] == "held" for r in holder.records()))
    looked = runner.run("look", wanted.nodes, look_request(wanted), wanted.look_s + wanted.starts_s)
    if holder is not None:
        runner.end(holder)
    told = {str(r["node"]): r for r in looked if r["what"] == "node"}
    well = able(wanted.nodes, looked)
    rounds: list[list[Sequence[str]]] = [list(pairs) for pairs in pair_rounds(well)]
    if len(well) > 2:
        rounds.append([well])
    for turn, groups in enumerate(rounds):
        here = [node for group in groups for node in group]
        request = reduce_request(wanted, groups, told, turn)
        runner.run(f"reduce {turn}", here, request, wanted.reduce_s + wanted.starts_s)


@dataclass
class _Step:
    """One running step."""

    seen: StepSeen
    process: subprocess.Popen[str]
    lines: list[tuple[float, str]] = field(default_factory=list)

    def listen(self) -> None:
        """Collects the step's lines until its end, in a thread of its own."""
        assert self.process.stdout is not None
        with self.process.stdout as stdout:
            for line in stdout:
                self.lines.append((time.time(), line.rstrip("\n")))

    def records(self) -> list[dict[str, Any]]:
        return [{**record, "step": self.seen.name} for record in records(list(self.lines))]


@dataclass
class _Runner:
    place: ProbeTarget
    environ: Mapping[str, str]
    goes_on: Callable[[], bool]
    note: Callable[[list[str]], None]
    records: list[Mapping[str, Any]] = field(default_factory=list)
    steps: list[StepSeen] = field(default_factory=list)
    _open: list[_Step] = field(default_factory=list)

    def run(
        self, name: str, nodes: Sequence[str], request: Mapping[str, Any], limit_s: float
    ) -> list[dict[str, Any]]:
        """Runs one step to its end; returns its records."""
        if not self.goes_on():
            return []
        step = self.start(name, nodes, request, limit_s)
        self.wait(step, until=lambda: False)
        return self.end(step)

    def start(
        self, name: str, nodes: Sequence[str], request: Mapping[str, Any], limit_s: float
    ) -> _Step:
        argv = self.place.argv(nodes, request)
        self.note(argv)
        process = subprocess.Popen(
            argv,
            env=dict(self.environ),
            cwd="/",  # `python -c` imports from the working folder first; srun takes this one
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
            errors="replace",
        )
        step = _Step(
            StepSeen(name=name, nodes=tuple(nodes), begun=time.time(), limit_s=limit_s), process
        )
        self._open.append(step)
        threading.Thread(target=step.listen, name=f"preflight {name}", daemon=True).start()
        return step

    def wait(self, step: _Step, *, until: Callable[[], bool]) -> None:
        """Waits until the step ends, ``until`` returns true, the run is to stop, or its time is over."""
        deadline = time.monotonic() + step.seen.limit_s
        while step.process.poll() is None and self.goes_on() and not until():
            if time.monotonic() > deadline:
                step.seen = replace(step.seen, is_late=True)
                return
            time.sleep(POLL_S)

    def end(self, step: _Step) -> list[dict[str, Any]]:
        """Ends the step if it still runs, and keeps its records."""
        self._open.remove(step)
        deadline = time.monotonic() + ENDS_S
        if step.process.poll() is None:
            step.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            step.process.wait(ENDS_S)
        with suppress(ProcessLookupError):  # also what it has started here, which may hang
            os.killpg(step.process.pid, signal.SIGKILL)
        while time.monotonic() < deadline and not _is_read(step):
            time.sleep(POLL_S / 10)
        found = step.records()
        self.records += found
        output = tuple(other_lines(line for _, line in list(step.lines))[-5:])
        self.steps.append(replace(step.seen, said=output))
        return found

    def end_all(self) -> None:
        """Ends steps left by an error."""
        for step in list(self._open):
            self.end(step)


def _is_read(step: _Step) -> bool:
    name = f"preflight {step.seen.name}"
    return step.process.poll() is not None and all(t.name != name for t in threading.enumerate())


def main() -> int:
    """Runs inside an allocation: takes Wanted and ProbeTarget as JSON, prints ProbeRecords as JSON."""
    request = json.loads(sys.argv[1])
    nodes = expand(os.environ["SLURM_JOB_NODELIST"])
    ports = tuple(request["wanted"]["ports"]) if request["wanted"]["ports"] else None
    wanted = Wanted(**{**request["wanted"], "nodes": nodes, "ports": ports})
    given = request["place"]
    place = ProbeTarget(
        by_srun=True, options=tuple(given["options"]), command=tuple(given["command"])
    )
    seen = examine(wanted, place, step_environment(os.environ))
    sys.stdout.write(json.dumps({**asdict(seen), "nodes": nodes}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
