"""Reads Harbor task directories (schema 1.x of Harbor 0.26): instruction, limits, box, tests, solution.

Everything wrong with a directory is found at once, with file and line. Keys that are not known are
ignored, as a later schema may have them; what a box can't do is refused. Nothing is run.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
# What a box does not have. Demands are refused if they have a value: section, key, what is asked for.
_REFUSED = (
    ("", "steps", "several steps"),
    ("environment", "gpus", "GPUs"),
    ("environment", "tpu", "TPUs"),
    ("environment", "mcp_servers", "MCP servers"),
    ("environment", "healthcheck", "a service that outlives a command"),
    ("verifier", "collect", "commands in other containers"),
    ("verifier", "environment", "a container for the tests alone"),
)
_REFUSED_FILES = {
    "environment/docker-compose.yaml": "containers beside the task's own",
    "environment/.dockerignore": "a .dockerignore",
    "trajectory.json": "an agent's earlier turns",
}
_MARKER = re.compile(r"\s*(<!--.*canary.*-->|#.*canary.*)\s*$", re.I)
_TEMPLATE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
_DOWNLOAD = re.compile(r"^\s*(?:sudo\s+)?(apt-get|apt|curl|wget|pip3?|uvx?|npm|git clone)\b", re.M)
_SIZE = re.compile(r"([\d.]+)\s*([GMK])I?B?", re.I)
_UNITS = {"G": 1 << 30, "M": 1 << 20, "K": 1 << 10}


@dataclass(frozen=True, kw_only=True)
class TaskDirectory:
    """One task.

    Attributes:
        solution: text of ``solution/solve.sh``, if there is one.
        agent_s, verifier_s, memory_bytes, storage_bytes, cpus: what the task allows; None: it does not say.
        image: ``docker_image``; ``sif`` is the file of it that is at hand, without which the Dockerfile is
            read as ``build``.
        folders: writable folders, uppermost ones, besides those for logs.
        env, verifier_env, solution_env: variables of everything, of the tests, of the solution.
        downloads: lines of ``tests/test.sh`` that need a network.
    """

    path: Path
    instruction: str
    solution: str | None
    agent_s: float | None
    verifier_s: float | None
    memory_bytes: int | None
    storage_bytes: int | None
    cpus: float | None
    image: str
    sif: str
    build: BuildPlan
    workdir: str
    folders: tuple[str, ...]
    env: Mapping[str, str]
    verifier_env: Mapping[str, str]
    solution_env: Mapping[str, str]
    downloads: tuple[str, ...]

    @property
    def name(self) -> str:
        """Name of the directory."""
        return self.path.name

    @property
    def base(self) -> str:
        """The image that the task names, and that is not at hand."""
        return "" if self.sif else self.image or self.build.image

    @property
    def is_solved(self) -> bool:
        """Whether there is a solution, and it is one script."""
        return self.solution is not None and len(os.listdir(self.path / "solution")) == 1


def task_paths(path: str | Path) -> list[Path]:
    """Lists the task directories that a path means: itself, or those in it, in the order of their names.

    Raises:
        DataError: it can't be listed, or there are none.
    """
    given = Path(path).expanduser()
    if (given / CONFIG).exists():
        return [given]
    try:
        found = sorted(p.parent for name in (CONFIG, INSTRUCTION) for p in given.glob(f"*/{name}"))
        folders = list(dict.fromkeys(found))
        os.listdir(given)
    except OSError as error:
        what = f"{given} can't be listed: {error.strerror}"
        raise DataError(what, where=str(given), fix="correct the path") from error
    if not 0 < len(folders) <= MOST_TASKS:
        raise DataError(
            f"{len(folders):,} folders with a {CONFIG}" if folders else f"no {CONFIG} in it",
            where=str(given),
            fix=f"name a task's directory, or a folder of 1 to {MOST_TASKS:,} of them",
        )
    return folders


def read_task(path: Path, images: Mapping[str, str] | None = None) -> TaskDirectory:
    """Reads one directory.

    Raises:
        DataError: the first thing that is wrong with it.
    """
    task, problems = checked_task(path, images)
    if task is None:
        raise problems[0]
    return task


def checked_task(
    path: Path, images: Mapping[str, str] | None = None
) -> tuple[TaskDirectory | None, list[DataError]]:
    """Returns the task, or None and all that is wrong with its directory.

    Args:
        images: ``docker_image`` or name of a task → a file of its image.
    """
    reader = _TaskReader(path)
    texts = {name: reader.text(name, needed=True) for name in (CONFIG, INSTRUCTION, TEST)}
    solution = reader.text(SOLUTION) if (path / SOLUTION).exists() else None
    config = _Config(reader, texts[CONFIG])
    for name, what in _REFUSED_FILES.items():
        if (path / name).exists():
            reader.refuse(name, 1, what)
    image = config.text("environment", "docker_image")
    sif = (images or {}).get(image) or (images or {}).get(path.name, "")
    dockerfile = reader.text(DOCKERFILE) if (path / DOCKERFILE).exists() else ""
    if image and not sif and not dockerfile:
        reader.refuse(CONFIG, 1, f"the image {image}, of which there is no file and no Dockerfile")
    build = BuildPlan() if sif else _build(reader, dockerfile)
    workdir = config.text("environment", "workdir") or build.workdir
    task = TaskDirectory(
        path=path,
        instruction=_without_marker(texts[INSTRUCTION]),
        solution=solution,
        agent_s=config.number("agent", "timeout_sec"),
        verifier_s=config.number("verifier", "timeout_sec"),
        memory_bytes=config.size("memory"),
        storage_bytes=config.size("storage"),
        cpus=config.number("environment", "cpus"),
        image=image,
        sif=sif,
        build=build,
        workdir=workdir,
        folders=tuple(
            dict.fromkeys([WORKDIR, HOME, *named_folders(workdir, dockerfile, texts[INSTRUCTION])])
        ),
        env=config.env("environment"),
        verifier_env=config.env("verifier"),
        solution_env=config.env("solution"),
        downloads=tuple(_downloads(texts[TEST])),
    )
    return (None if reader.problems else task), reader.problems


def _build(reader: _TaskReader, dockerfile: str) -> BuildPlan:
    """Reads the Dockerfile and checks that what it copies is there."""
    folder = reader.path / "environment"
    requirements = {p.name: reader.text(f"environment/{p.name}") for p in folder.glob("*.txt")}
    build = read_dockerfile(dockerfile, requirements)
    for step in (step for step in build.steps if isinstance(step, CopyStep)):
        for source in step.sources:
            if not copied_files(folder, source):
                what = f"there is no {source} in environment/"
                reader.problem(DOCKERFILE, step.line, what, "put it there, or leave the line out")
    for problem in build.problems:
        reader.problem(DOCKERFILE, problem.line, problem.what, problem.fix)
    return build


def copied_files(environment: Path, source: str) -> list[Path]:
    """Lists what a source of COPY means: a file, a folder, or all that a pattern fits."""
    name = source.strip("/") or "."
    return (
        sorted(environment.glob(name))
        if set(name) & set("*?[")
        else [path for path in [environment / name] if path.exists()]
    )


def _downloads(test: str) -> Iterator[str]:
    for found in _DOWNLOAD.finditer(test):
        yield f"{TEST}:{test[: found.start(1)].count(chr(10)) + 1}: {found[1]}"


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

    def problem(self, name: str, line: int, what: str, fix: str) -> None:
        """Adds a problem of a file."""
        self.problems.append(DataError(what, where=f"{self.path / name}:{line}", fix=fix))

    def refuse(self, name: str, line: int, what: str) -> None:
        """Adds a demand that a box does not meet."""
        what = f"it asks for {what}, which a box does not have"
        self.problem(name, line, what, "leave it out, or leave the task out (docs/harbor.md)")

    def text(self, name: str, *, needed: bool = False) -> str:
        """Returns a file's text; empty if it can't be read."""
        try:
            found = read_bounded_text(self.path / name)
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
            fix = "a task has task.toml, instruction.md and tests/test.sh (docs/harbor.md)"
            self.problem(name, 1, f"{name} can't be read: {why}", fix)
            return ""
        if needed and not found.strip():
            self.problem(name, 1, f"{name} is empty", "write it")
        return found


class _Config:
    """The tables of ``task.toml``."""

    def __init__(self, reader: _TaskReader, text: str) -> None:
        self._reader, self._text = reader, text
        self._tables: dict[str, Any] = {}
        try:
            self._tables = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            at = re.search(r"line (\d+)", str(error))
            line = int(at[1]) if at else text.count("\n") + 1
            reader.problem(CONFIG, line, f"it is no TOML: {error}", "correct it")
        self._check_demands()

    def _check_demands(self) -> None:
        version = str(self._get("", "schema_version") or self._get("", "version") or "1.0")
        if version.partition(".")[0] != "1":
            self._refuse("", "schema_version", f"schema {version} (1.x is known)")
        for section, key, what in _REFUSED:
            if self._get(section, key):
                self._refuse(section, key, what)
        if self.text("environment", "os").lower() not in ("", "linux"):
            self._refuse("environment", "os", "another system than Linux")
        if self.text("verifier", "environment_mode") == "separate":
            self._refuse("verifier", "environment_mode", "a container for the tests alone")
        for section in ("environment", "agent", "verifier"):
            if self.text(section, "network_mode") == "allowlist":
                self._refuse(section, "network_mode", "a network")
        for section in ("agent", "verifier"):
            if self._get(section, "user") not in (None, "", "root", 0):
                self._refuse(section, "user", "a second user")

    def _get(self, section: str, key: str) -> Any:
        table = self._tables.get(section, {}) if section else self._tables
        return table.get(key) if isinstance(table, dict) else None

    def _line(self, section: str, key: str) -> int:
        """Returns the line of a key, or of its table; 1 if it is written in another way."""
        current = ""
        for number, line in enumerate(self._text.splitlines(), 1):
            name = f"{section}.{key}".lstrip(".")
            if header := re.match(r"\s*\[+\s*([\w.]+)\s*\]", line):
                current = header[1]
                if current == name:
                    return number
            elif current == section and re.match(rf"\s*{re.escape(key)}\s*=", line):
                return number
        return 1

    def _refuse(self, section: str, key: str, what: str) -> None:
        self._reader.refuse(CONFIG, self._line(section, key), what)

    def _wrong(self, section: str, key: str, value: Any, wanted: str) -> None:
        name = f"{section}.{key}"
        what = f"{name} is {value!r:.80}, not {wanted}"
        self._reader.problem(CONFIG, self._line(section, key), what, f"give {wanted}")

    def text(self, section: str, key: str) -> str:
        """Returns a text; empty if there is none."""
        value = self._get(section, key)
        if value is not None and not isinstance(value, str):
            self._wrong(section, key, value, "a text")
            return ""
        return value or ""

    def number(self, section: str, key: str) -> float | None:
        """Returns a number above 0; None if there is none."""
        value = self._get(section, key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12:
            self._wrong(section, key, value, "a number above 0")
            return None
        return float(value)

    def size(self, key: str) -> int | None:
        """Returns bytes of ``KEY_mb``, or of the older ``KEY = "2G"``."""
        if (old := self._get("environment", key)) is None:
            size_mb = self.number("environment", f"{key}_mb")
            return None if size_mb is None else int(size_mb) << 20
        found = _SIZE.fullmatch(old.strip()) if isinstance(old, str) else None
        if found is None:
            self._wrong("environment", key, old, "a size such as '2G'")
            return None
        return int(float(found[1]) * _UNITS[found[2].upper()])

    def env(self, section: str) -> dict[str, str]:
        """Returns variables; ``${NAME:-text}`` is the text, as no variable of the host is seen."""
        table = self._get(section, "env") or {}
        found: dict[str, str] = {}
        for name, value in table.items() if isinstance(table, dict) else ():
            templates = _TEMPLATE.findall(str(value))
            if any(f"${{{key}}}" in str(value) for key, _ in templates):
                what = f"a variable of the host ({name})"
                self._reader.refuse(CONFIG, self._line(f"{section}.env", name), what)
            found[name] = _TEMPLATE.sub(lambda match: match[2] or "", str(value))
        return found
