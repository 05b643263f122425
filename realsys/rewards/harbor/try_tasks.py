"""Tries tasks on this node: `python -m realsys.rewards.harbor.try_tasks TASKS_DIR [images={…} disk=512 …]`.

A line a task: what its own solution gets, which should be 1, and what no work at all gets, which should be
less. The words behind the folder are arguments of the rule ``harbor``. Exit status 1: some can't be used.
"""

from __future__ import annotations

import sys
from pathlib import Path

import yaml

from realsys.api import registry
from realsys.api.errors import RealsysError
from realsys.data.harbor.node_packages import lacking_packages
from realsys.data.harbor.task_directory import checked_task, task_paths
from realsys.rewards.harbor.harbor_rule import HarborTests

_SHOWN_LINES = 20  # of the output of a task's solution and tests


def tried(rule: HarborTests, path: Path) -> tuple[bool, str]:
    """Returns whether a task can be used on this node, and a line about it."""
    task, problems = checked_task(path, rule.images)
    if task is None:
        return False, "; ".join(f"{problem.what} ({problem.where})" for problem in problems)
    if lacking := lacking_packages([task], rule.assume):
        return False, f"this node does not have {lacking}"
    try:
        box = rule.open_box(task)
        nothing = box.verify()
        if not (path / "solution").is_dir():
            return not nothing.why, f"no solution; nothing {nothing.reward:g} {nothing.why}".strip()
        outcome, solved = box.run_solution(), box.verify()
    except RealsysError as error:
        return False, f"{error.what} ({error.where})"
    usable = solved.reward > nothing.reward and not solved.why
    line = f"solution {solved.reward:g}, nothing {nothing.reward:g}"
    if not usable:
        output = outcome.stderr.decode(errors="replace") + solved.output
        line += f" {solved.why}\n{_end_of(output)}".rstrip()
    return usable, line


def _end_of(output: str) -> str:
    """Returns the last lines of an output, of no more than 2000 characters."""
    return "\n".join(output[-2000:].splitlines()[-_SHOWN_LINES:])


def main(words: list[str]) -> int:
    """Tries all tasks of a folder."""
    if not words:
        sys.stderr.write(f"{__doc__}")
        return 2
    given = dict(word.partition("=")[::2] for word in words[1:])
    args = {name: yaml.safe_load(value) for name, value in given.items()}
    rule = registry.make_reward("harbor", **args)
    assert isinstance(rule, HarborTests)
    lines = [(path, *tried(rule, path)) for path in task_paths(words[0])]
    for path, usable, line in lines:
        sys.stdout.write(f"{'ok ' if usable else 'NO '} {path.name}: {line}\n")
    return 0 if all(usable for _, usable, _ in lines) else 1


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except RealsysError as error:
        sys.exit(str(error))
