"""Counts the shape of a tree: sizes, doubled names, flat rooms, import circles, words, start-up times.

    python benchmarks/house.py                              # a table for this tree
    python benchmarks/house.py --against REVISION           # the same, before -> after
    python benchmarks/house.py --duplicates                 # all doubled names and circles, in full
    python benchmarks/house.py --json --tree DIR
    python benchmarks/house.py --no-run                     # only what is read, nothing is started

Counted are ``*.py`` below realsys, launcher and experiments. Method, by row:

- *Code lines*: lines that hold a part of a token (`tokenize`) that is no comment and no docstring; blank
  lines inside of a string do not count. A docstring is any statement that is a string and nothing else.
- *Modules* are files; those without a code line (an ``__init__.py`` with a docstring) are counted but
  are left out of the median. *Function lengths* run from ``def`` to the last line, docstring and inner
  functions included.
- *Class names twice*: a name that a ``class`` statement binds in two or more modules, at any depth.
- *File names twice*: ``build.py``, ``__init__.py`` and ``__main__.py`` may repeat, and so may files of
  rooms that mirror each other. Two rooms mirror each other when they stand in the same folder, and two
  files or more, and at least half of the smaller room's, bear names that also stand in the other room.
- *Flat room*: Python files directly in a folder, ``__init__.py`` left out. *Rooms on one level*: folders
  with Python files that stand directly in one folder.
- *Import circles* are strongly connected components of two members or more. A module has an edge to the
  module that an ``import`` names; that Python also runs the ``__init__.py`` above it makes none. Three
  graphs: imports at load time; these and imports inside of functions; all, with those under
  ``TYPE_CHECKING``. *Between rooms*: a room is a folder, its edges are those of the modules directly in
  it. A room and one inside of it are not counted there but beside it, as pairs that import each other.
- *Words*: ``BANNED`` in names that a module binds (definitions, parameters, targets, its own name), as
  whole words of the name, each name once a module; in docstrings, every occurrence; and in other strings
  of two words or more (messages, help). Words of a docstring are runs of letters, digits, ``_``, ``'``.
- What has to be run (`benchmarks/house_start.py`): the files that touch ``actor.optimizer.lr``, and the
  times of the command line. Its header has the method.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import statistics
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import house_start

PACKAGES = ("realsys", "launcher", "experiments")
MAY_REPEAT = ("build.py", "__init__.py", "__main__.py")
FLAT_LIMIT = 12  # files of a room above which it is listed

# Everyday words with the word of the field that replaces them ("" where the case decides). Written as the
# words of a name, in lower case: "last words" is found in ``last_words`` and in ``LastWords``.
BANNED = {
    "ahead": "prefetched",
    "asking": "policy client",
    "bands": "length buckets",
    "begun": "issued",
    "beyond help": "unrecoverable",
    "bury": "report exit",
    "canary": "node probe",
    "cells": "regions",
    "company": "groups, context",
    "crowd": "fan out",
    "desk": "dispatcher",
    "disorder": "reorder policy",
    "dispensable": "optional",
    "endings": "deletion cause",
    "giving": "shard sources",
    "gives": "provides",
    "goodbye": "deregistration",
    "hand over": "dispatch",
    "hear": "on message",
    "heard": "received",
    "hears": "on message",
    "holders": "trainer ranks",
    "keepsakes": "artifacts",
    "last words": "failure record",
    "looks": "store poller, poll",
    "makers": "rollout group",
    "needers": "receivers",
    "patience": "retry",
    "patiently": "retry while unavailable",
    "putting": "tensor upload",
    "remarks": "launch warnings",
    "said": "reported",
    "says": "reports",
    "sight": "poll",
    "standing": "lease status",
    "story": "report, explain",
    "take away": "discard",
    "take back": "cancel",
    "tell": "publish, notify, send",
    "tells": "publishes, notifies, distinguishes",
    "told": "published, notified",
    "wish": "placement request, scale request",
    "wishes": "placement requests",
}
# Names that are banned as a whole: their words are the field's elsewhere.
BANNED_NAMES = {
    "Admitted": "PromptGrant",
    "Begin": "Init",
    "LeaseJudge": "LeaseValidity",
    "LeaseKeeper": "LeaseRenewer",
    "Line": "PacketSocket",
    "ManagerLink": "GserverManagerClient",
    "Over": "Terminate",
    "Parkable": "Offloadable",
    "Pulse": "HeartbeatMemory",
    "RESTARTED_ALONE": "INDEPENDENTLY_RESTARTABLE",
    "RolloutSide": "RolloutService",
    "WarmMemory": "BufferPool",
    "Watched": "TimeoutEnvironment",
    "Way": "FetchMode",
    "_Under": "_path",
    "_clears": "_resets_to_none",
    "_leaves": "_flatten",
    "due_steps": "deadline_steps",
    "first_calls": "prefetchable_calls",
    "moments": "slurm_datetime",
    "put_on": "apply_overrides",
    "settle": "unshard_and_wait",
    "to_plain": "to_builtins",
    "tries": "attempt",
    "turn_link": "replace_symlink",
}
PRONOUNS = ("one", "whose", "nobody", "somebody", "whoever")
SHORT_WORDS = 4  # words up to which a docstring counts as short


# What is read of one module


@dataclass(frozen=True)
class Module:
    """A parsed file of the tree; ``path`` is relative to it, with slashes."""

    path: str
    source: str

    @property
    def name(self) -> str:
        """The dotted name that imports it."""
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def room(self) -> str:
        """The dotted name of its folder."""
        return self.path.rpartition("/")[0].replace("/", ".")

    @property
    def file(self) -> str:
        return self.path.rpartition("/")[2]

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source, filename=self.path)


def read_tree(root: Path, packages: Iterable[str] = PACKAGES) -> list[Module]:
    """All modules of the packages below ``root``, sorted by path."""
    paths = sorted(path for package in packages for path in (root / package).rglob("*.py"))
    return [Module(p.relative_to(root).as_posix(), p.read_text(encoding="utf-8")) for p in paths]


def code_lines(module: Module) -> int:
    """Lines of a module without blanks, comments and docstrings."""
    text = module.source.splitlines()
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(module.source).readline):
        if token.type not in (tokenize.COMMENT, *_LAYOUT):
            lines.update(range(token.start[0], token.end[0] + 1))
    for statement in _bare_strings(module.tree):
        lines.difference_update(range(statement.lineno, (statement.end_lineno or 0) + 1))
    return sum(1 for line in lines if text[line - 1].strip())


_LAYOUT = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def _bare_strings(tree: ast.Module) -> Iterator[ast.Expr]:
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                yield node
            case _:
                pass


def function_lengths(module: Module) -> list[int]:
    """Lines of every function and method."""
    return [
        (node.end_lineno or node.lineno) - node.lineno + 1
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def docstrings(module: Module) -> list[str]:
    """Docstrings of the module, its classes and functions, at any depth."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(node) for node in ast.walk(module.tree) if isinstance(node, kinds))
    return [text for text in found if text is not None]


