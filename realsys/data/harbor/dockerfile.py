"""Reads a Dockerfile as a list of steps for a box that is no image: this node's programs, own files. Pure.

FROM is only remembered. What installs packages is not run: the packages have to be on the node
(node_packages.py). Other RUN lines, COPY and ADD are steps, in order; what a box can't do is a problem.
"""

from __future__ import annotations

import json
import posixpath
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

HOME, WORKDIR = "/root", "/app"  # of a container's root; of the images that tasks begin with
# Folders that a box has already, or has for other things.
_OWN = frozenset(
    "bin box dev etc lib lib32 lib64 libx32 logs mnt proc sbin solution sys tests tmp usr".split()
)
_MOST_FOLDERS = 32
_ABSOLUTE = re.compile(r"(?<![\w.$}/:~-])/([A-Za-z_][\w.-]*)")
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?-([^}]*))?\}|(\w+))")
_HERE_DOCUMENT = re.compile(r"(?<!<)<<(?!<)-?\s*[\"']?\w")
_NOT_COPIED = re.compile(r"://|\.(tar|tgz|tbz2|txz)\b|(^|/)\.\.(/|$)")
_IDLE = frozenset(
    "CMD ENTRYPOINT EXPOSE HEALTHCHECK LABEL MAINTAINER SHELL STOPSIGNAL USER VOLUME".split()
)
_SYSTEM = {"apt-get": "install", "apt": "install", "apk": "add", "dnf": "install", "yum": "install"}
_PIP = re.compile(r"^(uv pip|python3? -m pip|pip3?) install ")
_WITH_VALUE = frozenset(
    "-t --target-release -o --option -i --index-url --extra-index-url --target -c --constraint -f "
    "--find-links --python -p".split()
)
_PACKAGE = re.compile(r"([A-Za-z0-9][\w.+-]*?)(?:\[[\w,.-]*\])?(?:\s*[=<>~!/;].*)?")
# Shell functions in place of the programs that install, for RUN lines that also do something else.
INSTALL_NOTHING = "; ".join(
    [
        *(f"{name}() {{ :; }}" for name in (*_SYSTEM, "pip", "pip3")),
        'uv() { [ "$1" = pip ] || command uv "$@"; }',
        *(
            f'{p}() {{ [ "$1 $2" = "-m pip" ] || command {p} "$@"; }}'
            for p in ("python", "python3")
        ),
    ]
)


class DockerfileProblem(NamedTuple):
    """What a box can't do of a Dockerfile."""

    line: int
    what: str
    fix: str


class PackageNeed(NamedTuple):
    """A package that a RUN line installs, with pip or the distribution's installer."""

    by_pip: bool
    name: str
    line: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStep:
    """Shell text to run in ``workdir``."""

    line: int
    text: str
    workdir: str
    env: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyStep:
    """Files of ``environment/``, patterns allowed, to put at ``target``, an absolute path.

    Attributes:
        into: ``target`` is a folder for them; else the name of the one file, or of a folder's contents.
    """

    line: int
    sources: tuple[str, ...]
    target: str
    into: bool


@dataclass(kw_only=True, slots=True)
class BuildPlan:
    """What a Dockerfile comes to in a box.

    Attributes:
        image: name behind FROM.
        env: variables for all that runs; ``$PATH`` in a value is left as it is.
    """

    image: str = ""
    workdir: str = WORKDIR
    env: dict[str, str] = field(default_factory=lambda: {"HOME": HOME})
    steps: list[RunStep | CopyStep] = field(default_factory=list)
    packages: list[PackageNeed] = field(default_factory=list)
    problems: list[DockerfileProblem] = field(default_factory=list)


def read_dockerfile(text: str, requirements: Mapping[str, str]) -> BuildPlan:
    """Reads a Dockerfile; what can't be done stands in ``problems``.

    Args:
        requirements: texts of requirement files that ``pip install -r`` may name, by their last names.
    """
    reader = _DockerfileReader(requirements)
    for line, name, rest in _instructions(text):
        reader.line = line
        reader.read(name, rest)
    return reader.plan


def named_folders(*texts: str) -> list[str]:
    """Returns the uppermost folders of absolute paths in texts, but for those that a box has already."""
    found = dict.fromkeys(name for text in texts for name in _ABSOLUTE.findall(text))
    return ["/" + name for name in found if name not in _OWN][:_MOST_FOLDERS]


def _instructions(text: str) -> Iterator[tuple[int, str, str]]:
    """Yields line number, name and rest of each instruction; lines that go on are joined."""
    begin, joined = 0, ""
    for number, line in enumerate([*text.splitlines(), ""], 1):
        if line.lstrip().startswith("#"):
            continue
        begin = begin if joined else number
        goes_on = line.rstrip().endswith("\\")
        joined += line.rstrip().removesuffix("\\")
        if not goes_on:
            if words := joined.split(None, 1):
                yield begin, words[0].upper(), words[1].strip() if len(words) > 1 else ""
            joined = ""


