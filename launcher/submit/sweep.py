"""A sweep: several trials from one command, one for each combination of values (pure).

With ``--sweep``, every NAME=VALUE word whose value has a comma outside brackets, braces and quotes is an
axis; all other words hold for every trial. A list value is written in brackets: ``x=[1,2],[3]`` has two
values. Trials are numbered in the order of the product, the last axis fastest.
launcher/submit/submit_sweep.py creates and starts them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from realsys.api.errors import ConfigError, raise_all
from realsys.api.plan import JobLayout, JobPlan

MAX_POINTS = 1000  # Slurm's own default for the elements of a job array (MaxArraySize 1001)
_OPENING, _CLOSING = "[{(", "]})"


@dataclass(frozen=True)
class Axis:
    """A setting and its values, as written."""

    name: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Point:
    """One trial of a sweep.

    Attributes:
        number: from 0; on Slurm also its index in a job array.
        trial: the trial's name, ``sweep1-07``.
        values: axis → its value in this trial.
        words: all NAME=VALUE words of the trial, in the order of the command line.
    """

    number: int
    trial: str
    values: Mapping[str, str]
    words: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.values.items())


def points_of(words: Sequence[str], name: str) -> list[Point]:
    """Expands every combination, in order; ``name`` is the sweep's.

    Raises:
        ConfigErrors: no axis, an axis given twice or with an empty or repeated value, or more
            than MAX_POINTS combinations.
    """
    axes = {i: axis for i, word in enumerate(words) if (axis := axis_of(word)) is not None}
    raise_all(_problems(words, list(axes.values())))
    count = math.prod(len(axis.values) for axis in axes.values())
    width = len(str(count - 1))
    points = []
    for number, values in enumerate(product(*(axis.values for axis in axes.values()))):
        here = list(words)
        for (i, axis), value in zip(axes.items(), values, strict=True):
            here[i] = f"{axis.name}={value}"
        named = {axis.name: value for axis, value in zip(axes.values(), values, strict=True)}
        points.append(Point(number, f"{name}-{number:0{width}d}", named, tuple(here)))
    return points


def axis_of(word: str) -> Axis | None:
    """Parses a word as an axis; None for a plain setting."""
    name, equals, text = word.partition("=")
    values = split_values(text)
    return Axis(name.strip(), tuple(values)) if equals and len(values) > 1 else None


def split_values(text: str) -> list[str]:
    """Splits the text at its commas outside brackets, braces and quotes; strips the values."""
    values, start, depth, quote = [], 0, 0, ""
    for i, char in enumerate(text):
        before = text[:i].rstrip()[-1:]
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'" and (not before or before in ",:" + _OPENING):  # else an apostrophe
            quote = char
        elif char in _OPENING:
            depth += 1
        elif char in _CLOSING:
            depth = max(0, depth - 1)
        elif char == "," and not depth:
            values.append(text[start:i].strip())
            start = i + 1
    return [*values, text[start:].strip()]


def _problems(words: Sequence[str], axes: Sequence[Axis]) -> list[ConfigError]:
    if not axes:
        return [
            ConfigError(
                "--sweep without a setting that has several values",
                where="command line",
                fix="write them with commas, e.g. --sweep algorithm.loss.eps_clip=0.1,0.2 seed=1,2,3",
            )
        ]
    found = []
    given = [word.partition("=")[0].strip() for word in words]
    for axis in axes:
        repeated = [v for v in dict.fromkeys(axis.values) if axis.values.count(v) > 1]
        wrong = ""
        if given.count(axis.name) > 1:
            wrong = f"{axis.name} is given {given.count(axis.name)} times"
        elif "" in axis.values:
            wrong = f"{axis.name} has an empty value in {','.join(axis.values)!r}"
        elif repeated:
            wrong = f"{axis.name} has the value {repeated[0]!r} twice"
        if wrong:
            where = f"{axis.name}, command line --sweep"
            fix = "give every value once, in one word; write none for no value"
            found.append(ConfigError(wrong, where=where, fix=fix))
    count = math.prod(len(axis.values) for axis in axes)
    if count > MAX_POINTS:
        sizes = " × ".join(f"{len(axis.values)} {axis.name}" for axis in axes)
        found.append(
            ConfigError(
                f"the sweep has {count:,} trials ({sizes}); at most {MAX_POINTS:,} are possible",
                where="command line --sweep",
                fix="give fewer values, or launch several sweeps",
            )
        )
    return found


def merged_problems(
    points: Sequence[Point], problems: Mapping[int, Sequence[ConfigError]]
) -> list[ConfigError]:
    """Merges the mistakes of all trials, naming the trials concerned unless all are.

    Args:
        problems: point's number → problems of its plan.
    """
    concerned_by: dict[tuple[str, str, str], list[Point]] = {}
    kinds: dict[tuple[str, str, str], type[ConfigError]] = {}
    for point in points:
        anonymous = f"{point.trial.rpartition('-')[0]}-N"
        for problem in problems.get(point.number, ()):
            texts = (problem.what, problem.where, problem.fix)
            key = tuple(text.replace(point.trial, anonymous) for text in texts)
            assert len(key) == 3
            kinds.setdefault(key, type(problem))
            if point not in concerned_by.setdefault(key, []):
                concerned_by[key].append(point)
    return [
        kinds[key](key[0], where=key[1] + _which(concerned, points), fix=key[2])
        for key, concerned in concerned_by.items()
    ]


def _which(concerned: Sequence[Point], points: Sequence[Point]) -> str:
    """Names the trials concerned, as a suffix of a problem's place."""
    if len(concerned) == len(points):
        return ""
    if len(concerned) == 1:
        return f", at {concerned[0]}"
    first = concerned[0].values
    shared = {n: v for n, v in first.items() if all(p.values[n] == v for p in concerned)}
    same = [p for p in points if all(p.values[n] == v for n, v in shared.items())]
    if len(same) == len(concerned):
        return ", at " + " ".join(f"{name}={value}" for name, value in shared.items())
    return f", at {concerned[0]} and {len(concerned) - 1} more"


def job_groups(jobs: Sequence[JobPlan]) -> list[list[int]]:
    """Groups the trials that share a job array, as indices into ``jobs``; single if one can't.

    An array's elements have equal requests, and Slurm has no arrays of het jobs; a split trial has
    several jobs already.
    """
    groups: list[list[int]] = []
    for i, job in enumerate(jobs):
        for group in groups:
            if job.layout is JobLayout.SINGLE and jobs[group[0]] == job:
                group.append(i)
                break
        else:
            groups.append([i])
    return groups


def array_text(numbers: Sequence[int], parallel: int | None) -> str:
    """Renders sbatch's --array for ascending indices: ``0-3,6%2``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"{text}%{parallel}" if parallel else text
