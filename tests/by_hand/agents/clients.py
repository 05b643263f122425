"""Unmodified agents' clients drive real runs: each of them, in each situation. By hand; half an hour.

    make test-agents                                  environments, runs, results
    python tests/by_hand/agents/clients.py                writes results/clients.json beside this file
    python tests/by_hand/agents/clients.py --only openai  that client's results; others stay as they are

A client is the library as it comes from PyPI, in an environment of its own (.agents/NAME), used as its
documentation shows by a program of programs/, which knows nothing but the variables in its environment.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[2]), str(HERE.parents[1] / "support"), str(HERE)]

import forked  # noqa: E402
from by_hand import HandCheck  # noqa: E402
from client_proxy import Fault  # noqa: E402
from client_trials import (  # noqa: E402
    GROUP,
    QUESTIONS,
    TRAINING,
    Client,
    ExternalRun,
    FinishedRun,
    external_run,
    kill_run,
    problems_of_faults,
)
from clients_table import CLIENTS, NOT_THERE, REAL, RESULT, SCENARIOS  # noqa: E402
from real_trials import Trials, make_policy  # noqa: E402

WHAT = "unmodified agents' clients drive real runs"
ENVIRONMENTS = HERE.parents[2] / ".agents"
POSITIONS = 65536  # of the random policy: some clients begin with pages of instructions
MOST_CUTS = 4  # an answer of a token or two is there whole before it can be cut off
END_LOGIT_STD = 8.0  # of the end token over all places, where the policy ends
ANSWER_TOKENS, WHOLE_ANSWER_TOKENS = (
    32,
    384,
)  # of the real one; the second where answers have to end


@dataclass
class Matrix:
    """What was found so far: client → scenario → problems, or the reason why there is none."""

    cells: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    notes: dict[str, list[str]] = field(default_factory=dict)
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    ran: dict[str, dict[str, Any]] = field(default_factory=dict)
    ran_real: dict[str, dict[str, Any]] = field(default_factory=dict)

    def over(self, said: Mapping[str, Any]) -> Matrix:
        """Returns an earlier result with what is here in its place, clients in their order."""
        made = Matrix()
        for name, own in vars(self).items():
            old = said.get(name, {})
            for client in (c for c in CLIENTS if c in old or c in own):
                if name == "cells":
                    found = {**old.get(client, {}), **own.get(client, {})}
                else:
                    found = own.get(client, old.get(client))
                getattr(made, name)[client] = found
        return made

    def put(self, client: str, scenario: str, problems: Sequence[str]) -> None:
        """Adds problems to a cell."""
        cell = self.cells.setdefault(client, {}).setdefault(scenario, {"status": "ok", "why": []})
        cell["why"] += problems
        if problems:
            cell["status"] = "failed"
        sys.stdout.write(f"{client}, {scenario}: {cell['status']} {' | '.join(problems)}\n")
        sys.stdout.flush()

    def leave_out(self, client: str, scenario: str, why: str) -> None:
        """Notes that a client has no such thing."""
        self.cells.setdefault(client, {})[scenario] = {"status": "n/a", "why": [why]}

    def problems(self) -> list[str]:
        """A line for each cell that did not hold."""
        return [
            f"{client}, {scenario}: {' | '.join(cell['why'])}"
            for client, row in self.cells.items()
            for scenario, cell in row.items()
            if cell["status"] == "failed"
        ]


def drive(matrix: Matrix, trials: Trials, client: Client, policy: Path) -> None:
    """All scenarios of a client but ``kill``, in one trial that trains on what they made."""
    missing = NOT_THERE.get(client.name, {})
    for scenario, why in missing.items():
        matrix.leave_out(client.name, scenario, why)
    words = (f"actor.path={policy}", *TRAINING, f"gen.max_new_tokens={most_tokens(client)}")
    with external_run(trials, client.name, *words) as run:
        for scenario in SCENARIOS:
            if scenario not in missing and scenario != "kill":
                play_scenario(run, client, scenario)
        run.play_to_the_end(client)
        judge(matrix, run, client, policy)


def most_tokens(client: Client) -> int:
    """Few, unless the client wants answers that end."""
    return 128 if CLIENTS[client.name].needs_ends else 16


def play_scenario(run: ExternalRun, client: Client, scenario: str) -> None:
    """A session of it, two at the same time, or some with faults."""
    if scenario == "parallel":
        run.play_at_once(client, scenario, 2)
    elif scenario == "retry":
        run.play(client, "retry", [Fault.DROP, Fault.STATUS_502])
        run.play(client, "retry", [Fault.STATUS_502, Fault.DROP])
        for _ in range(MOST_CUTS):
            run.play(client, "cut", [Fault.CUT])
            if any(r.fault is Fault.CUT and r.is_cut for r in run.proxy.replies):
                break
    else:
        run.play(client, scenario)


def judge(
    matrix: Matrix, run: ExternalRun, client: Client, policy: Path, *, trained: bool = True
) -> None:
    """Puts what was found into the client's cells."""
    finished = FinishedRun(run.files, tokenizer_of(policy))
    of_all = finished.problems() if trained else []
    for played in run.played:
        found = finished.problems_of(played, run.proxy.replies)
        scenario = "retry" if played.scenario == "cut" else played.scenario
        if scenario == "retry":
            found += problems_of_faults(run.proxy.replies, played.episode)
        matrix.put(client.name, scenario, found)
        matrix.notes.setdefault(client.name, []).extend(
            f"{played.scenario}: {note}" for note in played.notes
        )
    for scenario in {("retry" if p.scenario == "cut" else p.scenario) for p in run.played}:
        if of_all:
            matrix.put(client.name, scenario, of_all)
    matrix.figures[client.name] = {
        "episodes": len(run.played),
        "requests": len(run.proxy.replies),
        "spoiled": sum(r.fault is not None for r in run.proxy.replies),
        "questions_trained": len(finished.trained),
    }


