"""Collecting mistakes instead of stopping at the first: a user repairs them in one go.

For overrides.py, clusters.py and resolve.py. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from realsys.api.errors import ConfigError, ConfigErrors


def flat(error: ConfigError) -> tuple[ConfigError, ...]:
    """The single problems of ``error``."""
    return error.problems if isinstance(error, ConfigErrors) else (error,)


@contextmanager
def collected(problems: list[ConfigError]) -> Iterator[None]:
    """A ConfigError raised inside joins ``problems``; the rest of the block is skipped."""
    try:
        yield
    except ConfigError as error:
        problems.extend(flat(error))


def raise_all(problems: Iterable[ConfigError]) -> None:
    """Raises the problems, each once, if there are any."""
    unique: list[ConfigError] = []
    for problem in problems:
        if all((problem.what, problem.where) != (p.what, p.where) for p in unique):
            unique.append(problem)
    if unique:
        raise unique[0] if len(unique) == 1 else ConfigErrors(unique)
