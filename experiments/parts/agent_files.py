"""Files that arguments of agents and environments name: found where the command was given, as workers run
elsewhere.
"""

from __future__ import annotations

import ast
import os
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from realsys.api.errors import ConfigError, did_you_mean


def located_agent_args(agent: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of ``agent`` with absolute paths in place of files' names.

    Of a command those words that are files here; of a function its file; and an interpreter's. A chat
    template's file is replaced by its text.
    """
    made = dict(args)
    if isinstance(made.get("template"), str) and _is_file(made["template"]):
        made["template"] = Path(made["template"]).expanduser().read_text()
    if _is_path(made.get("python")):
        made["python"] = _whole(made["python"])
    if agent == "command" and made.get("command"):
        words = _words(made["command"])
        made["command"] = [_whole(w) if _is_file(w) else w for w in words] or made["command"]
    if agent == "python" and isinstance(made.get("function"), str):
        place, colon, name = made["function"].rpartition(":")
        if place.endswith(".py"):
            made["function"] = _whole(place) + colon + name
    return made


def located_env_args(env: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of environment ``env`` with absolute paths of files in servers' commands.

    A command that can't be read stays as it is: its arguments' own check reports it.
    """
    made = dict(args)
    if env == "mcp" and made.get("servers"):
        given = made["servers"]
        servers = [given] if isinstance(given, str) else given
        made["servers"] = [_located_command(server) for server in servers]
    return made


def _located_command(command: Any) -> Any:
    try:
        words = shlex.split(command)
    except (ValueError, TypeError, AttributeError):
        return command
    return shlex.join(_whole(w) if _is_file(w) else w for w in words)


def agent_file_problems(agent: str, args: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Yields files that are not there."""
    python = args.get("python")
    if _is_path(python) and not os.path.isabs(os.path.expanduser(python)) and not _is_file(python):
        yield ConfigError(
            f"no interpreter {python}",
            where="task.agent_args.python",
            fix="name one that is here, or by its whole path",
        )
    function = args.get("function")
    if agent == "python" and isinstance(function, str):
        place, _, name = function.rpartition(":")
        if place.endswith(".py") and not _is_file(place):
            yield ConfigError(
                f"no file {place}",
                where="task.agent_args.function",
                fix="name a file that is here: FILE.py:FUNCTION",
            )
        elif place.endswith(".py"):
            yield from _function_problems(place, name)
    if agent == "command" and args.get("command"):
        for word in _words(args["command"])[:2]:  # the program, and what an interpreter runs
            if word.endswith(".py") and not _is_file(word):
                yield ConfigError(
                    f"no file {word}",
                    where="task.agent_args.command",
                    fix="name a file that is here",
                )


def role_problems(args: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Yields roles that are given models, or settings, of their own: a run trains one policy."""
    roles = args.get("roles")
    own = isinstance(roles, Mapping) or (
        isinstance(roles, list | tuple) and any(isinstance(role, Mapping) for role in roles)
    )
    if own:
        yield ConfigError(
            "roles are given models of their own, and a run trains one policy, which plays all roles",
            where="task.agent_args.roles",
            fix="name them only, roles=[a, b]: they share the policy, and groups compare each role with "
            "itself. A role that doesn't learn is a server of its own, `realsys serve MODEL`, whose "
            "address the agent is given; to train two in turn, launch a run for each against the other's",
        )


def _function_problems(place: str, name: str) -> Iterator[ConfigError]:
    """Yields that a file can't be read as Python, or names nothing so. It is not run."""
    try:
        tree = ast.parse(Path(place).expanduser().read_bytes())
    except (SyntaxError, ValueError) as error:
        yield ConfigError(
            f"{place} can't be read: {error}", where="task.agent_args.function", fix="mend the file"
        )
        return
    functions = [n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    others = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    imported = {
        alias.asname or alias.name
        for n in ast.walk(tree)
        if isinstance(n, ast.Import | ast.ImportFrom)
        for alias in n.names
    }
    if name not in {*functions, *others, *imported, *_inner_names(tree)} and "*" not in imported:
        yield ConfigError(
            f"{place} has no function {name!r}",
            where="task.agent_args.function",
            fix=did_you_mean(name, functions),
        )
    yield from _parameter_problems(tree, place, name)


def _parameter_problems(tree: ast.Module, place: str, name: str) -> Iterator[ConfigError]:
    """Yields parameters of a function of the file that no episode gives a value."""
    from realsys.rollout.runners.hosts.function_host import PROVIDED

    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    found = [n for n in tree.body if isinstance(n, kinds) and n.name == name]
    if len(found) != 1 or found[0].decorator_list:
        return
    given = found[0].args
    by_place = [*given.posonlyargs, *given.args]
    needed = by_place[: len(by_place) - len(given.defaults)]
    needed += [a for a, d in zip(given.kwonlyargs, given.kw_defaults, strict=True) if d is None]
    unknown = [a.arg for a in needed if a.arg not in PROVIDED]
    if unknown:
        yield ConfigError(
            f"{place}: {name} has parameters that no agent is given: {', '.join(unknown)}",
            where="task.agent_args.function",
            fix=f"name some of {', '.join(PROVIDED)}, or give the others a value",
        )


def _inner_names(tree: ast.Module) -> set[str]:
    """Returns names of functions that are defined under a condition."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return {n.name for n in ast.walk(tree) if isinstance(n, kinds)}


def _words(command: Any) -> list[str]:
    if not isinstance(command, str) and not (
        isinstance(command, list | tuple) and all(isinstance(word, str) for word in command)
    ):
        return []  # the arguments' own check reports it
    from realsys.rollout.runners.agent_arguments import CommandArguments

    return CommandArguments(command=command if isinstance(command, str) else list(command)).argv


def _whole(path: str) -> str:
    """Returns the absolute path; links stay: a virtual environment's interpreter is one."""
    return os.path.abspath(os.path.expanduser(path))


def _is_file(word: str) -> bool:
    return bool(word) and os.path.isfile(os.path.expanduser(word))


def _is_path(word: Any) -> TypeGuard[str]:
    return isinstance(word, str) and os.sep in word