def tokenizer_of(policy: Path) -> Any:
    """The policy's tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(policy)


def drive_real(matrix: Matrix, trials: Trials, clients: Sequence[Client], policy: Path) -> None:
    """Plain and tools of all clients with a real model, in one run that trains nothing."""
    scenarios = ("plain", "tools")
    steps = -(-len(clients) * len(scenarios) // (QUESTIONS * GROUP))
    must_end = any(CLIENTS[client.name].needs_ends for client in clients)
    tokens = WHOLE_ANSWER_TOKENS if must_end else ANSWER_TOKENS
    words = (f"actor.path={policy}", "schedule=rollout", f"gen.max_new_tokens={tokens}")
    words += (f"exp_ctrl.benchmark_steps={steps}",)
    by_client: list[tuple[Client, Any]] = []
    with external_run(trials, f"real-{tokens}", *words, experiment="grpo-math") as run:
        for client in clients:
            for scenario in scenarios:
                by_client.append((client, run.play(client, scenario)))
        run.play_to_the_end(clients[0])
        finished = FinishedRun(run.files, tokenizer_of(policy))
        for client, played in by_client:
            found = finished.problems_of(played, run.proxy.replies)
            matrix.put(client.name, f"{played.scenario}, SmolLM2", found)


def attempt(
    matrix: Matrix, clients: Sequence[str], scenarios: Sequence[str], what: Callable[[], None]
) -> None:
    """Does ``what``; an exception is a problem of all cells that have nothing yet."""
    try:
        what()
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        for client in clients:
            for scenario in scenarios:
                if scenario not in matrix.cells.get(client, {}):
                    matrix.put(client, scenario, [f"{type(error).__name__}: {error}"[:1500]])


def versions_of(client: Client, packages: Sequence[str]) -> dict[str, str]:
    """Versions of the client's packages, as installed."""
    code = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"
    done = subprocess.run(
        [client.python, "-c", code, *packages], capture_output=True, text=True, check=True
    )
    return dict(zip(packages, done.stdout.split(), strict=True))


