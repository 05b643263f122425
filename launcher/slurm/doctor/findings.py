"""Results of `realsys doctor`: one record per check.

A check that could not be made is ``None``, never True: "not checked" must not read as "works".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from realsys.api.errors import RealsysError


@dataclass(frozen=True)
class Finding:
    """The outcome of one check.

    Attributes:
        ok: None if the check could not be made.
        what: the observed state, as a sentence.
        fix: what to do; may be empty only if ``ok``.
    """

    name: str
    ok: bool | None
    what: str
    fix: str = ""

    def __post_init__(self) -> None:
        assert self.ok or self.fix, f"{self.name}: a finding that is not ok needs a fix"


def of_error(name: str, error: RealsysError) -> Finding:
    """Makes a failed finding from a realsys error."""
    return Finding(name, False, error.what, error.fix)


def unchecked(names: Iterable[str], why: str, fix: str) -> list[Finding]:
    """Makes findings for checks that could not be made, all for one reason."""
    return [Finding(name, None, f"not checked: {why}", fix) for name in names]