def sentences(module: Module) -> list[str]:
    """Strings of two words or more that are no docstrings: messages, and help."""
    bare = {id(statement.value) for statement in _bare_strings(module.tree)}
    return [
        node.value
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in bare
        if len(node.value.split()) > 1
    ]


def bound_names(module: Module) -> set[str]:
    """Names that a module gives: to itself, definitions, parameters, targets and fields."""
    found = {module.name.rpartition(".")[2]}
    for node in ast.walk(module.tree):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                found.add(name)
            case ast.AsyncFunctionDef(name=name) | ast.arg(arg=name):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                found.add(name)
            case ast.alias(asname=str(name)) | ast.ExceptHandler(name=str(name)):
                found.add(name)
            case _:
                pass
    return found


# Names that stand twice, and rooms


def classes_twice(modules: Iterable[Module]) -> dict[str, list[str]]:
    """Class name -> the modules that define it, where there are two or more."""
    places: dict[str, set[str]] = defaultdict(set)
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].add(module.path)
    return {name: sorted(found) for name, found in sorted(places.items()) if len(found) > 1}


def rooms(modules: Iterable[Module]) -> dict[str, set[str]]:
    """Room -> names of the files directly in it, ``__init__.py`` left out."""
    found: dict[str, set[str]] = defaultdict(set)
    for module in modules:
        found[module.room].update({module.file} - {"__init__.py"})
    return dict(found)