class _DockerfileReader:
    """Adds one instruction after another to a plan."""

    def __init__(self, requirements: Mapping[str, str]) -> None:
        self.plan, self.line = BuildPlan(), 0
        self._requirements, self._arguments = requirements, dict[str, str]()

    def read(self, name: str, rest: str) -> None:
        """Reads an instruction."""
        plan = self.plan
        if _HERE_DOCUMENT.search(rest):
            self._problem("here-documents are not read", "put the text into a file and COPY it")
        elif name == "FROM":
            if plan.image:
                fix = "write what the last one needs into one stage"
                self._problem("stages before the last are not built", fix)
            plan.image = self._expanded(rest.split(None, 1)[0])
        elif name == "ARG":
            key, _, value = rest.partition("=")
            self._arguments.setdefault(key.strip(), self._expanded(value.strip("\"' ")))
        elif name == "ENV":
            for key, value in _assignments(rest):
                plan.env[key] = self._expanded(value)
        elif name == "WORKDIR":
            plan.workdir = self._path(rest.strip("\"'"))
            text = f"mkdir -p {shlex.quote(plan.workdir)}"
            plan.steps.append(RunStep(line=self.line, text=text, workdir="/", env={}))
        elif name == "RUN":
            text = re.sub(r"^(?:--\S+\s+)+", "", rest)
            text = shlex.join(_words(text)) if text.startswith("[") else text
            self._packages(text)
            env = {**self._arguments, **plan.env}
            plan.steps.append(RunStep(line=self.line, text=text, workdir=plan.workdir, env=env))
        elif name in ("COPY", "ADD"):
            self._copy([self._expanded(word) for word in _words(rest)])
        elif name not in _IDLE:
            self._problem(f"there is no instruction {name}", "leave it out")

    def _problem(self, what: str, fix: str) -> None:
        self.plan.problems.append(DockerfileProblem(self.line, what, fix))

    def _expanded(self, text: str) -> str:
        """Puts in variables; one that is not known stays as it is."""
        variables = {**self._arguments, **self.plan.env}

        def value(found: re.Match[str]) -> str:
            return variables.get(found[1] or found[3], found[0] if found[2] is None else found[2])

        return _VARIABLE.sub(value, text)

    def _path(self, given: str) -> str:
        """Returns an absolute path, which must be in a folder that the box can have."""
        path = posixpath.normpath(posixpath.join(self.plan.workdir, self._expanded(given)))
        if path.split("/")[1] in _OWN - {"tmp"}:
            self._problem(
                f"{path} is in a folder of the box's own", "use another one, such as /app"
            )
        return path

    def _copy(self, words: list[str]) -> None:
        *sources, given = [word for word in words if not word.startswith("--")] or [""]
        if not sources or any(word.startswith("--from") for word in words):
            self._problem("it copies from another image", "put the files into environment/")
        elif wrong := [source for source in sources if _NOT_COPIED.search(source)]:
            fix = "put what is in it into environment/, and COPY that"
            self._problem(f"{wrong[0]} is an address, an archive or outside of environment/", fix)
        else:
            target = self._path(given)
            into = given.endswith("/") or posixpath.basename(given) in (".", "..")
            into = into or len(sources) > 1 or f"{self.plan.workdir}/".startswith(f"{target}/")
            self.plan.steps.append(
                CopyStep(line=self.line, sources=tuple(sources), target=target, into=into)
            )

    def _packages(self, shell: str) -> None:
        """Notes the packages that shell text installs."""
        for command in re.split(r"&&|\|\||[;|\n]", shell):
            try:
                words = shlex.split(command)
            except ValueError:  # a quote that is open here
                continue
            while words and re.match(r"\w+=|sudo$", words[0]):
                del words[0]
            by_pip = _PIP.match(" ".join([*words, ""]))
            verb = "install" if by_pip else _SYSTEM.get(words[0]) if words else None
            if verb in words:
                self._names(bool(by_pip), iter(words[words.index(verb) + 1 :]))

    def _names(self, by_pip: bool, words: Iterator[str]) -> None:
        for word in words:
            if word in ("-r", "--requirement") and by_pip:
                file = posixpath.basename(next(words, ""))
                if file not in self._requirements:
                    self._problem(f"there is no {file} in environment/", "put it there")
                lines = (line.strip() for line in self._requirements.get(file, "").splitlines())
                self._names(by_pip, (line for line in lines if line and line[0] not in "#-"))
            elif word in _WITH_VALUE:
                next(words, None)
            elif not word.startswith("-"):
                name = _PACKAGE.fullmatch(word)
                if name is None or "://" in word:
                    fix = "install it on the nodes, and drop the line"
                    self._problem(f"it installs {word}, which is no package's name", fix)
                else:
                    self.plan.packages.append(PackageNeed(by_pip, name[1], self.line))


def _words(rest: str) -> list[str]:
    """Returns the words of an instruction, whichever of its two forms it has."""
    flags, body = rest[: rest.find("[")], rest[rest.find("[") :]
    try:
        if rest.startswith("[") or flags.startswith("--"):
            return [*flags.split(), *map(str, json.loads(body))]
    except ValueError:
        pass
    try:
        return shlex.split(rest)
    except ValueError:
        return rest.split()


def _assignments(rest: str) -> list[tuple[str, str]]:
    words = _words(rest)
    if words and "=" not in words[0]:  # the old form: ENV NAME all the rest
        name, _, value = rest.partition(" ")
        return [(name, value.strip())]
    return [(key, value) for key, _, value in (word.partition("=") for word in words)]
