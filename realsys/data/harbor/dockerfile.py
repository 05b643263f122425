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
# A box has these, or has them for itself.
_NO_FOLDERS = frozenset(
    "bin box dev etc lib lib32 lib64 libx32 logs mnt proc sbin solution sys tests tmp usr".split()
)
_MOST_FOLDERS = 32
_ABSOLUTE = re.compile(r"(?<![\w.$}/:~-])/([A-Za-z_][\w.-]*)")
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?-([^}]*))?\}|(\w+))")
_HERE_DOCUMENT = re.compile(r"(?<!<)<<(?!<)-?\s*[\"']?\w")
_ARCHIVE = re.compile(r"\.(tar|tgz|tbz2|txz)(\.\w+)?$")
_IDLE = frozenset(
    "CMD ENTRYPOINT EXPOSE HEALTHCHECK LABEL MAINTAINER SHELL STOPSIGNAL USER".split()
)
_SYSTEM_INSTALLERS = {"apt-get": "install", "apt": "install", "apk": "add", "dnf": "install"}
_SYSTEM_INSTALLERS |= {"yum": "install", "microdnf": "install"}
_WITH_VALUE = frozenset(
    "-t --target-release -o --option -i --index-url --extra-index-url --target -c --constraint -f "
    "--find-links --python -p".split()
)
_REQUIREMENT = re.compile(r"[A-Za-z0-9][\w.-]*")
# Shell functions in place of the programs that install, for RUN lines that also do something else.
INSTALL_NOTHING = "; ".join(
    [
        *(f"{name}() {{ :; }}" for name in (*_SYSTEM_INSTALLERS, "pip", "pip3")),
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
    """A package that a RUN line installs. ``manager`` is "pip", or "system" for the distribution's."""

    manager: str
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
        mode: permissions of the files; None: those they have.
    """

    line: int
    sources: tuple[str, ...]
    target: str
    into: bool
    mode: int | None = None


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
    plan, arguments = BuildPlan(), dict[str, str]()
    for line, name, rest in _instructions(text):
        refused = _refusal(name, rest, plan)
        if refused:
            plan.problems.append(DockerfileProblem(line, *refused))
        elif name == "FROM":
            plan.image = _expanded(rest.split()[0], arguments) if rest else ""
        elif name == "ARG":
            key, _, value = rest.partition("=")
            arguments.setdefault(key.strip(), _expanded(value.strip("\"' "), arguments))
        elif name == "ENV":
            for key, value in _assignments(rest):
                plan.env[key] = _expanded(value, {**arguments, **plan.env})
        elif name == "WORKDIR":
            folder = _expanded(rest.strip("\"'"), {**arguments, **plan.env})
            plan.workdir = posixpath.normpath(posixpath.join(plan.workdir, folder))
            text = f"mkdir -p {shlex.quote(plan.workdir)}"
            plan.steps.append(RunStep(line=line, text=text, workdir="/", env={}))
        elif name == "RUN":
            shell = _shell_text(rest)
            plan.packages += _installed(shell, line, requirements, plan.problems)
            env = {**arguments, **plan.env}
            plan.steps.append(RunStep(line=line, text=shell, workdir=plan.workdir, env=env))
        elif name in ("COPY", "ADD"):
            plan.steps.append(_copy(line, rest, plan, {**arguments, **plan.env}))
    return plan


def named_folders(*texts: str) -> list[str]:
    """Returns the uppermost folders of absolute paths in texts, but for those that a box has already."""
    found = dict.fromkeys(name for text in texts for name in _ABSOLUTE.findall(text))
    return ["/" + name for name in found if name not in _NO_FOLDERS][:_MOST_FOLDERS]


def _instructions(text: str) -> Iterator[tuple[int, str, str]]:
    """Yields line number, name and rest of each instruction; lines that go on are joined."""
    begin, joined = 0, ""
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#") or (not line.strip() and joined):
            continue
        begin = number if not joined else begin
        if line.rstrip().endswith("\\"):
            joined += line.rstrip()[:-1] + "\n"
            continue
        joined += line
        if joined.strip():
            name, _, rest = joined.strip().partition(" ")
            yield begin, name.upper(), rest.strip()
        joined = ""
    if joined.strip():
        name, _, rest = joined.strip().partition(" ")
        yield begin, name.upper(), rest.strip()


def _refusal(name: str, rest: str, plan: BuildPlan) -> tuple[str, str] | None:
    """Returns what a box can't do of an instruction, and what to do about it."""
    if name in _IDLE or name in ("ARG", "ENV", "VOLUME"):
        return None
    if name == "WORKDIR":
        return _folder_refusal(rest.strip("\"'"))
    if name == "FROM" and plan.image:
        return "a second FROM: stages are not built", "write what the last one needs into one stage"
    if name in ("RUN", "COPY", "ADD") and _HERE_DOCUMENT.search(rest):
        return "here-documents are not read", "put the text into a file and COPY it"
    if name in ("COPY", "ADD"):
        return _copy_refusal(name, rest)
    if name not in ("FROM", "RUN"):
        return f"there is no instruction {name}", "leave it out"
    return None


def _copy_refusal(name: str, rest: str) -> tuple[str, str] | None:
    words = _words(rest)
    options = [word for word in words if word.startswith("--")]
    if any(option.startswith("--from") for option in options):
        return "COPY --from another image", "put the files into environment/"
    *sources, target = [word for word in words if not word.startswith("--")] or [""]
    if not sources:
        return f"{name} without a source and a target", "write COPY SOURCE TARGET"
    if name == "ADD" and any("://" in s or _ARCHIVE.search(s) for s in sources):
        return "ADD of an address or an archive", "put the files into environment/ and COPY them"
    if any(".." in source.split("/") for source in sources):
        return "files outside of environment/", "put them into environment/"
    return _folder_refusal(target)


def _folder_refusal(path: str) -> tuple[str, str] | None:
    top = path.split("/")[1] if path.startswith("/") else ""
    if top in _NO_FOLDERS - {"tmp"}:
        return f"{path} is in a folder of the box's own", "use another one, such as /app"
    return None


def _copy(line: int, rest: str, plan: BuildPlan, variables: Mapping[str, str]) -> CopyStep:
    words = [_expanded(word, variables) for word in _words(rest)]
    *sources, given = [word for word in words if not word.startswith("--")]
    modes = [word.partition("=")[2] for word in words if word.startswith("--chmod=")]
    target = posixpath.normpath(posixpath.join(plan.workdir, given))
    into = given.endswith("/") or posixpath.basename(given) in (".", "..") or len(sources) > 1
    into = into or f"{plan.workdir}/".startswith(f"{target}/")  # it is there
    mode = int(modes[0], 8) if modes and re.fullmatch("[0-7]{3,4}", modes[0]) else None
    return CopyStep(line=line, sources=tuple(sources), target=target, into=into, mode=mode)


def _words(rest: str) -> list[str]:
    """Returns the words of an instruction, whichever of its two forms it has."""
    options = re.match(r"(?:--\S+\s+)*", rest)
    flags = options[0].split() if options else []
    body = rest[options.end() :] if options else rest
    if body.startswith("["):
        try:
            return [*flags, *map(str, json.loads(body))]
        except ValueError:
            pass
    try:
        return [*flags, *shlex.split(body)]
    except ValueError:
        return [*flags, *body.split()]


def _shell_text(rest: str) -> str:
    text = re.sub(r"^(?:--\S+\s+)+", "", rest)
    return shlex.join(_words(text)) if text.startswith("[") else text


def _assignments(rest: str) -> list[tuple[str, str]]:
    words = _words(rest)
    if words and "=" not in words[0]:  # the old form: ENV NAME all the rest
        name, _, value = rest.partition(" ")
        return [(name, value.strip())]
    return [(key, value) for key, _, value in (word.partition("=") for word in words)]


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    """Puts in variables; one that is not known stays as it is."""

    def value(found: re.Match[str]) -> str:
        name = found[1] or found[3]
        return variables.get(name, found[0] if found[2] is None else found[2])

    return _VARIABLE.sub(value, text)


def _installed(
    shell: str, line: int, requirements: Mapping[str, str], problems: list[DockerfileProblem]
) -> Iterator[PackageNeed]:
    """Yields the packages that shell text installs."""
    for command in re.split(r"&&|\|\||[;|\n]", shell):
        try:
            words = [w for w in shlex.split(command) if not re.match(r"\w+=|sudo$", w)]
        except ValueError:
            continue
        manager, rest = _install_arguments(words)
        names = iter(rest)
        for name in names:
            if name in ("-r", "--requirement"):
                file = posixpath.basename(next(names, ""))
                if file in requirements:
                    for wanted in requirements[file].splitlines():
                        if found := _REQUIREMENT.match(wanted.strip()):
                            yield PackageNeed(manager, found[0], line)
                    continue
                what = f"pip install -r {file}, which is not in environment/"
                problems.append(DockerfileProblem(line, what, "put the file there"))
            elif name in _WITH_VALUE:
                next(names, None)
            elif not name.startswith("-") or name == "-e":
                found = _REQUIREMENT.match(name) if "/" not in name or manager == "system" else None
                if found is None or name == "-e" or "://" in name:
                    what = f"it installs {name}, which is no package's name"
                    problems.append(
                        DockerfileProblem(line, what, "install it on the nodes, and drop the line")
                    )
                else:
                    yield PackageNeed(manager, found[0], line)


def _install_arguments(words: list[str]) -> tuple[str, list[str]]:
    """Returns "pip" or "system" and what is behind the word that installs; else nothing."""
    for prefix in (["uv", "pip"], ["python", "-m", "pip"], ["python3", "-m", "pip"], ["pip3"]):
        if words[: len(prefix)] == prefix:
            words = ["pip", *words[len(prefix) :]]
    if words[:2] == ["pip", "install"]:
        return "pip", words[2:]
    verb = _SYSTEM_INSTALLERS.get(words[0]) if words else None
    if verb is not None and verb in words:
        return "system", words[words.index(verb) + 1 :]
    return "", []