def mirrored(files: Mapping[str, set[str]], one: str, other: str) -> bool:
    """Whether two rooms are variants of the same thing, by their file names (header of this file)."""
    shared = (files[one] & files[other]) - set(MAY_REPEAT)
    beside = one.rpartition(".")[0] == other.rpartition(".")[0] != ""
    return beside and len(shared) >= max(2, min(len(files[one]), len(files[other])) / 2)


def files_twice(modules: list[Module]) -> dict[str, list[str]]:
    """File name -> paths that bear it without a reason, where there are two or more."""
    files = rooms(modules)
    places: dict[str, list[Module]] = defaultdict(list)
    for module in modules:
        if module.file not in MAY_REPEAT:
            places[module.file].append(module)
    return {
        name: [module.path for module in found]
        for name, found in sorted(places.items())
        if any(not mirrored(files, a.room, b.room) for a in found for b in found if a is not b)
    }


def levels(modules: Iterable[Module]) -> dict[str, list[str]]:
    """Room -> rooms directly inside of it; "" has the packages."""
    found: dict[str, set[str]] = defaultdict(set)
    for module in modules:
        parts = module.room.split(".")
        for i, part in enumerate(parts):
            found[".".join(parts[:i])].add(part)
    return {room: sorted(inside) for room, inside in found.items()}


# Imports


@dataclass(frozen=True)
class Import:
    """An import of one module of the tree by another; ``when`` is "load", "call" or "typing"."""

    source: str
    target: str
    when: str


def imports(modules: Iterable[Module]) -> list[Import]:
    """Every import between modules of the tree, without those of a module by itself."""
    modules = list(modules)
    known = {module.name for module in modules}
    return [
        Import(module.name, target, when)
        for module in modules
        for statement, when in _import_statements(module.tree, "load")
        for target in _targets(module, statement, known)
        if target != module.name
    ]


