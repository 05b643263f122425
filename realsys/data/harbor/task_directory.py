"""Reads Harbor task directories (schema 1.x of Harbor 0.26): instruction, limits, box, tests, solution.

Everything wrong with a directory is found at once, with file and line. Keys that are not known are
ignored, as a later schema may have them; what a box can't do is refused. Nothing is run.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from realsys.api.basics.bounded_files import read_bounded_text
from realsys.api.errors import DataError
from realsys.data.harbor.dockerfile import (
    HOME,
    WORKDIR,
    BuildPlan,
    CopyStep,
    named_folders,
    read_dockerfile,
)

CONFIG, INSTRUCTION = "task.toml", "instruction.md"
TEST, SOLUTION, DOCKERFILE = "tests/test.sh", "solution/solve.sh", "environment/Dockerfile"
MOST_TASKS = 100_000
# What a box does not have. Refused if it has a value, of those behind it if there are some.
_REFUSED: tuple[tuple[str, str, str, tuple[Any, ...]], ...] = (
    ("", "steps", "several steps", ()),
    ("environment", "os", "Windows", ("windows",)),
    ("environment", "gpus", "GPUs", ()),
    ("environment", "tpu", "TPUs", ()),
    ("environment", "mcp_servers", "MCP servers", ()),
    ("environment", "healthcheck", "a service that outlives a command", ()),
    ("environment", "network_mode", "a network", ("allowlist",)),
    ("agent", "network_mode", "a network", ("allowlist", "public")),
    ("verifier", "network_mode", "a network", ("allowlist", "public")),
    ("verifier", "collect", "commands in other containers", ()),
    ("verifier", "environment", "a container for the tests alone", ()),
    ("verifier", "environment_mode", "a container for the tests alone", ("separate",)),
)
_REFUSED_FILES = {
    "environment/docker-compose.yaml": "containers beside the task's own",
    "environment/.dockerignore": "a .dockerignore",
    "trajectory.json": "an agent's earlier turns",
}
_FOLDERS = ("tests", "solution", "environment")
_MARKER = re.compile(r"\s*(<!--.*canary.*-->|#.*canary.*)\s*$", re.I)
_TEMPLATE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
_DOWNLOAD = re.compile(r"^\s*(?:sudo\s+)?(apt-get|apt|curl|wget|pip3?|uvx?|npm|git clone)\b", re.M)
_SIZE = re.compile(r"([\d.]+)\s*([GMK])", re.I)
_UNITS = {"G": 1 << 30, "M": 1 << 20, "K": 1 << 10}


class TaskPart(msgspec.Struct, frozen=True, kw_only=True):
    """The table ``[agent]``, ``[verifier]`` or ``[solution]``."""

    timeout_sec: float | None = None
    user: str | int | None = None
    env: dict[str, str] = {}


class TaskEnvironment(msgspec.Struct, frozen=True, kw_only=True):
    """The table ``[environment]``; sizes in MiB, or as text in older schemas."""

    docker_image: str = ""
    workdir: str = ""
    cpus: float = 1.0
    memory_mb: int | None = None
    memory: str | None = None
    storage_mb: int | None = None
    storage: str | None = None
    env: dict[str, str] = {}

    @property
    def memory_bytes(self) -> int | None:
        """Memory that the task allows."""
        return _bytes(self.memory, self.memory_mb)

    @property
    def storage_bytes(self) -> int | None:
        """Files that the task allows."""
        return _bytes(self.storage, self.storage_mb)


T = TypeVar("T", TaskPart, TaskEnvironment)


@dataclass(frozen=True, kw_only=True)
class TaskDirectory:
    """One task.

    Attributes:
        answer: text of ``solution/solve.sh``, if that is the whole solution.
        sif: file of the task's image that is at hand; without it a box does what ``build`` has.
        folders: writable folders, uppermost ones, besides those for logs.
        downloads: lines of ``tests/test.sh`` that need a network.
    """

    path: Path
    instruction: str
    answer: str | None
    agent: TaskPart
    verifier: TaskPart
    solution: TaskPart
    environment: TaskEnvironment
    sif: str
    build: BuildPlan
    workdir: str
    folders: tuple[str, ...]
    downloads: tuple[str, ...]

    @property
    def name(self) -> str:
        """Name of the directory."""
        return self.path.name


def task_paths(path: str | Path) -> list[Path]:
    """Lists the task directories that a path means: itself, or those in it, in the order of their names.

    Raises:
        DataError: it can't be listed, or there are none.
    """
    given = Path(path).expanduser()
    if (given / CONFIG).exists():
        return [given]
    found = {p.parent for name in (CONFIG, INSTRUCTION) for p in given.glob(f"*/{name}")}
    if not 0 < len(found) <= MOST_TASKS:
        raise DataError(
            f"{len(found):,} folders in it have a {CONFIG}",
            where=str(given),
            fix=f"name a task's directory, or a folder of 1 to {MOST_TASKS:,} of them",
        )
    return sorted(found)


def read_task(path: Path, images: Collection[str] = ()) -> TaskDirectory:
    """Reads one directory. Raises DataError: the first thing that is wrong with it."""
    task, problems = checked_task(path, images)
    if task is None:
        raise problems[0]
    return task


def checked_task(
    path: Path, images: Collection[str] = ()
) -> tuple[TaskDirectory | None, list[DataError]]:
    """Returns the task, or None and all that is wrong with its directory.

    Args:
        images: ``NAME=FILE``: ``docker_image`` or the name of a task, and a file of the image.
    """
    reader = _TaskReader(path)
    texts = {name: reader.text(name) for name in (CONFIG, INSTRUCTION, TEST)}
    reader.read_config(texts[CONFIG])
    reader.check_line_ends(TEST, texts[TEST])
    environment = reader.table("environment", TaskEnvironment)
    files = dict(text.partition("=")[::2] for text in images)
    sif = files.get(environment.docker_image) or files.get(path.name, "")
    dockerfile = reader.text(DOCKERFILE) if (path / DOCKERFILE).exists() else ""
    if environment.docker_image and not sif and not dockerfile:
        what = f"the image {environment.docker_image}, of which there is no file and no Dockerfile"
        reader.refuse(CONFIG, reader.line("environment", "docker_image"), what)
    build = reader.build(dockerfile)
    if sif:  # the image has what the Dockerfile does
        reader.problems = [error for error in reader.problems if DOCKERFILE not in error.where]
        build = BuildPlan(workdir=build.workdir)
    workdir = environment.workdir or build.workdir
    folders = [WORKDIR, HOME, *named_folders(workdir, dockerfile, texts[INSTRUCTION])]
    task = TaskDirectory(
        path=path,
        instruction=_without_marker(texts[INSTRUCTION]),
        answer=reader.text(SOLUTION) if _names(path / "solution") == ["solve.sh"] else None,
        agent=reader.table("agent", TaskPart),
        verifier=reader.table("verifier", TaskPart),
        solution=reader.table("solution", TaskPart),
        environment=environment,
        sif=sif,
        build=build,
        workdir=workdir,
        folders=tuple(dict.fromkeys(folders)),
        downloads=tuple(_downloads(texts[TEST])),
    )
    return (None if reader.problems else task), reader.problems


def copied_files(environment: Path, source: str) -> list[Path]:
    """Lists what a source of COPY means: a file, a folder, or all that a pattern fits."""
    name = source.strip("/") or "."
    if set(name) & set("*?["):
        return sorted(environment.glob(name))
    return [path for path in [environment / name] if path.exists()]


def _names(folder: Path) -> list[str]:
    return os.listdir(folder) if folder.is_dir() else []


def _bytes(text: str | None, size_mb: int | None) -> int | None:
    found = _SIZE.match(text or "")
    if found:
        return int(float(found[1]) * _UNITS[found[2].upper()])
    return None if size_mb is None else size_mb << 20


def _downloads(test: str) -> Iterator[str]:
    for found in _DOWNLOAD.finditer(test):
        yield f"{TEST}:{test.count(chr(10), 0, found.start(1)) + 1}: {found[1]}"


def _without_marker(text: str) -> str:
    """Leaves out the lines by which a benchmark's files are found again; Harbor does it too."""
    lines = text.splitlines()
    begin = next((n for n, line in enumerate(lines) if not _MARKER.match(line)), len(lines))
    return "\n".join(lines[begin:]).strip()


