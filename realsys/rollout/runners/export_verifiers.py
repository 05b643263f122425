"""Writes the tasks of an environment of verifiers as records, which ``task=verifiers`` trains on.

    python -m realsys.rollout.runners.export_verifiers ENVIRONMENT --python VENV/bin/python --out FOLDER

The environment is loaded by the other interpreter (hosts/verifiers_host.py), where it is installed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from realsys.rollout.runners.hosted_agent import HOSTS

EXPORT_S = 3600.0  # an environment may fetch its data first


def main(argv: Sequence[str] | None = None) -> int:
    """Exports, and prints the command that trains on it. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="export_verifiers", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("environment", help="as verifiers' own commands take it")
    parser.add_argument(
        "--python", default=sys.executable, help="interpreter that has it installed"
    )
    parser.add_argument("--args", default="{}", help="arguments of the environment, as JSON")
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for train.jsonl, eval.jsonl"
    )
    parser.add_argument("--limit", type=int, default=0, help="most records of each; 0: all")
    given = parser.parse_args(argv)
    try:
        is_object = isinstance(json.loads(given.args), dict)
    except ValueError:
        is_object = False
    if not is_object or given.limit < 0:
        parser.error("--args is a JSON object, e.g. '{\"seed\": 1}', and --limit 0 or more")
    given.out.mkdir(parents=True, exist_ok=True)
    command = [
        given.python, str(HOSTS / "verifiers_host.py"), "export", given.environment, given.args,
        str(given.out.resolve()), str(given.limit),
    ]  # fmt: skip
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, timeout=EXPORT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        parser.exit(1, f"export_verifiers: {error}\n")
    if done.returncode != 0:
        parser.exit(1, f"export_verifiers: {given.environment} can't be exported, see above\n")
    written: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    for split, count in written.items():
        sys.stdout.write(f"{given.out / split}.jsonl: {count} records\n")
    if "train" not in written:
        parser.exit(1, f"export_verifiers: {given.environment} has no tasks to train on\n")
    sys.stdout.write(launch_command(given.environment, given.python, given.args, given.out) + "\n")
    return 0


def launch_command(environment: str, python: str, args: str, folder: Path) -> str:
    """Returns the command that trains on an export."""
    words = [
        "realsys launch grpo-math-async actor.path=MODEL task=verifiers",
        f"task.path={folder}/train.jsonl task.agent_args.environment={environment}",
        f"task.agent_args.python={Path(python).absolute()}",
    ]
    if json.loads(args):
        words.append(f"'task.agent_args.environment_args={args}'")
    return " ".join(words)


if __name__ == "__main__":
    sys.exit(main())