def _import_statements(
    node: ast.AST, when: str
) -> Iterator[tuple[ast.Import | ast.ImportFrom, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, when
        elif isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            yield from _import_statements(ast.Module(child.body, []), "typing")
            yield from _import_statements(ast.Module(child.orelse, []), when)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and when == "load":
            yield from _import_statements(child, "call")
        else:
            yield from _import_statements(child, when)


def _targets(
    module: Module, statement: ast.Import | ast.ImportFrom, known: set[str]
) -> Iterator[str]:
    if isinstance(statement, ast.Import):
        yield from (alias.name for alias in statement.names if alias.name in known)
        return
    base = statement.module or ""
    if statement.level:
        above = module.room.split(".")
        above = above[: len(above) - statement.level + 1]
        base = ".".join([*above, *([base] if base else [])])
    for alias in statement.names:
        if (inner := f"{base}.{alias.name}") in known:
            yield inner
        elif base in known:
            yield base


def circles(edges: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Strongly connected components of two members or more, each sorted (Tarjan, without recursion)."""
    after: dict[str, set[str]] = defaultdict(set)
    for source, target in edges:
        after[source].add(target)
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    path: list[str] = []
    found: list[list[str]] = []
    for start in sorted(after):
        if start in number:
            continue
        number[start] = low[start] = len(number)
        path.append(start)
        open_nodes = [(start, iter(sorted(after[start])))]
        while open_nodes:
            node, rest = open_nodes[-1]
            for target in rest:
                if target not in number:
                    number[target] = low[target] = len(number)
                    path.append(target)
                    open_nodes.append((target, iter(sorted(after.get(target, ())))))
                    break
                if target in path:
                    low[node] = min(low[node], number[target])
            else:
                open_nodes.pop()
                if open_nodes:
                    above = open_nodes[-1][0]
                    low[above] = min(low[above], low[node])
                if low[node] == number[node]:
                    cut = path.index(node)
                    if len(path) - cut > 1:
                        found.append(sorted(path[cut:]))
                    del path[cut:]
    return sorted(found)


def _inside(one: str, other: str) -> bool:
    return one.startswith(other + ".") or other.startswith(one + ".")


def room_edges(modules: Iterable[Module], found: Iterable[Import]) -> set[tuple[str, str]]:
    """Imports as edges between the rooms of both modules, within a room left out."""
    room_of = {module.name: module.room for module in modules}
    edges = {(room_of[edge.source], room_of[edge.target]) for edge in found}
    return {(a, b) for a, b in edges if a != b}


GRAPHS = {
    "load time": ("load",),
    "and inside functions": ("load", "call"),
    "and TYPE_CHECKING": ("load", "call", "typing"),
}


def all_circles(modules: list[Module]) -> dict[str, list[list[str]]]:
    """Circles of modules and of rooms, and rooms inside one another that import each other."""
    found = imports(modules)
    result: dict[str, list[list[str]]] = {}
    for graph, kinds in GRAPHS.items():
        edges = [edge for edge in found if edge.when in kinds]
        between = room_edges(modules, edges)
        apart = [(a, b) for a, b in between if not _inside(a, b)]
        nested = [[a, b] for a, b in between if _inside(a, b) and (b, a) in between and a < b]
        result[f"modules, {graph}"] = circles((edge.source, edge.target) for edge in edges)
        result[f"rooms, {graph}"] = circles(apart)
        result[f"a room and one inside it, {graph}"] = sorted(nested)
    return result


def ties(members: Iterable[str], node_of: Mapping[str, str], found: Iterable[Import]) -> list[str]:
    """What ties a circle: every import between two of its members, the rarer direction in full.

    Args:
        node_of: the member that a module counts for: itself, or its room.
    """
    inside = set(members)
    between: dict[tuple[str, str], list[str]] = defaultdict(list)
    for edge in sorted(set(found), key=lambda edge: (edge.source, edge.target, edge.when)):
        ends = node_of[edge.source], node_of[edge.target]
        if ends[0] != ends[1] and inside.issuperset(ends):
            between[ends].append(f"{edge.source} -> {edge.target} ({edge.when})")
    lines = []
    for (source, target), edges in sorted(between.items()):
        back = len(between.get((target, source), edges))
        lines += edges if len(edges) <= back else [f"{source} -> {target}: {len(edges)} imports"]
    return lines


# Words


def words_of_name(name: str) -> list[str]:
    """``RolloutDesk`` -> rollout, desk; ``last_words`` -> last, words."""
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)
    return [part.lower() for part in parts]


def banned_in_name(name: str) -> str | None:
    """The entry of a banned table that a name falls under, or None."""
    if name in BANNED_NAMES:
        return name
    text = f" {' '.join(words_of_name(name))} "
    return next((word for word in BANNED if f" {word} " in text), None)


def banned_names(modules: Iterable[Module]) -> list[tuple[str, str, str]]:
    """(entry, name, path) of every name with a banned word, each once a module."""
    return sorted(
        (entry, name, module.path)
        for module in modules
        for name in bound_names(module)
        if (entry := banned_in_name(name)) is not None
    )


def words_of_text(text: str) -> list[str]:
    return re.findall(r"[A-Za-z0-9_']+", text)


def banned_in_texts(texts: Iterable[str]) -> Counter[str]:
    """Banned word -> times that it stands in texts."""
    text = "\n".join(texts).lower()
    counts = {word: len(re.findall(rf"\b{word.replace(' ', '[ _]')}\b", text)) for word in BANNED}
    return Counter({word: count for word, count in counts.items() if count})


def pronouns(modules: Iterable[Module]) -> Counter[str]:
    """Pronoun -> times that it stands in docstrings."""
    words = Counter(
        word.lower()
        for module in modules
        for text in docstrings(module)
        for word in words_of_text(text)
    )
    return Counter({word: words[word] for word in PRONOUNS})


def short_docstrings(modules: Iterable[Module]) -> list[tuple[str, str]]:
    """(path, text) of docstrings of at most ``SHORT_WORDS`` words."""
    return [
        (module.path, text)
        for module in modules
        for text in docstrings(module)
        if len(words_of_text(text)) <= SHORT_WORDS
    ]


# The table


def quantile(values: list[int], part: float) -> int:
    """The smallest value that at least ``part`` of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -int(-part * len(ordered) // 1) - 1)]


def counts(modules: list[Module]) -> dict[str, str | int | float]:
    """Every row that reading gives, name -> value."""
    lines = {module.path: code_lines(module) for module in modules}
    filled = [count for count in lines.values() if count]
    lengths = [length for module in modules for length in function_lengths(module)]
    flat = sorted(((len(files), room) for room, files in rooms(modules).items()), reverse=True)
    level = sorted(((len(inside), room) for room, inside in levels(modules).items()), reverse=True)
    texts = [text for module in modules for text in docstrings(module)]
    messages = [text for module in modules for text in sentences(module)]
    names = banned_names(modules)
    found = all_circles(modules)
    rows: dict[str, str | int | float] = {"code lines": sum(lines.values())}
    for package in PACKAGES:
        of_package = [n for path, n in lines.items() if path.startswith(f"{package}/")]
        rows[f"code lines, {package}"] = sum(of_package)
    rows |= {
        "modules": len(modules),
        "modules without code": len(modules) - len(filled),
        "median code lines of a module": statistics.median(filled),
        "mean code lines of a module": round(statistics.mean(filled), 1),
        "functions": len(lengths),
        "99th percentile of function lines": quantile(lengths, 0.99),
        "class names twice": len(classes_twice(modules)),
        "file names twice": len(files_twice(modules)),
        "largest flat room": f"{flat[0][0]} ({flat[0][1]})",
        f"rooms over {FLAT_LIMIT} files": sum(count > FLAT_LIMIT for count, _ in flat),
        "most rooms on one level": f"{level[0][0]} ({level[0][1]})",
        "rooms": len(flat),
    }
    rows |= {f"circles: {name}": len(members) for name, members in found.items()}
    rows |= {
        "names with a banned word": len(names),
        "banned words in docstrings": banned_in_texts(texts).total(),
        "banned words in other sentences": banned_in_texts(messages).total(),
        "docstrings": len(texts),
        f"docstrings of {SHORT_WORDS} words or fewer": len(short_docstrings(modules)),
        "docstrings of one line (%)": round(100 * sum("\n" not in t for t in texts) / len(texts)),
    }
    rows |= {f"'{word}' in docstrings": count for word, count in pronouns(modules).items()}
    return rows


def duplicates(modules: list[Module]) -> dict[str, object]:
    """Everything that a rename or a move acts on, in full."""
    found = imports(modules)

    def of_graph(name: str) -> list[Import]:
        kinds = GRAPHS[name.partition(", ")[2]]
        return [edge for edge in found if edge.when in kinds]

    own = {module.name: module.name for module in modules}
    room_of = {module.name: module.room for module in modules}
    by_circle = {
        name: [
            {
                "members": members,
                "imports": ties(
                    members, own if name.startswith("modules") else room_of, of_graph(name)
                ),
            }
            for members in lists
        ]
        for name, lists in all_circles(modules).items()
    }
    flat = {room: sorted(files) for room, files in rooms(modules).items()}
    texts = [text for module in modules for text in docstrings(module)]
    messages = [text for module in modules for text in sentences(module)]
    banned: dict[str, list[str]] = defaultdict(list)
    for entry, name, path in banned_names(modules):
        banned[entry].append(f"{name} ({path})")
    return {
        "class names twice": classes_twice(modules),
        "file names twice": files_twice(modules),
        f"rooms over {FLAT_LIMIT} files": {
            room: files for room, files in sorted(flat.items()) if len(files) > FLAT_LIMIT
        },
        "rooms on one level": levels(modules),
        "circles": by_circle,
        "names with a banned word": dict(banned),
        "banned words in docstrings": dict(banned_in_texts(texts).most_common()),
        "banned words in other sentences": dict(banned_in_texts(messages).most_common()),
        "short docstrings": [f"{path}: {text}" for path, text in short_docstrings(modules)],
    }


# Output


def markdown(tables: Mapping[str, Mapping[str, object]]) -> str:
    """Columns are trees, rows the union of their rows in the order of the first that has them."""
    names = list(dict.fromkeys(row for table in tables.values() for row in table))
    head = ["row", *tables]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for name in names:
        cells = [str(table.get(name, "")) for table in tables.values()]
        lines.append("| " + " | ".join([name, *cells]) + " |")
    return "\n".join(lines) + "\n"


def outline(value: object, depth: int = 0) -> str:
    """Nested mappings and lists as indented Markdown lists."""
    pad = "  " * depth
    if isinstance(value, Mapping):
        parts = []
        for key, inner in value.items():
            size = f" ({len(inner)})" if isinstance(inner, Mapping | list) else ""
            if isinstance(inner, Mapping | list):
                parts.append(f"{pad}- **{key}**{size}\n{outline(inner, depth + 1)}")
            else:
                parts.append(f"{pad}- {key}: {inner}\n")
        return "".join(parts)
    if isinstance(value, list):
        return "".join(
            outline(inner, depth) if isinstance(inner, Mapping | list) else f"{pad}- {inner}\n"
            for inner in value
        )
    return f"{pad}- {value}\n"


def tree_of(revision: str, repository: Path, into: Path) -> Path:
    """Checks ``revision`` out into ``into`` as a worktree without a branch."""
    command = ["git", "-C", str(repository), "worktree", "add", "--detach", str(into), revision]
    subprocess.run(command, check=True, capture_output=True)
    return into


def drop_tree(repository: Path, tree: Path) -> None:
    """Removes a worktree that `tree_of` made."""
    command = ["git", "-C", str(repository), "worktree", "remove", "--force", str(tree)]
    subprocess.run(command, check=True, capture_output=True)


def rows_of(root: Path, *, run: bool, rounds: int) -> dict[str, str | int | float]:
    """The whole column of a tree."""
    rows = counts(read_tree(root))
    return rows | house_start.rows_of(root, rounds=rounds) if run else rows


def main() -> None:
    """Counts and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tree", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--against", metavar="REVISION", help="of the tree's repository: before")
    parser.add_argument("--duplicates", action="store_true", help="what stands twice, in full")
    parser.add_argument("--no-run", action="store_true", help="leave out what has to be run")
    parser.add_argument("--rounds", type=int, default=15, help="of the times of the command line")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    root: Path = given.tree.resolve()
    if given.duplicates:
        full = duplicates(read_tree(root))
        sys.stdout.write(json.dumps(full, indent=1) + "\n" if given.json else outline(full))
        return
    columns: dict[str, dict[str, str | int | float]] = {}
    if given.against:
        with tempfile.TemporaryDirectory() as folder:
            before = tree_of(given.against, root, Path(folder, "before"))
            try:
                columns[given.against] = rows_of(before, run=not given.no_run, rounds=given.rounds)
            finally:
                drop_tree(root, before)
    columns["after" if given.against else "now"] = rows_of(
        root, run=not given.no_run, rounds=given.rounds
    )
    sys.stdout.write(json.dumps(columns, indent=1) + "\n" if given.json else markdown(columns))


if __name__ == "__main__":
    main()