def make_long_policy(folder: Path, *, ends: bool) -> None:
    """Makes the tests' random policy with room for long conversations.

    Args:
        ends: its end token's row of the output is so long that this token is likely in a quarter of
            all places: answers end by themselves, after some tokens; else hardly any does.
    """
    from safetensors.torch import load_file, save_file

    make_policy(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "max_position_embeddings": POSITIONS}))
    if ends:
        weights = load_file(folder / "model.safetensors")
        row = weights["lm_head.weight"][config["eos_token_id"]]
        row *= (
            END_LOGIT_STD / row.norm()
        )  # behind the last norm, each number of a state is around 1
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def run_one(matrix: Matrix, trials: Trials, client: Client, folder: Path) -> None:
    """All scenarios of a client, but for the real model's."""
    ends = CLIENTS[client.name].needs_ends
    policy = folder / ("ending" if ends else "random")
    if not policy.exists():
        make_long_policy(policy, ends=ends)
    others = [scenario for scenario in SCENARIOS if scenario != "kill"]
    attempt(matrix, [client.name], others, lambda: drive(matrix, trials, client, policy))

    def kill() -> None:
        marker = folder / f"killed-{client.name}"
        found = kill_run(trials, client, policy, most_tokens(client), marker)
        matrix.put(client.name, "kill", found)

    attempt(matrix, [client.name], ["kill"], kill)


def run_real(matrix: Matrix, trials: Trials, clients: Sequence[Client], folder: Path) -> None:
    """The real model's scenarios of these clients."""

    def drive_them() -> None:
        sys.path.append(str(HERE.parent / "acceptance"))
        from grpo_smollm2 import make_directory

        real = folder / "smollm2"
        if not real.exists():
            make_directory(str(real))
        drive_real(matrix, trials, clients, real)

    attempt(matrix, [client.name for client in clients], REAL, drive_them)


def main() -> int:
    """Returns 0 when all cells are ok, or n/a."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="names of clients, with commas; others keep their results")
    parser.add_argument("--real", choices=("no", "only"), help="leaves out SmolLM2, or all else")
    parser.add_argument("--dry", action="store_true", help="writes nothing")
    parser.add_argument("--folder", type=Path, help="keeps the trials there")
    options = parser.parse_args()
    check = HandCheck(__file__)
    matrix, keeps = (
        Matrix(),
        [bool(options.only)],
    )  # the first result replaces the former one, or adds to it
    names = options.only.split(",") if options.only else list(CLIENTS)
    clients = [
        Client(name=n, python=ENVIRONMENTS / n / "bin/python", program=CLIENTS[n].program)
        for n in names
    ]
    status = 0

    def keep(clients: Sequence[Client], ran: dict[str, dict[str, Any]]) -> None:
        nonlocal status
        for client in clients:
            matrix.versions[client.name] = versions_of(client, CLIENTS[client.name].packages)
            ran[client.name] = {"revision": check.revision, "changed": check.changed}
        if options.dry:
            sys.stdout.write(json.dumps(vars(matrix), indent=1) + "\n")
            return
        whole = matrix.over(former() if keeps[0] else {})
        keeps[0] = True
        status = check.write(WHAT, whole.problems(), **vars(whole))

    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # what the proxy cuts off
    forked.start()
    with tempfile.TemporaryDirectory(prefix="clients-") as made:
        folder = options.folder or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        trials = Trials(folder / "root")
        for client in [] if options.real == "only" else clients:
            run_one(matrix, trials, client, folder)
            keep([client], matrix.ran)
        if options.real != "no":
            for part in (True, False):  # a run each
                some = [c for c in clients if CLIENTS[c.name].needs_ends is part]
                if some:
                    run_real(matrix, trials, some, folder)
            keep(clients, matrix.ran_real)
    return status


def former() -> dict[str, Any]:
    """The result that is there."""
    found: dict[str, Any] = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    return found


if __name__ == "__main__":
    sys.exit(main())