class _TaskReader:
    """Reads a directory's files and collects what is wrong."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problems: list[DataError] = []
        self._lines: list[str] = []
        self._config: dict[str, Any] = {}
        for name, what in _REFUSED_FILES.items():
            if (path / name).exists():
                self.refuse(name, 1, what)
        for name in (*_FOLDERS, TEST, SOLUTION):
            if self._is_link(name):
                what = f"{name} is a symbolic link, which a box does not follow out of the folder"
                self.problem(name, 1, what, "put what it leads to in its place (cp -rL)")

    def _is_link(self, name: str) -> bool:
        """True for a link in place of a folder, or of a script that is not in its folder."""
        file = self.path / name
        inside = name not in _FOLDERS and file.resolve().is_relative_to(file.parent.resolve())
        return file.is_symlink() and not inside

    def problem(self, name: str, line: int, what: str, fix: str) -> None:
        """Adds a problem of a file."""
        self.problems.append(DataError(what, where=f"{self.path / name}:{line}", fix=fix))

    def refuse(self, name: str, line: int, what: str) -> None:
        """Adds a demand that a box does not meet."""
        what = f"it asks for {what}, which a box does not have"
        self.problem(name, line, what, "leave it out, or leave the task out (docs/harbor.md)")

    def text(self, name: str) -> str:
        """Returns a file's text; empty if it can't be read, which is a problem, as an empty file is."""
        why = "it is empty"
        try:
            if (found := read_bounded_text(self.path / name)).strip():
                return found
        except (OSError, UnicodeDecodeError) as error:
            why = (error.strerror or "") if isinstance(error, OSError) else "it is no UTF-8 text"
        fix = "a task has task.toml, instruction.md and tests/test.sh (docs/harbor.md)"
        self.problem(name, 1, f"{name} can't be used: {why}", fix)
        return ""

    def check_line_ends(self, name: str, text: str) -> None:
        """Adds a problem for a script in which bash would take CR for a part of words."""
        if text.partition("\n")[0].endswith("\r"):
            fix = f"write it with LF alone: sed -i 's/\\r$//' {name}"
            self.problem(name, 1, f"{name} has CRLF line ends, with which bash can't run it", fix)

    def read_config(self, text: str) -> None:
        """Reads ``task.toml`` and refuses what it asks for in vain."""
        self._lines = text.splitlines()
        try:
            self._config = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            at = re.search(r"line (\d+)", str(error))
            line = int(at[1]) if at else len(self._lines)
            self.problem(CONFIG, line, f"it is no TOML: {error}", "correct it")
        version = str(self._value("", "schema_version") or self._value("", "version") or "1")
        if version.partition(".")[0] != "1":
            self.refuse(CONFIG, self.line("", "schema_version"), f"schema {version} (1.x is known)")
        for section, key, what, values in _REFUSED:
            value = self._value(section, key)
            if value in values or (value and not values):
                self.refuse(CONFIG, self.line(section, key), what)

    def _value(self, section: str, key: str) -> Any:
        table = self._config.get(section) if section else self._config
        value = table.get(key) if isinstance(table, dict) else None
        return value.lower() if isinstance(value, str) else value

    def line(self, section: str, key: str) -> int:
        """Returns the line of a key, or of its table; 1 if it is written in another way."""
        table = ""
        for number, line in enumerate(self._lines, 1):
            if header := re.match(r"\s*\[+\s*([\w.]+)\s*\]", line):
                table = header[1]
                if table == f"{section}.{key}".lstrip("."):
                    return number
            elif table == section and re.match(rf"\s*{re.escape(key)}\s*=", line):
                return number
        return 1

    def table(self, name: str, kind: type[T]) -> T:
        """Returns a table; one with values of a wrong kind is a problem."""
        try:
            found = msgspec.convert(self._config.get(name, {}), kind)
        except msgspec.ValidationError as error:
            what, _, at = str(error).partition(" - at ")
            key = at.strip("`").lstrip("$.").split(".")[0].split("[")[0]
            self.problem(CONFIG, self.line(name, key), f"{name}.{key}: {what}", "correct it")
            return kind()
        env = {key: self._resolved(name, key, text) for key, text in found.env.items()}
        if isinstance(found, TaskPart):
            if found.user not in (None, "", "root", 0):
                self.refuse(CONFIG, self.line(name, "user"), "a second user")
            if found.timeout_sec is not None and found.timeout_sec <= 0:
                what = f"{name}.timeout_sec is {found.timeout_sec:g}"
                fix = "give a number above 0"
                self.problem(CONFIG, self.line(name, "timeout_sec"), what, fix)
        return msgspec.structs.replace(found, env=env)

    def _resolved(self, table: str, key: str, text: str) -> str:
        """Returns a variable's value; ``${NAME:-text}`` is the text, as the host's are not seen."""
        if any(f"${{{name}}}" in text for name, _ in _TEMPLATE.findall(text)):
            self.refuse(CONFIG, self.line(f"{table}.env", key), f"a variable of the host ({key})")
        return _TEMPLATE.sub(lambda found: found[2] or "", text)

    def build(self, dockerfile: str) -> BuildPlan:
        """Reads the Dockerfile and checks that what it copies is there."""
        folder = self.path / "environment"
        files = [file for file in folder.glob("*.txt") if file.stat().st_size < 1 << 20]
        requirements = {file.name: file.read_text(errors="replace") for file in files}
        build = read_dockerfile(dockerfile, requirements)
        for line, what, fix in build.problems:
            self.problem(DOCKERFILE, line, what, fix)
        for step in (step for step in build.steps if isinstance(step, CopyStep)):
            for source in step.sources:
                found = copied_files(folder, source)
                if not found:
                    what = f"there is no {source} in environment/"
                    self.problem(DOCKERFILE, step.line, what, "put it there, or drop the line")
                if not step.into and step.target.count("/") == 1 and any(map(Path.is_file, found)):
                    what = f"{step.target} is a file in the root folder"
                    self.problem(DOCKERFILE, step.line, what, "put it into a folder, such as /app")
        return build
