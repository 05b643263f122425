"""Expands and compresses Slurm's hostlists exactly: ``gpu[01-04,7],login1`` to names and back (pure).

Derived from Slurm's own answers (`scontrol show hostnames`, 22.05), tables in
tests/unit/slurm/test_hostlist.py. The package python-hostlist (2.3) agrees on one and two brackets and on
zero padding, but orders three brackets differently, does not split at blanks, and has another limit for a
range. A local parser also works where no Slurm is installed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from itertools import groupby, product

from realsys.api.errors import ConfigError, UnknownName, did_you_mean

MAX_HOSTS = 65_536  # of one range, where Slurm refuses more; here also of a list, repeats counted
_RANGE = re.compile(r"(\d{1,20})(?:-(\d{1,20}))?", re.ASCII)  # Slurm counts in 64 bits
_BRACKET = re.compile(r"\[([^\[\]]*)\]")
_NUMBERED = re.compile(r"(.*?)(\d+)", re.ASCII | re.DOTALL)
_HOW = "write names and ranges like gpu[01-04,7],login1"


def expand(text: str) -> tuple[str, ...]:
    """Returns the names, in Slurm's order, each once.

    Raises:
        ConfigError: not a hostlist, or one that only slurmctld can expand.
    """
    found: dict[str, None] = {}
    named = 0
    for item in _items(text):
        for name in _names(item, text):
            found[name] = None
            named += 1  # repeats too: they cost as much
            if named > MAX_HOSTS:
                raise _too_many(text)
    return tuple(found)


def compress(names: Iterable[str]) -> str:
    """Returns a hostlist of the names, in their order: ``n[1-3,10]``, as `scontrol show hostlist` writes
    it."""
    parts = []
    for (prefix, numbered), group in groupby(map(_split, dict.fromkeys(names)), key=_family):
        digits = [digit for _, digit in group]
        if not numbered:
            parts += [prefix] * len(digits)
            continue
        ranges = list(_runs(digits))
        single = len(ranges) == 1 and "-" not in ranges[0]
        parts.append(prefix + (ranges[0] if single else f"[{','.join(ranges)}]"))
    return ",".join(parts)


def short_name(host: str) -> str:
    """Returns a host's name without its domain, in lower case; an address as it is."""
    is_address = ":" in host or host.replace(".", "").isdigit()
    return host.lower() if is_address else host.lower().partition(".")[0]


def check_nodelist(
    text: str, *, known: Collection[str] | None, where: str
) -> Iterator[ConfigError]:
    """Yields the errors of a nodelist or exclude: its grammar, and nodes that the site does not have.

    Slurm silently accepts an unknown node in --exclude, so a typing error there has no effect.

    Args:
        known: the site's nodes; None if unknown.
    """
    try:
        names = expand(text)
    except ConfigError as error:
        yield ConfigError(error.what, where=where, fix=error.fix)
        return
    if not names:
        yield ConfigError(f"{text!r} names no node", where=where, fix=_HOW)
    for name in names if known is not None else ():
        if known is not None and name not in known:
            yield UnknownName(
                f"no node {name!r} at this site", where=where, fix=_nearest(name, known)
            )


def _nearest(name: str, known: Collection[str]) -> str:
    suggestion = did_you_mean(name, known)
    return (
        suggestion
        if suggestion.startswith("did you mean")
        else f"use some of {compress(sorted(known))}"
    )


def _items(text: str) -> list[str]:
    """Splits at commas and blanks outside brackets."""
    if "/" in text:
        raise _refused(text, "Slurm takes a value with '/' for the name of a file", _HOW)
    if "{" in text:
        raise _refused(
            text,
            "only Slurm's controller can expand feature{…}, switch{…} and block{…}",
            "name the nodes, or use --constraint",
        )
    items, depth, item = [], 0, ""
    for char in text:
        depth += (char == "[") - (char == "]")
        if depth not in (0, 1):
            raise _refused(text, "its brackets do not match", _HOW)
        if depth == 0 and (char == "," or char.isspace()):
            items.append(item)
            item = ""
        else:
            item += char
    if depth:
        raise _refused(text, "its brackets do not match", _HOW)
    return [i for i in [*items, item] if i]


def _names(item: str, text: str) -> Iterator[str]:
    """Yields one item's names: the last bracket counts fastest, and of the others the first."""
    literals = _BRACKET.split(item)[::2]
    groups: list[list[str]] = []
    room = MAX_HOSTS
    for inner in _BRACKET.findall(item):
        groups.append(_numbers(inner, text, room))
        room //= len(groups[-1])
    if not groups:
        yield item
        return
    *others, last = groups
    for reversed_combination in product(*reversed(others)):
        for number in last:
            numbers = [*reversed(reversed_combination), number, ""]
            yield "".join(a + b for a, b in zip(literals, numbers, strict=True))


def _numbers(inner: str, text: str, room: int) -> list[str]:
    """Expands ``01-03,7`` to 01 02 03 7, as wide as the low bound is written. At most ``room`` of them."""
    found: list[str] = []
    for part in inner.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise _refused(text, f"{part!r} is no range of numbers", _HOW)
        low, high = int(match[1]), int(match[2] or match[1])
        if high < low:
            raise _refused(text, f"the range {part} runs backwards", f"write {high}-{low}")
        if high - low >= MAX_HOSTS:
            raise _refused(text, f"the range {part} has more than {MAX_HOSTS} hosts", _HOW)
        if len(found) + high - low >= room:
            raise _too_many(text)
        found += [f"{number:0{len(match[1])}d}" for number in range(low, high + 1)]
    return found


def _split(name: str) -> tuple[str, str]:
    """Splits into (``gpu``, ``07``); no digits for a name that does not end in a number."""
    match = _NUMBERED.fullmatch(name)
    return (match[1], match[2]) if match else (name, "")


def _family(pair: tuple[str, str]) -> tuple[str, bool]:
    return pair[0], bool(pair[1])


def _runs(digits: list[str]) -> Iterator[str]:
    """Yields runs: ``["01", "02", "1"]`` → ``01-02``, ``1``; a run counts up by one in the same width."""
    start = end = digits[0]
    for digit in [*digits[1:], ""]:
        if digit == f"{int(end) + 1:0{len(start)}d}":
            end = digit
            continue
        yield start if start == end else f"{start}-{end}"
        start = end = digit


def _too_many(text: str) -> ConfigError:
    return _refused(text, f"it names more than {MAX_HOSTS} hosts", _HOW)


def _refused(text: str, why: str, fix: str) -> ConfigError:
    return ConfigError(f"{text!r} is not a hostlist: {why}", where="hostlist", fix=fix)
