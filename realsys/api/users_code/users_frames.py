"""Finds the line of a user's own code in an exception, which a message about it begins with.

The standard library alone, and nothing of ours: the hosts of users' functions load this file in
interpreters that have no realsys.
"""

from __future__ import annotations

import builtins
import os
import traceback
from collections.abc import Iterator

_GROUPS: tuple[type[BaseException], ...] = tuple(
    filter(None, [getattr(builtins, "BaseExceptionGroup", None)])
)
_PACKAGES = tuple(f"{os.sep}{kind}-packages{os.sep}" for kind in ("site", "dist"))
_STANDARD = os.path.dirname(os.__file__) + os.sep  # sysconfig would load more than it is worth
_ROOT = os.path.dirname(
    os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
)
_OWN = tuple(
    os.path.join(_ROOT, name) + os.sep
    for name in ("realsys", "launcher", "experiments", "cluster_specs")
)
_MOST_CAUSES = 16  # causes may go in a circle


def shown_error(error: BaseException, *, own: tuple[str, ...] = ()) -> str:
    """Returns ``my_agent.py:3 in solve: KeyError: 'x'``; without a place where no frame is the user's.

    Args:
        own: folders of packages that are the user's, though they are installed.
    """
    error = _single(error)
    place = users_place(error, own=own)
    text = f"{type(error).__name__}: {error}"
    return f"{place}: {text}" if place else text


def users_place(error: BaseException, *, own: tuple[str, ...] = ()) -> str:
    """Returns ``file.py:3 in function`` of the innermost frame of a user's file; of a cause where the error
    itself has none; empty if there is none."""
    places = (_place(one, own) for one in _with_causes(_single(error)))
    return next(filter(None, places), "")


def users_error(error: BaseException) -> BaseException | None:
    """Returns the error, or the first of its causes, that came through a user's file; None: none did."""
    return next((one for one in _with_causes(_single(error)) if _place(one, ())), None)


def is_users_file(filename: str, *, own: tuple[str, ...] = ()) -> bool:
    """True for a file that is of no installed package, not Python's and not ours."""
    if own and filename.startswith(own):
        return True
    if filename.startswith("<") or any(part in filename for part in _PACKAGES):
        return False
    return not filename.startswith((*_OWN, _STANDARD))


def _place(error: BaseException, own: tuple[str, ...]) -> str:
    if isinstance(error, SyntaxError) and error.filename and is_users_file(error.filename, own=own):
        return f"{os.path.basename(error.filename)}:{error.lineno}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_users_file(frame.filename, own=own):
            return f"{os.path.basename(frame.filename)}:{frame.lineno} in {frame.name}"
    return ""


def _single(error: BaseException) -> BaseException:
    """Returns the first error of a group, as of a task group in an agent."""
    while isinstance(error, _GROUPS):
        error = error.exceptions[0]  # type: ignore[attr-defined]
    return error


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    for _ in range(_MOST_CAUSES):
        if seen is None:
            return
        yield _single(seen)
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
